//! Envelopes (DSSE), who may sign them, and the policy for commands. The one maker of [`Verified`].
//!
//! A signature is over the payload's type and bytes together ([`pre_authentication`]), so that one over a command never
//! passes for one over a cancellation. What was verified is what is parsed: a payload is never encoded again.

mod command;
mod document;
mod key;
mod sign;
mod worker;

use bytes::Bytes;

pub use command::{
    Authority, CANCEL_TYPE, COMMAND_TYPE, CancelBody, Policy, Refusal, verify_cancel, verify_command,
};
pub use document::{Document, DocumentError, verify_document};
pub use key::{KeyError, PublicKey};
pub use sign::{SignError, sign, signing_key};
pub use worker::{BadRoot, CommandRoots, Worker, WorkerError};

use serde::{Deserialize, Serialize};

use super::der;
use crate::model::NodeId;
use crate::mutant::{self, Mutant};

/// An envelope as received, within the limits. In JSON, for files of ours, its bytes are base64.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// `application/vnd.bcd.v1.<suffix>`.
    pub payload_type: String,
    /// The signed body.
    #[serde(with = "der::one")]
    pub payload: Bytes,
    /// At most [`crate::model::limits::SIGNATURES`].
    pub signatures: Vec<Signature>,
}

/// One signature of an envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// SHA-256 of the signer's SPKI.
    #[serde(with = "der::one")]
    pub key_id: Bytes,
    /// The signature's bytes.
    #[serde(with = "der::one")]
    pub signature: Bytes,
    /// DER certificates, leaf first; empty when the key is known by its id.
    #[serde(with = "der::list", default)]
    pub chain: Vec<Bytes>,
}

/// Proof that `T` came from a document whose signature held, or that the policy let pass.
#[derive(Debug, Clone)]
pub struct Verified<T> {
    document: T,
    signer: Option<Worker>,
}

impl<T> Verified<T> {
    /// The document.
    pub fn get(&self) -> &T {
        &self.document
    }

    /// The document, without the proof.
    pub fn into_inner(self) -> T {
        self.document
    }

    /// The worker that signed it; absent where the policy let it pass unsigned, or where the key was pinned.
    pub fn signer(&self) -> Option<&Worker> {
        self.signer.as_ref()
    }
}

/// Whom a document must be for.
#[derive(Debug, Clone)]
pub struct Audience {
    /// The deployment's name.
    pub trust_domain: String,
    /// This node.
    pub node_id: NodeId,
}

/// What a signature is over: DSSE's pre-authentication encoding.
fn pre_authentication(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

/// Whether a body is for this node and deployment.
fn check_audience(trust_domain: &str, node_id: Option<&NodeId>, audience: &Audience) -> Result<(), String> {
    if trust_domain != audience.trust_domain {
        return Err(format!("the body is for the trust domain {:?}", shown(trust_domain)));
    }
    match node_id {
        Some(node_id) if *node_id != audience.node_id && !mutant::is(Mutant::WrongNodeTaken) => {
            Err(format!("the body is for node {node_id}"))
        }
        _ => Ok(()),
    }
}

/// What a log or a message shows of a peer's text.
fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_encoding_is_that_of_dsse() {
        // The example of the DSSE protocol's own text.
        let encoded = pre_authentication("http://example.com/HelloWorld", b"hello world");
        assert_eq!(encoded, b"DSSEv1 29 http://example.com/HelloWorld 11 hello world");
    }
}
