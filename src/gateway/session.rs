//! One session after its Hello transaction: a task that reads the node's frames and owns what goes out.
//!
//! It sends Welcome and the acks of the results that came with Hello at once; commands and cancellations wait for
//! the first heartbeat, the node's word that it took the Welcome. Frames that have already arrived are handled together,
//! so that their updates share a transaction and their acks a frame. Beside it run the watch over silence and
//! expiry, and the word of another part of the gateway that the session is over: both cut in even while a send
//! waits for a node that does not read.

mod lying;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;
use tonic::{Code, Status, Streaming};

use self::lying::Lying;
use super::credits::Credits;
use super::hub::{Hub, Live, SessionEnd, lock};
use super::node_events::Batch;
use super::store::{Applied, Deliver, Effects, Route, StoreError, Stray};
use super::update::Update;
use super::worker::{Ask, Told};
use crate::failpoint;
use crate::model::{CommandId, EventType, Incarnation, Lane, Reason, ServerTime};
use crate::wire::dsse::Envelope;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;
use crate::wire::{pb, status};

/// Frames that wait for the transport.
pub const OUTGOING: usize = 64;
/// Frames handled together: results of a full session (26 credits by default) many times over.
const TOGETHER: usize = 256;
/// Result ids in one Ack.
const ACKS: usize = 256;
/// The watch looks at least this often.
const WATCH: Duration = Duration::from_secs(5);
/// Missed intervals that end a session.
const MISSED: u32 = 3;
/// The last word waits this long for room on its way out.
const LAST_WORD: Duration = Duration::from_secs(1);

/// What a session knows from its opening.
pub struct Opening {
    /// Whose session, and what it writes under.
    pub route: Route,
    /// The daemon process.
    pub incarnation: Incarnation,
    /// End of the certificate.
    pub not_after: ServerTime,
    /// Commands that the node runs; they are not sent again.
    pub running: Vec<CommandId>,
    /// Detail of node.connected.
    pub connected: serde_json::Value,
    /// The first frame.
    pub welcome: pb::Welcome,
    /// Results stored by the Hello transaction.
    pub acks: Vec<CommandId>,
}

/// A session that the Hello transaction has opened.
pub struct Begun {
    /// As others see it.
    pub live: Arc<Live>,
    /// What it starts with.
    pub opening: Opening,
    /// Frames that others want sent.
    pub orders: mpsc::Receiver<pb::GatewayFrame>,
    /// Its end, when another decides it.
    pub told: oneshot::Receiver<SessionEnd>,
}

/// The frames' way to the node.
pub type Outgoing = mpsc::Sender<Result<pb::GatewayFrame, Status>>;

/// Runs a session to its end.
pub async fn run(
    hub: Arc<Hub>,
    begun: Begun,
    inbound: Streaming<pb::NodeFrame>,
    out: Outgoing,
    place: OwnedSemaphorePermit,
) {
    let Begun { live, opening, orders, mut told } = begun;
    let route = opening.route.clone();
    let not_after = opening.not_after;
    let credits = Credits::new(hub.settings.lane_credits.clone());
    let lying = Lying::about(opening.welcome.journal_id.clone());
    let mut session = Session {
        hub: hub.clone(),
        live: live.clone(),
        opening,
        inbound,
        out: out.clone(),
        orders,
        credits,
        phase: Phase::AwaitingHeartbeat,
        next_due: None,
        ignored_logged: false,
        lying,
    };
    let end = tokio::select! {
        biased;
        told = &mut told => told.unwrap_or_else(|_| SessionEnd::superseded()),
        end = watch(&hub, &live, not_after) => end,
        end = session.serve() => end,
    };
    drop(session);
    hub.forget(&route.node, &live);
    tracing::info!(node = %route.node, epoch = live.epoch, reason = end.reason, "session ended");
    if end.owns_node {
        let last_seen = hub.now().minus(live.silent_for());
        match hub.store.disconnected(route.clone(), last_seen, end.reason).await {
            Ok(true) => hub.event_added(),
            Ok(false) => {}
            Err(error) => tracing::error!(node = %route.node, %error, "a disconnect was not written"),
        }
    }
    if let Some(status) = end.status {
        let _ = tokio::time::timeout(LAST_WORD, out.send(Err(status))).await;
    }
    drop(place);
}

