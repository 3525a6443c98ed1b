//! The steps of an admitted command, each durable before the next: RUNNING, the begun record, the effect, DONE.
//!
//! A step that cannot be written is tried again while the command keeps its credit; until RUNNING and the begun record
//! are durable nothing has started, and an outcome that cannot be written waits in memory.

use std::error::Error as _;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::{OwnedSemaphorePermit, RwLockReadGuard};

use super::cancel::{Cancellable, Cancelled};
use super::lanes::Closed;
use super::programs::{Program, StartError};
use super::supervise::job::Job;
use super::{Attached, Shared, kinds, reboot};
use crate::blocking;
use crate::failpoint;
use crate::journal::begun::{Record, Starter};
use crate::journal::{Accepted, Begun, BegunError, Durable, Running, WriteError};
use crate::model::{AnswerState, Args, CommandId, Effect, Outcome, Reason, Terminal};
use crate::session::outbox::Outgoing;
use crate::waits::Waits;

/// First wait before a step is written again.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// Longest wait: a disk that has room again is found soon.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

fn waits() -> Waits {
    Waits::new(FIRST_WAIT, LONGEST_WAIT)
}

/// Starts an accepted command, or ends it where it was cancelled before.
pub(super) async fn from_accepted(
    shared: &Shared,
    mut accepted: Durable<Accepted>,
    mut cancellable: Cancellable,
    between_steps: RwLockReadGuard<'_, ()>,
) {
    let (_closed, between_steps) = ready(shared, &accepted, &mut cancellable.cancelled, between_steps).await;
    let mut waits = self::waits();
    let running = loop {
        if cancellable.cancelled.is_requested() {
            return cancel_accepted(shared, accepted).await;
        }
        if shared.parts.lanes.stopping() {
            // It stays ACCEPTED: a redelivery to the next daemon starts it.
            return;
        }
        match shared.parts.journal.start(accepted, shared.parts.working.now()).await {
            Ok(running) => break running,
            Err((back, error)) => {
                accepted = back;
                if !retries(&accepted.command.command().header.id, "RUNNING", &error) {
                    return;
                }
                pause(&mut waits, &mut cancellable.cancelled).await;
            }
        }
    };
    from_running(shared, running, cancellable, between_steps).await;
}

/// Waits for the moment at which a command may start. While it waits it is between no two steps.
async fn ready<'a>(
    shared: &'a Shared,
    accepted: &Durable<Accepted>,
    cancelled: &mut Cancelled,
    between_steps: RwLockReadGuard<'a, ()>,
) -> (Option<Closed>, RwLockReadGuard<'a, ()>) {
    let Args::Reboot(args) = accepted.command.args() else { return (None, between_steps) };
    drop(between_steps);
    let closed = reboot::wait(args, shared, cancelled).await;
    (closed, shared.steps.read().await)
}

/// Carries out a command whose RUNNING is durable.
pub(super) async fn from_running(
    shared: &Shared,
    running: Durable<Running>,
    mut cancellable: Cancellable,
    between_steps: RwLockReadGuard<'_, ()>,
) {
    let _running_here = shared.parts.lanes.running(id(&running).clone());
    let (running, begin) = begin(shared, running, &mut cancellable.cancelled).await;
    let outcome = match begin {
        Begin::Go(carrier) => {
            let state = AnswerState::Running { attempt: running.attempt };
            shared.pass(Some(id(&running).clone()), running.command.command().body_sha256, state);
            tracing::info!(id = %id(&running), kind = %running.command.kind(), attempt = running.attempt, "started");
            drop(between_steps);
            let outcome = effect(shared, &running, carrier, &mut cancellable.cancelled).await;
            failpoint::hit(failpoint::EFFECT_ENDED);
            outcome
        }
        Begin::Never(outcome) => {
            drop(between_steps);
            *outcome
        }
        Begin::Leave => return,
    };
    finish(shared, running, outcome).await;
}

enum Begin {
    /// The effect may start, or has started.
    Go(Carrier),
    /// It must not, and this is the end of the command.
    Never(Box<Outcome>),
    /// The daemon stops: the next start settles the command.
    Leave,
}

/// Who carries a command out.
enum Carrier {
    /// This process.
    Here,
    /// A process that outlives it.
    Supervisor(Box<dyn Program>),
}

