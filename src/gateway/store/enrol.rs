//! What is noted of the certificates that the worker has issued.

use rusqlite::params;

use super::revocations::{Renewing, hinders};
use super::{Store, StoreError, int};
use crate::gateway::worker::Noted;
use crate::model::Reason;

impl Store {
    /// Notes a certificate, and its node where it is new or has joined again. Of a renewal: unless it was revoked or
    /// deleted while the worker answered; then why, and nothing is noted.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn note_certificate(
        &self,
        noted: Noted,
        renewing: Option<Renewing>,
    ) -> Result<Option<Reason>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            if let Some(renewing) = &renewing
                && let Some(reason) = hinders(db, renewing, now())?
            {
                return Ok(Some(reason));
            }
            let (node, generation) = (noted.node.as_str(), int(noted.generation));
            // A map of strings cannot fail to serialise.
            let labels = serde_json::to_string(&noted.labels).unwrap_or_default();
            db.execute(
                "INSERT INTO nodes (node_id, generation, role, site, labels) VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (node_id) DO UPDATE
                 SET generation = max(generation, ?2), role = ?3, site = ?4, labels = ?5",
                params![node, generation, noted.role.name(), noted.site, labels],
            )?;
            db.execute(
                "INSERT OR IGNORE INTO certs (serial, node_id, generation, not_after_ms) VALUES (?, ?, ?, ?)",
                params![noted.serial, node, generation, noted.not_after.0],
            )?;
            Ok(None)
        })
        .await
    }
}
