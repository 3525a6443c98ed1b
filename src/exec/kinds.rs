//! The registry: what each kind does. Reached with a `Durable<Running>` alone.

use std::time::Duration;

use super::{Shared, barrier, probe, reboot};
use crate::journal::{Durable, Running};
use crate::model::limits::cut_text;
use crate::model::{Args, Effect, Outcome, Reason, ServerTime, Terminal};

/// How an effect ended; whoever carries it out adds attempt and times.
#[derive(Debug)]
pub(super) struct Ended {
    /// Which end.
    pub(super) state: Terminal,
    /// Why; absent where nothing needs saying.
    pub(super) reason: Option<Reason>,
    /// For people.
    pub(super) message: String,
    /// What is known of the effect.
    pub(super) effect: Effect,
    /// The kind's output: JSON, or empty.
    pub(super) output: Vec<u8>,
}

impl Ended {
    /// The whole outcome.
    pub(super) fn into_outcome(
        self,
        attempt: u32,
        started: Option<ServerTime>,
        finished: Option<ServerTime>,
        duration: Duration,
    ) -> Outcome {
        Outcome {
            state: self.state,
            reason: self.reason,
            message: cut_text(self.message),
            effect: self.effect,
            attempt,
            started,
            finished,
            duration_ms: u64::try_from(duration.as_millis()).unwrap_or(u64::MAX),
            output: self.output,
        }
    }
}

/// Does what the command asks for, in this process.
pub(super) async fn effect(running: &Durable<Running>, shared: &Shared) -> Ended {
    let parts = &shared.parts;
    match running.command.args() {
        Args::Probe(_) => probe::run(&parts.facts, &parts.state).await,
        Args::Barrier(args) => {
            barrier::run(&args.barrier_id, &running.command.command().header.id, shared).await
        }
        // Started, it is not cancelled any more.
        Args::Reboot(_) => reboot::run(shared).await,
        // Its supervisor is its only way to run (steps.rs); here it would die with the daemon.
        Args::Exec(_) => Ended {
            state: Terminal::Failed,
            reason: Some(Reason::CouldNotStart),
            message: "the program has no supervisor".into(),
            effect: Effect::None,
            output: Vec::new(),
        },
    }
}
