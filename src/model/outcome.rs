//! How a command ends, and what is answered about it.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ids::{CommandId, Digest};
use super::reason::Reason;
use super::time::ServerTime;

/// The terminal states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Terminal {
    /// Done as asked.
    Succeeded,
    /// Not done as asked.
    Failed,
    /// Cancelled.
    Cancelled,
    /// Will never be run.
    Rejected,
}

/// What is known of the side effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// Nothing was done.
    None,
    /// It ran to its end.
    Complete,
    /// It is not known whether, or how far.
    Unknown,
}

/// A command's end, as the journal keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Which end.
    pub state: Terminal,
    /// Why; absent where nothing needs saying.
    pub reason: Option<Reason>,
    /// For people, at most [`super::limits::TEXT_BYTES`].
    pub message: String,
    /// What is known of the effect.
    pub effect: Effect,
    /// Executions (not deliveries) so far.
    pub attempt: u32,
    /// Start in server time; absent when it never started.
    pub started: Option<ServerTime>,
    /// End in server time; absent when the working clock was not known.
    pub finished: Option<ServerTime>,
    /// Run time on the monotonic clock, ms.
    pub duration_ms: u64,
    /// The kind's output: JSON bytes, at most [`super::limits::RESULT_BYTES`]; empty for none.
    #[serde(with = "base64_bytes")]
    pub output: Vec<u8>,
}

impl Outcome {
    /// An end without a run: nothing was done.
    pub fn not_run(state: Terminal, reason: Reason, message: impl Into<String>) -> Self {
        Self {
            state,
            reason: Some(reason),
            message: super::limits::cut_text(message),
            effect: Effect::None,
            attempt: 0,
            started: None,
            finished: None,
            duration_ms: 0,
            output: Vec::new(),
        }
    }

    /// The end of a command whose run a dead daemon left behind: nobody knows how far it came, so nothing else is said.
    pub fn interrupted(attempt: u32, started: Option<ServerTime>) -> Self {
        Self {
            message: "the daemon ended while the command ran; its outcome is not known".into(),
            effect: Effect::Unknown,
            attempt,
            started,
            ..Self::not_run(Terminal::Failed, Reason::Interrupted, "")
        }
    }

    /// The end of a reboot after which the machine has another boot.
    pub fn rebooted(attempt: u32, started: Option<ServerTime>) -> Self {
        Self {
            effect: Effect::Complete,
            attempt,
            started,
            ..Self::not_run(Terminal::Succeeded, Reason::Rebooted, "the machine has a new boot")
        }
    }

    /// The run time.
    pub fn duration(&self) -> Duration {
        Duration::from_millis(self.duration_ms)
    }
}

/// An ended command whose result is owed until it is acked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The command.
    pub id: CommandId,
    /// SHA-256 of its payload.
    pub body_sha256: Digest,
    /// Whether its kind asks that the node signs it.
    pub to_sign: bool,
    /// How it ended.
    pub outcome: Outcome,
}

/// The state that an answer names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerState {
    /// Not terminal, never written: the control plane delivers again later, or ends the command at not_after.
    Refused {
        /// Which refusal.
        reason: Reason,
        /// Why busy, or more of the reason; a token or a text for people.
        detail: String,
    },
    /// Known durably, not started.
    Accepted,
    /// Started.
    Running {
        /// Which execution.
        attempt: u32,
    },
    /// Ended.
    Done(Box<Outcome>),
}

/// An answer about one command, ready for the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The command; absent when the body was too broken to name one.
    pub id: Option<CommandId>,
    /// SHA-256 of the payload that this answer speaks of.
    pub body_sha256: Digest,
    /// What is said.
    pub state: AnswerState,
}

mod base64_bytes {
    use data_encoding::BASE64;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(bytes))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)
    }
}
