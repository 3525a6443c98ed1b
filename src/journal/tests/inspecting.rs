//! Looking at a journal, with and without a daemon.

use super::*;
use crate::journal::export::Cursor;
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

fn exported(machine: &Machine) -> Vec<serde_json::Value> {
    let mut lines = String::new();
    inspect::export(&machine.state(), |page| {
        lines.push_str(page);
        true
    })
    .expect("exported");
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[tokio::test]
async fn an_export_has_everything_from_the_daemon_and_from_the_file_alike() {
    let machine = Machine::new();
    let journal = machine.start_thread();
    for name in ["c-1", "c-2"] {
        let running = running(&journal, name, ONCE).await;
        Begun::create(&machine.state(), &machine.starter(&journal), &running).expect("a record");
        journal.finish(running, success()).await.expect("finished");
    }
    accepted(&journal, "c-3", RETRY_SAFE).await;
    journal.acked(vec![id("c-1")]);
    let (mut asked, mut cursor) = (String::new(), Some(Cursor::Commands(None)));
    while let Some(at) = cursor {
        assert_eq!(at.to_string().parse(), Ok(at.clone()));
        let page = journal.export(at).await.expect("read");
        asked.push_str(&page.lines);
        cursor = page.next;
    }
    journal.close().await;
    let lines = exported(&machine);
    let of = |kind: &str| lines.iter().filter(|line| line["type"] == kind).cloned().collect::<Vec<_>>();
    assert_eq!((of("journal").len(), of("command").len(), of("begun").len()), (1, 3, 2), "{lines:?}");
    let seqs: Vec<_> = of("event").iter().filter_map(|event| event["seq"].as_u64()).collect();
    assert!(!seqs.is_empty() && seqs.is_sorted(), "{lines:?}");
    assert_eq!(of("command")[0]["state"], "TOMBSTONE");
    assert_eq!(of("command")[0]["output"], serde_json::Value::Null);
    assert_eq!(of("command")[1]["output"], data_encoding::BASE64.encode(&success().output));
    let asked: Vec<serde_json::Value> =
        asked.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let (stopped, before) = lines.split_last().expect("lines");
    assert_eq!(stopped["event"], "daemon.stopped", "it came after the daemon was asked");
    assert_eq!(asked[1..], before[1..], "but for the sizes of the files");
}

#[tokio::test]
async fn a_check_finds_nothing_in_a_sound_journal_and_names_what_does_not_hold() {
    let machine = Machine::new();
    let journal = machine.start_thread();
    for name in ["c-1", "c-2", "c-3"] {
        done(&journal, name, ONCE).await;
    }
    assert_eq!(journal.check().await.expect("checked").problems, Vec::<String>::new());
    journal.close().await;
    let check =
        || inspect::check(&machine.state(), Some(&NodeId::new("n-1").expect("an id"))).expect("checked");
    assert_eq!(check().problems, Vec::<String>::new());
    assert_eq!(check().counts.done, 3);

    std::fs::write(machine.state().join("begun/c-9.json"), "{").expect("written");
    let sql = machine.sql();
    sql.execute_batch(
        "DELETE FROM results WHERE id = 'c-1'; UPDATE commands SET result_seq = 77 WHERE id = 'c-2';
         UPDATE commands SET state = 4 WHERE id = 'c-3';",
    )
    .expect("written");
    drop(sql);
    let problems = check().problems;
    for (words, id) in [
        ("a finished command has no result", "c-1"),
        ("a result belongs to no finished command", "c-2"),
        ("a tombstone has a result", "c-3"),
        ("a begun record cannot be read", "c-9.json"),
    ] {
        let told = problems.iter().any(|problem| problem.starts_with(words) && problem.ends_with(id));
        assert!(told, "{words}: {id} is not in {problems:?}");
    }
    let other = NodeId::new("n-2").expect("an id");
    let error = inspect::check(&machine.state(), Some(&other)).expect_err("of another node");
    assert_eq!(error.exit(), crate::model::Exit::ForeignState);
}
