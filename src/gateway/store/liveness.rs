//! Nodes that fell silent. Nothing here releases anything: a node that is unreachable is one that nobody knows of.

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::{Store, StoreError, events, notices};
use crate::model::ServerTime;

/// The sweep is done this often, by whichever gateway comes to it, ms.
const EVERY_MS: i64 = 5_000;
/// Without a sweep for longer than this, the store was out of reach, ms.
const OUTAGE_MS: i64 = 20_000;
/// No node is called unreachable for this long after that, ms: ages that nobody could write are no silence.
const HOLD_MS: i64 = 5 * 60_000;

impl Store {
    /// Judges the silent nodes, if nobody has for a while. How many have become unreachable.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn judge_silence(&self) -> Result<usize, StoreError> {
        let now = self.clock();
        self.run(move |db| judge(db, now())).await
    }
}

fn judge(db: &Connection, now: ServerTime) -> rusqlite::Result<usize> {
    let judged = time(db, "liveness.judged")?;
    // A clock that was set back makes a sweep due, and no outage.
    if judged.is_some_and(|judged| (judged..judged + EVERY_MS).contains(&now.0)) {
        return Ok(0);
    }
    set_time(db, "liveness.judged", now.0)?;
    notices::forget(db, now)?;
    if judged.is_some_and(|judged| now.0 - judged > OUTAGE_MS) {
        set_time(db, "liveness.held", now.0 + HOLD_MS)?;
    }
    if time(db, "liveness.held")?.is_some_and(|held| (held - HOLD_MS..held).contains(&now.0)) {
        return Ok(0);
    }
    let silent: Vec<(String, i64)> = db
        .prepare_cached(
            "UPDATE nodes SET state = 'unreachable'
             WHERE state = 'disconnected' AND epoch > 0 AND last_seen_ms + patience_ms <= ?
             RETURNING node_id, last_seen_ms",
        )?
        .query_map([now.0], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_, _>>()?;
    for (node, last_seen) in &silent {
        events::add(db, now.0, "node.unreachable", node, &json!({"silentMs": now.0 - last_seen}))?;
    }
    Ok(silent.len())
}

fn time(db: &Connection, key: &str) -> rusqlite::Result<Option<i64>> {
    db.prepare_cached("SELECT CAST(value AS INTEGER) FROM meta WHERE key = ?")?
        .query_row([key], |row| row.get(0))
        .optional()
}

fn set_time(db: &Connection, key: &str, at_ms: i64) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)")?
        .execute(params![key, at_ms.to_string()])?;
    Ok(())
}
