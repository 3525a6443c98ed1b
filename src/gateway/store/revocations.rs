//! Certificates that no longer count, and nodes that are no more.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::notices::{self, Notice};
use super::{Store, StoreError, corrupt, duplicates, events, uint};
use crate::model::{CommandId, Incarnation, NodeId, Reason, ServerTime};

/// Its event.
const RENEW_REFUSED: &str = "security.renew.refused";
/// One of a node is not told again within this time, ms.
const TOLD_MS: i64 = 60_000;

/// What has become of a session's right to be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// It is the node's newest.
    Newest,
    /// A newer one has the node.
    Superseded,
    /// Its certificate was revoked, for this reason.
    Revoked(Reason),
    /// The node was deleted.
    Unknown,
}

/// Who asks for a renewal.
#[derive(Debug, Clone)]
pub struct Renewing {
    /// The node.
    pub node: NodeId,
    /// Of the certificate that it calls with.
    pub serial: String,
    /// Of the process that calls, where it says so.
    pub incarnation: Option<Incarnation>,
    /// Its live session, where it has one; for people.
    pub session: Option<String>,
    /// Its certificate has run out, and it joins again with the key of it.
    pub rejoins: bool,
}

/// Why a certificate is not renewed, if there is a why.
pub(super) fn hinders(
    db: &Connection,
    renewing: &Renewing,
    now: ServerTime,
) -> rusqlite::Result<Option<Reason>> {
    if let Some(reason) = revoked(db, &renewing.serial)? {
        return Ok(Some(reason));
    }
    if renewing.rejoins && has_newer(db, renewing, now)? {
        return Ok(Some(Reason::IdentitySuperseded));
    }
    let node = renewing.node.as_str();
    let newest: Option<String> = db
        .prepare_cached("SELECT incarnation FROM nodes WHERE node_id = ?")?
        .query_row([node], |row| row.get(0))
        .optional()?;
    let Some(newest) = newest else { return Ok(Some(Reason::UnknownNode)) };
    let incarnation = renewing.incarnation.as_ref().map(Incarnation::as_str);
    let other = incarnation.filter(|incarnation| *incarnation != newest);
    let Some(other) = other else { return Ok(None) };
    let followed = db
        .prepare_cached("SELECT 1 FROM appearances WHERE node_id = ? AND incarnation = ?")?
        .exists([node, other])?;
    Ok(followed.then_some(Reason::Superseded))
}

/// Whether the newest session of the node was opened with a certificate that outlives the one which has run out: the key of
/// that is retired. A node that never had the answer to its renewal has opened none with a newer one. Of a certificate that
/// is not known here the end is not, but for that it is over.
fn has_newer(db: &Connection, renewing: &Renewing, now: ServerTime) -> rusqlite::Result<bool> {
    let sql = "SELECT 1 FROM nodes n JOIN certs newest ON newest.serial = n.serial
         LEFT JOIN certs old ON old.serial = ?2
         WHERE n.node_id = ?1 AND n.serial <> ?2 AND newest.not_after_ms > coalesce(old.not_after_ms, ?3)";
    db.prepare_cached(sql)?.exists(params![renewing.node.as_str(), renewing.serial, now.0])
}

