//! The commands that a run takes through the journal, and the ledger of what was asked and answered when.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::FutureExt as _;
use tokio::sync::oneshot;

use super::vfs::Vfs;
use crate::admission::Context;
use crate::journal::core::{Call, Job};
use crate::journal::disk::Ground;
use crate::journal::settings::Setting;
use crate::journal::{Admission, Durable, Journal, Locked, Mode, Options, Running, ops};
use crate::model::{
    BootId, Command, CommandId, Effect, Incarnation, JournalId, NodeId, Outcome, Role, ServerTime, Terminal,
};
use crate::wire::dsse::{Audience, COMMAND_TYPE, Envelope, Policy, Verified, verify_command};

/// Commands of a run: their states overlap, and their commits run through the log several times.
pub(super) const COMMANDS: usize = 14;
/// The first of them; the rest follow after a clean stop and a start, and are accepted together.
const BEFORE_THE_STOP: usize = COMMANDS - 3;
/// The time at which everything happens; birth and deadlines lie around it.
const NOW_MS: i64 = 1_796_000_000_000;
const HOUR_MS: i64 = 3_600_000;
const LAST_EPOCH: u64 = 7;

/// Which journal is put to the test, and how it is used.
#[derive(Debug, Clone)]
pub(super) struct Scenario {
    pub(super) settings: Vec<Setting>,
    pub(super) wal_bytes: u64,
    /// The effect comes before the command is handed to the journal: what must never be.
    pub(super) effect_first: bool,
}

/// How far a command has come on disk, recovery included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Absent,
    Accepted,
    /// RUNNING, or ended `interrupted` by recovery.
    Running,
    Done,
    Tombstone,
}

/// One step of a command. The numbers count operations of the disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) level: Level,
    /// Before it was asked for: no crash up to here shows it.
    pub(super) asked: usize,
    /// When the journal's proof was handed out: every crash from here on must show it. Absent for an ack, which
    /// promises nothing.
    pub(super) proven: Option<usize>,
}

/// What a run did, by command.
#[derive(Debug, Clone, Default)]
pub(super) struct Ledger {
    pub(super) steps: Vec<Vec<Step>>,
    /// When the effect of a command began.
    pub(super) effects: Vec<Option<usize>>,
    /// When the journal was open: its id must stay from here on.
    pub(super) opened: usize,
    /// When a Welcome's epoch was durable.
    pub(super) welcomed: usize,
}

impl Ledger {
    /// The least and the most that a crash after `point` operations may leave of a command.
    pub(super) fn bounds(&self, command: usize, point: usize) -> (Level, Level) {
        let last = |when: &dyn Fn(&Step) -> bool| {
            self.steps[command].iter().filter(|step| when(step)).map(|step| step.level).max()
        };
        let least = last(&|step| step.proven.is_some_and(|proven| proven <= point));
        let most = last(&|step| step.asked < point);
        (least.unwrap_or(Level::Absent), most.unwrap_or(Level::Absent))
    }

    pub(super) fn effect_began(&self, command: usize, point: usize) -> bool {
        self.effects[command].is_some_and(|began| began <= point)
    }

    /// The epoch that a crash after `point` operations must not take.
    pub(super) fn epoch(&self, point: usize) -> u64 {
        if self.welcomed <= point { LAST_EPOCH } else { 0 }
    }
}

/// Every second command may run twice.
pub(super) fn retry_safe(command: usize) -> bool {
    command % 2 == 1
}

pub(super) fn id(command: usize) -> CommandId {
    CommandId::new(format!("c-{command}")).expect("an id")
}

pub(super) fn verified(command: usize) -> Verified<Command> {
    let (issued, not_after) = (ServerTime(NOW_MS), ServerTime(NOW_MS + HOUR_MS));
    let payload = format!(
        r#"{{"trust_domain":"lab","node_id":"n-1","id":"{}","kind":"node.exec","issued_at":"{issued}",
        "not_after":"{not_after}","args":{{"argv":["true"],"retry_safe":{}}}}}"#,
        id(command),
        retry_safe(command)
    );
    let envelope =
        Envelope { payload_type: COMMAND_TYPE.into(), payload: Bytes::from(payload), signatures: Vec::new() };
    let audience = Audience { trust_domain: "lab".into(), node_id: NodeId::new("n-1").expect("an id") };
    verify_command(&envelope, &audience, &Policy::None.into()).expect("verified")
}

pub(super) fn context() -> Context {
    Context {
        upgrade_only: false,
        role: Role::Host,
        denied: Arc::default(),
        now: Some(ServerTime(NOW_MS)),
        signed: Some(ServerTime(NOW_MS)),
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    }
}

/// The end of a command; its output is told from any other's, and some do not fit into one page.
pub(super) fn outcome(command: usize) -> Outcome {
    Outcome {
        state: Terminal::Succeeded,
        reason: None,
        message: format!("command {command}"),
        effect: Effect::Complete,
        attempt: 1,
        started: Some(ServerTime(NOW_MS)),
        finished: Some(ServerTime(NOW_MS + 1)),
        duration_ms: 1,
        output: format!("output of {command};").repeat(command * 40).into_bytes(),
    }
}

/// The id that a journal made in a run has.
pub(super) fn journal_id() -> JournalId {
    JournalId::new("j-run").expect("an id")
}