/// Resolves when the node has been silent for too long or its certificate has run out.
async fn watch(hub: &Hub, live: &Live, not_after: ServerTime) -> SessionEnd {
    let interval = hub.settings.heartbeat_interval;
    let mut tick = tokio::time::interval(WATCH.min(interval / 2).max(Duration::from_millis(10)));
    loop {
        tick.tick().await;
        if live.silent_for() > interval * MISSED {
            let message = "no frame came for three heartbeat intervals";
            return SessionEnd::told(Code::Unavailable, Reason::HeartbeatTimeout, message);
        }
        if hub.now() >= not_after {
            let message = "the node certificate has run out";
            return SessionEnd::told(Code::Unauthenticated, Reason::CertificateExpired, message);
        }
    }
}

/// Where a session stands.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Welcome is out; the node may still refuse it. Nothing is dispatched.
    AwaitingHeartbeat,
    /// Commands flow.
    Live,
    /// The node said Goodbye; nothing more is dispatched.
    Leaving,
}

struct Session {
    hub: Arc<Hub>,
    live: Arc<Live>,
    opening: Opening,
    inbound: Streaming<pb::NodeFrame>,
    out: Outgoing,
    orders: mpsc::Receiver<pb::GatewayFrame>,
    credits: Credits,
    phase: Phase,
    /// When a back-off of this node ends.
    next_due: Option<Instant>,
    ignored_logged: bool,
    lying: Lying,
}

/// Ends the session.
struct Ended(SessionEnd);

impl From<StoreError> for Ended {
    fn from(error: StoreError) -> Self {
        tracing::error!(error = %chain(&error), "the store failed; the session ends");
        Self(SessionEnd::told(Code::Internal, Reason::Internal, "the gateway's store failed"))
    }
}

impl From<Stray> for Ended {
    fn from(stray: Stray) -> Self {
        Self(stray.into())
    }
}

/// An error with its sources, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        text.push_str(": ");
        text.push_str(&source.to_string());
        next = source.source();
    }
    text
}

impl Session {
    async fn serve(&mut self) -> SessionEnd {
        match self.serve_frames().await {
            Ok(end) | Err(Ended(end)) => end,
        }
    }

    async fn serve_frames(&mut self) -> Result<SessionEnd, Ended> {
        let welcome = std::mem::take(&mut self.opening.welcome);
        self.send(Out::Welcome(welcome)).await?;
        if self.hub.settings.lies.hangs_up {
            return Ok(self.closed_by_node());
        }
        let acks = std::mem::take(&mut self.opening.acks);
        self.ack(None, acks).await?;
        loop {
            let due = self.next_due.unwrap_or_else(|| Instant::now() + WATCH);
            let late = self.lying.due();
            tokio::select! {
                // What is to be sent first: a node that never falls silent must not keep a cancellation back.
                biased;
                Some(order) = self.orders.recv() => self.order(order).await?,
                frame = self.inbound.message() => match self.received(frame).await? {
                    None => {}
                    Some(end) => return Ok(end),
                },
                () = self.live.poke.notified() => self.dispatch().await?,
                () = tokio::time::sleep_until(due), if self.next_due.is_some() => self.dispatch().await?,
                () = tokio::time::sleep_until(late.unwrap_or(due)), if late.is_some() => self.deliver_late().await?,
            }
        }
    }

