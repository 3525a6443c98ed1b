//! What nodes have signed of how their commands ended: judged here, by the keys that were certified here. A gateway hands
//! over what a node has said and the signed body that came with it; what of the two it has changed does not hold.
//!
//! What holds is noted once a fact, however often it is said and by which of its node's keys; of what does not hold the
//! latest is kept for people.

use std::collections::BTreeSet;

use rusqlite::{Connection, params};

use super::enrol::Enrolment;
use super::messages::{Claim, FactView, Judged};
use super::{AskError, Told, Worker};
use crate::gateway::store::{corrupt, int, uint};
use crate::model::limits::{ID_BYTES, REASON_BYTES, TEXT_BYTES, cut_text};
use crate::model::{CommandId, Digest, NodeId, Reason, ServerTime};
use crate::mutant::{self, Mutant};
use crate::wire::dsse::{Audience, DocumentError, Envelope, PublicKey, verify_document};
use crate::wire::frames::read_envelope;
use crate::wire::pb;
use crate::wire::report::{Fact, SignedResult};
use crate::wire::shape;

/// Facts answered at once.
const PAGE: i64 = 1_000;
/// Claims that did not hold which are kept: a gateway may make up as many as it likes.
const REFUSED: i64 = 1_000;
/// Facts of one node that are kept: a node may sign as many ends as it likes, of commands that nobody gave it.
const HELD: i64 = 10_000;

/// Each fact once; `refused` is empty for one that holds. A result whose output its node has forgotten is the same one.
pub(super) const TABLE: &str = "
CREATE TABLE IF NOT EXISTS facts (
  number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, command_id TEXT NOT NULL, node_id TEXT NOT NULL,
  state TEXT NOT NULL, reason TEXT NOT NULL, effect TEXT NOT NULL, attempt INTEGER NOT NULL,
  serial TEXT NOT NULL, refused TEXT NOT NULL, detail TEXT NOT NULL,
  UNIQUE (command_id, node_id, state, reason, effect, attempt, refused));
CREATE INDEX IF NOT EXISTS facts_refused ON facts (number) WHERE refused <> '';
CREATE INDEX IF NOT EXISTS facts_held ON facts (node_id, number) WHERE refused = '';
";

/// Why a claim does not hold.
struct No(Reason, String);

/// A certificate of the key that a signature names.
struct Certified {
    serial: String,
    node: NodeId,
    key: PublicKey,
    revoked: bool,
}

impl Worker {
    /// Judges what gateways hand over, in one transaction.
    pub(super) fn facts(&self, claims: &[Claim], now: ServerTime) -> Result<Told, AskError> {
        let judged = self.enrolment().alone(|tables| {
            let judged = claims.iter().map(|claim| self.fact(tables, claim, now));
            let judged = judged.collect::<Result<Vec<_>, AskError>>()?;
            let held = claims.iter().zip(&judged).filter(|(_, judged)| judged.refused.is_none());
            let nodes: BTreeSet<&str> = held.map(|(claim, _)| claim.node.as_str()).collect();
            nodes.into_iter().try_for_each(|node| forget_oldest(&tables.0, node, HELD))?;
            Ok::<_, AskError>(judged)
        })?;
        Ok(Told::Judged(judged))
    }

    /// What was made of them, behind a number.
    pub(super) fn facts_after(&self, after: u64) -> Result<Told, AskError> {
        Ok(Told::Facts(read(&self.enrolment().0, after)?))
    }

