//! Envelopes (DSSE) and the policy for their signatures. The one maker of [`Verified`].

use bytes::Bytes;

use crate::model::{Command, CommandId, Digest, NodeId, Reason, ServerTime};

/// An envelope as received, within the limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// `application/vnd.bcd.v1.<suffix>`.
    pub payload_type: String,
    /// The signed body.
    pub payload: Bytes,
    /// At most [`crate::model::limits::SIGNATURES`].
    pub signatures: Vec<Signature>,
}

/// One signature of an envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// SHA-256 of the signer's SPKI.
    pub key_id: Bytes,
    /// The signature's bytes.
    pub signature: Bytes,
    /// DER certificates, leaf first; empty when the key is known by its id.
    pub chain: Vec<Bytes>,
}

/// Which commands need a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// All.
    #[default]
    All,
    /// Destructive kinds only.
    Destructive,
    /// None: whoever can reach the node commands it. Simulation builds only.
    #[cfg(feature = "fakehw")]
    None,
}

/// Proof that `T` came from a document whose signature held, or that the policy let pass.
#[derive(Debug, Clone)]
pub struct Verified<T>(T);

impl<T> Verified<T> {
    /// The document.
    pub fn get(&self) -> &T {
        &self.0
    }

    /// The document, without the proof.
    pub fn into_inner(self) -> T {
        self.0
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

/// A refusal on the bytes alone (admission steps 1 and 2): never written, no trace of the id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The command, where the body could name one.
    pub id: Option<CommandId>,
    /// SHA-256 of the payload.
    pub body_sha256: Digest,
    /// `invalid`, `signature-required`, `signature-invalid`, `wrong-node` or `not-after-too-far`.
    pub reason: Reason,
    /// For people.
    pub detail: String,
}

/// The signed body of a cancellation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct CancelBody {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it is for.
    pub node_id: NodeId,
    /// The command to cancel.
    pub command_id: CommandId,
    /// When it was signed.
    pub issued_at: ServerTime,
}

/// Verifies a command's envelope: steps 1 and 2 of admission.
///
/// # Errors
/// See [`Refusal`].
pub fn verify_command(
    _envelope: &Envelope,
    _audience: &Audience,
    _policy: Policy,
) -> Result<Verified<Command>, Box<Refusal>> {
    todo!()
}

/// Verifies a cancellation's envelope. `command_id` is the frame's and must be the body's.
///
/// # Errors
/// See [`Refusal`].
pub fn verify_cancel(
    _envelope: &Envelope,
    _command_id: &CommandId,
    _audience: &Audience,
    _policy: Policy,
) -> Result<Verified<CancelBody>, Box<Refusal>> {
    todo!()
}
