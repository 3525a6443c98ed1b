//! Looking at a journal, with and without a daemon.

use super::*;
use crate::journal::inspect::{self, InspectError};

fn listing(machine: &Machine) -> Vec<(String, u64)> {
    let entries = std::fs::read_dir(machine.state()).expect("a directory");
    let mut found: Vec<_> = entries
        .map(|entry| entry.expect("an entry"))
        .map(|entry| {
            (entry.file_name().into_string().expect("a name"), entry.metadata().expect("metadata").len())
        })
        .collect();
    found.sort();
    found
}

#[tokio::test]
async fn a_snapshot_tells_states_times_and_counts_and_reads_back_from_json() {
    let machine = Machine::new();
    let journal = machine.start();
    drop(accepted(&journal, "c-1", ONCE).await);
    drop(running(&journal, "c-2", ONCE).await);
    done(&journal, "c-3", ONCE).await;
    done(&journal, "c-4", ONCE).await;
    journal.acked(vec![id("c-4")]);
    journal.welcomed(3, at(NOW)).await.expect("written");
    let snapshot = journal.snapshot().await.expect("a snapshot");
    let counts = inspect::Counts { accepted: 1, running: 1, done: 1, tombstones: 1 };
    assert_eq!((snapshot.counts, snapshot.last_epoch, snapshot.commands_left_out), (counts, 3, 0));
    let states: Vec<_> = snapshot.commands.iter().map(|line| (line.id.as_str(), line.state)).collect();
    assert!(states[..2].contains(&("c-1", State::Accepted)), "{states:?}");
    assert!(states[..2].contains(&("c-2", State::Running)), "{states:?}");
    let third = snapshot.commands.iter().find(|line| line.id == id("c-3")).expect("a line");
    assert_eq!((third.accepted, third.started), (Some(at(NOW)), Some(at(NOW))));
    assert_eq!(third.end.as_ref().map(|end| end.state), Some(Terminal::Succeeded));
    let text = serde_json::to_string(&snapshot).expect("json");
    assert_eq!(serde_json::from_str::<Snapshot>(&text).expect("read back"), snapshot);
}

#[tokio::test]
async fn without_a_daemon_the_files_are_read_log_included_and_left_as_they_are() {
    let machine = Machine::new();
    done(&machine.start(), "c-1", ONCE).await;
    // As a crash leaves it: the last commit stands in the log alone.
    let sql = machine.sql();
    sql.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).expect("set");
    sql.execute("UPDATE journal SET last_epoch = 5", []).expect("written");
    drop(sql);
    let before = listing(&machine);
    assert!(before.iter().any(|(name, _)| name == "journal.db-wal"), "{before:?}");
    let snapshot = inspect::read(&machine.state()).expect("a snapshot");
    assert_eq!((snapshot.last_epoch, snapshot.counts.done), (5, 1));
    assert_eq!(listing(&machine), before);
}

#[test]
fn a_missing_journal_is_told_from_a_broken_one() {
    let machine = Machine::bare();
    assert!(matches!(inspect::read(&machine.state()), Err(InspectError::Missing(_))));
    assert!(!machine.state().exists(), "nothing was made");
    machine.start();
    std::fs::write(
        machine.db(),
        b"not a database, and long enough to be read as a header by anyone. ".repeat(20),
    )
    .expect("written");
    assert!(matches!(inspect::read(&machine.state()), Err(InspectError::Open(_))));
}

#[tokio::test]
async fn a_journal_that_a_daemon_holds_is_not_read_and_its_pid_is_told() {
    let machine = Machine::new();
    let _journal = machine.start();
    match inspect::read(&machine.state()) {
        Err(InspectError::Held { pid, .. }) => assert_eq!(u32::try_from(pid), Ok(std::process::id())),
        other => panic!("{other:?}"),
    }
}