    fn fact(&self, tables: &Enrolment, claim: &Claim, now: ServerTime) -> Result<Judged, AskError> {
        let update: Option<pb::CommandUpdate> = shape::decode(&claim.update.0).ok();
        let said = update.as_ref().and_then(Fact::of).filter(is_bounded);
        let (Some(update), Some(said)) = (update, said) else {
            let message = "what was handed over is no result";
            tracing::warn!(node = %claim.node, message);
            return Ok(Judged { refused: Some(Reason::Invalid), message: message.into() });
        };
        let judged = self.judge(tables, claim, update, &said)?;
        let (serial, refused) = match judged {
            Ok(serial) => {
                tables.used(&serial)?;
                (serial, None)
            }
            Err(No(reason, detail)) => (String::new(), Some(No(reason, cut_text(detail)))),
        };
        // Whoever hands over may name as many nodes as it likes.
        if refused.as_ref().is_none_or(|no| no.0 != Reason::UnknownNode) {
            note(&tables.0, &claim.node, &said, &serial, refused.as_ref(), now)?;
        }
        Ok(match refused {
            None => Judged { refused: None, message: String::new() },
            Some(No(reason, message)) => {
                let (node, command) = (&claim.node, &said.command_id);
                tracing::warn!(%node, %command, %reason, message, "a result does not hold");
                Judged { refused: Some(reason), message }
            }
        })
    }

    /// The serial of the certificate under which all of it holds.
    fn judge(
        &self,
        tables: &Enrolment,
        claim: &Claim,
        update: pb::CommandUpdate,
        said: &Fact,
    ) -> Result<Result<String, No>, AskError> {
        if mutant::is(Mutant::ResultUnverified) {
            return Ok(Ok(String::new()));
        }
        let Some(envelope) = update.signed_result else {
            let message = "the kind asks that its node signs the result, and it is not signed";
            return Ok(Err(No(Reason::SignatureRequired, message.into())));
        };
        let envelope = match read_envelope(envelope) {
            Ok(envelope) => envelope,
            Err(error) => return Ok(Err(No(Reason::Invalid, error.to_string()))),
        };
        let certified = certified(&tables.0, &envelope)?;
        if certified.is_empty() && !is_known(&tables.0, &claim.node)? {
            let message = "its node was deleted before the result was judged, and its keys with it";
            return Ok(Err(No(Reason::UnknownNode, message.into())));
        }
        Ok(self.holds(claim, &envelope, said, &certified))
    }

    fn holds(
        &self,
        claim: &Claim,
        envelope: &Envelope,
        said: &Fact,
        certified: &[Certified],
    ) -> Result<String, No> {
        let invalid = |message: String| No(Reason::SignatureInvalid, message);
        let Some(first) = certified.first() else {
            return Err(invalid("no certificate that was issued here has the key that signed it".into()));
        };
        // A key has one node, however many certificates.
        let audience = Audience { trust_domain: self.trust_domain.clone(), node_id: first.node.clone() };
        let verified = verify_document::<SignedResult>(envelope, &first.key, Some(&audience));
        let body = verified.map_err(|error| No(token(&error), error.to_string()))?.into_inner();
        let certificate = certified.iter().find(|held| held.serial == body.certificate_serial);
        let Some(certificate) = certificate else {
            let serial = Some(&*body.certificate_serial).filter(|serial| serial.len() <= ID_BYTES);
            let serial = serial.unwrap_or("with a serial that is none");
            return Err(invalid(format!("it names the certificate {serial}, which is not of its key")));
        };
        if certificate.revoked {
            let message = format!("its certificate {} was revoked", certificate.serial);
            return Err(No(Reason::CertificateRevoked, message));
        }
        if body.node_id != claim.node {
            let message = format!("it was signed by {}, and came as that of {}", body.node_id, claim.node);
            return Err(No(Reason::WrongNode, message));
        }
        if body.fact != *said {
            let message = match body.fact.command_id == said.command_id {
                true => "what stands beside it is not what its node has signed".to_owned(),
                false => format!("it was signed for the command {}", body.fact.command_id),
            };
            return Err(No(Reason::ResultAltered, message));
        }
        Ok(body.certificate_serial)
    }
}

/// No node of ours says more, and a gateway hands over no more.
fn is_bounded(said: &Fact) -> bool {
    said.reason.len() <= REASON_BYTES && said.message.len() <= TEXT_BYTES
}

fn is_known(db: &Connection, node: &NodeId) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM nodes WHERE node_id = ?")?.exists([node.as_str()])
}

