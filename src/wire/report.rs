//! What a node says under its own key, for workers: a gateway carries it and cannot make it up.
//!
//! The signer's certificate stands beside: in a result by its serial, since the worker has issued it; in a leave as a
//! whole, since it may be heard after its node was forgotten.

use std::sync::Arc;

use bytes::Bytes;
use rustls::sign::SigningKey;
use serde::{Deserialize, Serialize};

use super::dsse::{Document, Envelope, SignError, sign};
use super::pb;
use crate::model::{CommandId, Digest, Effect, NodeId, ServerTime, Terminal, strict};

/// A machine that is no node any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Tells it from other reports.
    #[serde(rename = "type")]
    pub kind: LeaveKind,
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it was.
    pub node_id: NodeId,
    /// The working clock.
    pub issued_at: ServerTime,
    /// It counts for nothing afterwards: a machine that has not left in time has stayed.
    pub not_after: ServerTime,
}

/// The `type` of a [`Leave`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaveKind {
    /// `leave`.
    Leave,
}

impl Document for Leave {
    const TYPE: &'static str = "application/vnd.bcd.v1.report";

    fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    fn node_id(&self) -> Option<&NodeId> {
        Some(&self.node_id)
    }
}

/// How a command has ended: what a CommandUpdate says, of the output its digest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SignedResult {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it ran on.
    pub node_id: NodeId,
    /// The working clock when it was signed.
    pub issued_at: ServerTime,
    /// Of the certificate whose key signs, hex.
    pub certificate_serial: String,
    /// What it says.
    #[serde(deserialize_with = "strict::object")]
    pub fact: Fact,
}

/// The part that stays the same however often it is signed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// The command.
    pub command_id: CommandId,
    /// SHA-256 of its payload.
    pub body_sha256: Digest,
    /// Which end.
    pub state: Terminal,
    /// Executions.
    pub attempt: u32,
    /// Reason token; empty for none. Text, since a newer node may know more of them.
    pub reason: String,
    /// For people.
    pub message: String,
    /// What is known of the effect.
    pub effect: Effect,
    /// Start in server time, ms since the Unix epoch. 0: never started.
    pub started_ms: i64,
    /// End, likewise. 0: not known.
    pub finished_ms: i64,
    /// Run time on the monotonic clock, ms.
    pub duration_ms: u64,
    /// Length of the output.
    pub output_bytes: u64,
    /// SHA-256 of the output.
    pub output_sha256: Digest,
}

impl Document for SignedResult {
    const TYPE: &'static str = "application/vnd.bcd.v1.result";

    fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    fn node_id(&self) -> Option<&NodeId> {
        Some(&self.node_id)
    }
}

impl Fact {
    /// What an update says; absent when it names no command or no end.
    pub fn of(update: &pb::CommandUpdate) -> Option<Self> {
        let state = match update.state() {
            pb::CommandState::Succeeded => Terminal::Succeeded,
            pb::CommandState::Failed => Terminal::Failed,
            pb::CommandState::Cancelled => Terminal::Cancelled,
            pb::CommandState::Rejected => Terminal::Rejected,
            pb::CommandState::Unspecified
            | pb::CommandState::Refused
            | pb::CommandState::Accepted
            | pb::CommandState::Running => return None,
        };
        let effect = match update.effect() {
            pb::Effect::None => Effect::None,
            pb::Effect::Complete => Effect::Complete,
            pb::Effect::Unknown | pb::Effect::Unspecified => Effect::Unknown,
        };
        Some(Self {
            command_id: CommandId::new(update.command_id.as_str()).ok()?,
            body_sha256: Digest::from_slice(&update.body_sha256)?,
            state,
            attempt: update.attempt,
            reason: update.reason.clone(),
            message: update.message.clone(),
            effect,
            started_ms: update.started_ms,
            finished_ms: update.finished_ms,
            duration_ms: update.duration_ms,
            output_bytes: u64::try_from(update.output.len()).ok()?,
            output_sha256: Digest::of(&update.output),
        })
    }
}

/// The key of the certificate in use, and whose it is.
#[derive(Debug, Clone)]
pub struct Signer {
    /// The deployment's name.
    pub trust_domain: Arc<str>,
    /// The node.
    pub node_id: NodeId,
    /// The certificate's serial, hex.
    pub serial: Arc<str>,
    /// Its key.
    pub key: Arc<dyn SigningKey>,
}

impl Signer {
    /// Signs what an update says, into it. Blocks as long as the key does.
    ///
    /// # Errors
    /// See [`SignError`].
    pub fn sign_result(&self, update: &mut pb::CommandUpdate, now: ServerTime) -> Result<(), SignError> {
        let Some(fact) = Fact::of(update) else { return Ok(()) };
        let body = SignedResult {
            trust_domain: self.trust_domain.to_string(),
            node_id: self.node_id.clone(),
            issued_at: now,
            certificate_serial: self.serial.to_string(),
            fact,
        };
        update.signed_result = Some(self.sign(&body, Vec::new())?.into());
        Ok(())
    }

