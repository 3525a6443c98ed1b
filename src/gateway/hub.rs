//! What the gateway holds in memory: live sessions, admission, those who wait for a command's end. All of it is
//! rebuilt by the next Hellos, which is why a gateway's crash costs a reconnect and nothing more.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rand::rngs::StdRng;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;
use tonic::{Code, Status};

use super::Settings;
use super::admission::{self, Bucket};
use super::forger::Forger;
use super::lease::Grant;
use super::lies::{Lie, Lies};
use super::renewals::Relayed;
use super::store::{Lease, Store, Stray};
use super::trust::Bundle;
use super::worker;
use crate::clock::Clock;
use crate::model::{CommandId, NodeId, Reason, ServerTime};
use crate::wire::{pb, status};

/// Frames from outside a session's own loop (Cancel, Drain) that may wait for it.
const ORDERS: usize = 64;

/// The gateway's memory.
pub struct Hub {
    /// As configured, with defaults filled in.
    pub settings: Settings,
    /// Its keys, where it is to lie.
    pub forger: Option<Forger>,
    /// It has lied, and does so no more.
    reformed: AtomicBool,
    /// The store.
    pub store: Store,
    /// Who signs and issues.
    pub worker: worker::Link,
    /// What connections are accepted with.
    pub tls: Arc<rustls::ServerConfig>,
    clock: Arc<dyn Clock>,
    rng: Mutex<StdRng>,
    bucket: Mutex<Bucket>,
    streams: Arc<Semaphore>,
    hellos: Arc<Semaphore>,
    proofs: Arc<Semaphore>,
    grant: Mutex<Option<Grant>>,
    live: Mutex<BTreeMap<NodeId, Arc<Live>>>,
    waiting: Mutex<BTreeMap<CommandId, Vec<oneshot::Sender<()>>>>,
    refused: Mutex<BTreeMap<&'static str, u64>>,
    draining: watch::Sender<bool>,
    events: Notify,
    /// There may be results for the worker to judge.
    pub results: Notify,
    /// The latest signed result, for a gateway that lies.
    signed: Mutex<Option<(NodeId, pb::Envelope)>>,
    bundle: Mutex<Bundle>,
    relayed: Mutex<Relayed>,
}

/// A live session, as others see it.
pub struct Live {
    /// Its epoch.
    pub epoch: u64,
    /// Serial of its certificate.
    pub serial: String,
    /// The time of its last frame.
    pub last_frame: Mutex<Instant>,
    /// Free credits as last reported.
    pub free_credits: Mutex<BTreeMap<String, u32>>,
    /// There may be something to dispatch.
    pub poke: Notify,
    /// Frames for it to send.
    pub orders: mpsc::Sender<pb::GatewayFrame>,
    end: Mutex<Option<oneshot::Sender<SessionEnd>>>,
}

/// How a session ends.
#[derive(Debug)]
pub struct SessionEnd {
    /// What the node is told; absent: it ended the stream itself.
    pub status: Option<Status>,
    /// For the event.
    pub reason: &'static str,
    /// Whether the node is still this session's to disconnect.
    pub owns_node: bool,
}

impl SessionEnd {
    /// The gateway ends it.
    pub fn told(code: Code, reason: Reason, message: &str) -> Self {
        let status = status::refusal(code, reason, message, None);
        Self { status: Some(status), reason: reason.token(), owns_node: true }
    }

    /// The gateway may not route any more.
    pub fn fenced() -> Self {
        let message = "the gateway has lost its lease";
        Self { owns_node: false, ..Self::told(Code::Aborted, Reason::GatewayFenced, message) }
    }

    /// The gateway has lied, and does so no more.
    pub fn put_right() -> Self {
        Self::told(Code::Unavailable, Reason::Draining, "the gateway was put right")
    }

    /// The certificate no longer counts, for this reason.
    pub fn revoked(reason: Reason) -> Self {
        Self::told(Code::Unauthenticated, reason, revoked_message(reason))
    }

