//! The one loop that performs what [`super::machine`] says. It decides nothing about the session; what it does by
//! itself is to keep to the room of the link's queue.
//!
//! Order promised: Hello goes with the call; the Welcome is durable before the first heartbeat tells of it; results
//! leave as `Durable<Done>` only. Never waits for the wire, the journal or the executor: each of those is a future
//! of the same select.

mod opening;
mod wire;

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rand::Rng as _;
use tokio::sync::watch;
use tokio::time::Instant;

use super::backoff::Reaction;
use super::events::EventFlow;
use super::machine::{Beat, Input, Intent, Machine, Now, Offered, Output, State};
use super::outbox::Outgoing;
use super::resend::Resend;
use super::status::SessionStatus;
use super::{Credentials, SessionParts};
use crate::failpoint;
use crate::journal::{AckOf, Durable, EventPage, PendingEvents, Unacked};
use crate::model::{Done, JournalId, Reason, ServerTime};
use crate::wire::frames::{Inbound, Notice, Welcome};
use crate::wire::link::{Endpoint, Link, LinkEnd};
use crate::wire::pb;
use crate::wire::pb::node_frame::Frame;

/// Places of the link's queue kept for a heartbeat and a Goodbye.
const RESERVED: usize = 2;
/// A Goodbye gets this long to leave; a clean stop has 10 s in all.
const GOODBYE_FLUSH: Duration = Duration::from_secs(2);
/// While it waits to dial, the node looks this often whether its identity was replaced.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// A disk that hangs must not keep the node from dialing.
const LOOK_DEADLINE: Duration = Duration::from_secs(2);
/// Boot time runs on while the machine sleeps, the driver's clock does not.
const SLEPT: Duration = Duration::from_secs(1);
/// A key that could not sign is asked again after this; each time that it fails again, after twice as long.
const REST: Duration = Duration::from_secs(1);
/// But not longer.
const LONGEST_REST: Duration = Duration::from_secs(30);

type Pending<T> = Option<BoxFuture<'static, T>>;
type Opened = Result<(Box<dyn Link>, Resend), LinkEnd>;

pub(super) struct Driver {
    parts: SessionParts,
    machine: Machine,
    /// By chance, and the same for as long as the process lives.
    first: usize,
    started: Instant,
    /// The same moment in boot time.
    began_boot: Duration,
    link: Option<Box<dyn Link>>,
    /// Of the session that is moved from: it ends when the gateway has taken the next one, not before.
    left: Option<Box<dyn Link>>,
    resend: Resend,
    /// A heartbeat that found no room; a newer one replaces it.
    heartbeat: Option<Beat>,
    /// The epoch of a refused Welcome, recorded before the next Hello is built.
    refused_epoch: Option<u64>,
    /// The trust bundle of the Welcome that is being applied.
    bundle: Option<Inbound>,
    /// Of the last Welcome, in force or refused, which a journal that cannot be written does not know; 0 before the
    /// first. Without it an honest node on a full disk would look like a clone that has missed its sessions.
    last_epoch: u64,
    /// What of the journal's events this session has still to say.
    events: EventFlow,
    /// The journal's news of its events.
    pending: watch::Receiver<PendingEvents>,
    outbox_ended: bool,
    looking: Pending<Option<Credentials>>,
    /// Armed while there is somebody who may replace the credentials.
    replaced: Pending<()>,
    look_at: Instant,
    opening: Pending<Opened>,
    applying: Pending<()>,
    reading: Pending<Unacked>,
    reading_events: Pending<EventPage>,
    /// A result on its way to the wire.
    signing: Pending<Result<pb::CommandUpdate, Durable<Done>>>,
    /// It is signed and waits for room.
    signed: Option<pb::CommandUpdate>,
    /// The key could not sign: nothing is asked of it until this is over.
    key_rests: Pending<()>,
    /// How long it rests the next time.
    rest: Duration,
    /// Results were put off since: the journal has them.
    put_off: bool,
    /// The journal takes a new id. Outlives the session; the next Hello waits for it.
    renaming: Pending<()>,
    /// Armed while the link's queue is full.
    flushed: Pending<()>,
    closing: Pending<()>,
}

