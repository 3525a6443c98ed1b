//! Tokens, joins, and the certificates that were signed.

use rusqlite::{Connection, OptionalExtension, params};

use super::{Store, StoreError, int, uint};
use crate::gateway::ticket::Grant;
use crate::model::{Digest, NodeId, Role, ServerTime};

/// A repeated join holds at least this long after the first, ms: a machine that was killed in the middle of its
/// join needs no second ticket.
const REPEAT_MS: i64 = 24 * 3600 * 1000;

/// A join, as far as the store decides it.
#[derive(Debug)]
pub struct JoinTry {
    /// Digest of the token.
    pub token: Digest,
    /// SHA-256 of the public key.
    pub spki: Digest,
    /// The role asked for.
    pub role: Role,
    /// The id to give if the machine is new.
    pub fresh: NodeId,
    /// The gateway's clock.
    pub now: ServerTime,
}

/// What the machine becomes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Its id.
    pub node: NodeId,
    /// Where it stands.
    pub site: String,
    /// host or ramdisk.
    pub role: Role,
    /// Its identity generation.
    pub generation: u64,
}

/// Why a token is not honoured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JoinRefusal {
    /// Not known here.
    Unknown,
    /// Run out.
    Expired,
    /// Used up.
    Used,
}

impl Store {
    /// Stores a new token.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn add_token(&self, token: Digest, grant: Grant) -> Result<(), StoreError> {
        self.run(move |db| {
            db.execute(
                "INSERT INTO tokens (sha256, uses, expires_ms, site) VALUES (?, ?, ?, ?)",
                params![token.hex(), grant.uses, grant.expires_at.0, grant.site],
            )?;
            Ok(())
        })
        .await
    }

    /// Uses a token once. The same token and key again give the same node and use nothing.
    ///
    /// # Errors
    /// See [`StoreError`]; a token that is not honoured is the inner error.
    pub async fn join(&self, attempt: JoinTry) -> Result<Result<Joined, JoinRefusal>, StoreError> {
        self.run(move |db| join(db, &attempt)).await
    }

    /// Records a certificate that was signed for a node.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn add_certificate(
        &self,
        serial: String,
        node: &Joined,
        not_after: ServerTime,
    ) -> Result<(), StoreError> {
        let (id, generation) = (node.node.clone(), int(node.generation));
        self.run(move |db| {
            db.execute(
                "INSERT INTO certs (serial, node_id, generation, not_after_ms) VALUES (?, ?, ?, ?)",
                params![serial, id.as_str(), generation, not_after.0],
            )?;
            Ok(())
        })
        .await
    }
}

fn join(db: &Connection, attempt: &JoinTry) -> rusqlite::Result<Result<Joined, JoinRefusal>> {
    let token = attempt.token.hex();
    let row = db
        .query_row("SELECT uses, used, expires_ms, site FROM tokens WHERE sha256 = ?", [&token], |row| {
            Ok((
                row.get::<_, i64>(0)?,
                row.get::<_, i64>(1)?,
                row.get::<_, i64>(2)?,
                row.get::<_, String>(3)?,
            ))
        })
        .optional()?;
    let Some((uses, used, expires_ms, site)) = row else { return Ok(Err(JoinRefusal::Unknown)) };
    let spki = attempt.spki.hex();
    let before = db
        .query_row(
            "SELECT n.node_id, n.site, n.role, n.generation, j.joined_ms FROM joins j JOIN nodes n USING (node_id)
             WHERE j.token_sha256 = ? AND j.spki_sha256 = ?",
            [&token, &spki],
            |row| Ok((read_joined(row)?, row.get::<_, i64>(4)?)),
        )
        .optional()?;
    if let Some((joined, joined_ms)) = before {
        let until = expires_ms.max(joined_ms.saturating_add(REPEAT_MS));
        return Ok(if attempt.now.0 <= until { Ok(joined) } else { Err(JoinRefusal::Expired) });
    }
    if attempt.now.0 > expires_ms {
        return Ok(Err(JoinRefusal::Expired));
    }
    if used >= uses {
        return Ok(Err(JoinRefusal::Used));
    }
    let joined = Joined { node: attempt.fresh.clone(), site, role: attempt.role, generation: 1 };
    db.execute("UPDATE tokens SET used = used + 1 WHERE sha256 = ?", [&token])?;
    db.execute(
        "INSERT INTO nodes (node_id, generation, role, site) VALUES (?, 1, ?, ?)",
        params![joined.node.as_str(), joined.role.name(), joined.site],
    )?;
    db.execute(
        "INSERT INTO joins (token_sha256, spki_sha256, node_id, joined_ms) VALUES (?, ?, ?, ?)",
        params![token, spki, joined.node.as_str(), attempt.now.0],
    )?;
    Ok(Ok(joined))
}

fn read_joined(row: &rusqlite::Row<'_>) -> rusqlite::Result<Joined> {
    let node = NodeId::new(row.get::<_, String>(0)?).map_err(|error| super::corrupt(0, error))?;
    let role = Role::from_name(&row.get::<_, String>(2)?).unwrap_or(Role::Host);
    Ok(Joined { node, site: row.get(1)?, role, generation: uint(row.get(3)?) })
}
