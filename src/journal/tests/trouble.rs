//! A disk without room, and a file that is taken away.

use std::os::unix::fs::MetadataExt as _;

use rusqlite::ffi;

use super::*;
use crate::journal::{At, Faults};

const LIMITS: Limits = Limits { state_bytes: 512 << 20, reserve_bytes: 1 << 20 };

fn with_reserve(machine: &Machine) -> (Journal, Faults) {
    let faults = Faults::default();
    let locked = machine.locked().with_limits(LIMITS).with_faults(faults.clone());
    (locked.recover(Some(at(ISSUED))).expect("recovered").0, faults)
}

fn refused(admission: Admission) -> (Reason, String) {
    match state_of(admission) {
        AnswerState::Refused { reason, detail } => (reason, detail),
        other => panic!("not refused: {other:?}"),
    }
}

fn whys(journal: &Journal) -> Vec<Reason> {
    journal.troubles().into_iter().map(|trouble| trouble.why).collect()
}

#[tokio::test]
async fn a_full_disk_frees_the_reserve_for_results_and_admits_nothing_until_it_stands_again() {
    let machine = Machine::new();
    let (journal, faults) = with_reserve(&machine);
    let reserve = || machine.state().join("reserve").metadata().expect("a reserve").blocks() * 512;
    assert!(reserve() >= 1 << 20);
    let first = running(&journal, "c-1", ONCE).await;
    faults.fail_some(At::Commit, ffi::SQLITE_FULL, 0, 1);
    let (first, outcome, error) = journal.finish(first, success()).await.expect_err("a full disk");
    assert_eq!((error.why, reserve(), whys(&journal)), (Reason::Disk, 0, vec![Reason::Disk]));
    journal.finish(first, outcome).await.expect("what the reserve is for");
    assert_eq!(refused(deliver(&journal, "c-2", ONCE).await), (Reason::Busy, "disk".into()));
    assert_eq!(journal.snapshot().await.expect("read").commands.len(), 1, "a refusal leaves no trace");
    assert!(matches!(deliver(&journal, "c-1", ONCE).await, Admission::Ended(_)), "what is known is answered");

    assert_eq!(journal.make_room(), None);
    journal.look(false).await.expect("looked");
    assert_eq!(whys(&journal), []);
    accepted(&journal, "c-2", ONCE).await;
}

#[tokio::test]
async fn a_rejection_is_not_written_to_a_disk_without_room_either() {
    let machine = Machine::new();
    let (journal, _) = with_reserve(&machine);
    journal.file_written(Some(Trouble { why: Reason::ReadOnly, detail: "read-only".into() }));
    let unknown = journal.admit(kind_of_command("c-1", "node.unknown", "{}"), context()).await;
    assert_eq!(refused(unknown.expect("answered")), (Reason::Busy, "read-only".into()));
    journal.file_written(None);
    let unknown = journal.admit(kind_of_command("c-1", "node.unknown", "{}"), context()).await;
    assert_eq!(ended(unknown.expect("answered")).reason, Some(Reason::UnknownKind));
}

#[tokio::test]
async fn trouble_of_the_journal_stands_until_a_write_is_taken() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    faults.fail(At::Commit, ffi::SQLITE_IOERR_WRITE);
    journal.look(true).await.expect_err("refused");
    faults.clear();
    journal.look(false).await.expect("looked");
    assert_eq!(whys(&journal), [Reason::IoError], "looking proves nothing about writing");
    journal.look(true).await.expect("written");
    assert_eq!(whys(&journal), []);
}

#[tokio::test]
async fn a_journal_that_is_deleted_while_it_is_open_is_put_back_and_nothing_is_lost() {
    let machine = Machine::new();
    let journal = machine.start_thread();
    done(&journal, "c-1", ONCE).await;
    std::fs::remove_file(machine.db()).expect("removed");
    let error =
        journal.admit(command("c-2", ONCE), context()).await.expect_err("it would be written nowhere");
    assert_eq!(error.why, Reason::IoError);
    assert_eq!(journal.failed().await, Failed::Displaced { rescued: true });
    assert_eq!(machine.db().metadata().expect("a file").mode() & 0o7777, 0o600);
    journal.close().await;
    let journal = machine.start();
    assert_eq!(journal.id(), journal_id("j-1"), "the same journal");
    assert_eq!(result(&journal, "c-1").await, success());
    accepted(&journal, "c-2", ONCE).await;
}

#[tokio::test]
async fn a_file_in_the_place_of_the_open_journal_is_moved_aside() {
    let machine = Machine::new();
    let copy = machine.state().join("copy");
    std::fs::copy(machine.db(), &copy).expect("a copy");
    let journal = machine.start();
    done(&journal, "c-1", ONCE).await;
    std::fs::rename(&copy, machine.db()).expect("replaced");
    journal.look(false).await.expect_err("it is another file");
    drop(journal);
    let names = std::fs::read_dir(machine.state()).expect("a directory");
    let names = names.map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"));
    assert_eq!(names.filter(|name| name.starts_with("journal.db.displaced-")).count(), 1);
    assert_eq!(result(&machine.start(), "c-1").await, success());
}

#[tokio::test]
async fn an_outcome_record_that_cannot_be_written_may_be_tried_again_and_is_whole_or_not_there() {
    use crate::journal::Ended;
    use crate::journal::begun::Record;
    use crate::write_fault::{Point, arm};
    let machine = Machine::new();
    let journal = machine.start();
    let begun = Record::of(&machine.starter(&journal), &running(&journal, "c-1", ONCE).await);
    for point in Point::OUTCOME {
        for errno in [5, 24, 28, 30, 122] {
            let ended = Ended { begun: begun.clone(), outcome: success() };
            let fault = arm(&machine.state(), point, errno);
            assert_eq!(ended.write(&machine.state()).expect_err("a fault").raw_os_error(), Some(errno));
            let read = || Ended::read(&machine.state(), &begun).expect("read");
            // What is written shows before it is durable, and only its supervisor's end makes anybody look.
            let there = matches!(point, Point::OutcomeSync | Point::OutcomeDirSync).then(success);
            assert_eq!(read(), there, "{} {errno}", point.name());
            drop(fault);
            ended.write(&machine.state()).expect("written");
            assert_eq!(read(), Some(success()));
            std::fs::remove_file(machine.state().join("outcome/c-1.json")).expect("removed");
        }
    }
}
