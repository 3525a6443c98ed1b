//! Events of the nodes: each once by (node, journal, sequence), in the order in which they came.

use rusqlite::{Connection, params};

use super::{Store, StoreError, int, uint};
use crate::gateway::control::NodeEventView;
use crate::gateway::node_events::Batch;
use crate::model::{JournalId, NodeId, ServerTime};

/// Events answered at once.
const PAGE: i64 = 1_000;

impl Store {
    /// Stores a batch; the highest number stored of that journal may be acked.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn take_node_events(
        &self,
        node: NodeId,
        batch: Batch,
        now: ServerTime,
    ) -> Result<(JournalId, u64), StoreError> {
        self.run(move |db| {
            take(db, &node, &batch, now)?;
            let acked = acked(db, &node, &batch.journal)?;
            Ok((batch.journal, acked))
        })
        .await
    }

    /// Events of a node (of all of them where none is named) behind a number of the store's, in the order in which
    /// they came, at most a thousand.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn node_events(
        &self,
        node: Option<NodeId>,
        after: u64,
    ) -> Result<Vec<NodeEventView>, StoreError> {
        self.run(move |db| {
            let mut rows = db.prepare_cached(
                "SELECT number, node_id, journal_id, seq, class, type, body, at_ms, age_ms, received_ms,
                   dropped_from, dropped_to
                 FROM node_events WHERE number > ?1 AND (?2 IS NULL OR node_id = ?2) ORDER BY number LIMIT ?3",
            )?;
            let node = node.as_ref().map(NodeId::as_str);
            let events = rows.query_map(params![int(after), node, PAGE], view)?;
            events.collect()
        })
        .await
    }
}

fn view(row: &rusqlite::Row<'_>) -> rusqlite::Result<NodeEventView> {
    let body: String = row.get(6)?;
    let dropped: (Option<i64>, Option<i64>) = (row.get(10)?, row.get(11)?);
    Ok(NodeEventView {
        number: uint(row.get(0)?),
        node: row.get(1)?,
        journal: row.get(2)?,
        seq: uint(row.get(3)?),
        class: row.get(4)?,
        kind: row.get(5)?,
        body: serde_json::from_str(&body).unwrap_or_default(),
        at_ms: row.get(7)?,
        age_ms: row.get::<_, Option<i64>>(8)?.map(uint),
        received_ms: row.get(9)?,
        dropped: dropped.0.zip(dropped.1).map(|(from, to)| (uint(from), uint(to))),
    })
}

/// The highest number stored of a journal; 0 for none. A journal that comes back is acked where it was.
pub(super) fn acked(db: &Connection, node: &NodeId, journal: &JournalId) -> rusqlite::Result<u64> {
    db.prepare_cached("SELECT coalesce(max(seq), 0) FROM node_events WHERE node_id = ? AND journal_id = ?")?
        .query_row([node.as_str(), journal.as_str()], |row| row.get(0))
        .map(uint)
}

fn take(db: &Connection, node: &NodeId, batch: &Batch, now: ServerTime) -> rusqlite::Result<()> {
    let mut insert = db.prepare_cached(
        "INSERT OR IGNORE INTO node_events (node_id, journal_id, seq, class, type, body, at_ms, age_ms, received_ms,
           dropped_from, dropped_to)
         VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )?;
    for event in &batch.events {
        insert.execute(params![
            node.as_str(),
            batch.journal.as_str(),
            int(event.seq),
            event.class,
            event.kind,
            event.body,
            event.at_ms,
            event.age_ms.map(int),
            now.0,
            event.dropped.map(|(from, _)| int(from)),
            event.dropped.map(|(_, to)| int(to)),
        ])?;
    }
    Ok(())
}
