//! What a gateway that lies needs to know, and what it notes.

use rusqlite::{OptionalExtension, params};

use super::commands::{Deliver, read_deliver};
use super::{Store, StoreError, events};
use crate::model::NodeId;

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