    /// The same, with what the join service has signed of it.
    pub fn with_revocation(mut self, envelope: Option<Vec<u8>>) -> Self {
        if let Some(envelope) = envelope {
            self.status = self.status.map(|status| status::with_revocation(status, &envelope));
        }
        self
    }

    /// The node was deleted.
    pub fn unknown_node() -> Self {
        Self::told(Code::PermissionDenied, Reason::UnknownNode, "the node was deleted; join again")
    }

    /// A newer session has the node.
    pub fn superseded() -> Self {
        let message = "a newer session of the same identity took over";
        Self { owns_node: false, ..Self::told(Code::Aborted, Reason::Superseded, message) }
    }
}

/// What a node is told whose certificate was revoked.
pub fn revoked_message(reason: Reason) -> &'static str {
    match reason {
        Reason::DuplicateIdentity => {
            "two machines use this identity and it is quarantined; join the right one anew, or release it"
        }
        _ => "the node certificate was revoked",
    }
}

impl From<Stray> for SessionEnd {
    fn from(stray: Stray) -> Self {
        match stray {
            Stray::Unknown => Self::unknown_node(),
            Stray::Superseded => Self::superseded(),
            Stray::Fenced => Self::fenced(),
            Stray::Revoked(reason) => Self::revoked(reason),
        }
    }
}

impl Live {
    /// A session that begins now, what it takes orders from, and how it hears of its end.
    pub fn new(
        epoch: u64,
        serial: String,
    ) -> (Arc<Self>, mpsc::Receiver<pb::GatewayFrame>, oneshot::Receiver<SessionEnd>) {
        let (orders, taken) = mpsc::channel(ORDERS);
        let (end, ended) = oneshot::channel();
        let live = Self {
            epoch,
            serial,
            last_frame: Mutex::new(Instant::now()),
            free_credits: Mutex::default(),
            poke: Notify::new(),
            orders,
            end: Mutex::new(Some(end)),
        };
        (Arc::new(live), taken, ended)
    }

    /// Ends it; the first call counts.
    pub fn end(&self, how: SessionEnd) {
        if let Some(end) = lock(&self.end).take() {
            let _ = end.send(how);
        }
    }

    /// How long ago its last frame came.
    pub fn silent_for(&self) -> Duration {
        lock(&self.last_frame).elapsed()
    }
}

impl Hub {
    pub(super) fn new(
        (settings, forger): (Settings, Option<Forger>),
        store: Store,
        (worker, tls): (worker::Link, Arc<rustls::ServerConfig>),
        grant: Grant,
        clock: Arc<dyn Clock>,
        rng: StdRng,
    ) -> Self {
        let limits = settings.limits;
        Self {
            bucket: Mutex::new(Bucket::new(limits.rate, clock.boot())),
            streams: Arc::new(Semaphore::new(limits.streams)),
            hellos: Arc::new(Semaphore::new(limits.pending_hellos)),
            proofs: Arc::new(Semaphore::new(limits.pending_proofs)),
            settings,
            forger,
            reformed: AtomicBool::new(false),
            store,
            worker,
            tls,
            clock,
            rng: Mutex::new(rng),
            grant: Mutex::new(Some(grant)),
            live: Mutex::default(),
            waiting: Mutex::default(),
            refused: Mutex::default(),
            draining: watch::Sender::new(false),
            events: Notify::new(),
            results: Notify::new(),
            signed: Mutex::default(),
            bundle: Mutex::default(),
            relayed: Mutex::default(),
        }
    }

    /// The newest trust bundle that is known here.
    pub fn bundle(&self) -> Bundle {
        lock(&self.bundle).clone()
    }

    /// Keeps a bundle; it is given back when it is newer than the one before.
    pub fn keep_bundle(&self, bundle: Bundle) -> Option<Bundle> {
        let mut held = lock(&self.bundle);
        if bundle.version <= held.version {
            return None;
        }
        held.clone_from(&bundle);
        Some(bundle)
    }

