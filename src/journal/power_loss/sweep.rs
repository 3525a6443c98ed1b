//! Crashes a run at every operation, in every mode, and looks at what a new process finds.

use std::path::{Path, PathBuf};
use std::str::FromStr as _;

use tempfile::TempDir;

use super::crash::{Crash, Mode, Platter};
use super::disk::{Image, Op};
use super::vfs::Vfs;
use super::workload::{self, COMMANDS, Ledger, Level, Scenario};
use crate::journal::core::Core;
use crate::journal::{Admission, Journal, State, ops, rows};
use crate::model::{Command, JournalId, Outcome, Reason};
use crate::wire::dsse::Verified;

/// Runs the one case that it names, `<point>:<mode>:<seed>`, of the test that is started; a second crash, within
/// the recovery from the first, behind a `/`. The same operations meet the same fate; only the salts of SQLite's
/// log differ from run to run.
const REPLAY: &str = "BCD_POWER_LOSS";

/// What is wrong after a crash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// Less is there of a command than was proven durable.
    Lost(String),
    /// The journal itself, or what it keeps beside its commands, is not the one that was proven durable.
    HeadLost(String),
    /// An effect has happened, and a redelivery would cause it again.
    EffectForgotten(String),
    /// More, or something else, is there than was ever written.
    Invented(String),
    /// The file is damaged, or does not open.
    Corrupt(String),
}

/// What a sweep saw.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) cases: usize,
    pub(super) lost: usize,
    pub(super) heads_lost: usize,
    pub(super) effects_forgotten: usize,
    pub(super) invented: usize,
    pub(super) corrupt: usize,
    /// The first few, each with what replays it.
    pub(super) first: Vec<String>,
}

impl Tally {
    pub(super) fn bad(&self) -> usize {
        self.lost + self.heads_lost + self.effects_forgotten + self.invented + self.corrupt
    }

    fn count(&mut self, case: &str, faults: &[Fault]) {
        self.cases += 1;
        for fault in faults {
            *match fault {
                Fault::Lost(_) => &mut self.lost,
                Fault::HeadLost(_) => &mut self.heads_lost,
                Fault::EffectForgotten(_) => &mut self.effects_forgotten,
                Fault::Invented(_) => &mut self.invented,
                Fault::Corrupt(_) => &mut self.corrupt,
            } += 1;
            if self.first.len() < 8 {
                self.first.push(format!("{REPLAY}={case}: {fault:?}"));
            }
        }
    }
}

/// The case that the environment asks for.
pub(super) fn replay() -> Option<Vec<Crash>> {
    let text = std::env::var(REPLAY).ok()?;
    Some(text.split('/').map(|crash| Crash::from_str(crash).expect(REPLAY)).collect())
}

/// A run that was recorded, and the place to crash it in.
pub(super) struct Sweep {
    scenario: Scenario,
    vfs: Vfs,
    /// The real part of a state directory: its lock, and begun records, of which there are none.
    dir: TempDir,
    ledger: Ledger,
    trace: Vec<Op>,
    commands: Vec<Verified<Command>>,
    outcomes: Vec<Outcome>,
}

impl Sweep {
    pub(super) fn record(scenario: Scenario) -> Self {
        // Each opening truncates the lock file, for which a file system on a disk makes it wait.
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let dir = tempfile::tempdir_in(parent).expect("a directory");
        let vfs = Vfs::new();
        let ledger = workload::run(&vfs, &scenario, &state_in(&dir));
        let trace = vfs.disk().trace().to_vec();
        let commands = (0..COMMANDS).map(workload::verified).collect();
        let outcomes = (0..COMMANDS).map(workload::outcome).collect();
        Self { scenario, vfs, dir, ledger, trace, commands, outcomes }
    }

    /// What was done to the disk.
    pub(super) fn trace(&self) -> &[Op] {
        &self.trace
    }

    /// Crashes at every point, `seeds` times where chance decides.
    pub(super) fn every_crash(&self, seeds: u64) -> Tally {
        self.crashes_at(|_| true, seeds)
    }