    /// Handles a frame and those that have arrived behind it.
    async fn received(
        &mut self,
        first: Result<Option<pb::NodeFrame>, Status>,
    ) -> Result<Option<SessionEnd>, Ended> {
        let mut frame = first;
        let mut heartbeat = None;
        let mut updates = Vec::new();
        let mut end = None;
        for _ in 0..TOGETHER {
            match frame {
                Ok(Some(taken)) => {
                    *lock(&self.live.last_frame) = Instant::now();
                    match taken.frame {
                        Some(In::CommandUpdate(update)) => self.keep(&update, &mut updates),
                        // An update may free a credit that the heartbeat behind it has counted, so that what came
                        // before a heartbeat is applied before it.
                        Some(In::Heartbeat(beat)) => {
                            self.apply(std::mem::take(&mut updates)).await?;
                            self.heartbeat(&beat).await?;
                            heartbeat = Some(beat.seq);
                        }
                        Some(In::EventBatch(batch)) => self.events(batch).await?,
                        Some(In::Goodbye(goodbye)) => self.goodbye(&goodbye).await?,
                        Some(In::Hello(_)) => {
                            end = Some(SessionEnd::told(
                                Code::InvalidArgument,
                                Reason::ProtocolError,
                                "a second Hello in one session",
                            ));
                        }
                        other => self.ignore(other.as_ref()),
                    }
                }
                Ok(None) => end = Some(self.closed_by_node()),
                Err(error) => end = Some(lost(&error)),
            }
            if end.is_some() {
                break;
            }
            match self.inbound.message().now_or_never() {
                Some(next) => frame = next,
                None => break,
            }
        }
        self.apply(updates).await?;
        if end.is_none() {
            self.ack(heartbeat, Vec::new()).await?;
            self.dispatch().await?;
        }
        Ok(end)
    }

    fn keep(&self, update: &pb::CommandUpdate, updates: &mut Vec<Update>) {
        match Update::read(update) {
            Ok(update) => updates.push(update),
            Err(error) => tracing::warn!(node = %self.opening.route.node, %error, "an update was ignored"),
        }
    }

    async fn apply(&mut self, mut updates: Vec<Update>) -> Result<(), Ended> {
        if updates.is_empty() {
            return Ok(());
        }
        self.note_answers(&updates).await?;
        let swallowed = self.swallow_results(&mut updates).await?;
        // A crash test counts updates, however many of them happen to share a transaction.
        let count = updates.len();
        (0..count).for_each(|_| failpoint::hit(failpoint::GATEWAY_UPDATE));
        let (node, epoch, now) = (self.opening.route.node.clone(), self.live.epoch, self.hub.now());
        let effects = self.hub.store.updates(node, epoch, updates, now).await?;
        (0..count).for_each(|_| failpoint::hit(failpoint::GATEWAY_STORED));
        self.account(&effects);
        self.hub.commands_ended(&effects.ended());
        self.ack(None, [effects.acks(), swallowed].concat()).await
    }

    /// Stores a node's events and acks what is stored of their journal.
    async fn events(&mut self, batch: pb::EventBatch) -> Result<(), Ended> {
        let batch = match Batch::read(batch) {
            Ok(batch) => batch,
            Err(error) => {
                tracing::warn!(node = %self.opening.route.node, %error, "a batch of events was ignored");
                return Ok(());
            }
        };
        let mut left = false;
        for event in batch.events.iter().filter(|event| event.kind == EventType::NodeLeaving.name()) {
            left |= self.leaves(&event.body).await?;
        }
        let (node, now) = (self.opening.route.node.clone(), self.hub.now());
        let (journal, event_seq) = match batch.events.last().map(|event| event.seq) {
            Some(last) if self.swallows_events(&batch).await? => (batch.journal, last),
            _ => self.hub.store.take_node_events(node, batch, now).await?,
        };
        let journal_id = journal.to_string();
        self.send(Out::Ack(pb::Ack { journal_id, event_seq, ..Default::default() })).await?;
        if left {
            let message = "the node has left, and is not known any more";
            return Err(Ended(SessionEnd::told(Code::PermissionDenied, Reason::UnknownNode, message)));
        }
        Ok(())
    }

