//! A live session moves to a renewed certificate: it goes on while the next one is dialed, and is left when that one's
//! Hello goes. The gateway then ends it as superseded, which nobody hears any more.

use std::time::Duration;

use super::{DIAL_DEADLINE, Machine, Now, Offered, Output, State};
use crate::model::Reason;
use crate::session::backoff::up_to;
use crate::wire::link::{Endpoint, LinkEnd};

/// Whoever has moved by then is never without a certificate: a tenth of the old one's life is left, ‰.
const MOVED_BY: u32 = 900;
/// A move that failed is tried again within this: the session goes on meanwhile.
const AGAIN: Duration = Duration::from_secs(60);

/// Where a live session's move stands.
#[derive(Debug)]
pub(super) enum Moving {
    /// Its certificate is the newest.
    Not,
    /// The dial is at this moment.
    At(Duration),
    /// The driver opens the next link; given up at `deadline`.
    Dialing {
        /// Where to.
        endpoint: Endpoint,
        /// Until when.
        deadline: Duration,
        /// What it is opened with.
        offered: Box<Offered>,
    },
}

impl Moving {
    pub(super) fn due(&self) -> Option<Duration> {
        match self {
            Self::Not => None,
            Self::At(at) => Some(*at),
            Self::Dialing { deadline, .. } => Some(*deadline),
        }
    }
}

impl Machine {
    /// Ends a session whose certificate was revoked. Sets a random time for the move of one that has another certificate
    /// than the next dial would offer.
    pub(super) fn follow_offer(&mut self, now: Now, outputs: &mut Vec<Output>) {
        if self.offered.revoked && matches!(self.state, State::Live(_)) {
            let detail = format!("the join service has revoked the node certificate; {}", self.offered.mend);
            return self.close(now, Reason::CertificateRevoked, detail, outputs);
        }
        let State::Live(live) = &mut self.state else { return };
        if self.used.certificate == self.offered.certificate || !matches!(live.moving, Moving::Not) {
            return;
        }
        let by = self.used.validity.passed(MOVED_BY);
        let within = now.working.map_or(Duration::ZERO, |working| by.since(working));
        live.moving = Moving::At(now.mono + up_to(within, &mut self.rng));
    }

    /// No attempt is counted: nothing has failed.
    pub(super) fn dial_to_move(&mut self, now: Now, outputs: &mut Vec<Output>) {
        let endpoint = self.next_endpoint();
        let State::Live(live) = &mut self.state else { return };
        let Some(endpoint) = endpoint else {
            live.moving = Moving::Not;
            return;
        };
        let deadline = now.mono + DIAL_DEADLINE;
        live.moving =
            Moving::Dialing { endpoint: endpoint.clone(), deadline, offered: Box::new(self.offered.clone()) };
        outputs.push(Output::Dial { endpoint, attempt: 0, keep_alive: self.keep_alive });
    }

    /// The next link is open; its endpoint, if a move was under way.
    pub(super) fn moved(&mut self) -> Option<Endpoint> {
        let State::Live(live) = &mut self.state else { return None };
        match std::mem::replace(&mut live.moving, Moving::Not) {
            Moving::Dialing { endpoint, offered, .. } => {
                self.used = *offered;
                Some(endpoint)
            }
            other => {
                live.moving = other;
                None
            }
        }
    }

    pub(super) fn move_failed(&mut self, now: Now, end: LinkEnd, outputs: &mut Vec<Output>) {
        let State::Live(live) = &mut self.state else { return };
        if matches!(live.moving, Moving::Dialing { .. }) {
            live.moving = Moving::At(now.mono + up_to(AGAIN, &mut self.rng));
            outputs.push(Output::MoveFailed(end));
        }
    }
}