impl Store {
    /// Where a session of this epoch and certificate stands.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn standing(&self, node: NodeId, epoch: u64, serial: String) -> Result<Standing, StoreError> {
        self.run(move |db| {
            if let Some(reason) = revoked(db, &serial)? {
                return Ok(Standing::Revoked(reason));
            }
            let newest: Option<i64> = db
                .prepare_cached("SELECT epoch FROM nodes WHERE node_id = ?")?
                .query_row([node.as_str()], |row| row.get(0))
                .optional()?;
            Ok(match newest {
                None => Standing::Unknown,
                Some(newest) if uint(newest) > epoch => Standing::Superseded,
                Some(_) => Standing::Newest,
            })
        })
        .await
    }

    /// Revokes every certificate of a node. Refusals from then on carry what the join service has signed of it. How many
    /// there were; absent: no such node.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn revoke(&self, node: NodeId, signed: Option<Bytes>) -> Result<Option<usize>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            if !known(db, &node)? {
                return Ok(None);
            }
            if let Some(envelope) = &signed {
                let put =
                    "INSERT OR REPLACE INTO signed_revocations (node_id, at_ms, envelope) VALUES (?, ?, ?)";
                db.execute(put, params![node.as_str(), now().0, &envelope[..]])?;
            }
            let serials = revoke(db, &node, None, Reason::CertificateRevoked, now())?;
            tell_its_gateway(db, &node, now())?;
            Ok(Some(serials.len()))
        })
        .await
    }

    /// What the join service has signed of a node's revocation, an encoded Envelope.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn signed_revocation(&self, node: NodeId) -> Result<Option<Vec<u8>>, StoreError> {
        self.run(move |db| {
            db.prepare_cached("SELECT envelope FROM signed_revocations WHERE node_id = ?")?
                .query_row([node.as_str()], |row| row.get(0))
                .optional()
        })
        .await
    }

    /// Why the certificate of this serial may not be renewed, if it may not: a renewal must not be the way out of a
    /// quarantine, nor a copy's way on, nor a re-join that of a key which a renewal has retired. An incarnation that has not
    /// said Hello yet may.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn not_renewed(&self, renewing: Renewing) -> Result<Option<Reason>, StoreError> {
        let now = self.clock();
        self.run(move |db| hinders(db, &renewing, now())).await
    }

    /// Tells of a renewal that was refused, once a minute a node: it can ask as often as it likes.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn renewal_refused(&self, renewing: Renewing, reason: Reason) -> Result<(), StoreError> {
        let now = self.clock();
        self.run(move |db| {
            let (now, node) = (now(), renewing.node.as_str());
            let told = db
                .prepare_cached("SELECT 1 FROM events WHERE kind = ? AND node_id = ? AND at_ms > ?")?
                .exists(params![RENEW_REFUSED, node, now.0 - TOLD_MS])?;
            if told {
                return Ok(());
            }
            let detail = json!({
                "serial": renewing.serial,
                "reason": reason.token(),
                "incarnation": renewing.incarnation,
                "session": renewing.session,
            });
            events::add(db, now.0, RENEW_REFUSED, node, &detail)
        })
        .await
    }

    /// Takes every revocation of a node's certificates back, those of a quarantine too, and counts its alternations
    /// anew. How many there were; absent: no such node.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn unrevoke(&self, node: NodeId) -> Result<Option<usize>, StoreError> {
        self.run(move |db| {
            if !known(db, &node)? {
                return Ok(None);
            }
            duplicates::forget(db, node.as_str())?;
            db.execute("DELETE FROM signed_revocations WHERE node_id = ?", [node.as_str()])?;
            db.execute("DELETE FROM revocations WHERE node_id = ?", [node.as_str()]).map(Some)
        })
        .await
    }

    /// Deletes a node: its certificates no longer count and its open commands have ended. What was told of it stays.
    /// The commands; absent: no such node.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn delete(&self, node: NodeId) -> Result<Option<Vec<CommandId>>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            if !known(db, &node)? {
                return Ok(None);
            }
            let now = now();
            tell_its_gateway(db, &node, now)?;
            duplicates::forget(db, node.as_str())?;
            for table in ["certs", "revocations", "signed_revocations", "nodes"] {
                db.execute(&format!("DELETE FROM {table} WHERE node_id = ?"), [node.as_str()])?;
            }
            let mut end = db.prepare(
                "UPDATE commands SET state = 'failed', reason = ?, message = 'the node was deleted', ended_ms = ?,
                 effect = iif(deliveries = 0, 'none', 'unknown'), terminal_changes = terminal_changes + 1
                 WHERE node_id = ? AND state IN ('pending', 'dispatched', 'accepted', 'running') RETURNING id",
            )?;
            let ended = end.query_map(
                params![Reason::NodeDeleted.token(), now.0, node.as_str()],
                |row| CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error)),
            )?;
            ended.collect::<Result<_, _>>().map(Some)
        })
        .await
    }
}

fn known(db: &Connection, node: &NodeId) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM nodes WHERE node_id = ?")?.exists([node.as_str()])
}

/// Why a certificate was revoked, if it was.
pub(super) fn revoked(db: &Connection, serial: &str) -> rusqlite::Result<Option<Reason>> {
    let reason: Option<String> = db
        .prepare_cached("SELECT reason FROM revocations WHERE serial = ?")?
        .query_row([serial], |row| row.get(0))
        .optional()?;
    // A reason of a newer gateway beside this one revokes all the same.
    Ok(reason.map(|token| Reason::from_token(&token).unwrap_or(Reason::CertificateRevoked)))
}

/// Revokes every certificate of a node that is known here, and the one that it has shown. All that are revoked now.
pub(super) fn revoke(
    db: &Connection,
    node: &NodeId,
    shown: Option<&str>,
    why: Reason,
    now: ServerTime,
) -> rusqlite::Result<Vec<String>> {
    db.execute(
        "INSERT OR IGNORE INTO revocations (serial, node_id, at_ms, reason)
         SELECT serial, ?1, ?2, ?3 FROM certs WHERE node_id = ?1
         UNION SELECT serial, ?1, ?2, ?3 FROM nodes WHERE node_id = ?1 AND serial <> ''
         UNION SELECT ?4, ?1, ?2, ?3 WHERE ?4 IS NOT NULL",
        params![node.as_str(), now.0, why.token(), shown],
    )?;
    db.prepare("SELECT serial FROM revocations WHERE node_id = ? ORDER BY serial")?
        .query_map([node.as_str()], |row| row.get(0))?
        .collect()
}

/// Whichever gateway has the node's newest session is to look at it, the one that writes this too.
pub(super) fn tell_its_gateway(db: &Connection, node: &NodeId, now: ServerTime) -> rusqlite::Result<()> {
    let gateway: String =
        db.query_row("SELECT gateway_id FROM nodes WHERE node_id = ?", [node.as_str()], |row| row.get(0))?;
    notices::tell(db, &gateway, &Notice::Session(node.clone()), now)
}