/// Of the facts of a node that hold, the latest are kept.
fn forget_oldest(db: &Connection, node: &str, kept: i64) -> rusqlite::Result<()> {
    db.prepare_cached(
        "DELETE FROM facts WHERE number IN
           (SELECT number FROM facts WHERE node_id = ? AND refused = '' ORDER BY number DESC LIMIT -1 OFFSET ?)",
    )?
    .execute(params![node, kept])?;
    Ok(())
}

fn token(error: &DocumentError) -> Reason {
    match error {
        DocumentError::Type(..) | DocumentError::Signature(_) => Reason::SignatureInvalid,
        DocumentError::UnknownField(_) => Reason::UnsupportedField,
        DocumentError::Body(_) => Reason::Invalid,
        DocumentError::Audience(_) => Reason::WrongNode,
    }
}

/// The certificates of the first key of an envelope that has any.
fn certified(db: &Connection, envelope: &Envelope) -> rusqlite::Result<Vec<Certified>> {
    let sql = "SELECT serial, node_id, public_key, revoked FROM certificates
         WHERE spki_sha256 = ? AND public_key <> ''";
    let mut rows = db.prepare_cached(sql)?;
    for signature in &envelope.signatures {
        let Some(id) = Digest::from_slice(&signature.key_id) else { continue };
        let found: Vec<Certified> = rows
            .query_map([id.hex()], |row| {
                let key: String = row.get(2)?;
                Ok(Certified {
                    serial: row.get(0)?,
                    node: NodeId::new(row.get::<_, String>(1)?).map_err(|error| corrupt(1, error))?,
                    key: key.parse().map_err(|error| corrupt(2, error))?,
                    revoked: row.get(3)?,
                })
            })?
            .collect::<Result<_, _>>()?;
        if !found.is_empty() {
            return Ok(found);
        }
    }
    Ok(Vec::new())
}

fn note(
    db: &Connection,
    node: &NodeId,
    said: &Fact,
    serial: &str,
    refused: Option<&No>,
    now: ServerTime,
) -> rusqlite::Result<()> {
    let (refused, detail) = refused.map_or(("", ""), |No(reason, detail)| (reason.token(), detail));
    let added = db
        .prepare_cached(
            "INSERT OR IGNORE INTO facts (at_ms, command_id, node_id, state, reason, effect, attempt, serial, refused,
               detail) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            now.0,
            said.command_id.as_str(),
            node.as_str(),
            word(&said.state),
            said.reason,
            word(&said.effect),
            said.attempt,
            serial,
            refused,
            detail,
        ])?;
    if added == 1 && !refused.is_empty() {
        db.prepare_cached(
            "DELETE FROM facts WHERE number IN
               (SELECT number FROM facts WHERE refused <> '' ORDER BY number DESC LIMIT -1 OFFSET ?)",
        )?
        .execute([REFUSED])?;
    }
    Ok(())
}

/// A state or an effect, as a gateway has it too.
fn word(of: &impl serde::Serialize) -> String {
    let word = serde_json::to_value(of).ok();
    word.and_then(|word| Some(word.as_str()?.to_lowercase())).unwrap_or_default()
}

fn read(db: &Connection, after: u64) -> rusqlite::Result<Vec<FactView>> {
    let sql =
        "SELECT number, at_ms, command_id, node_id, state, reason, effect, attempt, serial, refused, detail
         FROM facts WHERE number > ? ORDER BY number LIMIT ?";
    db.prepare_cached(sql)?
        .query_map(params![int(after), PAGE], |row| {
            Ok(FactView {
                number: uint(row.get(0)?),
                at_ms: row.get(1)?,
                command: CommandId::new(row.get::<_, String>(2)?).map_err(|error| corrupt(2, error))?,
                node: NodeId::new(row.get::<_, String>(3)?).map_err(|error| corrupt(3, error))?,
                state: row.get(4)?,
                reason: row.get(5)?,
                effect: row.get(6)?,
                attempt: row.get(7)?,
                serial: row.get(8)?,
                refused: row.get(9)?,
                detail: row.get(10)?,
            })
        })?
        .collect()
}

#[cfg(test)]
mod tests;
