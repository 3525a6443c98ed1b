//! The executor: verify, admit, journal, effect, journal, answer.
//!
//! ```text
//! deliveries ─▶ run ─▶ a task a delivery (at most ADMITTING before admission has answered)
//!                        verify → admit (journal) → ACCEPTED → steps: RUNNING (journal) → begun record
//!                          → kinds: the effect, or supervised: a program's → DONE (journal) ─▶ outbox
//! ```
//!
//! A program runs under a process of its own (supervise/) that outlives this one; what an earlier daemon left running is
//! waited for as what this one started (leftovers.rs, [`Attached`]).
//!
//! Deliveries are handled side by side, so that the journal's writer finds many to commit together. Tasks past
//! admission are bounded by the credits: each holds one. What is promised: a command's answers leave in the order
//! ACCEPTED, RUNNING, result; nothing starts before RUNNING and the begun record are durable.

mod arrivals;
mod barrier;
mod cancel;
#[cfg(test)]
mod documented;
mod kinds;
pub mod lanes;
mod launch;
pub mod leftovers;
mod mark;
mod probe;
mod process;
pub mod programs;
mod reboot;
mod steps;
pub mod supervise;
mod supervised;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore, mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval_at};
use tracing::Instrument as _;

pub use lanes::Lanes;
pub use leftovers::Leftovers;
pub use probe::ProbeFacts;
pub use programs::{Programs, Supervisors};

use self::arrivals::{Arrival, Arrivals};
use self::cancel::{Cancellable, Cancels};
use self::lanes::{Credit, InFlight};
use crate::admission::Context;
use crate::failpoint;
use crate::journal::{Admission, Durable, Journal, Reattached};
use crate::model::{
    Answer, AnswerState, CommandId, Digest, EventType, Kind, Lane, NewEvent, Reason, Role, ServerTime,
};
use crate::mutant::{self, Mutant};
use crate::ports::Reboot;
use crate::session::outbox::{OutboxSender, Outgoing};
use crate::session::working_clock::WorkingClock;
use crate::wire::dsse::{self, Audience, Authority, CommandRoots, Envelope, Policy};
use crate::wire::frames::Delivery;

/// Deliveries between the wire and the answer of admission: one group commit's worth. A body has at most 1 MiB, so
/// they hold at most 64 MiB.
const ADMITTING: usize = 64;

/// After the last delivery: how long commands that are between two steps may take to write them.
const SETTLE: Duration = Duration::from_secs(1);

/// What an older daemon left is looked at this often: whether signed time has ended it.
const EXPIRE: Duration = Duration::from_secs(60);

/// What an executor is made of.
#[derive(Debug)]
pub struct Parts {
    /// Where everything is written first.
    pub journal: Journal,
    /// Server time.
    pub working: WorkingClock,
    /// Credits, and what runs.
    pub lanes: Lanes,
    /// Where answers go.
    pub outbox: OutboxSender,
    /// Whom commands must be for.
    pub audience: Audience,
    /// Which commands need a signature.
    pub policy: Policy,
    /// Who may sign them.
    pub roots: watch::Receiver<CommandRoots>,
    /// What this node is.
    pub role: Role,
    /// `[kinds] deny` of bcd.toml.
    pub denied: Arc<BTreeSet<String>>,
    /// What a probe says of this process.
    pub facts: ProbeFacts,
    /// The state directory.
    pub state: PathBuf,
    /// Restarts the machine.
    pub reboot: Arc<dyn Reboot>,
    /// Who runs programs.
    pub programs: Arc<dyn Programs>,
    /// Programs of earlier daemons that still run.
    pub reattached: Vec<Durable<Reattached>>,
}

/// Takes deliveries and carries them out.
#[derive(Debug)]
pub struct Executor {
    shared: Arc<Shared>,
    attached: Vec<Attached>,
}

/// A program of an earlier daemon, in flight as any other: it holds a credit, is named in Hello, and can be cancelled.
#[derive(Debug)]
struct Attached {
    reattached: Durable<Reattached>,
    cancellable: Cancellable,
    _credit: Credit,
    _running_here: InFlight,
}

#[derive(Debug)]
struct Shared {
    parts: Parts,
    cancels: Cancels,
    arrivals: Arrivals,
    /// Held shared by every task but for the time of an effect: whoever takes it alone knows that no step is half
    /// written, and that none will be.
    steps: RwLock<()>,
}

impl Executor {
    /// A new one. What still runs is in flight when this returns: before the first Hello.
    pub fn new(mut parts: Parts) -> Self {
        let reattached = std::mem::take(&mut parts.reattached);
        let (cancels, arrivals) = (Cancels::default(), Arrivals::default());
        let shared = Shared { parts, cancels, arrivals, steps: RwLock::new(()) };
        let attached = reattached.into_iter().map(|reattached| shared.attach(reattached)).collect();
        Self { shared: Arc::new(shared), attached }
    }

