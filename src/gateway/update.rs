//! A CommandUpdate as the gateway reads it. Reasons stay text: a newer node may know tokens that this build does
//! not, and the gateway only stores and shows them.

use bytes::Bytes;
use prost::Message as _;

use super::command_state::State;
use crate::model::limits::{REASON_BYTES, RESULT_BYTES, TEXT_BYTES};
use crate::model::reason::Use;
use crate::model::{CommandId, Digest, Reason};
use crate::wire::pb;

/// A result with the longest output, its text twice, and a signed body.
const CLAIM_BYTES: usize = RESULT_BYTES + (64 << 10);

/// What a node says of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Update {
    /// The command; absent in a refusal of a body that named none, which its digest then finds.
    pub id: Option<CommandId>,
    /// SHA-256 of the payload that it speaks of.
    pub body_sha256: Digest,
    /// What it says.
    pub said: Said,
    /// Of a result, what a worker judges.
    pub fact: Option<Claimed>,
}

/// A result as it came, for a worker: whatever of it is read here, is read there anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claimed {
    /// The CommandUpdate, encoded.
    pub update: Bytes,
    /// Whether something that may be a signature came with it.
    pub signed: bool,
}

/// What is said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Said {
    /// Not now; never written by the node.
    Refused {
        /// Token.
        reason: String,
        /// More of it.
        detail: String,
        /// Why `busy`; absent for another reason, and for a why that this build does not know.
        busy: Option<Reason>,
    },
    /// Known durably.
    Accepted,
    /// Started.
    Running {
        /// Which execution.
        attempt: u32,
    },
    /// A result.
    Ended(End),
}

/// A terminal state with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// Terminal.
    pub state: State,
    /// Token; empty for none.
    pub reason: String,
    /// For people.
    pub message: String,
    /// `none`, `complete` or `unknown`.
    pub effect: &'static str,
    /// Executions.
    pub attempt: u32,
    /// JSON; empty for none.
    pub output: String,
}

/// Why an update is ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadUpdate {
    /// The command id is not one.
    #[error("the update's command id is malformed")]
    Id,
    /// The digest is missing or not 32 bytes long.
    #[error("the update's body digest is missing or malformed")]
    Digest,
    /// The state is absent or of a newer node.
    #[error("the update's state {0} is unknown here")]
    State(i32),
}

impl Update {
    /// Reads an update; texts over their limits are cut.
    ///
    /// # Errors
    /// See [`BadUpdate`].
    pub fn read(update: &pb::CommandUpdate) -> Result<Self, BadUpdate> {
        let body_sha256 = Digest::from_slice(&update.body_sha256).ok_or(BadUpdate::Digest)?;
        let state = update.state();
        let reason = cut(&update.reason, REASON_BYTES);
        let said = match state {
            pb::CommandState::Unspecified => return Err(BadUpdate::State(update.state)),
            pb::CommandState::Refused => refused(reason, cut(&update.message, TEXT_BYTES)),
            pb::CommandState::Accepted => Said::Accepted,
            pb::CommandState::Running => Said::Running { attempt: update.attempt },
            pb::CommandState::Succeeded => Said::Ended(end(update, State::Succeeded)),
            pb::CommandState::Failed => Said::Ended(end(update, State::Failed)),
            pb::CommandState::Cancelled => Said::Ended(end(update, State::Cancelled)),
            pb::CommandState::Rejected => Said::Ended(end(update, State::Rejected)),
        };
        let id = match (&said, update.command_id.as_str()) {
            (Said::Refused { .. }, "") => None,
            (_, id) => Some(CommandId::new(id).map_err(|_| BadUpdate::Id)?),
        };
        let fact = matches!(said, Said::Ended(_)).then(|| claimed(update));
        Ok(Self { id, body_sha256, said, fact })
    }
}

fn refused(reason: String, detail: String) -> Said {
    let why = Reason::from_token(&detail).filter(|why| why.used() == Use::Busy);
    let busy = why.filter(|_| reason == Reason::Busy.token());
    Said::Refused { reason, detail, busy }
}

fn end(update: &pb::CommandUpdate, state: State) -> End {
    let mut message = cut(&update.message, TEXT_BYTES);
    // A fact is kept even when its output breaks the limit; left unacked it would come again for ever.
    let output = if update.output.len() > RESULT_BYTES {
        message.push_str(" (its output was over the limit and is not kept)");
        String::new()
    } else {
        String::from_utf8_lossy(&update.output).into_owned()
    };
    let effect = match update.effect() {
        pb::Effect::None => "none",
        pb::Effect::Complete => "complete",
        pb::Effect::Unspecified | pb::Effect::Unknown => "unknown",
    };
    End { state, reason: cut(&update.reason, REASON_BYTES), message, effect, attempt: update.attempt, output }
}