    /// Crashes at every `stride`th point.
    pub(super) fn some_crashes(&self, stride: usize) -> Tally {
        self.crashes_at(|crash| crash.point.is_multiple_of(stride), 1)
    }

    fn crashes_at(&self, wanted: impl Fn(Crash) -> bool, seeds: u64) -> Tally {
        let mut tally = Tally::default();
        for (crash, image) in crashes(&Image::new(), &self.trace, seeds, wanted) {
            tally.count(&crash.to_string(), &self.check(image, crash.point));
        }
        tally
    }

    /// Crashes at every `stride`th point, and then at every point of the recovery from it.
    pub(super) fn every_crash_of_recoveries(&self, stride: usize) -> Tally {
        let mut tally = Tally::default();
        let sampled = |crash: Crash| crash.point.is_multiple_of(stride) && crash.mode == Mode::Torn;
        for (first, image) in crashes(&Image::new(), &self.trace, 1, sampled) {
            let trace = self.recovery_of(image.clone());
            for (second, image) in crashes(&image, &trace, 1, |_| true) {
                tally.count(&format!("{first}/{second}"), &self.check(image, first.point));
            }
        }
        tally
    }

    /// One case, as [`REPLAY`] names it.
    pub(super) fn one_case(&self, case: &[Crash]) -> Vec<Fault> {
        let (mut image, mut trace) = (Image::new(), self.trace.clone());
        for (nth, crash) in case.iter().enumerate() {
            if nth > 0 {
                trace = self.recovery_of(image.clone());
            }
            let mut platter = Platter::new(&image);
            trace.iter().take(crash.point).for_each(|op| platter.step(op));
            image = platter.crash(*crash);
        }
        self.check(image, case[0].point)
    }

    /// What opening and recovering does to a disk.
    fn recovery_of(&self, image: Image) -> Vec<Op> {
        self.vfs.boot(image);
        let opened = self.open();
        let trace = self.vfs.disk().trace().to_vec();
        self.vfs.disk().cut_power();
        drop(opened);
        trace
    }

    fn open(&self) -> anyhow::Result<Journal> {
        let new_id = JournalId::new("j-anew")?;
        workload::open(&self.vfs, &self.scenario, &state_in(&self.dir), "i-after", new_id)
    }

    /// Starts anew on what the crash left, and compares it with the ledger.
    fn check(&self, image: Image, point: usize) -> Vec<Fault> {
        self.vfs.boot(image);
        let mut faults = Vec::new();
        match self.open() {
            Ok(journal) => {
                if let Err(error) = self.look(&journal, point, &mut faults) {
                    faults.push(Fault::Corrupt(format!("{error:#}")));
                }
                self.vfs.disk().cut_power();
            }
            Err(error) => {
                self.vfs.disk().cut_power();
                faults.push(Fault::Corrupt(format!("{error:#}")));
            }
        }
        faults
    }

    fn look(&self, journal: &Journal, point: usize, faults: &mut Vec<Fault>) -> anyhow::Result<()> {
        if point >= self.ledger.opened && journal.id() != workload::journal_id() {
            faults.push(Fault::HeadLost(format!("there is the journal {}", journal.id())));
        }
        if journal.last_epoch() < self.ledger.epoch(point) {
            faults.push(Fault::HeadLost(format!("there is the epoch {}", journal.last_epoch())));
        }
        let (word, ends) = workload::now(journal.submit(|core| {
            let word: String = core.conn.query_row("PRAGMA integrity_check", [], |row| row.get(0))?;
            let ends: rusqlite::Result<Vec<_>> =
                (0..COMMANDS).map(|command| End::of(core, command)).collect();
            Ok((word, ends?))
        }))?;
        if word != "ok" {
            faults.push(Fault::Corrupt(word));
        }
        for (command, (end, lines)) in ends.into_iter().enumerate() {
            match lines - i64::from(matches!(end, End::Outcome(_))) {
                0 => {}
                ..0 => faults.push(Fault::Lost(format!("command {command} has ended without its line"))),
                _ => faults.push(Fault::Invented(format!("command {command} has {lines} lines"))),
            }
            let level = self.level(command, end, faults);
            let (least, most) = self.ledger.bounds(command, point);
            if level < least {
                faults.push(Fault::Lost(format!(
                    "command {command}: {least:?} was proven, there is {level:?}"
                )));
            }
            if level > most {
                faults.push(Fault::Invented(format!("command {command}: {level:?} was never asked for")));
            }
            if level < Level::Done && self.ledger.effect_began(command, point) {
                self.redeliver(journal, command, faults)?;
            }
        }
        Ok(())
    }