    /// Runs until the deliveries end. From `stop` on nothing new is admitted. Programs are neither ended nor waited
    /// for; a step that is being written is, for a moment.
    pub async fn run(self, mut deliveries: mpsc::Receiver<Delivery>, mut stop: watch::Receiver<bool>) {
        let turns = Arc::new(Semaphore::new(ADMITTING));
        let mut tasks = JoinSet::new();
        let mut stopping = false;
        // Recovery has looked just now.
        let mut expire = interval_at(Instant::now() + EXPIRE, EXPIRE);
        expire.set_missed_tick_behavior(MissedTickBehavior::Delay);
        for attached in self.attached {
            let shared = Arc::clone(&self.shared);
            let task = async move { steps::from_attached(&shared, attached).await };
            tasks.spawn(failpoint::carried(task).in_current_span());
        }
        loop {
            tokio::select! {
                biased;
                () = stopped(&mut stop), if !stopping => {
                    stopping = true;
                    self.shared.parts.lanes.stop();
                }
                Some(task) = tasks.join_next() => report(task),
                _ = expire.tick(), if !stopping => {
                    let task = Arc::clone(&self.shared).expire_left();
                    tasks.spawn(failpoint::carried(task).in_current_span());
                }
                next = next(&turns, &mut deliveries) => match next {
                    Some((turn, delivery)) => {
                        // Before the task runs: what came first is then known to whoever comes next.
                        let arrival = self.shared.arrive(&delivery);
                        let task = Arc::clone(&self.shared).deliver(delivery, turn, arrival);
                        tasks.spawn(failpoint::carried(task).in_current_span());
                    }
                    None => break,
                },
            }
        }
        self.shared.parts.lanes.stop();
        let alone = tokio::time::timeout(SETTLE, self.shared.steps.write()).await;
        if alone.is_err() {
            tracing::warn!("a command's step is still being written; it is settled at the next start");
        }
        // Before the lock is given back: no task takes another step.
        drop(tasks);
    }
}

/// A sender that is gone asks for nothing: the end of the deliveries ends the run.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    if stop.wait_for(|stop| *stop).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Dropping the future loses no delivery.
async fn next(
    turns: &Arc<Semaphore>,
    deliveries: &mut mpsc::Receiver<Delivery>,
) -> Option<(OwnedSemaphorePermit, Delivery)> {
    // The semaphore is never closed.
    let turn = Arc::clone(turns).acquire_owned().await.ok()?;
    Some((turn, deliveries.recv().await?))
}

/// A panic outside an effect leaves the command where the journal has it: the next start settles it.
fn report(task: Result<(), JoinError>) {
    if let Err(error) = task
        && error.is_panic()
    {
        let text = error.to_string();
        failpoint::pass_on(error.into_panic());
        tracing::error!(
            error = text,
            "handling a delivery panicked; the journal settles the command at the next start"
        );
    }
}

impl Shared {
    fn attach(&self, reattached: Durable<Reattached>) -> Attached {
        let id = &reattached.begun.id;
        let lane = Kind::from_name(&reattached.begun.kind).map_or(Lane::Work, |kind| kind.properties().lane);
        Attached {
            cancellable: self.cancels.enter(id.clone(), self.boot()),
            _credit: self.parts.lanes.hold(lane),
            _running_here: self.parts.lanes.running(id.clone()),
            reattached,
        }
    }

    fn arrive(&self, delivery: &Delivery) -> Option<Arrival> {
        match delivery {
            Delivery::Command(frame) => Some(self.arrivals.arrive(frame.seq)),
            Delivery::Cancel { .. } | Delivery::Malformed { .. } => None,
        }
    }

    async fn deliver(
        self: Arc<Self>,
        delivery: Delivery,
        turn: OwnedSemaphorePermit,
        arrival: Option<Arrival>,
    ) {
        match delivery {
            Delivery::Command(frame) => self.command(frame.envelope, turn, arrival).await,
            Delivery::Cancel { command_id, envelope } => self.cancel(&command_id, envelope, turn).await,
            Delivery::Malformed { body_sha256, detail } => {
                self.refuse(None, body_sha256, Reason::Invalid, detail);
            }
        }
    }

    async fn command(&self, envelope: Envelope, turn: OwnedSemaphorePermit, arrival: Option<Arrival>) {
        let between_steps = self.steps.read().await;
        let verified = match dsse::verify_command(&envelope, &self.parts.audience, &self.authority()) {
            Ok(verified) => verified,
            Err(refusal) => {
                self.note_forgery(refusal.reason, &refusal.detail).await;
                return self.refuse(refusal.id, refusal.body_sha256, refusal.reason, refusal.detail);
            }
        };
        let command = verified.get();
        let (id, body_sha256) = (command.header.id.clone(), command.body_sha256);
        if vouched(self.parts.policy, verified.signer().is_some()) {
            self.parts.working.document(command.header.issued_at);
        }
        // What is kept of the command from here on is its body.
        drop(envelope);
        let lane = Kind::from_name(&command.header.kind).map(|kind| kind.properties().lane);
        let credit = lane.and_then(|lane| self.parts.lanes.reserve(lane));
        let context = self.context(credit.is_some());
        let admission = self.parts.journal.admit(verified, context).await;
        drop((turn, arrival));
        match admission {
            Ok(Admission::Answered(answer)) => self.say(Outgoing::Passing(answer)),
            Ok(Admission::Ended(done)) => self.say(Outgoing::Result(done)),
            Ok(Admission::Accepted(accepted)) => {
                let cancellable = self.cancels.enter(id.clone(), self.boot());
                self.pass(Some(id), body_sha256, AnswerState::Accepted);
                // It may wait for long, and its end frees nothing.
                let _credit = credit.filter(|_| !accepted.command.kind().properties().self_terminating);
                steps::from_accepted(self, accepted, cancellable, between_steps).await;
            }
            Ok(Admission::Restarted(running)) => {
                let cancellable = self.cancels.enter(id, self.boot());
                let _credit = credit;
                steps::from_running(self, running, cancellable, between_steps).await;
            }
            Err(error) => {
                tracing::warn!(%id, %error, "a command is refused, since it cannot be written down");
                self.refuse(Some(id), body_sha256, Reason::Busy, error.why.token().to_owned());
            }
        }
    }

