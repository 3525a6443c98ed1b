//! The gateway's events and counters.

use rusqlite::{Connection, params};

use super::{Store, StoreError, int, uint};
use crate::gateway::control::EventView;

/// Events answered at once.
const PAGE: i64 = 1_000;

/// Adds an event within a job.
pub(super) fn add(
    db: &Connection,
    at_ms: i64,
    kind: &str,
    node: &str,
    detail: &serde_json::Value,
) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT INTO events (at_ms, kind, node_id, detail) VALUES (?, ?, ?, ?)")?
        .execute(params![at_ms, kind, node, detail.to_string()])?;
    Ok(())
}

/// Adds to a counter within a job.
pub(super) fn count(db: &Connection, name: &str, by: u64) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT INTO counters (name, count) VALUES (?1, ?2) ON CONFLICT (name) DO UPDATE SET count = count + ?2",
    )?
    .execute(params![name, int(by)])?;
    Ok(())
}

impl Store {
    /// Events behind a number, oldest first, at most a thousand.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn events(&self, after: u64) -> Result<Vec<EventView>, StoreError> {
        self.run(move |db| {
            let mut rows = db.prepare_cached(
                "SELECT seq, at_ms, kind, node_id, detail FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
            )?;
            let events = rows.query_map(params![int(after), PAGE], |row| {
                let detail: String = row.get(4)?;
                Ok(EventView {
                    seq: uint(row.get(0)?),
                    at_ms: row.get(1)?,
                    kind: row.get(2)?,
                    node: row.get(3)?,
                    detail: serde_json::from_str(&detail).unwrap_or_default(),
                })
            })?;
            events.collect()
        })
        .await
    }

    /// Adds refusals to the counters, by token.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn count_refusals(&self, refusals: Vec<(&'static str, u64)>) -> Result<(), StoreError> {
        self.run(move |db| {
            refusals.iter().try_for_each(|(token, by)| count(db, &format!("refused.{token}"), *by))
        })
        .await
    }
}