    /// The control plane's clock.
    pub fn now(&self) -> ServerTime {
        ServerTime(self.clock.wall_ms())
    }

    /// The clock that no operator sets.
    pub fn boot(&self) -> Duration {
        self.clock.boot()
    }

    /// The lease was granted or renewed, or (absent) is lost.
    pub fn set_grant(&self, grant: Option<Grant>) {
        *lock(&self.grant) = grant;
    }

    /// The lease, while it may be routed under.
    pub fn lease(&self) -> Option<Lease> {
        lock(&self.grant).as_ref()?.valid(self.boot()).cloned()
    }

    /// The lease that a new session is opened under.
    ///
    /// # Errors
    /// There is none.
    pub fn need_lease(&self) -> Result<Lease, Status> {
        let missing = "the gateway holds no lease";
        self.lease().ok_or_else(|| self.refuse(Code::Unavailable, Reason::NotStarted, missing, None))
    }

    /// Randomness, seeded once.
    pub fn with_rng<T>(&self, draw: impl FnOnce(&mut StdRng) -> T) -> T {
        draw(&mut lock(&self.rng))
    }

    /// Whether it lies.
    pub fn lies(&self) -> bool {
        self.settings.lies.any() && !self.is_reformed()
    }

    /// Whether it has been put right.
    pub fn is_reformed(&self) -> bool {
        self.reformed.load(Ordering::Relaxed)
    }

    /// The answers to renewals that it has relayed, for those that it gives twice.
    pub fn with_relayed<T>(&self, look: impl FnOnce(&mut Relayed) -> T) -> T {
        look(&mut lock(&self.relayed))
    }

    /// Whether this lie is told now.
    pub fn draws(&self, lie: Lie) -> bool {
        self.lies() && self.with_rng(|rng| self.settings.lies.draw(lie, rng))
    }

    /// Remembers a node's signed result for a lie; the one before, if it is another node's.
    pub fn swap_signed(&self, node: &NodeId, result: pb::Envelope) -> Option<(NodeId, pb::Envelope)> {
        lock(&self.signed).replace((node.clone(), result)).filter(|(other, _)| other != node)
    }

    /// The time that a Welcome names, and the lie that it is.
    pub fn welcome_time(&self, not_after: ServerTime) -> (ServerTime, Option<Lie>) {
        let lies = if self.is_reformed() { Lies::default() } else { self.settings.lies };
        self.with_rng(|rng| lies.welcome_time(self.now(), not_after, rng))
    }

    /// It lies no more. Whoever believed it comes anew and is asked again for what was acked and not stored.
    pub fn reform(&self) {
        self.reformed.store(true, Ordering::Relaxed);
        for (_, live) in self.sessions() {
            live.end(SessionEnd::put_right());
        }
    }

    /// A refusal, counted.
    pub fn refuse(&self, code: Code, reason: Reason, message: &str, pushback: Option<Duration>) -> Status {
        *lock(&self.refused).entry(reason.token()).or_default() += 1;
        status::refusal(code, reason, message, pushback)
    }

    /// The refusals counted since the last call.
    pub fn take_refused(&self) -> Vec<(&'static str, u64)> {
        std::mem::take(&mut *lock(&self.refused)).into_iter().collect()
    }

    /// Takes the token that an open or a join costs.
    ///
    /// # Errors
    /// Draining, without a lease, or too many at once.
    pub fn admit(&self) -> Result<(), Status> {
        self.need_lease()?;
        if self.is_draining() {
            return Err(self.refuse(Code::Unavailable, Reason::Draining, "the gateway is draining", None));
        }
        let taken = self.with_rng(|rng| lock(&self.bucket).take(self.clock.boot(), rng));
        taken.map_err(|wait| {
            self.refuse(Code::ResourceExhausted, Reason::Storm, "too many handshakes at once", Some(wait))
        })
    }

