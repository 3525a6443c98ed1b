//! The session as a state machine: `(now, input) → outputs`. It dials nothing, sends nothing and reads no clock;
//! [`super::driver`] does what it says. Chance comes from the generator that it was made with.
//!
//! ```text
//! WaitingToDial → Dialing → AwaitingWelcome → ApplyingWelcome → Live → WaitingToDial …
//!       any of them → Stopped
//! ```

mod live;
mod moving;
mod opening;

use std::time::Duration;

use rand::rngs::StdRng;

use self::live::Due;
use self::opening::vouch;
use super::backoff::{Backoff, Reaction};
use crate::model::{CommandId, Digest, JournalId, Reason, ServerTime};
use crate::wire::frames::{Delivery, FrameError, Inbound, Notice, Welcome};
use crate::wire::link::{DIAL_DEADLINE, EndKind, Endpoint, LinkEnd, Validity};
use crate::wire::version;

pub use self::live::Live;

/// Welcome must come within this of Hello.
const WELCOME_DEADLINE: Duration = Duration::from_secs(10);
/// A Welcome's time and epoch must be durable within this; a disk that hangs must not hold a silent session.
const APPLY_DEADLINE: Duration = Duration::from_secs(10);
/// HTTP/2 keep-alive, until a gateway asks for calm.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Calm doubles the keep-alive interval up to this, which is rarer than any heartbeat.
const CALMEST_KEEP_ALIVE: Duration = Duration::from_secs(15 * 60);
/// An expired certificate is said again this often. One that a join has put in its place comes as
/// [`Input::Renewed`], and ends the wait.
const EXPIRED_RETRY: Duration = Duration::from_secs(60);

/// The time of an input.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    /// Monotonic, from any fixed moment of this process.
    pub mono: Duration,
    /// The working clock; absent before the first server time ever known.
    pub working: Option<ServerTime>,
    /// Whether that comes from a peer of this process; else it is only a floor.
    pub heard: bool,
}

/// What has happened.
#[derive(Debug)]
pub enum Input {
    /// The moment of [`Machine::due`] has come.
    Due,
    /// The dial has succeeded and Hello is on its way; with the validity of the gateway's certificate.
    Opened(Option<Validity>),
    /// The dial has failed or the link has ended.
    Ended(LinkEnd),
    /// A frame came.
    Frame(Inbound),
    /// A frame came that ends the session.
    BadFrame(FrameError),
    /// The dial to which a live session was to move has failed.
    MoveFailed(LinkEnd),
    /// A newer identity of this node is to be used, or another trust bundle: from the next dial on. A live session
    /// moves to a certificate that is not its own.
    Renewed {
        /// Its gateways.
        endpoints: Vec<Endpoint>,
        /// Its certificate.
        offered: Offered,
    },
    /// The Welcome is in force, and durable where the journal could be written.
    Applied,
    /// The Welcome, or an Ack of events, has shown that the journal is an old copy of itself.
    OldCopy {
        /// The sequence that it named.
        acked: u64,
    },
    /// The daemon is to stop, and says so with this intent.
    Stop(Intent),
}

/// The certificate that the node offers.
#[derive(Debug, Clone)]
pub struct Offered {
    /// SHA-256 of it.
    pub certificate: Digest,
    /// When it holds.
    pub validity: Validity,
    /// The join service has revoked it, so that it is not to be offered.
    pub revoked: bool,
    /// What an operator does once it was revoked.
    pub mend: String,
    /// What happens once it has run out.
    pub rejoins: String,
}

