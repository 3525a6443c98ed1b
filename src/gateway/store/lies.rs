//! What a gateway that lies needs to know, and what it notes.

use rusqlite::{OptionalExtension, params};

use super::commands::{Deliver, read_deliver};
use super::{Store, StoreError, corrupt, events};
use crate::model::{CommandId, NodeId};

impl Store {
    /// Notes what was told, or answered.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn note_lie(
        &self,
        node: NodeId,
        kind: &'static str,
        detail: serde_json::Value,
    ) -> Result<(), StoreError> {
        let now = self.clock();
        self.run(move |db| events::add(db, now().0, kind, node.as_str(), &detail)).await
    }

    /// Keeps a command back that was marked for its first delivery: it stays in its queue until it has expired.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn withhold(&self, id: CommandId) -> Result<(), StoreError> {
        self.run(move |db| {
            db.prepare_cached(
                "UPDATE commands SET state = 'pending', deliveries = 0, dispatched_ms = 0,
                 not_before_ms = not_after_ms + 1 WHERE id = ? AND state = 'dispatched' AND deliveries = 1",
            )?
            .execute([id.as_str()])?;
            Ok(())
        })
        .await
    }

    /// Takes a node's commands that were kept back and have expired.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn withheld(&self, node: NodeId) -> Result<Vec<Deliver>, StoreError> {
        self.run(move |db| {
            db.prepare_cached(
                "UPDATE commands SET not_before_ms = 0
                 WHERE node_id = ? AND state = 'expired' AND deliveries = 0 AND not_before_ms > not_after_ms
                 RETURNING id, seq, deliveries, lane, payload, NULL, signatures",
            )?
            .query_map([node.as_str()], read_deliver)?
            .collect()
        })
        .await
    }

    /// The latest program that runs on a node, as far as is known.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn running_program(&self, node: NodeId) -> Result<Option<CommandId>, StoreError> {
        self.run(move |db| {
            db.prepare_cached(
                "SELECT id FROM commands WHERE node_id = ? AND kind = 'node.exec' AND state = 'running'
                 ORDER BY number DESC LIMIT 1",
            )?
            .query_row([node.as_str()], |row| {
                CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))
            })
            .optional()
        })
        .await
    }

    /// The latest program of a node, or of any other one while it may still be accepted there.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn latest_program(
        &self,
        node: NodeId,
        of_another: bool,
    ) -> Result<Option<Deliver>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            db.prepare_cached(
                "SELECT id, seq, deliveries, lane, payload, NULL, signatures FROM commands
                 WHERE kind = 'node.exec' AND iif(?2, node_id <> ?1 AND not_after_ms > ?3, node_id = ?1)
                 ORDER BY number DESC LIMIT 1",
            )?
            .query_row(params![node.as_str(), of_another, now().0], read_deliver)
            .optional()
        })
        .await
    }
}
