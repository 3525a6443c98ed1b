//! What a dead daemon left behind, looked at before anything is recovered: supervisors that live are taken over, what
//! lost its supervisor is ended, since a row that becomes `interrupted` must not have a program that still works at it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::fs::FlockOperation;

use super::mark::{self, Mark};
use super::process;
use super::programs::{Programs, Settled};
use super::supervise::group;
use crate::journal::begun::Record;
use crate::journal::{Ended, Left, Locked, OpenError};
use crate::model::{BootId, JournalId, Outcome};

/// Longest wait for supervisors that a dead daemon had just started to make their records.
const STARTS: Duration = Duration::from_secs(10);
const STARTS_PAUSE: Duration = Duration::from_millis(10);

/// The programs of earlier daemons, as this one found them.
#[derive(Debug)]
pub struct Leftovers {
    programs: Arc<dyn Programs>,
    state: PathBuf,
    boot_id: BootId,
    settled: Settled,
}

impl Leftovers {
    /// Looks, and has every program ended that was started here and has no supervisor any more. Blocks.
    ///
    /// # Errors
    /// The begun records cannot be read.
    pub fn settle(
        programs: Arc<dyn Programs>,
        locked: &Locked,
        state: &Path,
        boot_id: &BootId,
    ) -> Result<Self, OpenError> {
        let settled = programs.settle(locked, state, boot_id)?;
        Ok(Self { programs, state: state.to_owned(), boot_id: boot_id.clone(), settled })
    }

    /// Processes that were ended.
    pub fn ended(&self) -> usize {
        self.settled.ended
    }

    /// What is left of the process that carries a command out, for recovery. Blocks.
    pub fn left(&self, begun: &Record) -> Left<Box<Outcome>> {
        let Some(supervisor) = &begun.supervisor else { return Left::Nothing };
        // Before the outcome: one that dies in between has written it.
        let lives = self.programs.lives(supervisor, &self.boot_id);
        match Ended::read(&self.state, begun) {
            Ok(Some(outcome)) => Left::Ended(Box::new(outcome)),
            Ok(None) if lives => Left::Alive,
            Ok(None) => {
                // It died since: its program runs on, and must not behind the word that it was interrupted.
                if self.settled.spared.contains(&(begun.id.clone(), begun.attempt)) {
                    self.programs.end(begun);
                }
                Ended::give_back(&self.state, begun);
                Left::Nothing
            }
            Err(error) => {
                tracing::error!(id = %begun.id, %error, "an outcome record cannot be read now; it is tried again");
                Left::Alive
            }
        }
    }
}

/// Programs of journals that are not named in this state directory are never touched.
pub(super) fn settle(locked: &Locked, state: &Path, boot_id: &BootId) -> Result<Settled, OpenError> {
    let none_starts = await_starts(state);
    let records = locked.begun()?;
    let lives = |record: &Record| {
        record.supervisor.as_ref().is_some_and(|supervisor| process::may_live(supervisor, boot_id))
    };
    let (alive, gone): (Vec<&Record>, Vec<&Record>) = records.iter().partition(|record| lives(record));
    for supervisor in gone.iter().filter_map(|record| record.supervisor.as_ref()) {
        if supervisor.boot_id == *boot_id && !group::end(&supervisor.groups) {
            tracing::error!(groups = ?supervisor.groups, "control groups of an earlier program do not become empty");
        }
    }
    if none_starts {
        give_back_room(state, &records, &gone);
    }
    let spared: Vec<Mark> = alive.iter().map(|record| Mark::of(record)).collect();
    let mut journals: Vec<&JournalId> = records.iter().map(|record| &record.journal_id).collect();
    let (own, former) = (locked.facts().journal_id, locked.former_id()?);
    journals.extend([&own].into_iter().chain(&former));
    journals.sort();
    journals.dedup();
    let ended = journals.into_iter().map(|journal| end(&Mark::journal(journal), &spared)).sum();
    let spared = alive.iter().map(|record| (record.id.clone(), record.attempt)).collect();
    Ok(Settled { ended, spared })
}