/// What is to be done, in order.
#[derive(Debug, PartialEq)]
pub enum Output {
    /// Open a link.
    Dial {
        /// Where to.
        endpoint: Endpoint,
        /// Dials since the last session that held, this one not counted.
        attempt: u32,
        /// HTTP/2 keep-alive interval.
        keep_alive: Duration,
    },
    /// Record this epoch though its Welcome was refused: the gateway has counted it.
    RecordEpoch(u64),
    /// Make the Welcome durable and put it into force, then say [`Input::Applied`].
    Apply(Box<Welcome>),
    /// Send the results that did not fit in Hello; answers may go out from now on.
    Resume,
    /// Send a heartbeat.
    Heartbeat(Beat),
    /// Hand this to the executor.
    Deliver(Delivery),
    /// These results are stored by the control plane.
    Acked(Vec<CommandId>),
    /// Events of this journal up to this sequence are stored by the control plane, or so it says.
    EventsAcked(JournalId, u64),
    /// Say goodbye and end the link.
    Close(Intent, Reason),
    /// Drop the dial or the link.
    Abandon,
    /// Drop the dial of a move; the session goes on.
    AbandonMove,
    /// A move has failed and is tried again; for the log.
    MoveFailed(LinkEnd),
    /// Hand this to whoever keeps the identity.
    Notice(Notice),
    /// A document that cannot be read; for the log.
    BadNotice(String),
    /// A Cancel that cannot be read; for the log.
    BadCancel(String),
    /// The first frame of the session that this build does not know.
    FrameIgnored(&'static str),
    /// A session or an attempt has ended so; for the log.
    Ended(LinkEnd, Reaction),
}

/// The parts of a heartbeat that the machine knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beat {
    /// Its number within the session.
    pub seq: u64,
    /// Command frames taken in this session.
    pub commands_received: u64,
    /// The gateway's highest version, where the session's version has the field.
    pub peer_proto_max: Option<u32>,
}

/// The intents of a Goodbye that this build sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// The daemon stops: out of placement.
    Stopping,
    /// The machine restarts: out of placement.
    Rebooting,
    /// This session only.
    Closing,
}

impl Intent {
    /// The word on the wire.
    pub fn token(self) -> &'static str {
        match self {
            Self::Stopping => "stopping",
            Self::Rebooting => "rebooting",
            Self::Closing => "closing",
        }
    }
}

/// Where the session stands.
#[derive(Debug)]
pub enum State {
    /// The next dial is at `until`. Nothing is open.
    WaitingToDial {
        /// When.
        until: Duration,
    },
    /// The driver opens a link; given up at `deadline`.
    Dialing {
        /// Where to.
        endpoint: Endpoint,
        /// Until when.
        deadline: Duration,
    },
    /// Hello is sent; the gateway owes Welcome by `deadline`. Nothing else may come from it.
    AwaitingWelcome {
        /// Whose.
        endpoint: Endpoint,
        /// When that gateway's certificate holds.
        validity: Option<Validity>,
        /// Until when.
        deadline: Duration,
    },
    /// The driver makes the Welcome durable; no frame is read meanwhile.
    ApplyingWelcome {
        /// The session to be.
        terms: Terms,
        /// Until when.
        deadline: Duration,
    },
    /// Frames go both ways.
    Live(Live),
    /// For good.
    Stopped,
}

/// What a Welcome has settled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Terms {
    /// The session's id.
    pub session_id: String,
    /// The gateway's address.
    pub endpoint: Endpoint,
    /// The gateway's id.
    pub gateway_id: String,
    /// The session's epoch.
    pub epoch: u64,
    /// The version chosen.
    pub proto: u32,
    /// The gateway's highest version.
    pub proto_max: u32,
    /// Between two heartbeats.
    pub heartbeat_interval: Duration,
}

/// How the last session or attempt ended.
#[derive(Debug, Clone)]
pub struct LastEnd {
    /// How.
    pub end: LinkEnd,
    /// When.
    pub at: Duration,
}

/// The machine.
#[derive(Debug)]
pub struct Machine {
    endpoints: Vec<Endpoint>,
    next_endpoint: usize,
    /// What the next dial offers.
    offered: Offered,
    /// What this dial or session was opened with.
    used: Offered,
    backoff: Backoff,
    keep_alive: Duration,
    state: State,
    since: Duration,
    last_end: Option<LastEnd>,
    rng: StdRng,
}

impl Machine {
    /// A machine that waits to dial for the first time.
    pub fn new(endpoints: Vec<Endpoint>, offered: Offered, mut rng: StdRng, now: Duration) -> Self {
        let mut backoff = Backoff::new(endpoints.len());
        let until = now + backoff.jitter(&mut rng);
        Self {
            endpoints,
            next_endpoint: 0,
            used: offered.clone(),
            offered,
            backoff,
            keep_alive: KEEP_ALIVE,
            state: State::WaitingToDial { until },
            since: now,
            last_end: None,
            rng,
        }
    }

