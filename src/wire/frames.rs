//! Frames ⇄ model. Parsed once, here, into types that cannot be wrong.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use super::dsse::{Envelope, Signature};
use super::{pb, shape};
use crate::model::limits::{APPROVALS, CHAIN, COMMAND_BODY_BYTES, ENTRIES, ID_BYTES, SIGNATURES, cut_text};
use crate::model::{
    Answer, AnswerState, CommandId, Digest, Effect, Event, EventClass, JournalId, Lane, Outcome, Reason,
    ServerTime, Terminal,
};

/// A frame from the gateway.
#[derive(Debug, Clone, PartialEq)]
pub enum Inbound {
    /// The answer to Hello.
    Welcome(Box<Welcome>),
    /// Something was taken.
    Ack(Ack),
    /// A command or a cancellation, for the executor.
    Delivery(Delivery),
    /// A Cancel frame that is malformed or over a limit. Nobody waits for an answer to a Cancel: it is logged, and
    /// whoever wants the cancellation sends it again.
    BadCancel(String),
    /// A document of the join service.
    Notice(Notice),
    /// A frame that should carry such a document, and carries none within the limits: it is logged.
    BadNotice(String),
    /// A revocation that nobody has signed: a gateway's word alone, which ends the session and no more.
    UnsignedRevocation,
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

/// What the join service says of the identity, relayed and not verified.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    /// A trust bundle.
    TrustBundle(Envelope),
    /// A revocation.
    Revocation(Envelope),
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
    /// How many commands may be in flight; a lane without a row may have none.
    pub lane_credits: BTreeMap<Lane, u32>,
    /// The journal that `acked_event_seq` speaks of; absent when empty or not an id.
    pub journal_id: Option<JournalId>,
    /// Events up to it may be forgotten.
    pub acked_event_seq: u64,
    /// Sections to send in full.
    pub request_sections: Vec<String>,
    /// Only `daemon.upgrade` will come.
    pub upgrade_required: bool,
    /// Signed trust bundle, encoded; empty for none.
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

fn welcome_error(detail: impl Into<String>) -> FrameError {
    FrameError { reason: Reason::WelcomeInvalid, detail: detail.into() }
}

impl TryFrom<pb::GatewayFrame> for Inbound {
    type Error = FrameError;

