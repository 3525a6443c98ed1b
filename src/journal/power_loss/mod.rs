//! Power loss at every step of the disk, under the real journal.
//!
//! A run takes a dozen commands through a journal whose files lie on a simulated disk ([`disk`], reached by SQLite
//! through [`vfs`]), and keeps a ledger of what was proven durable when ([`workload`]). Then each prefix of the
//! disk's trace is a crash: what was synced is there, and the rest is dropped, kept, reordered or torn ([`crash`]).
//! The journal is opened and recovered on what is left, and held against the ledger ([`sweep`]).
//!
//! A harness that finds nothing proves nothing, so journals that are wrong on purpose are swept as well, and each
//! must be caught. A failure names the case; `BCD_POWER_LOSS=<case>` with the same test runs that one alone.

mod crash;
mod disk;
mod faults;
mod openings;
mod sweep;
mod vfs;
mod workload;

use self::disk::Op;
use self::sweep::{Sweep, Tally};
use self::vfs::Vfs;
use self::workload::{Scenario, now};
use super::Admission;
use super::settings::{SETTINGS, Setting};
use crate::model::ServerTime;

/// The settings of production but for those named; so small a checkpoint that a dozen commands meet several.
fn scenario(changes: &[(&'static str, &'static str, &'static str)]) -> Scenario {
    let mut settings = SETTINGS.to_vec();
    for &(name, set, read) in [("wal_autocheckpoint", "12", "12")].iter().chain(changes) {
        let at = settings.iter().position(|setting| setting.name == name).expect("a setting");
        settings[at] = Setting { name, set, read };
    }
    Scenario { settings, wal_bytes: 64 << 10, effect_first: false }
}

/// Sweeps, or replays the one case that the environment names; a replay that is good has nothing more to assert.
fn swept(scenario: Scenario, how: impl FnOnce(&Sweep) -> Tally) -> Option<Tally> {
    let sweep = Sweep::record(scenario);
    if let Some(case) = sweep::replay() {
        let faults = sweep.one_case(&case);
        assert!(faults.is_empty(), "{faults:#?}");
        return None;
    }
    let tally = how(&sweep);
    println!("{tally:?}");
    Some(tally)
}

#[test]
fn no_power_loss_takes_what_was_proven_durable() {
    let Some(tally) = swept(scenario(&[]), |sweep| sweep.every_crash(12)) else { return };
    assert_eq!(tally.bad(), 0, "{:#?}", tally.first);
    assert!(tally.cases >= 5000, "only {} cases", tally.cases);
}

#[test]
fn no_power_loss_during_recovery_takes_what_was_proven_durable() {
    let Some(tally) = swept(scenario(&[]), |sweep| sweep.every_crash_of_recoveries(7)) else { return };
    assert_eq!(tally.bad(), 0, "{:#?}", tally.first);
    assert!(tally.cases >= 1000, "only {} cases", tally.cases);
}

/// What a run does not do, its sweep does not crash.
#[test]
fn a_run_meets_every_operation_that_a_disk_has_and_several_checkpoints() {
    let sweep = Sweep::record(scenario(&[]));
    let count = |wanted: &dyn Fn(&Op) -> bool| sweep.trace().iter().filter(|op| wanted(op)).count();
    assert!(count(&|op| matches!(op, Op::Create { .. })) >= 2);
    assert!(count(&|op| matches!(op, Op::Unlink { .. })) >= 1);
    assert!(count(&|op| matches!(op, Op::Truncate { .. })) >= 1);
    assert!(count(&|op| matches!(op, Op::SyncDir)) >= 2);
    // The database is the first file; a checkpoint syncs it once.
    assert!(count(&|op| matches!(op, Op::Sync { inode: 0 })) >= 6);
}

#[test]
fn a_journal_that_does_not_sync_its_commits_is_caught() {
    let normal = scenario(&[("synchronous", "NORMAL", "1")]);
    let Some(tally) = swept(normal, |sweep| sweep.some_crashes(5)) else { return };
    assert!(tally.lost > 0, "{tally:?}");
}

#[test]
fn a_journal_that_never_syncs_is_caught() {
    let off = scenario(&[("synchronous", "OFF", "0")]);
    let Some(tally) = swept(off, |sweep| sweep.some_crashes(5)) else { return };
    assert!(tally.lost > 0 && tally.corrupt > 0, "{tally:?}");
}

/// Its commit point is an unlink that nothing syncs. With exclusive locking SQLite would keep the file.
#[test]
fn a_rollback_journal_is_caught() {
    let delete = scenario(&[("journal_mode", "DELETE", "delete"), ("locking_mode", "NORMAL", "normal")]);
    let Some(tally) = swept(delete, |sweep| sweep.some_crashes(5)) else { return };
    assert!(tally.lost > 0, "{tally:?}");
}

#[test]
fn an_effect_before_its_accept_is_caught() {
    let first = Scenario { effect_first: true, ..scenario(&[]) };
    let Some(tally) = swept(first, |sweep| sweep.some_crashes(5)) else { return };
    assert!(tally.effects_forgotten > 0 && tally.lost == 0, "{tally:?}");
}

/// The first commit after the log begins anew also syncs its new header, so one goes before.
#[test]
fn each_step_of_a_command_is_one_sync_over_a_log_that_does_not_grow() {
    let dir = tempfile::tempdir().expect("a directory");
    let vfs = Vfs::new();
    let production = Scenario { settings: SETTINGS.to_vec(), wal_bytes: 1 << 20, effect_first: false };
    let state = dir.path().join("state");
    let journal = workload::open(&vfs, &production, &state, "i-1", workload::journal_id()).expect("open");
    now(journal.welcomed(1, ServerTime(1))).expect("written");
    let mut from = vfs.disk().trace().len();
    let mut one_sync = |step: &str| {
        let disk = vfs.disk();
        let ops = &disk.trace()[from..];
        let writes = |op: &Op| matches!(op, Op::Write { grows: false, .. });
        let (last, before) = ops.split_last().expect("a write");
        assert!(matches!(last, Op::Sync { .. }) && before.iter().all(writes), "{step}: {ops:?}");
        from += ops.len();
    };
    for command in 0..4 {
        let admission = now(journal.admit(workload::verified(command), workload::context()));
        one_sync("accept");
        let Admission::Accepted(accepted) = admission.expect("written") else { panic!("not accepted") };
        let running = now(journal.start(accepted, None)).expect("written");
        one_sync("start");
        now(journal.finish(running, workload::outcome(command))).expect("written");
        one_sync("finish");
        journal.acked(vec![workload::id(command)]);
        one_sync("ack");
    }
    vfs.disk().cut_power();
}
