//! Commands that have not ended, as a barrier lists them.

use super::handle::Journal;
use super::record::State;
use super::rows;
use super::{WriteError, core::Core};
use crate::model::CommandId;

/// A command that is ACCEPTED or RUNNING.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unfinished {
    /// The command.
    pub id: CommandId,
    /// The kind's name.
    pub kind: String,
    /// Where it stands.
    pub state: State,
    /// Executions so far, one that is under way included.
    pub attempt: u32,
}

impl Journal {
    /// Every command that has not ended, by id: at one moment of the writer, behind whatever was handed to it before.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn unfinished(&self) -> Result<Vec<Unfinished>, WriteError> {
        self.submit(|core: &mut Core| {
            let rows = rows::unfinished(&core.conn)?;
            Ok(rows.into_iter().map(of_row).collect())
        })
        .await
    }
}

fn of_row(row: rows::Row) -> Unfinished {
    let rows::Row { id, kind, state, attempt, .. } = row;
    Unfinished { id, kind, state, attempt }
}