    fn try_from(frame: pb::GatewayFrame) -> Result<Self, FrameError> {
        use pb::gateway_frame::Frame;
        Ok(match frame.frame {
            Some(Frame::Welcome(welcome)) => Self::Welcome(Box::new(read_welcome(welcome)?)),
            Some(Frame::Ack(ack)) => Self::Ack(read_ack(ack)),
            Some(Frame::Command(command)) => Self::Delivery(read_command(command)),
            Some(Frame::Cancel(cancel)) => read_cancel(cancel),
            Some(Frame::Drain(drain)) => Self::Drain {
                max_delay: Duration::from_millis(drain.max_delay_ms.into()).min(MAX_DRAIN),
                reason: shown(&drain.reason),
            },
            Some(Frame::DesiredState(_)) => Self::Ignored("DesiredState"),
            Some(Frame::SpecSection(_)) => Self::Ignored("SpecSection"),
            Some(Frame::RequestInventory(_)) => Self::Ignored("RequestInventory"),
            Some(Frame::TrustBundle(bundle)) => {
                read_notice("TrustBundle", bundle.envelope, Notice::TrustBundle)
            }
            Some(Frame::SecretResponse(_)) => Self::Ignored("SecretResponse"),
            Some(Frame::RevocationNotice(notice)) => {
                let signed = notice.envelope.filter(|envelope| !envelope.signatures.is_empty());
                match signed {
                    signed @ Some(_) => read_notice("RevocationNotice", signed, Notice::Revocation),
                    None => Self::UnsignedRevocation,
                }
            }
            Some(Frame::OpenTunnel(_)) => Self::Ignored("OpenTunnel"),
            None => Self::Ignored("a frame of a newer gateway"),
        })
    }
}

/// A drain spreads its nodes over at most this.
const MAX_DRAIN: Duration = Duration::from_secs(60);
/// A gateway may not ask for heartbeats more or less often than this, ms.
const HEARTBEAT_MS: std::ops::RangeInclusive<u32> = 1_000..=60_000;

fn read_welcome(welcome: pb::Welcome) -> Result<Welcome, FrameError> {
    let server_time = ServerTime::from_wire(welcome.server_time_ms)
        .ok_or_else(|| welcome_error(format!("server_time_ms is {}", welcome.server_time_ms)))?;
    if welcome.epoch == 0 {
        return Err(welcome_error("epoch is 0"));
    }
    if welcome.heartbeat_interval_ms == 0 {
        return Err(welcome_error("heartbeat_interval_ms is 0"));
    }
    if welcome.lane_credits.len() > ENTRIES || welcome.request_sections.len() > ENTRIES {
        return Err(welcome_error(format!("a list has more than {ENTRIES} entries")));
    }
    let interval = welcome.heartbeat_interval_ms.clamp(*HEARTBEAT_MS.start(), *HEARTBEAT_MS.end());
    let lane_credits = welcome
        .lane_credits
        .iter()
        .filter_map(|(name, credits)| Lane::from_name(name).map(|lane| (lane, *credits)))
        .collect();
    Ok(Welcome {
        session_id: shown(&welcome.session_id),
        gateway_id: shown(&welcome.gateway_id),
        epoch: welcome.epoch,
        proto: welcome.proto,
        proto_max: welcome.proto_max,
        server_time,
        heartbeat_interval: Duration::from_millis(interval.into()),
        lane_credits,
        journal_id: JournalId::new(welcome.journal_id).ok(),
        acked_event_seq: welcome.acked_event_seq,
        request_sections: welcome.request_sections,
        upgrade_required: welcome.upgrade_required,
        trust_bundle: welcome.trust_bundle,
    })
}

fn read_ack(ack: pb::Ack) -> Ack {
    Ack {
        heartbeat_seq: (ack.heartbeat_seq != 0).then_some(ack.heartbeat_seq),
        events: JournalId::new(ack.journal_id).ok().map(|id| (id, ack.event_seq)).filter(|(_, seq)| *seq > 0),
        // An id that cannot be one of ours names no result. The frame's own limit bounds the list.
        result_ids: ack.result_ids.into_iter().filter_map(|id| CommandId::new(id).ok()).collect(),
    }
}

fn read_command(command: pb::Command) -> Delivery {
    let payload = command.envelope.as_ref().map(|envelope| envelope.payload.clone()).unwrap_or_default();
    let malformed = |detail: String| Delivery::Malformed { body_sha256: Digest::of(&payload), detail };
    if command.approvals.len() > APPROVALS {
        return malformed(format!("{} approvals, at most {APPROVALS}", command.approvals.len()));
    }
    let Some(envelope) = command.envelope else {
        return malformed("a Command without an envelope".into());
    };
    let approvals: Result<Vec<_>, _> = command.approvals.into_iter().map(read_envelope).collect();
    match (read_envelope(envelope), approvals) {
        (Ok(envelope), Ok(approvals)) => Delivery::Command(CommandFrame {
            seq: command.seq,
            delivery_attempt: command.delivery_attempt,
            envelope,
            approvals,
        }),
        (Err(error), _) | (_, Err(error)) => malformed(error.to_string()),
    }
}

fn read_cancel(cancel: pb::Cancel) -> Inbound {
    let Ok(command_id) = CommandId::new(cancel.command_id) else {
        return Inbound::BadCancel("a Cancel without a command id".into());
    };
    match cancel.envelope.map(read_envelope) {
        Some(Ok(envelope)) => Inbound::Delivery(Delivery::Cancel { command_id, envelope }),
        Some(Err(error)) => Inbound::BadCancel(format!("the Cancel of {command_id} has {error}")),
        None => Inbound::BadCancel(format!("the Cancel of {command_id} has no envelope")),
    }
}

impl Welcome {
    /// The trust bundle that came with it.
    pub fn bundle(&self) -> Option<Inbound> {
        if self.trust_bundle.is_empty() {
            return None;
        }
        let envelope = shape::decode::<pb::Envelope>(&self.trust_bundle).ok();
        Some(read_notice("Welcome", envelope, Notice::TrustBundle))
    }
}

fn read_notice(frame: &str, envelope: Option<pb::Envelope>, notice: fn(Envelope) -> Notice) -> Inbound {
    match envelope.map(read_envelope) {
        Some(Ok(envelope)) => Inbound::Notice(notice(envelope)),
        Some(Err(error)) => Inbound::BadNotice(format!("a {frame} has {error}")),
        None => Inbound::BadNotice(format!("a {frame} has no document that can be read")),
    }
}

/// An envelope over a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OverLimit {
    /// Its payload.
    #[error("a body of {0} bytes, at most {COMMAND_BODY_BYTES}")]
    Body(usize),
    /// Its signatures.
    #[error("{0} signatures, at most {SIGNATURES}")]
    Signatures(usize),
    /// Its type.
    #[error("a payload type of {0} bytes, at most {ID_BYTES}")]
    PayloadType(usize),
    /// The certificates of a signature.
    #[error("a chain of more than {CHAIN} certificates")]
    Chain,
}