    /// Where it stands.
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Since when.
    pub fn since(&self) -> Duration {
        self.since
    }

    /// Dials since the last session that held.
    pub fn attempt(&self) -> u32 {
        self.backoff.attempt()
    }

    /// How the last session or attempt ended.
    pub fn last_end(&self) -> Option<&LastEnd> {
        self.last_end.as_ref()
    }

    /// When [`Input::Due`] is wanted.
    pub fn due(&self) -> Option<Duration> {
        match &self.state {
            State::WaitingToDial { until } => Some(*until),
            State::Dialing { deadline, .. }
            | State::AwaitingWelcome { deadline, .. }
            | State::ApplyingWelcome { deadline, .. } => Some(*deadline),
            State::Live(live) => Some(live.due()),
            State::Stopped => None,
        }
    }

    /// Takes one input. What is due by `now` is done as well, so that no flood of frames holds up a heartbeat.
    pub fn handle(&mut self, now: Now, input: Input) -> Vec<Output> {
        let mut outputs = Vec::new();
        match input {
            Input::Due => {}
            Input::Stop(intent) => self.stop(now, intent, &mut outputs),
            Input::Ended(end) => self.ended(now, end, &mut outputs),
            Input::BadFrame(error) => {
                if matches!(self.state, State::AwaitingWelcome { .. } | State::Live(_)) {
                    self.close(now, error.reason, error.detail, &mut outputs);
                }
            }
            Input::Frame(frame) => self.frame(now, frame, &mut outputs),
            Input::OldCopy { acked } => {
                if matches!(self.state, State::ApplyingWelcome { .. } | State::Live(_)) {
                    let detail = format!(
                        "the gateway has event {acked} of this journal, which was not sent yet: the journal is an \
                         older copy and takes a new id"
                    );
                    self.close(now, Reason::OldCopy, detail, &mut outputs);
                }
            }
            Input::Opened(validity) => {
                let endpoint = match &self.state {
                    State::Dialing { endpoint, .. } => Some(endpoint.clone()),
                    State::Live(_) => self.moved(),
                    _ => None,
                };
                if let Some(endpoint) = endpoint {
                    let deadline = now.mono + WELCOME_DEADLINE;
                    self.enter(now, State::AwaitingWelcome { endpoint, validity, deadline });
                }
            }
            Input::MoveFailed(end) => self.move_failed(now, end, &mut outputs),
            Input::Renewed { endpoints, offered } => self.renewed(now, endpoints, offered, &mut outputs),
            Input::Applied => {
                if let State::ApplyingWelcome { terms, .. } = &self.state {
                    self.enter(now, State::Live(Live::new(terms.clone(), now.mono)));
                    outputs.push(Output::Resume);
                    self.follow_offer(now, &mut outputs);
                }
            }
        }
        if self.due().is_some_and(|due| due <= now.mono) {
            self.perform_due(now, &mut outputs);
        }
        outputs
    }

    fn enter(&mut self, now: Now, state: State) {
        self.state = state;
        self.since = now.mono;
    }