    /// A command that may have had its effect, and no outcome, is delivered again: it must have been ended by
    /// recovery, or be one that may run twice.
    fn redeliver(&self, journal: &Journal, command: usize, faults: &mut Vec<Fault>) -> anyhow::Result<()> {
        match workload::now(journal.admit(self.commands[command].clone(), workload::context()))? {
            Admission::Ended(_) => {}
            Admission::Restarted(_) if workload::retry_safe(command) => {}
            Admission::Accepted(_) => faults.push(Fault::EffectForgotten(format!("command {command}"))),
            other => faults.push(Fault::Invented(format!("command {command}: {other:?}"))),
        }
        Ok(())
    }

    fn level(&self, command: usize, end: End, faults: &mut Vec<Fault>) -> Level {
        let outcome = match end {
            End::None(None) => return Level::Absent,
            End::None(Some(State::Accepted)) => return Level::Accepted,
            End::None(Some(_)) => return Level::Running,
            End::Outcome(outcome) if outcome.reason == Some(Reason::Interrupted) => return Level::Running,
            End::Outcome(outcome) => outcome,
        };
        let wanted = &self.outcomes[command];
        let message = Reason::AlreadyDone.token().to_owned();
        if outcome == (Outcome { output: Vec::new(), message, ..*wanted }) {
            return Level::Tombstone;
        }
        if outcome != *wanted {
            faults.push(Fault::Invented(format!("command {command} ended with {outcome:?}")));
        }
        Level::Done
    }
}

/// What the journal says of a command.
enum End {
    /// It has not ended; its state, where there is a row.
    None(Option<State>),
    Outcome(Outcome),
}

impl End {
    /// With the lines that wait for audit.log; nobody takes one here.
    fn of(core: &Core, command: usize) -> rusqlite::Result<(Self, i64)> {
        let id = workload::id(command);
        let sql = "SELECT count(*) FROM audit WHERE json_extract(line, '$.id') = ?";
        let lines = core.conn.query_row(sql, [id.as_str()], |row| row.get(0))?;
        let end = match ops::result(core, &id)? {
            Some(done) => Self::Outcome(done.outcome),
            None => Self::None(rows::find(&core.conn, &id)?.map(|row| row.state)),
        };
        Ok((end, lines))
    }
}

/// Every crash of a trace that began on `image`, with what it leaves. Crashes at one point that leave the same are
/// one case.
pub(super) fn crashes<'a>(
    image: &Image,
    trace: &'a [Op],
    seeds: u64,
    wanted: impl Fn(Crash) -> bool + 'a,
) -> impl Iterator<Item = (Crash, Image)> + 'a {
    let mut platter = Platter::new(image);
    (0..=trace.len()).flat_map(move |point| {
        if let Some(op) = point.checked_sub(1).and_then(|last| trace.get(last)) {
            platter.step(op);
        }
        let modes = Mode::ALL.iter().take(if platter.is_clean() { 1 } else { Mode::ALL.len() });
        let drawn = modes.flat_map(|(mode, _)| {
            (0..if mode.draws() { seeds } else { 1 }).map(move |seed| Crash { point, mode: *mode, seed })
        });
        let mut cases: Vec<(Crash, Image)> = Vec::new();
        for crash in drawn.filter(|crash| wanted(*crash)) {
            let image = platter.crash(crash);
            if !cases.iter().any(|(_, other)| *other == image) {
                cases.push((crash, image));
            }
        }
        cases
    })
}

fn state_in(dir: &TempDir) -> PathBuf {
    // The journal makes it, with the modes that it insists on.
    dir.path().join("state")
}
