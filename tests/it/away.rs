//! A node whose disk, clock or gateway is not what it was, or whose certificate was revoked meanwhile: what it does then, and
//! what it says.

use std::time::Duration;

use bcd::gateway::control::Request;
use bcd::gateway::worker::{Order, Told};
use bcd::model::ServerTime;
use serde_json::Value;

use crate::lab::{Lab, copy, until};

const TWO_YEARS_S: i64 = 2 * 365 * 24 * 3600;

fn live(lab: &Lab) -> Value {
    until("a session", || {
        let status = lab.status()?;
        status["session"]["live"].as_object()?;
        Some(status)
    })
}

fn last_end(lab: &Lab, reason: &str) -> String {
    until(&format!("an end {reason}"), || {
        let end = lab.status()?["session"]["last_end"].clone();
        if end["reason"] == reason { end["detail"].as_str().map(str::to_owned) } else { None }
    })
}

#[track_caller]
fn runs_once(lab: &Lab, name: &str) {
    let id = lab.enqueue_program(name, "");
    assert_eq!((lab.ended(&id).state.as_str(), lab.runs(name)), ("succeeded", 1), "{}", lab.logs());
}

/// About a day is left: the node has the control plane's time.
fn has_server_time(lab: &Lab) {
    let left = live(lab)["certificate"]["remaining_s"].as_u64().expect("server time is known");
    assert!((23 * 3600..=24 * 3600).contains(&left), "{left}\n{}", lab.logs());
}

#[test]
fn a_clock_that_is_set_two_years_off_either_way_in_mid_session_changes_nothing_and_status_says_so() {
    let mut lab = Lab::joined();
    let off = lab.path("off");
    std::fs::write(&off, "0").expect("a file");
    lab.variables.push(("BCD_FAKE_CLOCK_OFF_S", off.to_string_lossy().into_owned()));
    lab.start_node(None);
    let before = live(&lab);
    let text = |lab: &Lab| {
        let output = lab.bcd(&["status"], None).output().expect("bcd starts");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(!text(&lab).contains("timedatectl"), "{}", text(&lab));
    let time = |status: &Value| ServerTime::parse(status["server_time"].as_str().expect("a time"));
    for (seconds, word) in [(-TWO_YEARS_S, "behind"), (TWO_YEARS_S, "ahead of")] {
        std::fs::write(&off, seconds.to_string()).expect("a file");
        runs_once(&lab, word);
        let said = text(&lab);
        assert!(said.contains(&format!("s {word} the control plane's")), "{said}");
        assert!(said.contains("timedatectl set-ntp true"), "{said}");
        let now = live(&lab);
        assert_eq!(now["session"]["live"]["epoch"], before["session"]["live"]["epoch"], "{}", lab.logs());
        let (then, now) = (time(&before).expect("a time"), time(&now).expect("a time"));
        assert!(now > then && now.since(then) < Duration::from_secs(600), "{then} {now}");
    }
    // What was kept is server time: the next process starts from it.
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    lab.start_node(None);
    has_server_time(&lab);
    lab.probe();
}

#[test]
fn a_node_that_was_revoked_while_it_was_down_has_no_session_runs_nothing_and_says_why() {
    let mut lab = Lab::joined();
    let node = lab.node_id();
    let id = lab.enqueue_program("one", "");
    let Told::Signed(revocation) = lab.order(&Order::RevokeForGood(node.clone())) else {
        panic!("not signed")
    };
    lab.ask(&Request::Revoke { node, revocation: Some(revocation) });
    lab.start_node(None);
    let told = last_end(&lab, "certificate-revoked");
    assert!(told.contains("revoked"), "{told}");
    assert_eq!(lab.runs("one"), 0);
    assert!(lab.show(&id).is_some_and(|view| view.state == "pending"), "{}", lab.logs());
    assert!(lab.events().iter().all(|event| event.kind != "node.connected"), "{}", lab.logs());
}

#[test]
fn a_disk_that_was_put_back_to_an_older_state_takes_a_new_journal_id_and_runs_nothing_again() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    copy(&lab.path("node"), &lab.path("backup"));
    lab.start_node(None);
    let before = live(&lab);
    let told = lab.told().len();
    ["one", "two"].into_iter().for_each(|name| runs_once(&lab, name));
    until("the events of both", || (lab.told().len() >= told + 4).then_some(()));
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    std::fs::rename(lab.path("node"), lab.path("lost")).expect("renamed");
    std::fs::rename(lab.path("backup"), lab.path("node")).expect("renamed");
    lab.start_node(None);
    let after = until("a journal of another id", || {
        let status = lab.status()?;
        status["session"]["live"].as_object()?;
        (status["journal"]["id"] != before["journal"]["id"]).then_some(status)
    });
    assert_eq!(after["node"]["id"], before["node"]["id"]);
    let log = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    assert!(log.contains("older copy and takes a new id"), "{}", lab.logs());
    lab.probe();
    assert_eq!((lab.runs("one"), lab.runs("two")), (1, 1), "{}", lab.logs());
}

#[test]
fn one_gateway_of_two_that_lies_about_the_time_gets_no_session_and_the_node_works_for_the_other() {
    for (lie, by, token) in
        [("--welcome-behind", "1h", "time-backwards"), ("--welcome-ahead", "48h", "time-ahead")]
    {
        let mut lab = Lab::new();
        let _liar = lab.gateway_beside("liar", &[lie, by]);
        lab.join_with_a_ticket();
        // The other one has the worker by then, or takes it.
        lab.gateway = None;
        lab.start_node(None);
        last_end(&lab, token);
        lab.start_gateway(None);
        live(&lab);
        runs_once(&lab, "one");
        has_server_time(&lab);
    }
}