/// Room for outcomes that nobody writes any more: a supervisor died before its record was made, or within an attempt that
/// another one has followed. That of the last attempt goes when the command is settled.
fn give_back_room(state: &Path, records: &[Record], gone: &[&Record]) {
    match Ended::give_back_unbegun(state) {
        Ok(0) => {}
        Ok(files) => tracing::info!(files, "room for outcomes of programs that never began was given back"),
        Err(error) => {
            tracing::warn!(state = %state.display(), %error, "room for outcomes that never come stays reserved")
        }
    }
    // Sorted by id and attempt.
    let superseded = records.windows(2).filter(|pair| pair[0].id == pair[1].id).map(|pair| &pair[0]);
    for record in superseded.filter(|record| gone.contains(record)) {
        Ended::give_back(state, record);
    }
}

/// The directory of the begun records, open: its lock is held by every supervisor that has not made its record yet.
pub(super) fn records(state: &Path) -> io::Result<File> {
    File::open(state.join("begun"))
}

/// Waits until no supervisor of a dead daemon is about to make its record. False when one still may.
fn await_starts(state: &Path) -> bool {
    let Ok(records) = records(state) else { return false };
    let mut waited = Duration::ZERO;
    while rustix::fs::flock(&records, FlockOperation::NonBlockingLockExclusive).is_err() {
        if waited >= STARTS {
            tracing::error!(state = %state.display(), "a program that an earlier daemon was starting neither starts nor ends");
            return false;
        }
        thread::sleep(STARTS_PAUSE);
        waited += STARTS_PAUSE;
    }
    true
}

/// Ends what the program of one record started, its supervisor being gone. Blocks.
pub(super) fn end_one(begun: &Record) {
    if let Some(supervisor) = &begun.supervisor
        && !group::end(&supervisor.groups)
    {
        tracing::error!(id = %begun.id, groups = ?supervisor.groups, "control groups do not become empty");
    }
    end(&Mark::of(begun), &[]);
}

