//! Frames ⇄ model. Parsed once, here, into types that cannot be wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::dsse::Envelope;
use super::pb;
use crate::model::{Answer, CommandId, Digest, JournalId, Lane, Reason, ServerTime};

/// A frame from the gateway.
#[derive(Debug, Clone, PartialEq)]
pub enum Inbound {
    /// The answer to Hello.
    Welcome(Box<Welcome>),
    /// Something was taken.
    Ack(Ack),
    /// A command or a cancellation, for the executor.
    Delivery(Delivery),
    /// Redial elsewhere after a random time up to this.
    Drain {
        /// At most 60 s.
        max_delay: Duration,
        /// For the log.
        reason: String,
    },
    /// A frame of a newer gateway, or one whose capability is not built: ignored with one log line a session.
    Ignored(&'static str),
}

/// What the executor is handed.
#[derive(Debug, Clone, PartialEq)]
pub enum Delivery {
    /// A command within the limits.
    Command(CommandFrame),
    /// A cancellation within the limits.
    Cancel {
        /// The frame's command id.
        command_id: CommandId,
        /// The signed body.
        envelope: Envelope,
    },
    /// A Command frame that is malformed or over a limit: answered REFUSED `invalid`, the session goes on.
    Malformed {
        /// SHA-256 of the payload, as far as there was one.
        body_sha256: Digest,
        /// What is wrong.
        detail: String,
    },
}

/// A Command frame.
#[derive(Debug, Clone, PartialEq)]
pub struct CommandFrame {
    /// Number within the node's queue.
    pub seq: u64,
    /// Deliveries so far, this one included.
    pub delivery_attempt: u32,
    /// The signed body.
    pub envelope: Envelope,
    /// Approvals over the same payload.
    pub approvals: Vec<Envelope>,
}

/// A Welcome within the limits; the session judges its time and version.
#[derive(Debug, Clone, PartialEq)]
pub struct Welcome {
    /// Id of the session.
    pub session_id: String,
    /// Id of the gateway.
    pub gateway_id: String,
    /// At least 1.
    pub epoch: u64,
    /// Version chosen.
    pub proto: u32,
    /// The gateway's highest version, for the log.
    pub proto_max: u32,
    /// The control plane's clock.
    pub server_time: ServerTime,
    /// Clamped to 1..60 s.
    pub heartbeat_interval: Duration,
    /// Most commands in flight; an absent lane has 0.
    pub lane_credits: BTreeMap<Lane, u32>,
    /// The journal that `acked_event_seq` speaks of; absent when empty or not an id.
    pub journal_id: Option<JournalId>,
    /// Events up to it may be forgotten.
    pub acked_event_seq: u64,
    /// Sections to send in full.
    pub request_sections: Vec<String>,
    /// Only `daemon.upgrade` will come.
    pub upgrade_required: bool,
    /// Signed trust bundle; empty for none.
    pub trust_bundle: Bytes,
}

/// An Ack frame; each part may be absent.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Ack {
    /// The heartbeat taken.
    pub heartbeat_seq: Option<u64>,
    /// Events of this journal up to and including this sequence are stored.
    pub events: Option<(JournalId, u64)>,
    /// Results stored.
    pub result_ids: Vec<CommandId>,
}

/// A frame that ends the session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {detail}")]
pub struct FrameError {
    /// `protocol-error` or `welcome-invalid`.
    pub reason: Reason,
    /// What is wrong.
    pub detail: String,
}

impl TryFrom<pb::GatewayFrame> for Inbound {
    type Error = FrameError;
    fn try_from(_frame: pb::GatewayFrame) -> Result<Self, FrameError> {
        todo!()
    }
}

/// An answer as a frame. `detail` of a refusal goes into `message`.
pub fn command_update(_answer: &Answer) -> pb::CommandUpdate {
    todo!()
}

/// An update as the gateway reads it.
///
/// # Errors
/// A field is missing or out of range; what is wrong.
pub fn answer(_update: &pb::CommandUpdate) -> Result<Answer, String> {
    todo!()
}