    /// Signs a document of this node's. Blocks as long as the key does.
    ///
    /// # Errors
    /// See [`SignError`].
    pub fn sign<T: Document + Serialize>(&self, body: &T, chain: Vec<Bytes>) -> Result<Envelope, SignError> {
        // Ids, times, digests and texts cannot fail to serialise.
        let body = serde_json::to_vec(body).unwrap_or_default();
        sign(T::TYPE, body, &*self.key, chain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::dsse::{Audience, DocumentError, PublicKey, Verified, signing_key, verify_document};

    fn signer(serial: &str) -> (Signer, PublicKey) {
        let pair = rcgen::KeyPair::generate().unwrap();
        let key = signing_key(pair.serialize_der()).unwrap();
        let public = PublicKey::from_spki(&key.public_key().unwrap()).unwrap();
        let node_id = NodeId::new("n-1").unwrap();
        (Signer { trust_domain: "lab.example".into(), node_id, serial: serial.into(), key }, public)
    }

    fn update() -> pb::CommandUpdate {
        pb::CommandUpdate {
            command_id: "c-1".into(),
            body_sha256: vec![7; 32].into(),
            state: pb::CommandState::Failed.into(),
            attempt: 1,
            reason: "exit-status".into(),
            message: "it ended with status 3".into(),
            effect: pb::Effect::Complete.into(),
            started_ms: 1_000,
            finished_ms: 2_000,
            duration_ms: 999,
            output: "{\"code\":3}".into(),
            ..Default::default()
        }
    }

    fn read(update: &pb::CommandUpdate, key: &PublicKey) -> SignedResult {
        let envelope = crate::wire::frames::read_envelope(update.signed_result.clone().unwrap()).unwrap();
        let node_id = NodeId::new("n-1").unwrap();
        let audience = Audience { trust_domain: "lab.example".into(), node_id };
        let verified: Result<Verified<SignedResult>, DocumentError> =
            verify_document(&envelope, key, Some(&audience));
        verified.unwrap().into_inner()
    }

    #[test]
    fn a_signed_result_says_all_that_its_update_says_and_each_other_word_is_another_fact() {
        let (signer, key) = signer("0a");
        let mut signed = update();
        signer.sign_result(&mut signed, ServerTime(5)).unwrap();
        let body = read(&signed, &key);
        assert_eq!((body.issued_at, body.certificate_serial.as_str()), (ServerTime(5), "0a"));
        assert_eq!(Fact::of(&signed).as_ref(), Some(&body.fact));
        let changes: [fn(&mut pb::CommandUpdate); 11] = [
            |update| update.command_id = "c-2".into(),
            |update| update.body_sha256 = vec![8; 32].into(),
            |update| update.state = pb::CommandState::Succeeded.into(),
            |update| update.attempt = 2,
            |update| update.reason = "signal".into(),
            |update| update.message = String::new(),
            |update| update.effect = pb::Effect::None.into(),
            |update| update.started_ms = 0,
            |update| update.finished_ms = 0,
            |update| update.duration_ms = 0,
            |update| update.output = "{\"code\":0}".into(),
        ];
        for (number, change) in changes.into_iter().enumerate() {
            let mut other = signed.clone();
            change(&mut other);
            assert_ne!(Fact::of(&other), Some(body.fact.clone()), "change {number}");
        }
    }

    #[test]
    fn what_is_signed_again_by_the_next_certificates_key_is_the_same_fact() {
        let ((old, old_key), (new, new_key)) = (signer("0a"), signer("0b"));
        let (mut first, mut again) = (update(), update());
        old.sign_result(&mut first, ServerTime(5)).unwrap();
        new.sign_result(&mut again, ServerTime(9)).unwrap();
        let (first, again) = (read(&first, &old_key), read(&again, &new_key));
        assert_eq!(first.fact, again.fact);
        assert_eq!((first.certificate_serial.as_str(), again.certificate_serial.as_str()), ("0a", "0b"));
    }

    #[test]
    fn a_signed_result_whose_fact_is_a_list_of_its_values_is_none() {
        let (signer, _) = signer("0a");
        let mut signed = update();
        signer.sign_result(&mut signed, ServerTime(5)).unwrap();
        let mut body: serde_json::Value =
            serde_json::from_slice(&signed.signed_result.unwrap().payload).unwrap();
        assert!(strict::parse::<SignedResult>(body.to_string().as_bytes()).is_ok());
        let fact = Fact::of(&update()).unwrap();
        body["fact"] = serde_json::json!([
            fact.command_id,
            fact.body_sha256,
            fact.state,
            fact.attempt,
            fact.reason,
            fact.message,
            fact.effect,
            fact.started_ms,
            fact.finished_ms,
            fact.duration_ms,
            fact.output_bytes,
            fact.output_sha256,
        ]);
        assert!(strict::parse::<SignedResult>(body.to_string().as_bytes()).is_err());
    }

    #[test]
    fn a_passing_answer_is_not_signed() {
        let (signer, _) = signer("0a");
        let mut running = pb::CommandUpdate { state: pb::CommandState::Running.into(), ..update() };
        signer.sign_result(&mut running, ServerTime(5)).unwrap();
        assert_eq!(running.signed_result, None);
    }
}