    fn perform_due(&mut self, now: Now, outputs: &mut Vec<Output>) {
        let timeout = |kind, reason, text: String| LinkEnd::local(kind, reason, text);
        match &mut self.state {
            State::WaitingToDial { .. } => self.dial(now, outputs),
            State::Dialing { endpoint, .. } => {
                let text = format!("{endpoint} took longer than {} s to connect", DIAL_DEADLINE.as_secs());
                self.ended(now, timeout(EndKind::Lost, Reason::DialTimeout, text), outputs);
            }
            State::AwaitingWelcome { endpoint, .. } => {
                let text =
                    format!("{endpoint} sent no Welcome within {} s of Hello", WELCOME_DEADLINE.as_secs());
                self.ended(now, timeout(EndKind::Local, Reason::WelcomeTimeout, text), outputs);
            }
            State::ApplyingWelcome { .. } => {
                let text = format!("the journal took no Welcome within {} s", APPLY_DEADLINE.as_secs());
                self.ended(now, timeout(EndKind::Local, Reason::IoError, text), outputs);
            }
            State::Live(live) => match live.perform_due(now.mono) {
                Due::Nothing => {}
                Due::Heartbeat(beat) => outputs.push(Output::Heartbeat(beat)),
                Due::HalfOpen(text) => {
                    self.ended(now, timeout(EndKind::Local, Reason::HalfOpen, text), outputs);
                }
                Due::Redial => self.redial(now, outputs),
                Due::Move => self.dial_to_move(now, outputs),
                Due::MoveTimeout(endpoint) => {
                    outputs.push(Output::AbandonMove);
                    let text =
                        format!("{endpoint} took longer than {} s to connect", DIAL_DEADLINE.as_secs());
                    let end = timeout(EndKind::Lost, Reason::DialTimeout, text);
                    self.move_failed(now, end, outputs);
                }
            },
            State::Stopped => {}
        }
    }

    fn dial(&mut self, now: Now, outputs: &mut Vec<Output>) {
        let Offered { validity: Validity { not_after, .. }, mend, rejoins, revoked, .. } = &self.offered;
        let unusable = if *revoked {
            let detail = format!("the join service has revoked the node certificate; {mend}");
            Some((Reason::CertificateRevoked, detail))
        } else {
            let expired = now.working.is_some_and(|working| working > *not_after);
            let detail =
                format!("the node certificate ran out at {not_after} by the working clock; {rejoins}");
            expired.then_some((Reason::IdentityExpired, detail))
        };
        if let Some((reason, detail)) = unusable {
            let end = LinkEnd::local(EndKind::Local, reason, detail);
            outputs.push(Output::Ended(end.clone(), Reaction::Operator));
            self.last_end = Some(LastEnd { end, at: now.mono });
            self.enter(now, State::WaitingToDial { until: now.mono + EXPIRED_RETRY });
            return;
        }
        let Some(endpoint) = self.next_endpoint() else {
            let end = LinkEnd::local(EndKind::Local, Reason::DialFailed, "no gateway is known to this node");
            self.wait_after(now, end, outputs);
            return;
        };
        self.used = self.offered.clone();
        let attempt = self.backoff.attempt();
        self.backoff.dialed();
        let deadline = now.mono + DIAL_DEADLINE;
        self.enter(now, State::Dialing { endpoint: endpoint.clone(), deadline });
        outputs.push(Output::Dial { endpoint, attempt, keep_alive: self.keep_alive });
    }

    fn next_endpoint(&mut self) -> Option<Endpoint> {
        let count = self.endpoints.len().max(1);
        let endpoint = self.endpoints.get(self.next_endpoint % count).cloned()?;
        self.next_endpoint = self.next_endpoint.wrapping_add(1);
        Some(endpoint)
    }

    /// Whatever the old identity was refused for says nothing of the new one. The jitter stays: a fleet may be
    /// renewed all at once.
    fn renewed(&mut self, now: Now, endpoints: Vec<Endpoint>, offered: Offered, outputs: &mut Vec<Output>) {
        self.backoff = Backoff::new(endpoints.len());
        (self.endpoints, self.next_endpoint, self.offered) = (endpoints, 0, offered);
        match self.state {
            State::WaitingToDial { .. } => {
                let until = now.mono + self.backoff.jitter(&mut self.rng);
                self.enter(now, State::WaitingToDial { until });
            }
            State::Live(_) => self.follow_offer(now, outputs),
            // A dial or an opening that is under way ends with what it began with.
            _ => {}
        }
    }

    /// The attempt or the session is over; nobody is told.
    fn ended(&mut self, now: Now, mut end: LinkEnd, outputs: &mut Vec<Output>) {
        match &self.state {
            State::WaitingToDial { .. } | State::Stopped => return,
            State::Dialing { endpoint, .. } | State::AwaitingWelcome { endpoint, .. } => {
                if let Some(mend) = end.reason.and_then(|reason| version::mend(reason, endpoint)) {
                    end.detail = format!("{mend} ({})", end.detail);
                }
            }
            State::ApplyingWelcome { .. } | State::Live(_) => {}
        }
        outputs.push(Output::Abandon);
        self.wait_after(now, end, outputs);
    }