    /// Hands a node's word that it leaves to the worker, and deletes the node if that holds: before the word is acked.
    /// Whether it held.
    async fn leaves(&mut self, body: &str) -> Result<bool, Ended> {
        #[derive(serde::Deserialize)]
        struct Body {
            report: Envelope,
        }
        let node = &self.opening.route.node;
        let Ok(Body { report }) = serde_json::from_str(body) else {
            tracing::warn!(%node, "a report of a leave cannot be read");
            return Ok(false);
        };
        match self.hub.worker.ask(Ask::Leave { node: node.clone(), report }).await {
            Told::Left(left) if left == *node => {}
            Told::Refused { reason, message } => {
                tracing::warn!(%node, %reason, message, "a report of a leave is refused");
                return Ok(false);
            }
            other => {
                tracing::error!(?other, "the worker did not answer");
                let message = "the worker did not answer to the report of a leave";
                return Err(Ended(SessionEnd::told(Code::Unavailable, Reason::Internal, message)));
            }
        }
        failpoint::hit(failpoint::GATEWAY_LEAVES);
        if let Some(ended) = self.hub.store.delete(node.clone()).await? {
            self.hub.commands_ended(&ended);
            tracing::info!(%node, "node left");
        }
        failpoint::hit(failpoint::GATEWAY_LEFT);
        Ok(true)
    }

    fn account(&mut self, effects: &Effects) {
        for applied in &effects.applied {
            match applied {
                Applied::Ended(_, lane) | Applied::BackOff(lane, false) => self.credits.released(*lane),
                Applied::BackOff(lane, true) => self.credits.exhausted(*lane),
                Applied::Nothing | Applied::Progress | Applied::Late(_) | Applied::Completed(_) => {}
            }
        }
    }

    async fn heartbeat(&mut self, beat: &pb::Heartbeat) -> Result<(), Ended> {
        self.credits.heartbeat(&beat.free_credits, beat.commands_received);
        let known = |(name, free): (&String, &u32)| Some((Lane::from_name(name)?.name().to_owned(), *free));
        let free: BTreeMap<String, u32> = beat.free_credits.iter().filter_map(known).collect();
        *lock(&self.live.free_credits) = free;
        if self.phase == Phase::AwaitingHeartbeat {
            self.first_heartbeat().await?;
        }
        self.lie_at_heartbeat().await
    }

    async fn first_heartbeat(&mut self) -> Result<(), Ended> {
        let running = std::mem::take(&mut self.opening.running);
        let connected = std::mem::take(&mut self.opening.connected);
        let route = self.opening.route.clone();
        let first = self.hub.store.first_heartbeat(route, running, connected).await??;
        self.phase = Phase::Live;
        self.hub.event_added();
        self.hub.commands_ended(&first.ended);
        for deliver in first.replay {
            self.deliver(deliver).await?;
        }
        for (id, body) in first.cancels {
            self.send(Out::Cancel(cancel_frame(&id, body))).await?;
        }
        Ok(())
    }

    /// Marks and sends what the credits allow.
    async fn dispatch(&mut self) -> Result<(), Ended> {
        if self.phase != Phase::Live {
            return Ok(());
        }
        let free: Vec<(Lane, u32)> = Lane::ALL.map(|lane| (lane, self.credits.free(lane))).into();
        let dispatched = self.hub.store.dispatch(self.opening.route.clone(), free).await??;
        if !dispatched.out.is_empty() {
            failpoint::hit(failpoint::GATEWAY_DISPATCHED);
        }
        self.next_due = dispatched.next_due.map(|due| Instant::now() + due);
        for deliver in dispatched.out {
            self.deliver(deliver).await?;
        }
        Ok(())
    }

    async fn deliver(&mut self, deliver: Deliver) -> Result<(), Ended> {
        if self.hub.lies() {
            return self.deliver_or_lie(deliver).await;
        }
        self.send_command(deliver).await
    }

