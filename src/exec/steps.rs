//! The steps of an admitted command, each durable before the next: RUNNING, the begun record, the effect, DONE.
//!
//! A step that cannot be written is tried again while the command keeps its credit; until RUNNING and the begun record
//! are durable nothing has started, and an outcome that cannot be written waits in memory.

use std::io;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::RwLockReadGuard;
use tokio::time;

use super::cancel::{Cancellable, Cancelled};
use super::{Shared, kinds};
use crate::failpoint;
use crate::journal::{Accepted, Durable, Running, WriteError};
use crate::model::limits::TEXT_BYTES;
use crate::model::{AnswerState, Effect, Outcome, Reason, Terminal};
use crate::session::outbox::Outgoing;

/// First wait before a step is written again.
const FIRST_WAIT: Duration = Duration::from_millis(250);
/// Longest wait: a disk that has room again is found soon.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

struct Waits(Duration);

impl Waits {
    fn new() -> Self {
        Self(FIRST_WAIT)
    }

    async fn next(&mut self) {
        time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(LONGEST_WAIT);
    }
}

/// Starts an accepted command, or ends it where it was cancelled before.
pub(super) async fn from_accepted(
    shared: &Shared,
    mut accepted: Durable<Accepted>,
    mut cancellable: Cancellable,
    between_steps: RwLockReadGuard<'_, ()>,
) {
    let mut waits = Waits::new();
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

/// Carries out a command whose RUNNING is durable.
pub(super) async fn from_running(
    shared: &Shared,
    running: Durable<Running>,
    mut cancellable: Cancellable,
    between_steps: RwLockReadGuard<'_, ()>,
) {
    let header = &running.command.command().header;
    let _running_here = shared.parts.lanes.running(header.id.clone());
    let outcome = match begin(shared, &running, &mut cancellable.cancelled).await {
        Begin::Go => {
            let state = AnswerState::Running { attempt: running.attempt };
            shared.pass(Some(header.id.clone()), running.command.command().body_sha256, state);
            tracing::info!(id = %header.id, kind = header.kind, attempt = running.attempt, "started");
            drop(between_steps);
            let outcome = effect(shared, &running, &mut cancellable.cancelled).await;
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
    /// The effect may start.
    Go,
    /// It must not, and this is the end of the command.
    Never(Box<Outcome>),
    /// The daemon stops: the next start settles the command.
    Leave,
}

async fn begin(shared: &Shared, running: &Durable<Running>, cancelled: &mut Cancelled) -> Begin {
    let mut waits = Waits::new();
    loop {
        if cancelled.is_requested() {
            return Begin::Never(Box::new(cancelled_before_effect(shared, running)));
        }
        if running.command.retry_safe() {
            return Begin::Go;
        }
        match create_begun(shared, running).await {
            Ok(()) => return Begin::Go,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Begin::Never(Box::new(Outcome {
                    message: "this attempt was begun before; its outcome is not known".into(),
                    finished: shared.parts.working.now(),
                    ..Outcome::interrupted(running.attempt, running.started)
                }));
            }
            Err(error) => {
                let id = &running.command.command().header.id;
                tracing::warn!(%id, %error, "the begun record cannot be written; nothing was started, tried again");
                if shared.parts.lanes.stopping() {
                    return Begin::Leave;
                }
                pause(&mut waits, cancelled).await;
            }
        }
    }
}

async fn create_begun(_shared: &Shared, _running: &Durable<Running>) -> io::Result<()> {
    todo!()
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
async fn effect(shared: &Shared, running: &Durable<Running>, cancelled: &mut Cancelled) -> Outcome {
    let from = shared.boot();
    let ended = AssertUnwindSafe(kinds::effect(running, shared, cancelled)).catch_unwind().await;
    let duration = shared.boot().saturating_sub(from);
    let outcome = match ended {
        Ok(ended) => Outcome {
            state: ended.state,
            reason: ended.reason,
            message: clipped(ended.message),
            effect: ended.effect,
            output: ended.output,
            ..Outcome::interrupted(running.attempt, running.started)
        },
        Err(_) => Outcome {
            message: "the daemon failed while it carried the command out; its outcome is not known".into(),
            ..Outcome::interrupted(running.attempt, running.started)
        },
    };
    Outcome {
        finished: shared.parts.working.now(),
        duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
        ..outcome
    }
}

async fn finish(shared: &Shared, mut running: Durable<Running>, mut outcome: Outcome) {
    let _between_steps = shared.steps.read().await;
    let mut waits = Waits::new();
    loop {
        match shared.parts.journal.finish(running, outcome).await {
            Ok(done) => {
                tracing::info!(id = %done.id, state = ?done.outcome.state, reason = ?done.outcome.reason, "done");
                return shared.say(Outgoing::Result(done));
            }
            Err((back, result, error)) => {
                (running, outcome) = (back, result);
                if !retries(&running.command.command().header.id, "DONE", &error) {
                    return;
                }
                waits.next().await;
            }
        }
    }
}

async fn cancel_accepted(shared: &Shared, mut accepted: Durable<Accepted>) {
    let mut waits = Waits::new();
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

/// Whether a failed write is tried again: not once the journal is closed for good.
fn retries(id: &crate::model::CommandId, step: &str, error: &WriteError) -> bool {
    let again = error.why != Reason::Stopping;
    tracing::warn!(%id, %error, again, "{step} cannot be written");
    again
}

async fn pause(waits: &mut Waits, cancelled: &mut Cancelled) {
    tokio::select! {
        () = waits.next() => {}
        () = cancelled.requested() => {}
    }
}

/// A message within the wire's limit.
fn clipped(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(TEXT_BYTES));
    message
}