    /// A place among the sessions.
    ///
    /// # Errors
    /// All are taken.
    pub fn stream(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.streams.clone().try_acquire_owned().map_err(|_| {
            let wait = self.with_rng(admission::streams_full);
            self.refuse(Code::ResourceExhausted, Reason::Full, "the gateway is full", Some(wait))
        })
    }

    /// A place among the Hello transactions.
    ///
    /// # Errors
    /// All are taken.
    pub fn hello_slot(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.pending(&self.hellos, "too many Hellos are pending")
    }

    /// A place among the joins that wait for their proofs.
    ///
    /// # Errors
    /// All are taken.
    pub fn proof_place(&self) -> Result<OwnedSemaphorePermit, Status> {
        self.pending(&self.proofs, "too many joins wait for their proofs")
    }

    fn pending(&self, places: &Arc<Semaphore>, message: &str) -> Result<OwnedSemaphorePermit, Status> {
        places.clone().try_acquire_owned().map_err(|_| {
            let wait = self.with_rng(admission::pending_full);
            self.refuse(Code::ResourceExhausted, Reason::Storm, message, Some(wait))
        })
    }

    /// The node's live session.
    pub fn session(&self, node: &NodeId) -> Option<Arc<Live>> {
        lock(&self.live).get(node).cloned()
    }

    /// Every live session.
    pub fn sessions(&self) -> Vec<(NodeId, Arc<Live>)> {
        lock(&self.live).iter().map(|(node, live)| (node.clone(), live.clone())).collect()
    }

    /// Makes `live` the node's session and ends the older one. False: a newer one is there already.
    pub fn take_over(&self, node: &NodeId, live: &Arc<Live>) -> bool {
        let mut sessions = lock(&self.live);
        if sessions.get(node).is_some_and(|other| other.epoch > live.epoch) {
            return false;
        }
        if let Some(older) = sessions.insert(node.clone(), live.clone()) {
            older.end(SessionEnd::superseded());
        }
        true
    }

    /// Forgets a session that has ended, unless a newer one took its place.
    pub fn forget(&self, node: &NodeId, live: &Arc<Live>) {
        let mut sessions = lock(&self.live);
        if sessions.get(node).is_some_and(|there| Arc::ptr_eq(there, live)) {
            sessions.remove(node);
        }
    }

    /// Wakes those who wait for these commands.
    pub fn commands_ended(&self, ids: &[CommandId]) {
        if ids.is_empty() {
            return;
        }
        let mut waiting = lock(&self.waiting);
        for waiter in ids.iter().filter_map(|id| waiting.remove(id)).flatten() {
            let _ = waiter.send(());
        }
    }

    /// Resolves at the next end of this command. Ask before looking at its state.
    pub fn command_end(&self, id: &CommandId) -> oneshot::Receiver<()> {
        let (tell, told) = oneshot::channel();
        let mut waiting = lock(&self.waiting);
        let waiters = waiting.entry(id.clone()).or_default();
        waiters.retain(|waiter| !waiter.is_closed());
        waiters.push(tell);
        told
    }

    /// Forgets those who no longer wait.
    pub fn sweep_waiting(&self) {
        lock(&self.waiting).retain(|_, waiters| {
            waiters.retain(|waiter| !waiter.is_closed());
            !waiters.is_empty()
        });
    }

    /// Whether new sessions are refused.
    pub fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    /// Begins or ends a drain.
    pub fn set_draining(&self, draining: bool) {
        self.draining.send_replace(draining);
    }

    /// An event may have been added.
    pub fn event_added(&self) {
        self.events.notify_waiters();
    }

    /// Resolves when an event may have been added after this call.
    pub fn next_event(&self) -> tokio::sync::futures::Notified<'_> {
        self.events.notified()
    }
}

/// A lock whose data is whole even if a holder panicked: every holder only inserts, removes or replaces.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
