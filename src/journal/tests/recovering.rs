//! The recovery table on real files, and the begun records beside it.

use super::*;
use crate::journal::begun;

fn interrupted(outcome: &Outcome) {
    let told = (outcome.state, outcome.reason, outcome.effect, outcome.attempt);
    assert_eq!(told, (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown, 1));
}

fn begin(machine: &Machine, journal: &Journal, running: &Durable<Running>) -> Result<Begun, BegunError> {
    Begun::create(&machine.state(), &machine.starter(journal), running)
}

async fn begun(machine: &Machine, journal: &Journal, name: &str) -> Durable<Running> {
    let running = running(journal, name, ONCE).await;
    begin(machine, journal, &running).expect("a record");
    running
}

#[tokio::test]
async fn accepted_stays_and_waits() {
    let machine = Machine::new();
    drop(accepted(&machine.start(), "c-1", ONCE).await);
    let (_, recovered) = machine.start_at(ISSUED);
    assert_eq!((recovered.waiting, recovered.interrupted, recovered.unacked), (vec![id("c-1")], vec![], 0));
}

#[tokio::test]
async fn accepted_past_not_after_by_signed_time_is_rejected_expired() {
    let machine = Machine::new();
    drop(accepted(&machine.start(), "c-1", ONCE).await);
    let (journal, recovered) = machine.start_at(NOT_AFTER);
    let outcome = result(&journal, "c-1").await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Rejected, Some(Reason::Expired)));
    assert_eq!((outcome.effect, recovered.unacked), (Effect::None, 1));
}

#[tokio::test]
async fn the_stored_signed_time_counts_where_the_caller_knows_none() {
    let machine = Machine::new();
    let journal = machine.start();
    drop(accepted(&journal, "c-1", ONCE).await);
    journal.note_time(at(LATER), Some(at(LATER)));
    journal.close().await;
    let (_, recovered) = machine.locked().recover(None).expect("recovered");
    assert_eq!((recovered.waiting.len(), recovered.unacked), (0, 1));
}

#[tokio::test]
async fn a_working_clock_that_a_gateway_pushed_ahead_expires_nothing() {
    let machine = Machine::new();
    let journal = machine.start();
    drop(accepted(&journal, "c-1", ONCE).await);
    journal.welcomed(1, at(MUCH_LATER)).await.expect("written");
    drop(journal);
    assert_eq!(machine.start_at(ISSUED).1.waiting, [id("c-1")]);
}

#[tokio::test]
async fn accepted_with_a_begun_record_is_interrupted() {
    let machine = Machine::new();
    let journal = machine.start();
    begun(&machine, &journal, "c-1").await;
    drop(journal);
    // An old copy, in which the command had not started yet.
    machine.sql().execute("UPDATE commands SET state = 1, attempt = 0", []).expect("written");
    let (journal, recovered) = machine.start_at(ISSUED);
    assert_eq!(recovered.interrupted, [id("c-1")]);
    interrupted(&result(&journal, "c-1").await);
}

#[tokio::test]
async fn running_that_may_not_run_twice_is_interrupted_and_sent() {
    let machine = Machine::new();
    drop(running(&machine.start(), "c-1", ONCE).await);
    let (journal, recovered) = machine.start_at(ISSUED);
    assert_eq!((recovered.interrupted, recovered.unacked), (vec![id("c-1")], 1));
    let page = journal.unacked(None, usize::MAX).await.expect("read");
    interrupted(&page.results[0].outcome);
    assert_eq!(page.results[0].outcome.started, Some(at(NOW)));
    interrupted(&ended(deliver(&journal, "c-1", ONCE).await));
}

#[tokio::test]
async fn running_that_may_run_twice_waits_and_expires_by_signed_time_as_interrupted() {
    let machine = Machine::new();
    drop(running(&machine.start(), "c-1", RETRY_SAFE).await);
    let (journal, recovered) = machine.start_at(ISSUED);
    assert_eq!(recovered.waiting, [id("c-1")]);
    drop(journal);
    let (journal, recovered) = machine.start_at(NOT_AFTER);
    assert_eq!(recovered.interrupted, [id("c-1")]);
    interrupted(&result(&journal, "c-1").await);
}