/// A frame has room for far more than a worker's line: what cannot be one of ours is handed over as not signed. Field by
/// field, so that nothing which is not judged comes along.
fn claimed(update: &pb::CommandUpdate) -> Claimed {
    let told = pb::CommandUpdate {
        command_id: update.command_id.clone(),
        body_sha256: update.body_sha256.clone(),
        state: update.state,
        attempt: update.attempt,
        reason: cut(&update.reason, REASON_BYTES),
        message: cut(&update.message, TEXT_BYTES),
        effect: update.effect,
        started_ms: update.started_ms,
        finished_ms: update.finished_ms,
        progress: None,
        output: Bytes::new(),
        signed_result: None,
        duration_ms: update.duration_ms,
    };
    let signed = update.signed_result.is_some();
    let body = update.signed_result.as_ref().map_or(0, pb::Envelope::encoded_len);
    let fits = told.reason == update.reason
        && told.message == update.message
        && told.encoded_len() + body + update.output.len() <= CLAIM_BYTES;
    let told = match fits {
        true => pb::CommandUpdate {
            output: update.output.clone(),
            signed_result: update.signed_result.clone(),
            ..told
        },
        false => told,
    };
    Claimed { update: told.encode_to_vec().into(), signed }
}

fn cut(text: &str, limit: usize) -> String {
    text[..text.floor_char_boundary(limit)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn update(state: pb::CommandState) -> pb::CommandUpdate {
        pb::CommandUpdate {
            command_id: "c-1".into(),
            body_sha256: vec![1; 32].into(),
            state: state.into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_token_that_this_build_does_not_know_is_kept() {
        let mut refused = update(pb::CommandState::Refused);
        refused.reason = "held".into();
        let read = Update::read(&refused).expect("read");
        assert_eq!(read.said, Said::Refused { reason: "held".into(), detail: String::new(), busy: None });
    }

    #[test]
    fn the_why_of_a_busy_is_a_token_and_nothing_that_only_begins_like_one() {
        let busy = |reason: &str, message: &str| {
            let mut refused = update(pb::CommandState::Refused);
            (refused.reason, refused.message) = (reason.into(), message.into());
            let Said::Refused { busy, .. } = Update::read(&refused).expect("read").said else { panic!() };
            busy
        };
        assert_eq!(busy("busy", "credits"), Some(Reason::Credits));
        assert_eq!(busy("busy", "journal-full"), Some(Reason::JournalFull));
        assert_eq!(busy("busy", "credits-of-the-future"), None);
        assert_eq!(busy("busy", "expired"), None, "a token, but no why of a busy");
        assert_eq!(busy("invalid", "credits"), None);
    }

    #[test]
    fn only_a_refusal_may_leave_the_id_out() {
        let mut refused = update(pb::CommandState::Refused);
        refused.command_id.clear();
        assert_eq!(Update::read(&refused).expect("read").id, None);
        let mut accepted = update(pb::CommandState::Accepted);
        accepted.command_id.clear();
        assert_eq!(Update::read(&accepted), Err(BadUpdate::Id));
    }

    #[test]
    fn an_update_without_a_digest_or_state_is_refused() {
        let mut short = update(pb::CommandState::Accepted);
        short.body_sha256 = vec![1; 31].into();
        assert_eq!(Update::read(&short), Err(BadUpdate::Digest));
        assert_eq!(Update::read(&update(pb::CommandState::Unspecified)), Err(BadUpdate::State(0)));
    }

    #[test]
    fn a_claim_carries_no_progress_and_is_never_longer_than_a_result_with_its_signature() {
        let of = |change: fn(&mut pb::CommandUpdate)| {
            let mut said = update(pb::CommandState::Succeeded);
            said.signed_result = Some(pb::Envelope { payload: "a body".into(), ..Default::default() });
            said.output = "{}".into();
            change(&mut said);
            let claim = Update::read(&said).expect("read").fact.expect("a claim");
            assert!(claim.signed && claim.update.len() <= CLAIM_BYTES + 1024, "{} bytes", claim.update.len());
            pb::CommandUpdate::decode(claim.update).expect("our own")
        };
        let progress = |said: &mut pb::CommandUpdate| {
            said.progress = Some(pb::Progress { text: "x".repeat(3 << 20), ..Default::default() });
        };
        let whole = of(progress);
        assert_eq!((whole.progress, &whole.output[..]), (None, &b"{}"[..]));
        assert!(whole.signed_result.is_some(), "what is judged comes whole");
        let long: [fn(&mut pb::CommandUpdate); 4] = [
            |said| said.output = vec![b'x'; 3 << 20].into(),
            |said| said.message = "x".repeat(3 << 20),
            |said| said.reason = "x".repeat(3 << 20),
            |said| {
                said.signed_result =
                    Some(pb::Envelope { payload: vec![0; 3 << 20].into(), ..Default::default() })
            },
        ];
        for change in long {
            let cut = of(change);
            assert_eq!(
                (cut.command_id.as_str(), cut.signed_result, &cut.output[..]),
                ("c-1", None, &b""[..])
            );
        }
    }

    #[test]
    fn an_output_over_the_limit_is_dropped_and_said() {
        let mut big = update(pb::CommandState::Succeeded);
        big.output = vec![b'x'; RESULT_BYTES + 1].into();
        let Said::Ended(end) = Update::read(&big).expect("read").said else { panic!("not an end") };
        assert!(end.output.is_empty() && end.message.contains("over the limit"));
    }
}