    async fn send_command(&mut self, deliver: Deliver) -> Result<(), Ended> {
        self.credits.sent(deliver.lane);
        let command = pb::Command {
            seq: deliver.seq,
            delivery_attempt: deliver.attempt,
            lane_hint: deliver.lane.name().to_owned(),
            envelope: Some(deliver.envelope),
            approvals: Vec::new(),
        };
        self.send(Out::Command(command)).await?;
        failpoint::hit(failpoint::GATEWAY_SENT);
        match deliver.cancel {
            Some(body) => self.send(Out::Cancel(cancel_frame(&deliver.id, body))).await,
            None => Ok(()),
        }
    }

    async fn order(&mut self, order: pb::GatewayFrame) -> Result<(), Ended> {
        match order.frame {
            // Its command goes out after the first heartbeat, and the cancellation behind it.
            Some(Out::Cancel(_)) if self.phase == Phase::AwaitingHeartbeat => Ok(()),
            Some(frame) => self.send(frame).await,
            None => Ok(()),
        }
    }

    async fn goodbye(&mut self, goodbye: &pb::Goodbye) -> Result<(), Ended> {
        tracing::info!(node = %self.opening.route.node, intent = %goodbye.intent, reason = %goodbye.reason, "goodbye");
        self.phase = Phase::Leaving;
        if goodbye.intent != "closing" {
            let route = self.opening.route.clone();
            self.hub.store.out_of_placement(route, self.opening.incarnation.clone()).await?;
        }
        Ok(())
    }

    fn closed_by_node(&self) -> SessionEnd {
        let reason = if self.phase == Phase::Leaving { "goodbye" } else { "closed" };
        SessionEnd { status: None, reason, owns_node: true }
    }

    fn ignore(&mut self, frame: Option<&In>) {
        if !self.ignored_logged {
            self.ignored_logged = true;
            let known = frame.is_some();
            tracing::info!(node = %self.opening.route.node, known, "a frame that has no use here yet is ignored");
        }
    }

    async fn ack(&mut self, heartbeat: Option<u64>, results: Vec<CommandId>) -> Result<(), Ended> {
        if let Some(seq) = heartbeat {
            self.send(Out::Ack(pb::Ack { heartbeat_seq: seq, ..Default::default() })).await?;
        }
        for ids in results.chunks(ACKS) {
            let result_ids = ids.iter().map(ToString::to_string).collect();
            self.send(Out::Ack(pb::Ack { result_ids, ..Default::default() })).await?;
            failpoint::hit(failpoint::GATEWAY_ACKED);
        }
        Ok(())
    }

    async fn send(&mut self, frame: Out) -> Result<(), Ended> {
        let sent = self.out.send(Ok(pb::GatewayFrame { frame: Some(frame) })).await;
        sent.map_err(|_| Ended(SessionEnd { status: None, reason: "link-lost", owns_node: true }))
    }
}

/// The frame of a cancellation.
pub fn cancel_frame(id: &CommandId, envelope: pb::Envelope) -> pb::Cancel {
    pb::Cancel { command_id: id.to_string(), envelope: Some(envelope) }
}

/// The transport's end, or a frame that could not be decoded.
fn lost(error: &Status) -> SessionEnd {
    if error.code() == Code::OutOfRange {
        let message = "a frame was larger than 4 MiB, or of over 32,768 elements";
        let told = status::refusal(Code::OutOfRange, Reason::FrameTooLarge, message, None);
        return SessionEnd { status: Some(told), reason: Reason::FrameTooLarge.token(), owns_node: true };
    }
    SessionEnd { status: None, reason: "link-lost", owns_node: true }
}

/// Detail of node.connected.
pub fn connected_detail(
    epoch: u64,
    boot: &str,
    journal_changed: bool,
    boot_changed: bool,
    duplicate: bool,
) -> serde_json::Value {
    json!({
        "epoch": epoch,
        "bootId": boot,
        "journalChanged": journal_changed,
        "bootChanged": boot_changed,
        "duplicateIdentity": duplicate,
    })
}