#[tokio::test]
async fn what_waits_ends_in_the_living_process_too_once_signed_time_passes() {
    let machine = Machine::new();
    let journal = machine.start();
    drop(accepted(&journal, "c-1", ONCE).await);
    drop(running(&journal, "c-2", RETRY_SAFE).await);
    drop(accepted(&journal, "c-3", RETRY_SAFE).await);
    drop(journal);
    let (journal, _) = machine.start_at(ISSUED);
    let _taken_up = accepted(&journal, "c-3", RETRY_SAFE).await;
    assert_eq!(journal.expire_left(at(NOW)).await.expect("written").len(), 0);
    let ended = journal.expire_left(at(NOT_AFTER)).await.expect("written");
    let told: Vec<_> = ended.iter().map(|done| (done.id.as_str(), done.outcome.reason)).collect();
    assert_eq!(told, [("c-1", Some(Reason::Expired)), ("c-2", Some(Reason::Interrupted))]);
    assert_eq!(journal.expire_left(at(NOT_AFTER)).await.expect("written").len(), 0, "once");
}

#[tokio::test]
async fn what_could_not_be_expired_is_expired_at_the_next_call() {
    let machine = Machine::new();
    drop(accepted(&machine.start(), "c-1", ONCE).await);
    let (journal, faults) = machine.start_faulty();
    faults.fail_some(At::Commit, rusqlite::ffi::SQLITE_FULL, 0, 1);
    journal.expire_left(at(NOT_AFTER)).await.expect_err("a full disk");
    assert_eq!(journal.expire_left(at(NOT_AFTER)).await.expect("written").len(), 1);
}

#[tokio::test]
async fn done_and_not_acked_is_sent_again() {
    let machine = Machine::new();
    done(&machine.start(), "c-1", ONCE).await;
    let (journal, recovered) = machine.start_at(MUCH_LATER);
    assert_eq!(recovered.unacked, 1);
    let page = journal.unacked(None, usize::MAX).await.expect("read");
    assert_eq!(page.results[0].outcome, success());
}

#[tokio::test]
async fn a_begun_record_forbids_a_second_start_for_ever() {
    let machine = Machine::new();
    let journal = machine.start();
    let first = begun(&machine, &journal, "c-1").await;
    assert!(matches!(begin(&machine, &journal, &first), Err(BegunError::AlreadyExists { .. })));
}