/// Makes the begun record durable where the command needs one: that of a program is its supervisor's.
async fn begin(
    shared: &Shared,
    mut running: Durable<Running>,
    cancelled: &mut Cancelled,
) -> (Durable<Running>, Begin) {
    let mut waits = self::waits();
    loop {
        if cancelled.is_requested() {
            let outcome = cancelled_before_effect(shared, &running);
            return (running, Begin::Never(Box::new(outcome)));
        }
        let made;
        (running, made) = carrier(shared, running).await;
        match made {
            Ok(carrier) => {
                shared.parts.journal.file_written(None);
                return (running, Begin::Go(carrier));
            }
            Err(StartError::Began) => {
                tracing::warn!(id = %id(&running), "began before; it is not started again");
                let outcome = Outcome {
                    message: "the command began before; it is not started again and its outcome is not known"
                        .into(),
                    finished: shared.parts.working.now(),
                    ..Outcome::interrupted(running.attempt, running.started)
                };
                return (running, Begin::Never(Box::new(outcome)));
            }
            Err(error @ StartError::Failed { .. }) => {
                tracing::warn!(id = %id(&running), %error, "nothing was started; tried again");
                if let Some(trouble) = error.trouble() {
                    shared.parts.journal.file_written(Some(trouble));
                }
                if shared.parts.lanes.stopping() {
                    return (running, Begin::Leave);
                }
                pause(&mut waits, cancelled).await;
            }
        }
    }
}

async fn carrier(
    shared: &Shared,
    running: Durable<Running>,
) -> (Durable<Running>, Result<Carrier, StartError>) {
    if let Args::Exec(args) = running.command.args() {
        let job = Job {
            state: shared.parts.state.clone(),
            boot_id: shared.parts.facts.boot_id.clone(),
            begun: Record::of(&starter(shared), &running),
            args: args.as_ref().clone(),
        };
        let started = shared.parts.programs.start(job).await;
        if started.is_ok() {
            failpoint::hit(failpoint::SUPERVISED);
        }
        return (running, started.map(Carrier::Supervisor));
    }
    if running.command.retry_safe() {
        return (running, Ok(Carrier::Here));
    }
    let (running, made) = create_begun(shared, running).await;
    let made = made.map(|_| Carrier::Here).map_err(|error| match error {
        BegunError::AlreadyExists { .. } => StartError::Began,
        BegunError::Io { .. } => {
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            StartError::Failed { detail: format!("{error}{cause}"), errno: error.errno() }
        }
    });
    (running, made)
}

fn starter(shared: &Shared) -> Starter {
    Starter {
        node_id: shared.parts.audience.node_id.clone(),
        journal_id: shared.parts.journal.id(),
        boot_id: shared.parts.facts.boot_id.clone(),
    }
}

/// On a thread that may wait for the disk; the command travels there and back.
async fn create_begun(
    shared: &Shared,
    running: Durable<Running>,
) -> (Durable<Running>, Result<Begun, BegunError>) {
    let (state, starter) = (shared.parts.state.clone(), starter(shared));
    let created = blocking::run(move || {
        let made = Begun::create(&state, &starter, &running);
        (running, made)
    });
    match created.await {
        Ok(created) => created,
        // The command went down with the thread: this task follows it, and the next start settles it.
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_runtime_ends) => std::future::pending().await,
        },
    }
}

/// Earlier attempts of a retry-safe command may have done something; the first one has not begun.
fn cancelled_before_effect(shared: &Shared, running: &Running) -> Outcome {
    let effect = if running.attempt > 1 { Effect::Unknown } else { Effect::None };
    Outcome {
        effect,
        attempt: running.attempt,
        started: running.started,
        finished: shared.parts.working.now(),
        ..Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "cancelled before it started")
    }
}

/// The effect itself. A panic in a kind's code ends that command, not the daemon.
async fn effect(
    shared: &Shared,
    running: &Durable<Running>,
    carrier: Carrier,
    cancelled: &mut Cancelled,
) -> Outcome {
    if let Carrier::Supervisor(program) = carrier {
        failpoint::hit(failpoint::EFFECT_STARTED);
        return program.ended(cancelled).await;
    }
    let from = shared.boot();
    let ended = AssertUnwindSafe(kinds::effect(running, shared)).catch_unwind().await;
    let duration = shared.boot().saturating_sub(from);
    match ended {
        Ok(ended) => {
            ended.into_outcome(running.attempt, running.started, shared.parts.working.now(), duration)
        }
        Err(panic) => {
            failpoint::pass_on(panic);
            Outcome {
                message: "the daemon failed while it carried the command out; its outcome is not known"
                    .into(),
                finished: shared.parts.working.now(),
                duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
                ..Outcome::interrupted(running.attempt, running.started)
            }
        }
    }
}