    async fn cancel(&self, command_id: &CommandId, envelope: Envelope, turn: OwnedSemaphorePermit) {
        let body = match dsse::verify_cancel(&envelope, command_id, &self.parts.audience, &self.authority()) {
            Ok(verified) => verified,
            Err(refusal) => {
                // The wire has no answer for it: a CommandUpdate speaks of a command's bytes, not of a cancellation's.
                tracing::warn!(id = %command_id, reason = %refusal.reason, detail = refusal.detail, "a cancellation is refused");
                self.note_forgery(refusal.reason, &refusal.detail).await;
                return;
            }
        };
        if vouched(self.parts.policy, body.signer().is_some()) {
            self.parts.working.document(body.get().issued_at);
        }
        let id = body.into_inner().command_id;
        drop(envelope);
        if self.cancels.cancel(&id, self.boot()) {
            tracing::info!(%id, "cancelled");
            return;
        }
        // Remembered first: a delivery that the journal takes before this look finds it there.
        steps::cancel_left(self, &id, turn).await;
    }

    /// What a signature is held against now.
    fn authority(&self) -> Authority {
        let Parts { policy, roots, working, .. } = &self.parts;
        Authority { policy: *policy, roots: roots.borrow().clone(), now: working.now() }
    }

    /// Ends what an older daemon left, nobody delivered again, and signed time has passed by now.
    async fn expire_left(self: Arc<Self>) {
        let Some(signed) = self.parts.working.signed() else { return };
        let _between_steps = self.steps.read().await;
        match self.parts.journal.expire_left(signed).await {
            Ok(ended) => {
                for done in ended {
                    tracing::info!(id = %done.id, reason = done.outcome.reason.map(Reason::token), "left by an older daemon; ended");
                    self.say(Outgoing::Result(done));
                }
            }
            Err(error) => tracing::warn!(%error, "what an older daemon left cannot be ended yet"),
        }
    }

    /// A body for another node, or that no worker vouches for, is a security event; without one, where the journal cannot
    /// be written.
    async fn note_forgery(&self, reason: Reason, detail: &str) {
        let kind = match reason {
            Reason::WrongNode => EventType::WrongNode,
            Reason::SignatureInvalid | Reason::SignatureRequired => EventType::SignatureInvalid,
            _ => return,
        };
        let event = NewEvent::new(kind, serde_json::json!({ "detail": detail }));
        if let Err(error) = self.parts.journal.record(event).await {
            tracing::warn!(%error, %reason, "a refused body is in no event");
        }
    }

    fn context(&self, credit: bool) -> Context {
        Context {
            upgrade_only: self.parts.lanes.upgrade_only(),
            role: self.parts.role,
            denied: Arc::clone(&self.parts.denied),
            now: self.parts.working.now(),
            signed: self.signed(),
            applied_generation: 0,
            credit,
            stopping: self.parts.lanes.stopping(),
            held: self.parts.lanes.on_hold(),
        }
    }

    fn signed(&self) -> Option<ServerTime> {
        let working = &self.parts.working;
        if mutant::is(Mutant::WallClockDecides) {
            return Some(ServerTime(working.clock().wall_ms()));
        }
        working.signed()
    }

    fn boot(&self) -> Duration {
        self.parts.working.clock().boot()
    }

    fn say(&self, outgoing: Outgoing) {
        self.parts.outbox.send(outgoing);
    }

    fn pass(&self, id: Option<CommandId>, body_sha256: Digest, state: AnswerState) {
        self.say(Outgoing::Passing(Answer { id, body_sha256, state }));
    }

    fn refuse(&self, id: Option<CommandId>, body_sha256: Digest, reason: Reason, detail: String) {
        self.pass(id, body_sha256, AnswerState::Refused { reason, detail });
    }
}

/// Whether a verified document's time may move signed time: under `destructive` a gateway can forge what needs no
/// signature.
fn vouched(policy: Policy, signed: bool) -> bool {
    match policy {
        Policy::All => true,
        Policy::Destructive => signed,
        #[cfg(feature = "fakehw")]
        Policy::None => true,
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests;