#[tokio::test]
async fn a_record_that_could_not_be_made_can_be_made_later() {
    let machine = Machine::new();
    let journal = machine.start();
    let first = running(&journal, "c-1", ONCE).await;
    std::fs::remove_dir(machine.state().join("begun")).expect("removed");
    assert!(matches!(begin(&machine, &journal, &first), Err(BegunError::Io { .. })));
    std::fs::create_dir(machine.state().join("begun")).expect("made");
    begin(&machine, &journal, &first).expect("a record");
    let mode = std::os::unix::fs::MetadataExt::mode(
        &machine.state().join("begun/c-1.json").metadata().expect("a file"),
    );
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn a_lost_journal_learns_from_the_begun_records_and_runs_nothing_again() {
    let machine = Machine::new();
    let journal = machine.start();
    begun(&machine, &journal, "c-1").await;
    journal.close().await;
    std::fs::remove_file(machine.db()).expect("lost");
    let started = machine.locked().begun().expect("read");
    assert_eq!(
        started.iter().map(|record| record.journal_id.clone()).collect::<Vec<_>>(),
        [journal_id("j-1")]
    );
    let (journal, recovered) = machine.start_at(ISSUED);
    assert_eq!((journal.id(), recovered.interrupted), (journal_id("j-2"), vec![id("c-1")]));
    let outcome = ended(deliver(&journal, "c-1", ONCE).await);
    interrupted(&outcome);
    assert_eq!(outcome.started, Some(at(NOW)));
    drop(journal);
    assert_eq!(machine.start_at(ISSUED).1.interrupted, [], "it is settled once");
}

#[tokio::test]
async fn an_old_copy_of_the_journal_restored_alone_runs_nothing_again() {
    let machine = Machine::new();
    machine.start().close().await;
    let copy = std::fs::read(machine.db()).expect("a copy");
    let journal = machine.start();
    let first = begun(&machine, &journal, "c-1").await;
    journal.finish(first, success()).await.expect("finished");
    journal.acked(vec![id("c-1")]);
    journal.close().await;
    std::fs::write(machine.db(), copy).expect("restored");
    let (journal, _) = machine.start_at(ISSUED);
    interrupted(&ended(deliver(&journal, "c-1", ONCE).await));
}

#[tokio::test]
async fn a_torn_begun_record_stays_and_forbids_its_command() {
    let machine = Machine::new();
    let path = machine.state().join("begun/c-1.json");
    machine.start();
    std::fs::write(&path, b"{\"id\":").expect("written");
    let (journal, recovered) = machine.start_at(ISSUED);
    assert_eq!(recovered.interrupted, []);
    let first = running(&journal, "c-1", ONCE).await;
    assert!(matches!(begin(&machine, &journal, &first), Err(BegunError::AlreadyExists { .. })));
    assert!(path.exists());
}

#[tokio::test]
async fn a_record_under_the_name_of_another_command_is_not_believed() {
    let machine = Machine::new();
    let journal = machine.start();
    begun(&machine, &journal, "c-1").await;
    drop(journal);
    let dir = machine.state().join("begun");
    std::fs::copy(dir.join("c-1.json"), dir.join("c-2.json")).expect("copied");
    let records = begun::read_all(&machine.state(), "n-1").expect("read");
    assert_eq!((records.whole.len(), records.unreadable), (1, vec![dir.join("c-2.json")]));
}

#[tokio::test]
async fn records_of_another_node_make_no_row_forbid_their_own_command_and_are_counted_and_told() {
    let machine = Machine::new();
    let journal = machine.start();
    for name in ["c-1", "c-2"] {
        let running = running(&journal, name, ONCE).await;
        let starter =
            begun::Starter { node_id: NodeId::new("n-2").expect("an id"), ..machine.starter(&journal) };
        let begun = begun::Record::of(&starter, &running);
        begun.create(&machine.state()).expect("a record");
        if name == "c-2" {
            crate::journal::Ended { begun, outcome: success() }.write(&machine.state()).expect("an outcome");
            std::fs::remove_file(machine.state().join("begun/c-2.json")).expect("removed");
        }
    }
    drop(journal);
    machine.sql().execute("DELETE FROM commands", []).expect("written");
    let locked = machine.locked();
    assert_eq!(locked.begun().expect("read"), [], "no program of theirs is taken over or ended");
    let (journal, recovered) = locked.recover(Some(at(ISSUED))).expect("recovered");
    assert_eq!((recovered.foreign, recovered.interrupted, recovered.unacked), (2, vec![], 0));
    assert!(journal.result(id("c-1")).await.expect("read").is_none());
    assert_eq!(begun::journals(&machine.state(), &machine.starter(&journal).node_id).expect("read").len(), 1);
    let problems = journal.check().await.expect("checked").problems;
    assert!(problems.len() == 1 && problems[0].contains("another node, n-2"), "{problems:?}");
    let first = running(&journal, "c-1", ONCE).await;
    assert!(matches!(begin(&machine, &journal, &first), Err(BegunError::AlreadyExists { .. })));
}

#[tokio::test]
async fn a_tombstone_and_its_record_go_five_minutes_past_not_after_by_signed_time() {
    let machine = Machine::new();
    let journal = machine.start();
    let first = begun(&machine, &journal, "c-1").await;
    journal.finish(first, success()).await.expect("finished");
    journal.acked(vec![id("c-1")]);
    let tombstones =
        async |journal: &Journal| journal.snapshot().await.expect("a snapshot").counts.tombstones;
    journal.note_time(at(MUCH_LATER), Some(at(LATER)));
    assert_eq!((tombstones(&journal).await, machine.records()), (1, 1), "the working clock prunes nothing");
    journal.note_time(at(MUCH_LATER), Some(at(MUCH_LATER)));
    // The first commit carries the lazy write; the second reads.
    tombstones(&journal).await;
    assert_eq!((tombstones(&journal).await, machine.records()), (0, 0));
}

#[tokio::test]
async fn a_record_whose_tombstone_went_is_removed_and_not_taken_for_a_lost_command() {
    let machine = Machine::new();
    let journal = machine.start();
    begun(&machine, &journal, "c-1").await;
    drop(journal);
    machine.sql().execute("DELETE FROM commands", []).expect("written");
    let (journal, recovered) = machine.start_at(MUCH_LATER);
    assert_eq!((recovered.interrupted, machine.records()), (vec![], 0));
    assert!(journal.result(id("c-1")).await.expect("read").is_none());
}

#[tokio::test]
async fn a_recovery_that_cannot_be_written_is_an_error_and_changes_nothing() {
    let machine = Machine::new();
    drop(running(&machine.start(), "c-1", ONCE).await);
    let faults = Faults::default();
    faults.fail(At::Commit, rusqlite::ffi::SQLITE_FULL);
    let error = machine.locked().with_faults(faults).recover(None).expect_err("a full disk");
    assert_eq!(error.why, Reason::Disk);
    assert_eq!(machine.start_at(ISSUED).1.interrupted, [id("c-1")]);
}

fn not_recovered(machine: &Machine, faults: &Faults) -> WriteError {
    let locked = machine.locked().with_faults(faults.clone());
    locked.recover(Some(at(ISSUED))).map(|(_, recovered)| recovered).expect_err("not recovered")
}

#[tokio::test]
async fn only_the_disk_holds_a_recovery_up_and_a_failed_sync_is_told_from_what_passes() {
    use rusqlite::ffi;
    let machine = Machine::new();
    for code in [ffi::SQLITE_FULL, ffi::SQLITE_READONLY, ffi::SQLITE_IOERR_WRITE, ffi::SQLITE_CANTOPEN] {
        let faults = Faults::default();
        faults.fail(At::Commit, code);
        let error = not_recovered(&machine, &faults);
        assert!(matches!(error.hindrance(), Some(Hindrance::Passing(_))), "{code}: {error:?}");
    }
    for code in [ffi::SQLITE_IOERR_FSYNC, ffi::SQLITE_IOERR_DIR_FSYNC] {
        let faults = Faults::default();
        faults.fail(At::Commit, code);
        let error = not_recovered(&machine, &faults);
        assert!(matches!(error.hindrance(), Some(Hindrance::FailedSync(_))), "{code}: {error:?}");
    }
    for code in [ffi::SQLITE_CORRUPT, ffi::SQLITE_CONSTRAINT] {
        let faults = Faults::default();
        faults.fail(At::Commit, code);
        assert_eq!(not_recovered(&machine, &faults).hindrance(), None, "{code}");
    }
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_not_waited_out() {
    let machine = Machine::new();
    accepted(&machine.start(), "c-1", ONCE).await;
    machine.sql().execute("UPDATE commands SET id = 'not/an id'", []).expect("written");
    let error = not_recovered(&machine, &Faults::default());
    assert_eq!(error.hindrance(), None, "{error:?}");
}

#[tokio::test]
async fn the_records_of_every_attempt_go_with_their_commands_tombstone() {
    let machine = Machine::new();
    let journal = machine.start();
    let running = running(&journal, "c-1", RETRY_SAFE).await;
    let other = running_record(&machine, &journal, &self::running(&journal, "c-10", RETRY_SAFE).await, 1);
    for attempt in 1..=3 {
        let record = running_record(&machine, &journal, &running, attempt);
        record.create(&machine.state()).expect("a record");
        Ended { begun: record, outcome: success() }.write(&machine.state()).expect("written");
    }
    other.create(&machine.state()).expect("a record");
    begun::remove(&machine.state(), &id("c-1"), 3).expect("removed");
    let outcomes = std::fs::read_dir(machine.state().join("outcome")).expect("a directory").count();
    assert_eq!((machine.records(), outcomes), (1, 0), "another command's stays");
}

fn running_record(
    machine: &Machine,
    journal: &Journal,
    running: &Durable<Running>,
    attempt: u32,
) -> begun::Record {
    begun::Record { attempt, ..begun::Record::of(&machine.starter(journal), running) }
}
