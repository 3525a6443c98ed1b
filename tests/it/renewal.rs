//! The real program renews its certificate and moves to it.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::lab::{Lab, shown, until};

/// A lab whose certificates hold this long, with a joined node that is not running.
fn short_lived(life: &str) -> Lab {
    let mut lab = Lab::new();
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--certificate-life", life]);
    let ticket = lab.ticket(1);
    let joined = lab.join(&ticket);
    assert!(joined.status.success(), "{}", shown(&joined));
    lab
}

fn status(lab: &Lab) -> Option<Value> {
    let status = lab.bcd(&["status", "--json"], None).output().expect("bcd starts");
    serde_json::from_slice(&status.stdout).ok()
}

fn keys(lab: &Lab) -> BTreeSet<String> {
    let names = std::fs::read_dir(lab.path("node").join("keys")).expect("keys");
    names.map(|name| name.expect("a name").file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until the session is one of another certificate's than the key of that fingerprint; the key it has now.
fn renewed_from(lab: &Lab, before: &str) -> String {
    until(&format!("a renewal\n{}", lab.logs()), || {
        let now = status(lab)?;
        let key = now["node"]["fingerprint"].as_str()?.to_owned();
        (key != before).then_some(key)
    })
}

fn epoch(lab: &Lab) -> Option<u64> {
    status(lab)?["session"]["live"]["epoch"].as_u64()
}

#[test]
fn a_node_renews_its_certificate_again_and_again_and_its_programs_see_nothing_of_it() {
    let mut lab = short_lived("10s");
    lab.start_node(None);
    let first = until("a session", || {
        epoch(&lab)?;
        Some(status(&lab)?["node"]["fingerprint"].as_str()?.to_owned())
    });
    let program = lab.enqueue_program("long", "; sleep 12");
    let second = renewed_from(&lab, &first);
    let third = renewed_from(&lab, &second);
    assert_ne!(first, third);
    until("the old key to go", || (keys(&lab) == BTreeSet::from([format!("{third}.key")])).then_some(()));
    until("a move", || epoch(&lab).filter(|epoch| *epoch > 1));
    let ended = lab.ended(&program);
    assert_eq!((ended.state.as_str(), lab.runs("long")), ("succeeded", 1), "{ended:?}\n{}", lab.logs());
    lab.probe();
    // Each session gave way to the next: the node was never disconnected, and never dialed after a failure.
    let events: Vec<String> = lab.events().into_iter().map(|event| event.kind).collect();
    assert!(!events.iter().any(|kind| kind == "node.disconnected"), "{events:?}\n{}", lab.logs());
    let now = status(&lab).expect("a daemon");
    assert_eq!((&now["session"]["last_end"], &now["session"]["attempt"]), (&Value::Null, &0.into()), "{now}");
    assert!(lab.node().terminate().success());
}

#[test]
fn a_gateway_that_does_not_renew_costs_no_session_and_the_status_says_how_long_the_certificate_holds() {
    let mut lab = short_lived("30s");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    lab.kill_gateway();
    let low = until("the condition", || {
        let conditions = status(&lab)?["conditions"].as_array()?.clone();
        conditions.into_iter().find(|condition| condition["token"] == "identity-expiring")
    });
    assert!(low["detail"].as_str().expect("text").contains("has not been renewed"), "{low}");
    let log = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    let failure = log.lines().find(|line| line.contains("the certificate was not renewed"));
    let failure = failure.unwrap_or_else(|| panic!("no failure is told\n{}", lab.logs()));
    assert!(failure.contains("attempt=1") && failure.contains("expiresIn="), "{failure}");
}

#[test]
fn a_lost_journal_has_a_birth_again_after_one_answer_and_takes_programs() {
    let mut lab = short_lived("24h");
    for file in ["journal.db", "journal.db-wal"] {
        std::fs::remove_file(lab.path("node").join(file)).expect("the journal");
    }
    lab.start_node(None);
    until("a birth", || status(&lab)?["journal"]["birth"].as_str().map(drop));
    let program = lab.enqueue_program("one", "");
    assert_eq!(lab.ended(&program).state, "succeeded", "{}", lab.logs());
    assert_eq!(lab.runs("one"), 1);
}
