//! A node that was away for long: it owes 1,000 results and 10,000 events when it starts.

use bcd::model::{Effect, Outcome, Terminal};
use rusqlite::{Connection, params};

use crate::lab::{Lab, until};

const EVENTS: i64 = 10_000;
const RESULTS: i64 = 1000;

/// Fills the journal of a node that does not run, with results whose text is as long as one may be.
fn fill(lab: &Lab) {
    let mut conn = Connection::open(lab.path("node/journal.db")).unwrap();
    let outcome = Outcome {
        state: Terminal::Succeeded,
        reason: None,
        message: "m".repeat(1024),
        effect: Effect::Complete,
        attempt: 1,
        started: None,
        finished: None,
        duration_ms: 1,
        output: Vec::new(),
    };
    let outcome = serde_json::to_string(&outcome).unwrap();
    let tx = conn.transaction().unwrap();
    let known: i64 = tx.query_row("SELECT coalesce(max(seq), 0) FROM events", [], |row| row.get(0)).unwrap();
    for n in 1..=RESULTS {
        let id = format!("c-old-{n}");
        let row = "INSERT INTO commands VALUES (?, zeroblob(32), 'node.exec', 0, 1999999999000, 3, 1, 'i-old', 'b-old', \
                   1, 1, ?, ?, NULL)";
        tx.execute(row, params![id, outcome, n]).unwrap();
        tx.execute("INSERT INTO results VALUES (?, ?, x'7b7d')", params![n, id]).unwrap();
    }
    for n in known + 1..=known + EVENTS {
        let body = format!(r#"{{"n":{n},"text":"{}"}}"#, "e".repeat(200));
        let row = "INSERT INTO events VALUES (?, 1, 'command.done', ?, 1, 'b-old', 1)";
        tx.execute(row, params![n, body]).unwrap();
    }
    tx.commit().unwrap();
    conn.close().unwrap();
}

/// A number of the line in which the node tells of its first Hello.
fn said(lab: &Lab, field: &str) -> u64 {
    let line = until("the first Hello", || {
        let log = std::fs::read_to_string(lab.path("node.log")).ok()?;
        log.lines().find(|line| line.contains("saying Hello")).map(str::to_owned)
    });
    let value = line.split(' ').find_map(|word| word.strip_prefix(field)?.strip_prefix('=')).expect(field);
    value.parse().expect(field)
}

#[test]
fn a_long_absence_makes_no_long_hello_and_everything_owed_arrives_behind_it() {
    let mut lab = Lab::joined();
    fill(&lab);
    lab.start_node(None);
    let (bytes, results, events) = (said(&lab, "bytes"), said(&lab, "results"), said(&lab, "events"));
    assert!(bytes < 300 << 10, "Hello has {bytes} bytes");
    assert!((100..400).contains(&results), "of results of about 1 KiB, Hello has {results}");
    assert!(events >= 10_000, "{events} events are told as pending");
    // The start itself is one commit, and so is a Welcome: what is owed is read, never written again.
    let commits = said(&lab, "commits");
    assert!(commits <= 2, "{commits} commits before the first Hello");

    until("the end of what is owed", || {
        let journal = lab.bcd(&["journal", "show", "--json"], None).output().ok()?;
        let journal: serde_json::Value = serde_json::from_slice(&journal.stdout).ok()?;
        (journal["counts"]["done"] == 0 && journal["events"]["unacked"].as_u64() < Some(100)).then_some(())
    });
    let old: Vec<u64> = (lab.told().iter())
        .filter(|event| event.kind == "command.done" && event.body.get("n").is_some())
        .map(|event| event.seq)
        .collect();
    assert_eq!(old.len(), 10_000);
    assert!(old.windows(2).all(|pair| pair[0] + 1 == pair[1]), "each once, in order, without a gap");
    lab.probe();
}
