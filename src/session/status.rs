//! What `bcd status` shows of the session.
//!
//! Moments are CLOCK_BOOTTIME in ms: they keep their meaning in another process of the same boot, which turns them
//! into ages.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::machine::{Machine, State};
use crate::model::Reason;
use crate::wire::link::EndKind;

/// The session as others see it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Where it stands.
    pub state: SessionState,
    /// Since when, boot time, ms.
    pub since_boot_ms: u64,
    /// The next dial, or the end of patience with what is waited for; boot time, ms. Absent while live or stopped.
    pub until_boot_ms: Option<u64>,
    /// The gateway that is dialed or talked to; absent while waiting or stopped.
    pub endpoint: Option<String>,
    /// The live session; absent while there is none.
    pub live: Option<LiveStatus>,
    /// Dials since the last session that held.
    pub attempt: u32,
    /// How the last session or attempt ended; absent before the first end.
    pub last_end: Option<EndStatus>,
}

/// States of a session, named for what they wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SessionState {
    /// For the next dial.
    Waiting,
    /// For a connection.
    Dialing,
    /// For Welcome, or for the journal to take it.
    AwaitingWelcome,
    /// For frames.
    Live,
    /// For nothing.
    Stopped,
}

/// A live session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LiveStatus {
    /// The session's id.
    #[serde(default)]
    pub session_id: String,
    /// The gateway's id.
    pub gateway_id: String,
    /// The session's epoch.
    pub epoch: u64,
    /// The protocol version chosen.
    pub proto: u32,
    /// Between two heartbeats, ms.
    pub heartbeat_interval_ms: u64,
    /// The last ack of a heartbeat, boot time, ms. Absent: none yet.
    pub acked_boot_ms: Option<u64>,
}

/// An end.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EndStatus {
    /// What kind of end.
    pub kind: EndKind,
    /// The token; absent for none or an unknown one.
    pub reason: Option<Reason>,
    /// For people.
    pub detail: String,
    /// When, boot time, ms.
    pub at_boot_ms: u64,
}

fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl SessionStatus {
    /// Before the session's first word.
    pub fn new(boot: Duration) -> Self {
        Self {
            state: SessionState::Waiting,
            since_boot_ms: ms(boot),
            until_boot_ms: None,
            endpoint: None,
            live: None,
            attempt: 0,
            last_end: None,
        }
    }

    /// Whether it tells the same as `other`, but for times. Every end and every dial changes more than those.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        self.timeless() == other.timeless()
    }

    fn timeless(&self) -> Self {
        Self {
            since_boot_ms: 0,
            until_boot_ms: None,
            live: self.live.clone().map(|live| LiveStatus { acked_boot_ms: None, ..live }),
            last_end: self.last_end.clone().map(|end| EndStatus { at_boot_ms: 0, ..end }),
            ..self.clone()
        }
    }

    /// Of a machine whose monotonic clock began when boot time was `began`.
    pub(super) fn of(machine: &Machine, began: Duration) -> Self {
        let at = |moment: Duration| ms(began + moment);
        let (state, endpoint, live) = match machine.state() {
            State::WaitingToDial { .. } => (SessionState::Waiting, None, None),
            State::Dialing { endpoint, .. } => (SessionState::Dialing, Some(endpoint), None),
            State::AwaitingWelcome { endpoint, .. } => (SessionState::AwaitingWelcome, Some(endpoint), None),
            State::ApplyingWelcome { terms, .. } => {
                (SessionState::AwaitingWelcome, Some(&terms.endpoint), None)
            }
            State::Live(live) => (SessionState::Live, Some(&live.terms.endpoint), Some(live)),
            State::Stopped => (SessionState::Stopped, None, None),
        };
        Self {
            state,
            since_boot_ms: at(machine.since()),
            until_boot_ms: if live.is_some() { None } else { machine.due().map(at) },
            endpoint: endpoint.map(ToString::to_string),
            live: live.map(|live| LiveStatus {
                session_id: live.terms.session_id.clone(),
                gateway_id: live.terms.gateway_id.clone(),
                epoch: live.terms.epoch,
                proto: live.terms.proto,
                heartbeat_interval_ms: ms(live.terms.heartbeat_interval),
                acked_boot_ms: live.acked_at.map(at),
            }),
            attempt: machine.attempt(),
            last_end: machine.last_end().map(|last| EndStatus {
                kind: last.end.kind,
                reason: last.end.reason,
                detail: last.end.detail.clone(),
                at_boot_ms: at(last.at),
            }),
        }
    }
}
