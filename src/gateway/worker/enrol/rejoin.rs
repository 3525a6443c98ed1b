//! A node whose certificate has run out is let in again by the key of it: its id stays, its generation rises.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior, params};

use super::{Enrolled, Enrolment, Holder, Refusal};
use crate::gateway::store::int;
use crate::model::{Digest, ServerTime};

/// A re-join, as far as the tables decide it.
#[derive(Debug)]
pub struct RejoinTry<'a> {
    /// Who asks, with the certificate that has run out.
    pub holder: &'a Holder,
    /// SHA-256 of the new public key.
    pub spki: Digest,
    /// So long after the certificate's end it is granted.
    pub window: Duration,
    /// The worker's clock.
    pub now: ServerTime,
}

impl Enrolment {
    /// Raises the generation of a node once for a certificate and a new key. The same two again give the same generation:
    /// a node that was killed before it had the answer asks again.
    pub fn rejoin(&mut self, attempt: &RejoinTry<'_>) -> rusqlite::Result<Result<Enrolled, Refusal>> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let joined = rejoin(&transaction, attempt)?;
        transaction.commit()?;
        Ok(joined)
    }
}

fn rejoin(db: &Connection, attempt: &RejoinTry<'_>) -> rusqlite::Result<Result<Enrolled, Refusal>> {
    let (holder, spki) = (attempt.holder, attempt.spki.hex());
    let standing = super::standing(db, holder)?;
    let Some(super::Standing { mut node, revoked, generation }) = standing else {
        return Ok(Err(Refusal::UnknownCertificate));
    };
    if revoked {
        return Ok(Err(Refusal::Revoked));
    }
    if generation < node.generation {
        let granted: Option<i64> = db
            .query_row(
                "SELECT generation FROM rejoins WHERE serial = ? AND spki_sha256 = ?",
                [&holder.serial, &spki],
                |row| row.get(0),
            )
            .optional()?;
        if granted != Some(int(node.generation)) {
            return Ok(Err(Refusal::Superseded));
        }
    } else if has_newer(db, holder)? {
        return Ok(Err(Refusal::Renewed));
    }
    if attempt.now < holder.not_after {
        return Ok(Err(Refusal::StillValid(holder.not_after)));
    }
    if attempt.now.since(holder.not_after) > attempt.window {
        return Ok(Err(Refusal::TooLate(holder.not_after)));
    }
    if generation == node.generation {
        node.generation += 1;
        db.execute(
            "UPDATE nodes SET generation = ? WHERE node_id = ?",
            params![int(node.generation), node.node.as_str()],
        )?;
        db.execute(
            "INSERT INTO rejoins (serial, spki_sha256, generation) VALUES (?, ?, ?)",
            params![holder.serial, spki, int(node.generation)],
        )?;
    }
    Ok(Ok(node))
}

/// Whether its node has used a certificate that was issued after this one: its key is retired then. One that was issued and
/// never used may be in an answer that was lost.
fn has_newer(db: &Connection, holder: &Holder) -> rusqlite::Result<bool> {
    // Those of earlier builds have no number, and end in the order of their issue.
    let sql = "SELECT 1 FROM certificates old JOIN certificates new USING (node_id, generation)
         WHERE old.serial = ? AND new.used = 1 AND (new.issued, new.not_after_ms) > (old.issued, old.not_after_ms)";
    db.prepare(sql)?.exists([&holder.serial])
}