/// An inline journal does its work within the first poll.
pub(super) fn now<T>(future: impl Future<Output = T>) -> T {
    future.now_or_never().expect("an inline journal never waits")
}

/// Opens the journal that lies on the disk of `vfs`, through the same steps as a daemon. Its lock and its begun
/// records lie in the real directory `state`.
pub(super) fn open(
    vfs: &Vfs,
    scenario: &Scenario,
    state: &Path,
    incarnation: &str,
    new_id: JournalId,
) -> anyhow::Result<Journal> {
    let options = Options {
        state: state.to_owned(),
        node_id: NodeId::new("n-1")?,
        incarnation: Incarnation::new(incarnation)?,
        boot_id: BootId::new("b-1")?,
        wal_bytes: scenario.wal_bytes,
        mode: Mode::Inline,
    };
    let ground = Ground { disk: vfs, settings: &scenario.settings };
    let locked = Locked::open_on(ground, options, new_id, Some(ServerTime(NOW_MS - HOUR_MS)))?;
    Ok(locked.with_audit(true).recover(None)?.0)
}

/// A journal in use, with the ledger of it.
struct Run<'a> {
    vfs: &'a Vfs,
    journal: Journal,
    ledger: Ledger,
    effect_first: bool,
    running: Vec<Option<Durable<Running>>>,
}

impl Run<'_> {
    fn ops(&self) -> usize {
        self.vfs.disk().trace().len()
    }

    fn proven(&mut self, command: usize, level: Level, asked: usize) {
        let proven = Some(self.ops());
        self.ledger.steps[command].push(Step { level, asked, proven });
    }

    fn accept_and_start(&mut self, command: usize) {
        let asked = self.ops();
        if self.effect_first {
            self.ledger.effects[command] = Some(asked);
        }
        let admission = now(self.journal.admit(verified(command), context())).expect("written");
        self.accepted(command, asked, admission);
    }

    /// Several that wait for the writer at once: one commit proves them all.
    fn accept_together_and_start(&mut self, commands: Range<usize>) {
        let asked = self.ops();
        let (mut jobs, mut answers): (Vec<Box<dyn Job>>, Vec<_>) = Default::default();
        for command in commands {
            let (reply, answer) = oneshot::channel();
            let delivered = verified(command);
            jobs.push(Box::new(Call::new(move |core| ops::admit(core, delivered, &context()), reply)));
            answers.push((command, answer));
        }
        if self.effect_first {
            answers.iter().for_each(|(command, _)| self.ledger.effects[*command] = Some(asked));
        }
        self.journal.run_together(jobs);
        for (command, answer) in answers {
            let admission = now(answer).expect("an answer").expect("written").after_sync();
            self.accepted(command, asked, admission);
        }
    }

    fn accepted(&mut self, command: usize, asked: usize, admission: Admission) {
        let Admission::Accepted(accepted) = admission else { panic!("not accepted: {admission:?}") };
        self.proven(command, Level::Accepted, asked);
        let asked = self.ops();
        let running = now(self.journal.start(accepted, Some(ServerTime(NOW_MS)))).expect("written");
        self.proven(command, Level::Running, asked);
        self.ledger.effects[command].get_or_insert(self.vfs.disk().trace().len());
        self.running[command] = Some(running);
    }

    fn finish(&mut self, command: usize) {
        let running = self.running[command].take().expect("running");
        let asked = self.ops();
        now(self.journal.finish(running, outcome(command))).expect("written");
        self.proven(command, Level::Done, asked);
    }

    fn ack(&mut self, command: usize) {
        let asked = self.ops();
        self.journal.acked(vec![id(command)]);
        self.ledger.steps[command].push(Step { level: Level::Tombstone, asked, proven: None });
    }
}

/// Takes the commands through a new journal on the disk of `vfs`, and cuts the power.
pub(super) fn run(vfs: &Vfs, scenario: &Scenario, state: &Path) -> Ledger {
    let journal = open(vfs, scenario, state, "i-1", journal_id()).expect("a new journal");
    let ledger =
        Ledger { steps: vec![Vec::new(); COMMANDS], effects: vec![None; COMMANDS], ..Ledger::default() };
    let running = (0..COMMANDS).map(|_| None).collect();
    let mut run = Run { vfs, journal, ledger, effect_first: scenario.effect_first, running };
    run.ledger.opened = run.ops();
    now(run.journal.welcomed(LAST_EPOCH, ServerTime(NOW_MS))).expect("written");
    run.ledger.welcomed = run.ops();
    for turn in 0..BEFORE_THE_STOP + 3 {
        if turn < BEFORE_THE_STOP {
            run.accept_and_start(turn);
        }
        if let Some(command) = turn.checked_sub(2).filter(|command| *command < BEFORE_THE_STOP) {
            run.finish(command);
        }
        // The last ones stay unacked.
        if let Some(command) = turn.checked_sub(4) {
            run.ack(command);
        }
    }
    // A stop carries the log into the file and removes it; a start makes it anew.
    now(run.journal.close());
    run.journal = open(vfs, scenario, state, "i-2", journal_id()).expect("the same journal");
    run.accept_together_and_start(BEFORE_THE_STOP..COMMANDS);
    (BEFORE_THE_STOP..COMMANDS).for_each(|command| run.finish(command));
    vfs.disk().cut_power();
    run.ledger
}
