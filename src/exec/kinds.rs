//! The registry: what each kind does. Reached with a `Durable<Running>` alone.

use super::Shared;
use super::cancel::Cancelled;
use super::mark::Mark;
use super::{barrier, probe, reboot, run};
use crate::journal::{Durable, Running};
use crate::model::{Args, Effect, Reason, Terminal};

/// How an effect ended; the executor adds attempt and times.
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

/// Does what the command asks for.
pub(super) async fn effect(running: &Durable<Running>, shared: &Shared, cancelled: &mut Cancelled) -> Ended {
    let id = &running.command.command().header.id;
    let parts = &shared.parts;
    match running.command.args() {
        Args::Probe(_) => probe::run(&parts.facts, &parts.state).await,
        Args::Barrier(args) => barrier::run(&args.barrier_id, id, shared).await,
        // Started, it is not cancelled any more.
        Args::Reboot(_) => reboot::run(shared).await,
        Args::Exec(args) => {
            let mark = Mark::attempt(&parts.journal.id(), id, running.attempt);
            run::run(args, &mark, cancelled).await
        }
    }
}