/// Waits for the end of a program that an earlier daemon started, and delivers it.
pub(super) async fn from_attached(shared: &Shared, mut attached: Attached) {
    let begun = attached.reattached.begun.clone();
    let id = begun.id.clone();
    tracing::info!(%id, attempt = begun.attempt, "goes on; an earlier daemon started it");
    let (state, boot_id) = (shared.parts.state.clone(), &shared.parts.facts.boot_id);
    let program = shared.parts.programs.find(state, begun, boot_id);
    let mut outcome = program.ended(&mut attached.cancellable.cancelled).await;
    failpoint::hit(failpoint::EFFECT_ENDED);
    let _between_steps = shared.steps.read().await;
    let mut waits = self::waits();
    loop {
        match shared.parts.journal.finish_reattached(&attached.reattached, outcome).await {
            Ok(done) => {
                tracing::info!(%id, state = ?done.outcome.state, reason = done.outcome.reason.map(Reason::token), "done");
                return shared.say(Outgoing::Result(done));
            }
            Err((result, error)) => {
                outcome = result;
                if !retries(&id, "DONE", &error) {
                    return;
                }
                waits.next().await;
            }
        }
    }
}

async fn finish(shared: &Shared, mut running: Durable<Running>, mut outcome: Outcome) {
    let _between_steps = shared.steps.read().await;
    let mut waits = self::waits();
    loop {
        match shared.parts.journal.finish(running, outcome).await {
            Ok(done) => {
                tracing::info!(id = %done.id, state = ?done.outcome.state, reason = done.outcome.reason.map(Reason::token), "done");
                return shared.say(Outgoing::Result(done));
            }
            Err((back, result, error)) => {
                (running, outcome) = (back, result);
                if !retries(id(&running), "DONE", &error) {
                    return;
                }
                waits.next().await;
            }
        }
    }
}

async fn cancel_accepted(shared: &Shared, mut accepted: Durable<Accepted>) {
    let mut waits = self::waits();
    let mut outcome = Outcome {
        attempt: accepted.attempt,
        finished: shared.parts.working.now(),
        ..Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "cancelled before it started")
    };
    loop {
        match shared.parts.journal.finish_accepted(accepted, outcome).await {
            Ok(done) => {
                tracing::info!(id = %done.id, "cancelled before it started");
                return shared.say(Outgoing::Result(done));
            }
            Err((back, result, error)) => {
                (accepted, outcome) = (back, result);
                if !retries(&accepted.command.command().header.id, "DONE", &error) {
                    return;
                }
                waits.next().await;
            }
        }
    }
}

/// Cancels a command that is not in flight here: what a dead daemon left is ended, what has ended is told again, and an
/// unknown one is waited for. While the journal cannot be asked, the cancellation is in effect and asked for again; it
/// keeps no `turn` meanwhile, which deliveries wait for.
pub(super) async fn cancel_left(shared: &Shared, id: &CommandId, turn: OwnedSemaphorePermit) {
    let Err(error) = try_cancel_left(shared, id).await else { return };
    if !retries(id, "a cancellation", &error) {
        return;
    }
    let Some(_undecided) = shared.cancels.undecided(id) else {
        return tracing::warn!(%id, "a cancellation is not tried again: it is already, or too many are");
    };
    drop(turn);
    let mut waits = self::waits();
    while !shared.parts.lanes.stopping() {
        waits.next().await;
        match try_cancel_left(shared, id).await {
            Ok(()) => return,
            Err(error) if error.why == Reason::Stopping => return,
            Err(error) => tracing::debug!(%id, %error, "a cancellation cannot be written yet"),
        }
    }
}

async fn try_cancel_left(shared: &Shared, id: &CommandId) -> Result<(), WriteError> {
    let _between_steps = shared.steps.read().await;
    match shared.parts.journal.cancel_left(id.clone(), shared.parts.working.now()).await? {
        Some(done) => {
            tracing::info!(%id, state = ?done.outcome.state, "a cancellation found it ended, or left by an older daemon");
            shared.cancels.forget(id);
            shared.say(Outgoing::Result(done));
        }
        None => {
            // Once more: the answer may have come after its minute, and its command in between.
            shared.cancels.cancel(id, shared.boot());
            tracing::info!(%id, "a cancellation waits for its command");
        }
    }
    Ok(())
}

fn id(running: &Running) -> &CommandId {
    &running.command.command().header.id
}

/// Whether a failed write is tried again: not once the journal is closed for good.
fn retries(id: &CommandId, step: &str, error: &WriteError) -> bool {
    let again = error.why != Reason::Stopping;
    tracing::warn!(%id, %error, again, "{step} cannot be written");
    again
}

async fn pause(waits: &mut Waits, cancelled: &mut Cancelled) {
    tokio::select! {
        biased;
        () = waits.next() => {}
        () = cancelled.requested() => {}
    }
}
