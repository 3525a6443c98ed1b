//! What stands in the journal of one command: one enum of states, and the values that prove them.

use std::sync::Arc;

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};

use super::begun::Record;
use crate::admission::Admitted;
use crate::model::ServerTime;

/// An accepted command: known durably, nothing done yet.
#[derive(Debug)]
pub struct Accepted {
    /// What was admitted.
    pub command: Arc<Admitted>,
    /// Executions so far; the next start is one more.
    pub attempt: u32,
}

/// A command whose effect may start, or may have started.
#[derive(Debug)]
pub struct Running {
    /// What was admitted.
    pub command: Arc<Admitted>,
    /// Which execution this is, from 1.
    pub attempt: u32,
    /// When it started, by the working clock.
    pub started: Option<ServerTime>,
}

/// A command whose process outlived an older daemon and that is still running. Its body is not known any more; its
/// record says all that is needed to wait for its end.
#[derive(Debug, Clone)]
pub struct Reattached {
    /// Its begun record.
    pub begun: Record,
}

/// The state of a row, as it stands on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// Known durably; admission started nothing yet.
    Accepted,
    /// The effect may have started.
    Running,
    /// Ended; its result is owed to the control plane.
    Done,
    /// Ended and acked: kept without output, so that a replay starts nothing.
    Tombstone,
}

impl State {
    /// Every state with its number on disk. A number is never given to another state.
    const CODES: [(Self, i64); 4] =
        [(Self::Accepted, 1), (Self::Running, 2), (Self::Done, 3), (Self::Tombstone, 4)];
}

impl ToSql for State {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let code = Self::CODES.iter().find(|(state, _)| state == self).map(|(_, code)| *code);
        Ok(ToSqlOutput::from(code.unwrap_or_default()))
    }
}

impl FromSql for State {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let code = value.as_i64()?;
        let found = Self::CODES.iter().find(|(_, known)| *known == code);
        found.map(|(state, _)| *state).ok_or(FromSqlError::OutOfRange(code))
    }
}
