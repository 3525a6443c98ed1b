//! Admission: the steps of commands.md in their order, as a function of what is known. Pure.

use std::collections::BTreeSet;

use crate::model::command::Body;
use crate::model::{
    Args, ArgsError, Command, Digest, Done, Effect, Kind, Outcome, Reason, Role, ServerTime, Terminal,
};
use crate::mutant::{self, Mutant};
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
    /// The operator holds the node (`bcd hold`).
    pub held: bool,
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
    /// Why the state directory takes no new command, if it takes none.
    pub disk: Option<Reason>,
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

/// A no that is not written, or one that is; the tail of the journey through the steps.
enum No {
    Refuse(Reason, String),
    Reject(Reason, String, Effect),
}

/// Why nothing new can be written down, if it cannot.
fn no_room(facts: &JournalFacts) -> Option<Reason> {
    facts.disk.or((!facts.room).then_some(Reason::JournalFull))
}

/// Decides, in the order of commands.md from step 3 on (steps 1 and 2 made the [`Verified`]).
pub fn decide(command: Verified<Command>, context: &Context, facts: &JournalFacts) -> Decision {
    let command = command.into_inner();
    let attempt = match known(&command, facts.row.as_ref()) {
        Ok(attempt) => attempt,
        Err(decision) => return *decision,
    };
    match steps_4_to_8(&command, context, facts) {
        Ok((kind, args)) => {
            let admitted = Admitted { command, kind, args };
            Decision::Admit { admitted, attempt: attempt.unwrap_or(0) }
        }
        Err(No::Refuse(reason, detail)) => Decision::Refuse { reason, detail },
        // A REJECTED needs a place on the disk and among the unacked results as well.
        Err(No::Reject(..)) if let Some(why) = no_room(facts) => busy(why),
        Err(No::Reject(reason, message, effect)) => {
            let outcome = match attempt {
                // A run was left behind, so the end is not "never run", whatever the step.
                Some(attempt) => Outcome::interrupted(attempt, None),
                None => Outcome { effect, ..Outcome::not_run(Terminal::Rejected, reason, message) },
            };
            let to_sign = Kind::signs_results(&command.header.kind);
            let Command { header, body_sha256, .. } = command;
            Decision::Reject(Done { id: header.id, body_sha256, to_sign, outcome })
        }
    }
}

fn busy(why: Reason) -> Decision {
    Decision::Refuse { reason: Reason::Busy, detail: why.token().into() }
}

/// Step 3. `Ok` goes on: with the executions of a run that was left behind, if there was one.
fn known(command: &Command, row: Option<&Known>) -> Result<Option<u32>, Box<Decision>> {
    let Some(row) = row else { return Ok(None) };
    if row.body_sha256 != command.body_sha256 {
        let detail = format!("the id is known with the body {}", row.body_sha256);
        return Err(Box::new(Decision::Refuse { reason: Reason::CommandIdConflict, detail }));
    }
    match &row.state {
        KnownState::AcceptedBefore => Ok(None),
        KnownState::RunningBefore { attempt } => Ok(Some(*attempt)),
        KnownState::Accepted => Err(Box::new(Decision::IsAccepted)),
        KnownState::Running { attempt } => Err(Box::new(Decision::IsRunning { attempt: *attempt })),
        KnownState::Done(done) => Err(Box::new(Decision::Again(done.clone()))),
    }
}

fn steps_4_to_8(command: &Command, context: &Context, facts: &JournalFacts) -> Result<(Kind, Args), No> {
    if context.upgrade_only {
        return Err(No::Refuse(Reason::UpgradeRequired, "this session admits only daemon.upgrade".into()));
    }
    let (kind, body) = readable(command, context)?;
    in_time(command, context, facts)?;
    not_lost(command, &body.args, facts)?;
    if body.min_generation > context.applied_generation {
        let detail =
            format!("needs generation {}, applied is {}", body.min_generation, context.applied_generation);
        return Err(No::Refuse(Reason::StaleGeneration, detail));
    }
    let hindrances = [
        context.stopping.then_some(Reason::Stopping),
        context.held.then_some(Reason::Held),
        no_room(facts),
        (!context.credit).then_some(Reason::Credits),
    ];
    match hindrances.into_iter().flatten().next() {
        Some(why) => Err(No::Refuse(Reason::Busy, why.token().into())),
        None => Ok((kind, body.args)),
    }
}

/// Step 5: the body is read strictly, the kind is known, the role may run it, the operator does not forbid it.
fn readable(command: &Command, context: &Context) -> Result<(Kind, Body), No> {
    let reject = |reason, message| No::Reject(reason, message, Effect::None);
    let name: String = command.header.kind.chars().take(80).collect();
    let Some(kind) = Kind::from_name(&command.header.kind) else {
        return Err(reject(Reason::UnknownKind, format!("this build does not run {name:?}")));
    };
    let body = command.body(kind).map_err(|error| match error {
        ArgsError::UnsupportedField(_) => reject(Reason::UnsupportedField, error.to_string()),
        ArgsError::Invalid(_) => reject(Reason::InvalidArguments, error.to_string()),
    })?;
    if !may_run(kind.properties().roles, context.role) {
        let message = format!("a node of the role {} does not run {kind}", context.role.name());
        return Err(reject(Reason::KindNotAllowed, message));
    }
    if context.denied.contains(kind.name()) {
        return Err(reject(
            Reason::DeniedByOperator,
            format!("{kind} is in [kinds] deny of this host's bcd.toml"),
        ));
    }
    Ok((kind, body))
}

/// Whether a node of `role` runs a kind whose row of the table names `roles`.
fn may_run(roles: &[Role], role: Role) -> bool {
    roles.contains(&role)
}

/// Step 7, first row: the working clock is a gateway's word, so it only postpones; signed time ends the command.
fn in_time(command: &Command, context: &Context, facts: &JournalFacts) -> Result<(), No> {
    if mutant::is(Mutant::ExpiredTaken) {
        return Ok(());
    }
    let not_after = command.header.not_after;
    let passed = |time: Option<ServerTime>| time.is_some_and(|time| time >= not_after);
    let message = format!("not_after was {not_after}");
    if passed(context.signed) {
        // Without a row nobody here knows what an earlier delivery did.
        let effect = if facts.row.is_some() { Effect::None } else { Effect::Unknown };
        return Err(No::Reject(Reason::Expired, message, effect));
    }
    if context.now.is_none() || passed(context.now) {
        return Err(No::Refuse(Reason::Expired, message));
    }
    Ok(())
}

/// Step 7, second row: what a lost journal may have run must not run again.
fn not_lost(command: &Command, args: &Args, facts: &JournalFacts) -> Result<(), No> {
    if args.retry_safe() {
        return Ok(());
    }
    match facts.birth {
        None => Err(No::Refuse(Reason::Busy, Reason::NoBirth.token().into())),
        Some(birth) if command.header.issued_at < birth => {
            let message =
                format!("issued at {}, before this journal's birth at {birth}", command.header.issued_at);
            Err(No::Reject(Reason::JournalLost, message, Effect::Unknown))
        }
        Some(_) => Ok(()),
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests;