enum Event {
    Stop,
    Opened(Opened),
    Applied,
    Read(Unacked),
    ReadEvents(EventPage),
    Signed(Result<pb::CommandUpdate, Durable<Done>>),
    Rested,
    Renamed,
    News,
    Frame(Result<pb::GatewayFrame, LinkEnd>),
    Due,
    Replaced,
    Looked(Option<Credentials>),
    Room,
    Outgoing(Option<Outgoing>),
}

/// Waits for a future that may not be there; takes it away when it is done.
async fn done<T>(pending: &mut Pending<T>) -> T {
    let Some(future) = pending else { return std::future::pending().await };
    let value = future.await;
    *pending = None;
    value
}

impl Driver {
    pub(super) fn new(parts: SessionParts) -> Self {
        let first = parts.rng.clone().random_range(..=usize::MAX >> 1);
        let (endpoints, offered) = terms_of(&parts.credentials, first);
        let started = Instant::now();
        let pending = parts.journal.pending_events();
        Self {
            machine: Machine::new(endpoints, offered, parts.rng.clone(), Duration::ZERO),
            parts,
            first,
            started,
            began_boot: Duration::ZERO,
            link: None,
            left: None,
            resend: Resend::default(),
            heartbeat: None,
            refused_epoch: None,
            bundle: None,
            last_epoch: 0,
            events: EventFlow::default(),
            pending,
            outbox_ended: false,
            looking: None,
            replaced: None,
            look_at: started,
            opening: None,
            applying: None,
            reading: None,
            reading_events: None,
            signing: None,
            signed: None,
            key_rests: None,
            rest: REST,
            put_off: false,
            renaming: None,
            flushed: None,
            closing: None,
        }
    }

    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        self.publish();
        while !matches!(self.machine.state(), State::Stopped) {
            let event = self.next(&mut stop).await;
            self.take(event);
            self.pump();
        }
        done_if_any(&mut self.closing).await;
    }

    fn waits_to_dial(&self) -> bool {
        matches!(self.machine.state(), State::WaitingToDial { .. })
    }

    fn due(&self) -> Option<Instant> {
        if self.looking.is_some() && self.waits_to_dial() {
            return None;
        }
        let due = self.machine.due().map(|due| self.started + due);
        let looks = self.parts.renewals.is_some() && self.waits_to_dial();
        due.map(|due| if looks { due.min(self.look_at) } else { due })
    }

    fn live(&self) -> bool {
        matches!(self.machine.state(), State::Live(_))
    }

    fn room(&self) -> usize {
        self.link.as_ref().map_or(0, |link| link.room().saturating_sub(RESERVED))
    }

    /// Frames before the clock: what has already come must count before silence is found. Neither starves the
    /// heartbeats, since the machine performs what is due with every input.
    async fn next(&mut self, stop: &mut watch::Receiver<bool>) -> Event {
        let due = self.due();
        let frames = matches!(self.machine.state(), State::AwaitingWelcome { .. } | State::Live(_));
        // One result after the other, so that they leave in their order.
        let outgoing = self.live() && !self.outbox_ended && self.room() > 0 && !self.signs();
        let live = self.live();
        let may_look = self.looking.is_none() && (live || self.waits_to_dial());
        if self.replaced.is_none() {
            self.replaced = self.parts.renewals.as_ref().map(|renewals| renewals.replaced());
        }
        let link = &mut self.link;
        let receive = async {
            match link {
                Some(link) if frames => link.receive().await,
                _ => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => Event::Stop,
            opened = done(&mut self.opening) => Event::Opened(opened),
            () = done(&mut self.applying) => Event::Applied,
            found = done(&mut self.looking) => Event::Looked(found),
            page = done(&mut self.reading) => Event::Read(page),
            page = done(&mut self.reading_events) => Event::ReadEvents(page),
            () = done(&mut self.renaming) => Event::Renamed,
            signed = done(&mut self.signing) => Event::Signed(signed),
            () = done(&mut self.key_rests) => Event::Rested,
            frame = receive => Event::Frame(frame),
            () = sleep_until(due) => Event::Due,
            () = done(&mut self.replaced), if may_look => Event::Replaced,
            () = done(&mut self.flushed) => Event::Room,
            outgoing = self.parts.outbox.next(), if outgoing => Event::Outgoing(outgoing),
            // The journal that this session holds keeps the other end.
            _ = self.pending.changed(), if live => Event::News,
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Stop => {
                let rebooting = self.parts.lanes.is_rebooting();
                self.input(Input::Stop(if rebooting { Intent::Rebooting } else { Intent::Stopping }));
            }
            Event::Opened(Ok((link, resend))) => self.opened_link(link, resend),
            Event::Opened(Err(mut end)) if self.live() => {
                self.hand_on_revocation(&mut end);
                // What the outbox held was left to a Hello that did not go.
                self.resend.missed();
                self.input(Input::MoveFailed(end));
            }
            Event::Opened(Err(mut end)) | Event::Frame(Err(mut end)) => {
                self.hand_on_revocation(&mut end);
                self.input(Input::Ended(end));
            }
            Event::Applied => {
                self.left = None;
                self.input(Input::Applied);
            }
            Event::Read(page) => self.resend.read(page, self.parts.outbox.len()),
            Event::Frame(Ok(frame)) => self.input(match Inbound::try_from(frame) {
                Ok(frame) => Input::Frame(frame),
                Err(error) => Input::BadFrame(error),
            }),
            Event::Due if self.waits_to_dial() && self.parts.renewals.is_some() => self.look(),
            Event::Due => self.input(Input::Due),
            Event::Replaced => self.look(),
            Event::Looked(found) => {
                self.look_at = Instant::now() + LOOK_EVERY;
                let input = match found {
                    Some(credentials) => {
                        let (endpoints, offered) = terms_of(&credentials, self.first);
                        self.parts.credentials = credentials;
                        Input::Renewed { endpoints, offered }
                    }
                    None => Input::Due,
                };
                self.input(input);
            }
            Event::ReadEvents(page) => self.events.read(page),
            Event::Signed(Ok(update)) => {
                self.rest = REST;
                // The queue may have filled up meanwhile.
                self.signed = Some(update);
            }
            Event::Signed(Err(done)) => self.key_failed(&done),
            Event::Room | Event::Rested | Event::Renamed | Event::News => {}
            Event::Outgoing(None) => self.outbox_ended = true,
            Event::Outgoing(Some(outgoing)) => self.say(outgoing),
        }
    }

    fn look(&mut self) {
        if let Some(renewals) = &self.parts.renewals {
            let look = tokio::time::timeout(LOOK_DEADLINE, renewals.look());
            self.looking = Some(look.map(|found| found.ok().flatten()).boxed());
        }
    }

    /// Of a dial, or of a session that moves: its link is left open until the next Welcome is applied, so that the node
    /// is never without one.
    fn opened_link(&mut self, link: Box<dyn Link>, resend: Resend) {
        let validity = link.gateway_validity();
        let moves = self.live();
        if moves {
            let left = self.link.take();
            self.forget_session();
            self.left = left;
        }
        self.link = Some(link);
        self.resend = resend;
        self.resend.suspect(self.parts.outbox.len());
        if moves {
            // Results that have gone to the old link since this Hello was made, and may be lost with it.
            self.resend.missed();
        }
        self.input(Input::Opened(validity));
    }

    fn input(&mut self, input: Input) {
        let working = &self.parts.working;
        let now = Now { mono: self.started.elapsed(), working: working.now(), heard: working.heard() };
        let outputs = self.machine.handle(now, input);
        // Traffic changes nothing that the status shows; everything else may, an input without outputs too.
        let traffic = |output: &Output| {
            let quiet = matches!(output, Output::Acked(_) | Output::EventsAcked(..));
            quiet || matches!(output, Output::Deliver(_) | Output::Notice(_))
        };
        let changed = outputs.is_empty() || !outputs.iter().all(traffic);
        for output in outputs {
            self.perform(output);
        }
        if changed {
            self.publish();
        }
    }

    fn publish(&mut self) {
        let began = self.parts.working.clock().boot().saturating_sub(self.started.elapsed());
        // The clocks are read one after the other: a moment that was told is told alike until the machine has slept.
        if began.abs_diff(self.began_boot) >= SLEPT {
            self.began_boot = began;
        }
        let now = SessionStatus::of(&self.machine, self.began_boot);
        // An ack is shown to whoever asks; told to everybody who listens it would wake the whole node at each heartbeat.
        self.parts.status.send_if_modified(|shown| {
            let news = !now.is_as(shown);
            *shown = now;
            news
        });
    }

    fn perform(&mut self, output: Output) {
        match output {
            Output::Dial { endpoint, attempt, keep_alive } => {
                if self.live() {
                    failpoint::hit(failpoint::RENEW_MOVES);
                }
                self.open(endpoint, attempt, keep_alive);
            }
            Output::RecordEpoch(epoch) => self.refused(epoch),
            Output::Apply(welcome) => match self.shows_old_copy(&welcome) {
                Some(acked) => {
                    // The gateway has counted its epoch.
                    self.refused(welcome.epoch);
                    self.old_copy(acked);
                }
                None => self.apply(&welcome),
            },
            Output::Resume => {
                self.log_live();
                match self.bundle.take() {
                    Some(Inbound::Notice(notice)) => self.hand_on(notice),
                    Some(Inbound::BadNotice(detail)) => self.perform(Output::BadNotice(detail)),
                    _ => {}
                }
            }
            Output::Heartbeat(beat) => {
                self.heartbeat = Some(beat);
                if let Some(now) = self.parts.working.now() {
                    self.parts.journal.note_time(now, self.parts.working.signed());
                }
            }
            Output::Deliver(delivery) => self.deliver(delivery),
            Output::Acked(ids) => {
                failpoint::hit(failpoint::ACK_RECEIVED);
                self.resend.acked(&ids);
                self.parts.journal.acked(ids);
            }
            Output::EventsAcked(journal, seq) => match self.parts.journal.ack_of(&journal, seq) {
                AckOf::Sent => {
                    self.events.acked(seq);
                    self.parts.journal.events_acked(journal, seq);
                }
                AckOf::AnotherJournal => {}
                AckOf::OldCopy => self.old_copy(seq),
            },
            Output::Close(intent, reason) => self.close(intent, reason),
            Output::Abandon => {
                self.forget_session();
                self.link = None;
            }
            Output::AbandonMove => {
                self.opening = None;
                self.resend.missed();
            }
            Output::MoveFailed(end) => {
                let reason = end.reason.map_or("-", Reason::token);
                tracing::warn!(reason, detail = %end, "the session cannot move to the renewed certificate yet; it goes on");
            }
            Output::Notice(notice) => self.hand_on(notice),
            Output::BadNotice(detail) => {
                tracing::warn!(detail, "a document of the join service cannot be read; ignored");
            }
            Output::BadCancel(detail) => tracing::warn!(detail, "a cancellation cannot be read; ignored"),
            Output::FrameIgnored(name) => {
                tracing::info!(
                    frame = name,
                    "the gateway sends a frame that this build does not know; ignored"
                );
            }
            Output::Ended(end, reaction) => log_end(&end, reaction),
        }
    }

    fn hand_on(&mut self, notice: Notice) {
        if self.parts.notices.try_send(notice).is_err() {
            tracing::warn!("documents of the join service come faster than they are kept; one is dropped");
        }
    }

    /// A refusal may bring the join service's own word. Until that is verified, the refusal is the gateway's word alone.
    fn hand_on_revocation(&mut self, end: &mut LinkEnd) {
        if let Some(envelope) = end.revocation.take() {
            self.hand_on(Notice::Revocation(*envelope));
        }
    }

    /// What only had a meaning within the session or the attempt.
    fn forget_session(&mut self) {
        self.left = None;
        self.opening = None;
        self.applying = None;
        self.reading = None;
        self.reading_events = None;
        self.signing = None;
        self.signed = None;
        // The next one may have another key.
        self.key_rests = None;
        self.put_off = false;
        self.events = EventFlow::default();
        self.flushed = None;
        self.heartbeat = None;
        self.resend = Resend::default();
    }

    /// The sequence of a Welcome that this journal cannot have sent.
    fn shows_old_copy(&self, welcome: &Welcome) -> Option<u64> {
        let (journal, acked) = (welcome.journal_id.as_ref()?, welcome.acked_event_seq);
        (self.parts.journal.ack_of(journal, acked) == AckOf::OldCopy).then_some(acked)
    }

    /// A lie of the gateway is treated no otherwise: a new id harms nothing but some commands that are refused.
    fn old_copy(&mut self, acked: u64) {
        let (journal, id) = (self.parts.journal.clone(), JournalId::random(&mut self.parts.rng));
        tracing::error!(journal = %journal.id(), new = %id, acked, "the journal is an older copy of itself and takes a new id");
        let rename = async move {
            if let Err(error) = journal.rename(id, acked).await {
                tracing::warn!(%error, "the journal keeps its id until the next Welcome");
            }
        };
        self.renaming = Some(rename.boxed());
        self.input(Input::OldCopy { acked });
    }

    fn working_now(&self) -> ServerTime {
        self.parts.working.now().unwrap_or_default()
    }

    /// A Welcome that is not applied has an epoch all the same.
    fn refused(&mut self, epoch: u64) {
        self.refused_epoch = Some(epoch);
        self.last_epoch = epoch;
    }

    fn log_live(&self) {
        if let State::Live(live) = self.machine.state() {
            let terms = &live.terms;
            tracing::info!(
                endpoint = %terms.endpoint, gateway = terms.gateway_id, epoch = terms.epoch, proto = terms.proto,
                "session is live"
            );
        }
    }

    fn close(&mut self, intent: Intent, reason: Reason) {
        self.forget_session();
        let Some(mut link) = self.link.take() else { return };
        let goodbye = pb::Goodbye { intent: intent.token().into(), reason: reason.token().into() };
        // A queue without room for it has no wire that would carry it.
        let _ = link.send(frame(Frame::Goodbye(goodbye)));
        let closing = link.close(GOODBYE_FLUSH);
        match intent {
            Intent::Stopping | Intent::Rebooting => self.closing = Some(closing),
            Intent::Closing => drop(tokio::spawn(closing)),
        }
    }
}