/// Ends every program that carries the mark and none of the spared ones; how many there were. Blocks.
fn end(mark: &Mark, spared: &[Mark]) -> usize {
    match mark::sweep(mark, spared) {
        Ok(swept) => {
            for pid in &swept.killed {
                tracing::warn!(pid, mark = mark.value(), "ended a program that had lost its supervisor");
            }
            if swept.remain {
                tracing::error!(mark = mark.value(), "a program does not go away on SIGKILL");
            }
            swept.killed.len()
        }
        Err(error) => {
            tracing::error!(mark = mark.value(), %error, "cannot look for programs in /proc");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};

    use rand::SeedableRng as _;

    use super::*;
    use crate::exec::Supervisors;
    use crate::journal::begun::Supervisor;
    use crate::journal::{self, Mode};
    use crate::model::{CommandId, Digest, NodeId, ServerTime};

    fn sleeper(mark: &str) -> Child {
        Command::new("/bin/sleep").arg("60").env(mark::VARIABLE, mark).spawn().expect("a sleeper")
    }

    #[test]
    fn a_leftover_is_killed_by_its_mark_and_other_journals_are_untouched() {
        let mut rng = rand::rngs::StdRng::from_os_rng();
        let (ours, other) = (JournalId::random(&mut rng), JournalId::random(&mut rng));
        let mut left = sleeper(&format!("{ours}/c-1/1"));
        let mut second = sleeper(&format!("{ours}/c-2/3"));
        let mut spared = sleeper(&format!("{other}/c-1/1"));

        assert_eq!(end(&Mark::journal(&ours), &[]), 2);
        assert_eq!(left.wait().expect("a status").signal(), Some(9));
        assert_eq!(second.wait().expect("a status").signal(), Some(9));
        assert!(spared.try_wait().expect("a status").is_none(), "another journal's program was ended");
        assert_eq!(end(&Mark::journal(&ours), &[]), 0);

        let living = Mark::attempt(&other, &CommandId::new("c-1").expect("an id"), 1);
        assert_eq!(end(&Mark::journal(&other), &[living]), 0, "its supervisor lives");
        spared.kill().expect("a signal");
        spared.wait().expect("a status");
    }

    /// A record of a program whose supervisor is this process.
    fn record(journal_id: &JournalId, boot_id: &BootId, supervisor: &Child) -> Record {
        let pid = rustix::process::Pid::from_child(supervisor);
        let start = process::stat(pid).expect("read").expect("a process").start;
        Record {
            id: CommandId::new("c-1").expect("an id"),
            body_sha256: Digest::of(b"body"),
            kind: "node.exec".into(),
            attempt: 1,
            node_id: Some(NodeId::new("n-1").expect("an id")),
            journal_id: journal_id.clone(),
            not_after: ServerTime(1),
            started: None,
            boot_id: Some(boot_id.clone()),
            retry_safe: false,
            supervisor: Some(Supervisor {
                pid: pid.as_raw_nonzero().get(),
                start,
                boot_id: boot_id.clone(),
                groups: Vec::new(),
            }),
        }
    }

    #[test]
    fn a_program_whose_supervisor_dies_between_the_look_and_the_recovery_is_ended_before_it_is_called_interrupted()
     {
        let state = tempfile::tempdir().expect("a directory");
        let state = state.path().join("state");
        // Random: its name marks the processes of this test among all of the machine.
        let journal_id = JournalId::random(&mut rand::rngs::StdRng::from_os_rng());
        let options = journal::Options::of_a_test(state.clone(), Mode::Inline);
        let boot_id = options.boot_id.clone();
        let locked = Locked::open(options, journal_id.clone()).expect("a journal");
        let mut supervisor = Command::new("/bin/sleep").arg("60").spawn().expect("a supervisor");
        let mut program = sleeper(&format!("{journal_id}/c-1/1"));
        let begun = record(&journal_id, &boot_id, &supervisor);
        begun.create(&state).expect("written");

        let supervisors = Arc::new(Supervisors::new("/bin/false".into()));
        let leftovers = Leftovers::settle(supervisors, &locked, &state, &boot_id).expect("looked");
        assert!(matches!(leftovers.left(&begun), Left::Alive));
        assert!(program.try_wait().expect("a status").is_none(), "it has its supervisor");
        supervisor.kill().expect("a signal");
        supervisor.wait().expect("a status");
        assert!(matches!(leftovers.left(&begun), Left::Nothing));
        assert_eq!(program.wait().expect("a status").signal(), Some(9));
    }

    #[test]
    fn room_of_programs_that_never_began_and_of_attempts_that_others_followed_is_given_back() {
        let state = tempfile::tempdir().expect("a directory");
        let state = state.path().join("state");
        // Random: its name marks the processes of this test among all of the machine.
        let journal_id = JournalId::random(&mut rand::rngs::StdRng::from_os_rng());
        let options = journal::Options::of_a_test(state.clone(), Mode::Inline);
        let boot_id = options.boot_id.clone();
        let locked = Locked::open(options, journal_id.clone()).expect("a journal");
        let mut supervisor = Command::new("/bin/sleep").arg("60").spawn().expect("a supervisor");
        let alive = Record { attempt: 3, retry_safe: true, ..record(&journal_id, &boot_id, &supervisor) };
        let dead = |attempt| Record { attempt, supervisor: None, ..alive.clone() };
        for record in [&dead(1), &dead(2), &alive] {
            record.create(&state).expect("written");
        }
        let unbegun = Record { id: CommandId::new("c-2").expect("an id"), ..dead(1) };
        for record in [&unbegun, &dead(1), &dead(2), &alive] {
            Ended::reserve(&state, record, 10).expect("room");
        }
        let supervisors = Arc::new(Supervisors::new("/bin/false".into()));
        Leftovers::settle(supervisors, &locked, &state, &boot_id).expect("looked");
        let left = std::fs::read_dir(state.join("outcome")).expect("a directory");
        let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
        assert_eq!(left, ["c-1~3.json"], "its supervisor lives");
        supervisor.kill().expect("a signal");
        supervisor.wait().expect("a status");
    }
}
