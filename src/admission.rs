//! Admission: the steps of commands.md in their order, as a function of what is known. Pure.

use std::collections::BTreeSet;

use crate::model::{Args, Command, Digest, Done, Kind, Reason, Role, ServerTime};
use crate::wire::dsse::Verified;

/// A command that passed admission. Made here alone.
#[derive(Debug)]
pub struct Admitted {
    command: Command,
    kind: Kind,
    args: Args,
}

impl Admitted {
    /// The command.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its arguments, read strictly.
    pub fn args(&self) -> &Args {
        &self.args
    }

    /// Whether this very command may run twice.
    pub fn retry_safe(&self) -> bool {
        self.args.retry_safe()
    }
}

/// What admission judges by, gathered by the executor when it submits the command.
#[derive(Debug, Clone)]
pub struct Context {
    /// Only `daemon.upgrade` is admitted.
    pub upgrade_only: bool,
    /// The node's role.
    pub role: Role,
    /// `[kinds] deny` of bcd.toml.
    pub denied: std::sync::Arc<BTreeSet<String>>,
    /// The working clock; absent before the first server time ever known.
    pub now: Option<ServerTime>,
    /// Signed time.
    pub signed: Option<ServerTime>,
    /// The generation applied.
    pub applied_generation: u64,
    /// A credit of the lane is reserved for this command.
    pub credit: bool,
    /// The daemon is stopping.
    pub stopping: bool,
}

/// What the journal knows, gathered by its writer in the same job that writes the answer.
#[derive(Debug, Clone)]
pub struct JournalFacts {
    /// The command's row, if there is one.
    pub row: Option<Known>,
    /// The journal's birth.
    pub birth: Option<ServerTime>,
    /// There is room for one more result.
    pub room: bool,
}

/// A row or tombstone of the same id.
#[derive(Debug, Clone)]
pub struct Known {
    /// Digest of the bytes that it was made from.
    pub body_sha256: Digest,
    /// Its state.
    pub state: KnownState,
}

/// The state of a row, as admission sees it.
#[derive(Debug, Clone)]
pub enum KnownState {
    /// Accepted in this process.
    Accepted,
    /// Running in this process.
    Running {
        /// Which execution.
        attempt: u32,
    },
    /// ACCEPTED, left by an older incarnation; nothing was started.
    AcceptedBefore,
    /// RUNNING and retry-safe, left by an older incarnation.
    RunningBefore {
        /// Executions so far.
        attempt: u32,
    },
    /// Done, or a tombstone (then without output, and `already-done` in its message).
    Done(Done),
}

/// What is to be done with a delivery.
#[derive(Debug)]
pub enum Decision {
    /// Never written.
    Refuse {
        /// The token.
        reason: Reason,
        /// Why busy, or a text for people.
        detail: String,
    },
    /// Written as done: REJECTED, or FAILED `interrupted` where a run was left behind.
    Reject(Done),
    /// Known: its result again.
    Again(Done),
    /// Known: running in this process.
    IsRunning {
        /// Which execution.
        attempt: u32,
    },
    /// Known: accepted in this process.
    IsAccepted,
    /// To be written ACCEPTED (or, left RUNNING and retry-safe, RUNNING with the attempt raised), then started.
    Admit {
        /// The command.
        admitted: Admitted,
        /// Executions so far.
        attempt: u32,
    },
}

/// Decides, in the order of commands.md from step 3 on (steps 1 and 2 made the [`Verified`]).
pub fn decide(_command: &Verified<Command>, _context: &Context, _facts: &JournalFacts) -> Decision {
    todo!()
}