impl From<Envelope> for pb::Envelope {
    fn from(envelope: Envelope) -> Self {
        let signatures = envelope.signatures.into_iter();
        Self {
            payload_type: envelope.payload_type,
            payload: envelope.payload,
            signatures: signatures
                .map(|Signature { key_id, signature, chain }| pb::Signature { key_id, signature, chain })
                .collect(),
        }
    }
}

/// An envelope within the limits.
///
/// # Errors
/// It is over one.
pub fn read_envelope(envelope: pb::Envelope) -> Result<Envelope, OverLimit> {
    if envelope.payload.len() > COMMAND_BODY_BYTES {
        return Err(OverLimit::Body(envelope.payload.len()));
    }
    if envelope.signatures.len() > SIGNATURES {
        return Err(OverLimit::Signatures(envelope.signatures.len()));
    }
    if envelope.payload_type.len() > ID_BYTES {
        return Err(OverLimit::PayloadType(envelope.payload_type.len()));
    }
    if envelope.signatures.iter().any(|signature| signature.chain.len() > CHAIN) {
        return Err(OverLimit::Chain);
    }
    let signature = |signature: pb::Signature| Signature {
        key_id: signature.key_id,
        signature: signature.signature,
        chain: signature.chain,
    };
    Ok(Envelope {
        payload_type: envelope.payload_type,
        payload: envelope.payload,
        signatures: envelope.signatures.into_iter().map(signature).collect(),
    })
}

/// What is kept of a peer's text: nothing that would break a line or flood a log.
fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(ID_BYTES).collect()
}

/// An answer as a frame. `detail` of a refusal goes into `message`.
pub fn command_update(answer: &Answer) -> pb::CommandUpdate {
    let mut update = pb::CommandUpdate {
        command_id: answer.id.as_ref().map(ToString::to_string).unwrap_or_default(),
        body_sha256: Bytes::copy_from_slice(&answer.body_sha256.0),
        ..pb::CommandUpdate::default()
    };
    match &answer.state {
        AnswerState::Refused { reason, detail } => {
            update.state = pb::CommandState::Refused.into();
            update.reason = reason.token().into();
            update.message = cut_text(detail.as_str());
        }
        AnswerState::Accepted => update.state = pb::CommandState::Accepted.into(),
        AnswerState::Running { attempt } => {
            update.state = pb::CommandState::Running.into();
            update.attempt = *attempt;
        }
        AnswerState::Done(outcome) => done_update(&mut update, outcome),
    }
    update
}

