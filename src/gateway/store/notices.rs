//! What gateways tell each other, through the store: a row in the transaction that makes it true. Each gateway looks
//! for its own rows; whatever it misses, the next Hello or the next look at the state itself makes good.

use std::sync::atomic::Ordering;

use rusqlite::{Connection, params};

use super::lease::has_others;
use super::{Store, StoreError, corrupt, int, uint};
use crate::model::{CommandId, NodeId, ServerTime};

/// Notices are kept this long, ms: many looks.
const KEPT_MS: i64 = 60_000;
/// Notices read at once.
const PAGE: usize = 1_000;

/// A word to one gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// There may be something to dispatch to a node.
    Work(NodeId),
    /// A command of one of its nodes was cancelled.
    Cancelled(CommandId),
    /// A node's session, or its certificate, may no longer be the one that counts.
    Session(NodeId),
}

impl Notice {
    fn columns(&self) -> (&'static str, &str) {
        match self {
            Self::Work(node) => ("work", node.as_str()),
            Self::Cancelled(id) => ("cancelled", id.as_str()),
            Self::Session(node) => ("session", node.as_str()),
        }
    }

    fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Option<Self>> {
        let (kind, subject): (String, String) = (row.get(1)?, row.get(2)?);
        let node = |subject| NodeId::new(subject).map_err(|error| corrupt(2, error));
        Ok(match kind.as_str() {
            "work" => Some(Self::Work(node(subject)?)),
            "cancelled" => Some(Self::Cancelled(CommandId::new(subject).map_err(|error| corrupt(2, error))?)),
            "session" => Some(Self::Session(node(subject)?)),
            // Of a newer gateway beside this one.
            _ => None,
        })
    }
}

/// What there is to hear.
#[derive(Debug, Default)]
pub struct Heard {
    /// Number of the last notice; the next look begins behind it.
    pub last: u64,
    /// Number of the last event of the gateways.
    pub last_event: u64,
    /// In the order in which they were written.
    pub notices: Vec<Notice>,
}

impl Store {
    /// The notices to this gateway behind a number.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn notices(&self, after: u64) -> Result<Heard, StoreError> {
        let (gateway, shared) = (self.gateway.clone(), self.shared.clone());
        self.run(move |db| {
            shared.store(has_others(db, &gateway)?, Ordering::Relaxed);
            let mut rows = db.prepare_cached(
                "SELECT number, kind, subject FROM notices WHERE number > ? AND gateway_id = ? ORDER BY number LIMIT ?",
            )?;
            let mut heard = Heard { last: after, last_event: last(db, "events")?, notices: Vec::new() };
            let rows = rows.query_map(params![int(after), &*gateway, int(PAGE as u64)], |row| {
                Ok((uint(row.get(0)?), Notice::read(row)?))
            })?;
            for row in rows {
                let (number, notice) = row?;
                heard.last = number;
                heard.notices.extend(notice);
            }
            Ok(heard)
        })
        .await
    }

    /// The number of the last notice there ever was: what a gateway that starts has no use for.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn last_notice(&self) -> Result<u64, StoreError> {
        self.run(|db| last(db, "notices")).await
    }
}

/// The highest number that a table has given out.
fn last(db: &Connection, table: &str) -> rusqlite::Result<u64> {
    db.prepare_cached("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = ?")?
        .query_row([table], |row| row.get(0))
        .map(uint)
}

/// Tells a gateway something, within the job that makes it true.
pub(super) fn tell(db: &Connection, gateway: &str, notice: &Notice, now: ServerTime) -> rusqlite::Result<()> {
    let (kind, subject) = notice.columns();
    db.prepare_cached("INSERT INTO notices (gateway_id, at_ms, kind, subject) VALUES (?, ?, ?, ?)")?
        .execute(params![gateway, now.0, kind, subject])?;
    Ok(())
}

/// Forgets notices that everybody has had time to read.
pub(super) fn forget(db: &Connection, now: ServerTime) -> rusqlite::Result<()> {
    db.prepare_cached("DELETE FROM notices WHERE at_ms < ?")?.execute([now.0 - KEPT_MS])?;
    Ok(())
}
