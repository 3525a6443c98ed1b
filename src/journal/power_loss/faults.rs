//! A disk that is full or broken from the n-th operation on, for every n, under the real journal: what fails says why,
//! nothing starts that is not written, nothing that was written is lost, and when the cause is gone all goes on, in the
//! same process unless a sync had failed.

use std::path::Path;

use super::disk::DiskError;
use super::vfs::Vfs;
use super::workload::{self, Scenario, id, now, outcome, verified};
use crate::journal::{Admission, Durable, Failed, Journal, Running, WriteError};
use crate::model::{Reason, ServerTime, Terminal};

/// Commands of a run: their commits meet several checkpoints.
const COMMANDS: usize = 6;

/// A node over the journal, and a gateway that delivers again.
struct Case<'a> {
    vfs: &'a Vfs,
    scenario: &'a Scenario,
    state: &'a Path,
    fault: DiskError,
    processes: u32,
    journal: Option<Journal>,
    /// How often the effect of each command began.
    effects: [u32; COMMANDS],
    /// Errors that were answered.
    refused: u32,
    synced_in_vain: bool,
}

impl Case<'_> {
    /// The open journal; a process that cannot open it is started again when the disk is mended.
    fn journal(&mut self) -> Journal {
        loop {
            if let Some(journal) = &self.journal {
                return journal.clone();
            }
            self.processes += 1;
            let incarnation = format!("i-{}", self.processes);
            let id = workload::journal_id();
            match workload::open(self.vfs, self.scenario, self.state, &incarnation, id) {
                Ok(journal) => self.journal = Some(journal),
                Err(error) => assert!(self.vfs.disk().mend(), "not because of the fault: {error:#}"),
            }
        }
    }

    /// Judges a write that failed, and mends the disk; a journal whose sync failed ends.
    fn failed(&mut self, error: &WriteError) {
        self.refused += 1;
        let journal = self.journal();
        let ended = futures_util::FutureExt::now_or_never(journal.failed());
        let wanted = match (ended, self.fault) {
            (None, DiskError::Full) => Reason::Disk,
            _ => Reason::IoError,
        };
        assert_eq!(error.why, wanted, "{error}");
        assert!(!journal.troubles().is_empty(), "a standing fault is shown");
        assert!(self.vfs.disk().mend(), "not because of the fault: {error}");
        if let Some(why) = ended {
            assert_eq!(why, Failed::Sync);
            self.synced_in_vain = true;
            drop(journal);
            self.journal = None;
        }
    }

    /// Delivers a command until it has ended.
    fn carry(&mut self, command: usize) {
        loop {
            let journal = self.journal();
            match now(journal.admit(verified(command), workload::context())) {
                Ok(Admission::Accepted(accepted)) => {
                    let mut accepted = accepted;
                    loop {
                        match now(journal.start(accepted, None)) {
                            Ok(running) => break self.run(&journal, command, running),
                            Err((back, error)) => {
                                accepted = back;
                                self.failed(&error);
                                if self.journal.is_none() {
                                    break;
                                }
                            }
                        }
                    }
                }
                Ok(Admission::Restarted(running)) => self.run(&journal, command, running),
                Ok(Admission::Ended(_)) => return,
                Ok(Admission::Answered(answer)) => panic!("{answer:?}"),
                Err(error) => self.failed(&error),
            }
        }
    }

    fn run(&mut self, journal: &Journal, command: usize, mut running: Durable<Running>) {
        self.effects[command] += 1;
        let mut end = outcome(command);
        loop {
            match now(journal.finish(running, end)) {
                Ok(_) => return,
                Err((back, outcome, error)) => {
                    (running, end) = (back, outcome);
                    self.failed(&error);
                    if self.journal.is_none() {
                        return;
                    }
                }
            }
        }
    }
}

/// Runs every command with a disk that fails from the operation `n` on, until something failed and it was mended.
/// False when the run had fewer operations.
fn one(vfs: &Vfs, scenario: &Scenario, state: &Path, n: usize, fault: DiskError) -> bool {
    vfs.boot(super::disk::Image::new());
    vfs.disk().fail_after(n, fault);
    let mut case = Case {
        vfs,
        scenario,
        state,
        fault,
        processes: 0,
        journal: None,
        effects: [0; COMMANDS],
        refused: 0,
        synced_in_vain: false,
    };
    let journal = case.journal();
    if let Err(error) = now(journal.welcomed(7, ServerTime(1))) {
        case.failed(&error);
    }
    drop(journal);
    for command in 0..COMMANDS {
        case.carry(command);
        if command >= 2 {
            case.journal().acked(vec![id(command - 2)]);
        }
    }
    let journal = case.journal();
    now(journal.close());
    drop(journal);
    case.journal = None;
    let struck = vfs.disk().mend() || case.refused > 0 || case.processes > 1;
    // What was acked may have been told with the fault: the ack is not proven, the result is.
    let journal = case.journal();
    for command in 0..COMMANDS {
        let done = now(journal.result(id(command))).expect("read").expect("an end").into_inner();
        let interrupted = done.outcome.state != Terminal::Succeeded;
        assert!(!interrupted || case.synced_in_vain, "operation {n}, {fault:?}: {command}: {done:?}");
        let most = if workload::retry_safe(command) && case.synced_in_vain { 2 } else { 1 };
        assert!(case.effects[command] <= most, "operation {n}, {fault:?}: {command} ran twice");
    }
    struck
}

fn every_operation(fault: DiskError) {
    let scenario = super::scenario(&[]);
    let vfs = Vfs::new();
    // Only the lock lies there.
    let dir = tempfile::tempdir().expect("a directory");
    let state = dir.path().join("state");
    let mut n = 0;
    while one(&vfs, &scenario, &state, n, fault) {
        n += 1;
    }
    assert!(n > 100, "only {n} operations met a fault");
}

#[test]
fn a_disk_full_at_any_write_of_the_journal_is_told_and_loses_nothing_and_all_goes_on_with_room() {
    every_operation(DiskError::Full);
}

#[test]
fn an_error_at_any_write_of_the_journal_is_told_and_loses_nothing_and_all_goes_on_after_it() {
    every_operation(DiskError::Broken);
}

#[test]
fn what_waits_for_a_later_commit_fails_nobody_who_only_reads_while_the_disk_is_full() {
    let scenario = super::scenario(&[]);
    let vfs = Vfs::new();
    let dir = tempfile::tempdir().expect("a directory");
    let state = dir.path().join("state");
    let opened = workload::open(&vfs, &scenario, &state, "i-1", workload::journal_id());
    let journal = opened.expect("a journal");
    vfs.disk().fail_after(0, DiskError::Full);
    let mark = workload::context().now;
    journal.note_time(mark.expect("a time"), None);
    let refused = now(journal.welcomed(1, ServerTime(1))).expect_err("a full disk");
    assert_eq!(refused.why, Reason::Disk);
    for _ in 0..3 {
        assert!(now(journal.unacked(None, 1)).is_ok(), "the mark that waits makes no reader fail");
        journal.acked(vec![id(0)]);
    }
    let known = || now(journal.snapshot()).expect("read").mark;
    assert!(known() < mark);
    vfs.disk().mend();
    now(journal.look(true)).expect("written");
    assert_eq!(known(), mark, "what waited is not forgotten");
    vfs.disk().cut_power();
}