/// Events of a journal as a frame; `boot_ms` is boot time now.
pub fn event_batch<'a>(
    journal: &JournalId,
    events: impl IntoIterator<Item = &'a Event>,
    boot_ms: u64,
) -> pb::EventBatch {
    let one = |event: &Event| {
        let class = match event.class {
            EventClass::Transition => pb::EventClass::Transition,
            EventClass::Security => pb::EventClass::Security,
            EventClass::Log => pb::EventClass::Log,
            EventClass::Metric => pb::EventClass::Metric,
        };
        let (dropped_from, dropped_to) = event.dropped.unwrap_or_default();
        pb::Event {
            seq: event.seq,
            class: class.into(),
            r#type: event.kind.clone(),
            body: Bytes::copy_from_slice(event.body.as_bytes()),
            at_ms: event.at_ms,
            age_ms: event.boot_ms.map(|at| boot_ms.saturating_sub(at)),
            dropped_from,
            dropped_to,
        }
    };
    pb::EventBatch { journal_id: journal.to_string(), events: events.into_iter().map(one).collect() }
}

fn done_update(update: &mut pb::CommandUpdate, outcome: &Outcome) {
    let state = match outcome.state {
        Terminal::Succeeded => pb::CommandState::Succeeded,
        Terminal::Failed => pb::CommandState::Failed,
        Terminal::Cancelled => pb::CommandState::Cancelled,
        Terminal::Rejected => pb::CommandState::Rejected,
    };
    let effect = match outcome.effect {
        Effect::None => pb::Effect::None,
        Effect::Complete => pb::Effect::Complete,
        Effect::Unknown => pb::Effect::Unknown,
    };
    update.state = state.into();
    update.effect = effect.into();
    update.reason = outcome.reason.map(|reason| reason.token().to_owned()).unwrap_or_default();
    update.message = cut_text(outcome.message.as_str());
    update.attempt = outcome.attempt;
    update.started_ms = outcome.started.map_or(0, |time| time.0);
    update.finished_ms = outcome.finished.map_or(0, |time| time.0);
    update.duration_ms = outcome.duration_ms;
    update.output = Bytes::copy_from_slice(&outcome.output);
}