fn terms_of(credentials: &Credentials, first: usize) -> (Vec<Endpoint>, Offered) {
    (from(&credentials.endpoints, first), credentials.offered.clone())
}

/// Gateways in turn, from one of them on: were it the same for every node, one gateway would have them all.
fn from(endpoints: &[Endpoint], first: usize) -> Vec<Endpoint> {
    let (before, behind) = endpoints.split_at(first.checked_rem(endpoints.len()).unwrap_or_default());
    [behind, before].concat()
}

async fn done_if_any(pending: &mut Pending<()>) {
    if pending.is_some() {
        done(pending).await;
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

fn frame(body: Frame) -> pb::NodeFrame {
    pb::NodeFrame { frame: Some(body) }
}

fn log_end(end: &LinkEnd, reaction: Reaction) {
    let reason = end.reason.map_or("-", Reason::token);
    match reaction {
        Reaction::Retry => tracing::warn!(reason, detail = %end, "session ended"),
        Reaction::Operator | Reaction::Condemned => {
            tracing::error!(reason, detail = %end, "session refused; an operator must act");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_begin_with_different_gateways_and_try_all_of_them_in_turn() {
        let list = |names: &[&str]| -> Vec<Endpoint> {
            names.iter().map(|host| Endpoint { host: (*host).into(), port: 443 }).collect()
        };
        assert_eq!(from(&list(&["a", "b", "c"]), 0), list(&["a", "b", "c"]));
        assert_eq!(from(&list(&["a", "b", "c"]), 4), list(&["b", "c", "a"]));
        assert_eq!(from(&list(&["a", "b", "c"]), 8), list(&["c", "a", "b"]));
        assert_eq!(from(&[], 7), []);
    }
}