    fn wait_after(&mut self, now: Now, mut end: LinkEnd, outputs: &mut Vec<Output>) {
        if end.kind == EndKind::Calm {
            self.keep_alive = self.keep_alive.saturating_mul(2).min(CALMEST_KEEP_ALIVE);
        }
        if end.reason == Some(Reason::Superseded) {
            end.detail = format!("another machine uses this identity: {}", end.detail);
        }
        let until = now.mono + self.backoff.after(&end, &mut self.rng);
        outputs.push(Output::Ended(end.clone(), Reaction::to(&end)));
        self.last_end = Some(LastEnd { end, at: now.mono });
        self.enter(now, State::WaitingToDial { until });
    }

    /// The node ends the session and says why.
    fn close(&mut self, now: Now, reason: Reason, detail: String, outputs: &mut Vec<Output>) {
        outputs.push(Output::Close(Intent::Closing, reason));
        self.wait_after(now, LinkEnd::local(EndKind::Local, reason, detail), outputs);
    }

    /// A drain's delay is over. A session that held is left without back-off; one that did not is a gateway that
    /// accepts and sends away, which must not be redialed in a loop.
    fn redial(&mut self, now: Now, outputs: &mut Vec<Output>) {
        let held = matches!(&self.state, State::Live(live) if live.held);
        self.close(now, Reason::DrainRequested, "the gateway asked the node to redial".into(), outputs);
        if held {
            self.backoff.session_held();
            self.state = State::WaitingToDial { until: now.mono };
        }
    }

    fn stop(&mut self, now: Now, intent: Intent, outputs: &mut Vec<Output>) {
        match self.state {
            State::WaitingToDial { .. } | State::Stopped => {}
            State::Dialing { .. } => outputs.push(Output::Abandon),
            State::AwaitingWelcome { .. } | State::ApplyingWelcome { .. } | State::Live(_) => {
                outputs.push(Output::Close(intent, Reason::Stop));
            }
        }
        self.enter(now, State::Stopped);
    }

    fn frame(&mut self, now: Now, frame: Inbound, outputs: &mut Vec<Output>) {
        match (&mut self.state, frame) {
            (State::AwaitingWelcome { endpoint, validity, .. }, Inbound::Welcome(welcome)) => {
                let (endpoint, validity) = (endpoint.clone(), validity.filter(|_| !now.heard));
                if let Err((reason, detail)) = vouch(validity, welcome.server_time) {
                    // Nothing that such a gateway says is kept, its epoch neither.
                    self.close(now, reason, detail, outputs);
                } else {
                    self.welcome(now, endpoint, welcome, outputs);
                }
            }
            (State::AwaitingWelcome { .. }, Inbound::Delivery(_) | Inbound::BadCancel(_)) => {
                let detail = "a Command or Cancel came before Welcome".into();
                self.close(now, Reason::ProtocolError, detail, outputs);
            }
            (State::Live(_), Inbound::Welcome(_)) => {
                let detail = "a second Welcome came".into();
                self.close(now, Reason::ProtocolError, detail, outputs);
            }
            (State::Live(_), Inbound::UnsignedRevocation) => {
                // As a refusal with this reason: without proof it must not take the node off the air.
                let (kind, reason) = (EndKind::Unauthenticated, Reason::CertificateRevoked);
                outputs.push(Output::Close(Intent::Closing, reason));
                let detail = "the gateway says, without a signature, that the certificate is revoked";
                self.wait_after(now, LinkEnd::local(kind, reason, detail), outputs);
            }
            (State::Live(live), frame) => {
                live.last_frame = now.mono;
                if live.frame(now.mono, frame, &mut self.rng, outputs) {
                    self.backoff.session_held();
                }
            }
            // Nothing else is read in the other states, and an Ack or Drain before Welcome speaks of nothing.
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests;