#[cfg(test)]
mod properties;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::limits::TEXT_BYTES;

    fn welcome() -> pb::Welcome {
        pb::Welcome {
            epoch: 3,
            proto: 1,
            server_time_ms: 1_000_000,
            heartbeat_interval_ms: 10_000,
            lane_credits: [("work".to_owned(), 16), ("of-a-newer-gateway".to_owned(), 1)].into(),
            ..pb::Welcome::default()
        }
    }

    fn read(frame: pb::gateway_frame::Frame) -> Result<Inbound, FrameError> {
        Inbound::try_from(pb::GatewayFrame { frame: Some(frame) })
    }

    fn command(envelope: Option<pb::Envelope>, approvals: usize) -> Inbound {
        let command = pb::Command {
            envelope,
            approvals: vec![pb::Envelope::default(); approvals],
            ..pb::Command::default()
        };
        read(pb::gateway_frame::Frame::Command(command)).expect("never ends the session")
    }

    #[test]
    fn a_welcome_without_epoch_time_or_heartbeat_interval_is_refused() {
        assert!(read_welcome(welcome()).is_ok());
        let broken: [fn(&mut pb::Welcome); 4] = [
            |welcome| welcome.epoch = 0,
            |welcome| welcome.server_time_ms = 0,
            |welcome| welcome.server_time_ms = i64::MAX,
            |welcome| welcome.heartbeat_interval_ms = 0,
        ];
        for breaks in broken {
            let mut welcome = welcome();
            breaks(&mut welcome);
            let error = read_welcome(welcome).expect_err("refused");
            assert_eq!(error.reason, Reason::WelcomeInvalid);
        }
    }

    #[test]
    fn the_heartbeat_interval_is_clamped_to_one_to_sixty_seconds() {
        let clamped = |ms| {
            let welcome = pb::Welcome { heartbeat_interval_ms: ms, ..welcome() };
            read_welcome(welcome).expect("a welcome").heartbeat_interval
        };
        assert_eq!(clamped(1), Duration::from_secs(1));
        assert_eq!(clamped(10_000), Duration::from_secs(10));
        assert_eq!(clamped(u32::MAX), Duration::from_secs(60));
    }

    #[test]
    fn an_absent_lane_has_no_row_and_an_unknown_one_is_ignored() {
        let credits = read_welcome(welcome()).expect("a welcome").lane_credits;
        assert_eq!(credits, BTreeMap::from([(Lane::Work, 16)]));
    }

    #[test]
    fn a_frame_of_a_newer_gateway_is_ignored() {
        let frame = Inbound::try_from(pb::GatewayFrame { frame: None });
        assert!(matches!(frame, Ok(Inbound::Ignored(_))));
    }

    #[test]
    fn a_command_over_a_limit_is_malformed_and_ends_no_session() {
        let body =
            |bytes: usize| pb::Envelope { payload: vec![b'x'; bytes].into(), ..pb::Envelope::default() };
        let signed = |count: usize| pb::Envelope {
            signatures: vec![pb::Signature::default(); count],
            ..pb::Envelope::default()
        };
        let malformed = |inbound| matches!(inbound, Inbound::Delivery(Delivery::Malformed { .. }));
        assert!(malformed(command(None, 0)));
        assert!(malformed(command(Some(body(COMMAND_BODY_BYTES + 1)), 0)));
        assert!(malformed(command(Some(signed(SIGNATURES + 1)), 0)));
        assert!(malformed(command(Some(body(1)), APPROVALS + 1)));
        assert!(!malformed(command(Some(body(COMMAND_BODY_BYTES)), APPROVALS)));
    }

    #[test]
    fn a_malformed_cancel_is_no_command() {
        let cancel = |command_id: &str, envelope| {
            let cancel = pb::Cancel { command_id: command_id.into(), envelope };
            read(pb::gateway_frame::Frame::Cancel(cancel)).expect("never ends the session")
        };
        let large =
            pb::Envelope { payload: vec![b'x'; COMMAND_BODY_BYTES + 1].into(), ..pb::Envelope::default() };
        for bad in
            [cancel("", Some(pb::Envelope::default())), cancel("c-1", None), cancel("c-1", Some(large))]
        {
            assert!(matches!(bad, Inbound::BadCancel(_)), "{bad:?}");
        }
        let good = cancel("c-1", Some(pb::Envelope::default()));
        assert!(matches!(good, Inbound::Delivery(Delivery::Cancel { .. })), "{good:?}");
    }

    #[test]
    fn a_drain_is_spread_over_at_most_a_minute() {
        let drain = pb::Drain { max_delay_ms: u32::MAX, reason: "maintenance\n".into() };
        let inbound = read(pb::gateway_frame::Frame::Drain(drain));
        let expected = Inbound::Drain { max_delay: Duration::from_secs(60), reason: "maintenance".into() };
        assert_eq!(inbound, Ok(expected));
    }

    #[test]
    fn an_ack_names_only_what_could_be_ours() {
        let ack = pb::Ack {
            result_ids: vec!["c-1".into(), "../etc".into()],
            heartbeat_seq: 0,
            ..pb::Ack::default()
        };
        assert_eq!(
            read_ack(ack),
            Ack { result_ids: vec![CommandId::new("c-1").expect("id")], ..Ack::default() }
        );
    }

    #[test]
    fn a_long_message_is_cut_at_a_character() {
        let answer = Answer {
            id: None,
            body_sha256: Digest::of(b""),
            state: AnswerState::Refused { reason: Reason::Busy, detail: "ä".repeat(TEXT_BYTES) },
        };
        let message = command_update(&answer).message;
        assert!(message.len() <= TEXT_BYTES && message.chars().all(|c| c == 'ä'));
    }
}
