//! A live session: what is due in it, and what its frames mean.

use std::time::Duration;

use rand::rngs::StdRng;

use super::moving::Moving;
use super::{Beat, Output, Terms};
use crate::session::backoff::up_to;
use crate::wire::frames::{Ack, Delivery, Inbound};
use crate::wire::link::Endpoint;
use crate::wire::version::GATE_PEER_PROTO_MAX;

/// So many heartbeat intervals without any frame are a half-open connection.
const SILENT_INTERVALS: u32 = 3;
/// The heartbeat whose ack proves that a gateway does more than accept and drop.
const PROVING_HEARTBEAT: u64 = 2;
/// A live session.
#[derive(Debug)]
pub struct Live {
    /// What the Welcome has settled.
    pub terms: Terms,
    /// When an ack of a heartbeat came last.
    pub acked_at: Option<Duration>,
    pub(super) last_frame: Duration,
    next_heartbeat: Duration,
    sent: u64,
    pub(super) held: bool,
    commands_received: u64,
    frame_ignored: bool,
    redial_at: Option<Duration>,
    pub(super) moving: Moving,
}

/// What is due in a live session.
pub(super) enum Due {
    Nothing,
    Heartbeat(Beat),
    HalfOpen(String),
    Redial,
    Move,
    MoveTimeout(Endpoint),
}

impl Live {
    pub(super) fn new(terms: Terms, now: Duration) -> Self {
        Self {
            terms,
            acked_at: None,
            last_frame: now,
            // The first heartbeat goes at once: it says that the Welcome is applied.
            next_heartbeat: now,
            sent: 0,
            held: false,
            commands_received: 0,
            frame_ignored: false,
            redial_at: None,
            moving: Moving::Not,
        }
    }

    fn silent_at(&self) -> Duration {
        self.last_frame + self.terms.heartbeat_interval.saturating_mul(SILENT_INTERVALS)
    }

    pub(super) fn due(&self) -> Duration {
        let due = self.next_heartbeat.min(self.silent_at());
        [self.redial_at, self.moving.due()].into_iter().flatten().fold(due, Duration::min)
    }

    pub(super) fn perform_due(&mut self, now: Duration) -> Due {
        if self.redial_at.is_some_and(|at| at <= now) {
            return Due::Redial;
        }
        if self.silent_at() <= now {
            let silence = now.saturating_sub(self.last_frame);
            return Due::HalfOpen(format!("no frame from the gateway for {:.1} s", silence.as_secs_f64()));
        }
        match &self.moving {
            Moving::At(at) if *at <= now => return Due::Move,
            Moving::Dialing { endpoint, deadline, .. } if *deadline <= now => {
                return Due::MoveTimeout(endpoint.clone());
            }
            _ => {}
        }
        if self.next_heartbeat > now {
            return Due::Nothing;
        }
        // From now rather than from the last one: after a pause no burst of heartbeats makes up for it.
        self.next_heartbeat = now + self.terms.heartbeat_interval;
        self.sent += 1;
        let echo = self.terms.proto >= GATE_PEER_PROTO_MAX;
        Due::Heartbeat(Beat {
            seq: self.sent,
            commands_received: self.commands_received,
            peer_proto_max: echo.then_some(self.terms.proto_max),
        })
    }

    /// Takes a frame that is in order; true when it proves that the session holds.
    pub(super) fn frame(
        &mut self,
        now: Duration,
        frame: Inbound,
        rng: &mut StdRng,
        outputs: &mut Vec<Output>,
    ) -> bool {
        match frame {
            Inbound::Ack(ack) => return self.ack(now, ack, outputs),
            Inbound::Delivery(delivery) => {
                if !matches!(delivery, Delivery::Cancel { .. }) {
                    self.commands_received += 1;
                }
                outputs.push(Output::Deliver(delivery));
            }
            Inbound::BadCancel(detail) => outputs.push(Output::BadCancel(detail)),
            Inbound::Notice(notice) => outputs.push(Output::Notice(notice)),
            Inbound::BadNotice(detail) => outputs.push(Output::BadNotice(detail)),
            Inbound::Drain { max_delay, .. } => {
                let at = now + up_to(max_delay, rng);
                self.redial_at = Some(self.redial_at.map_or(at, |earlier| earlier.min(at)));
            }
            Inbound::Ignored(name) if !self.frame_ignored => {
                self.frame_ignored = true;
                outputs.push(Output::FrameIgnored(name));
            }
            // The machine reads the last two.
            Inbound::Ignored(_) | Inbound::Welcome(_) | Inbound::UnsignedRevocation => {}
        }
        false
    }

    fn ack(&mut self, now: Duration, ack: Ack, outputs: &mut Vec<Output>) -> bool {
        if !ack.result_ids.is_empty() {
            outputs.push(Output::Acked(ack.result_ids));
        }
        if let Some((journal, seq)) = ack.events {
            outputs.push(Output::EventsAcked(journal, seq));
        }
        let Some(seq) = ack.heartbeat_seq.filter(|seq| *seq <= self.sent) else { return false };
        self.acked_at = Some(now);
        let proves = !self.held && seq >= PROVING_HEARTBEAT;
        self.held |= proves;
        proves
    }
}
