//! The real program renews its certificate and moves to it.

use std::collections::BTreeSet;
use std::time::Duration;

use bcd::gateway::control::{Request, Response};
use bcd::gateway::worker::{Order, Told};
use bcd::model::ServerTime;
use serde_json::{Value, json};

use crate::lab::{Lab, until};

/// A lab whose certificates hold this long, with a joined node that is not running.
fn short_lived(life: &str) -> Lab {
    let mut lab = Lab::new();
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--certificate-life", life]);
    lab.join_with_a_ticket();
    lab
}

fn keys(lab: &Lab) -> BTreeSet<String> {
    let names = std::fs::read_dir(lab.path("node").join("keys")).expect("keys");
    names.map(|name| name.expect("a name").file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until the session is one of another certificate's than the key of that fingerprint; the key it has now.
fn renewed_from(lab: &Lab, before: &str) -> String {
    until(&format!("a renewal\n{}", lab.logs()), || {
        let now = lab.status()?;
        let key = now["node"]["fingerprint"].as_str()?.to_owned();
        (key != before).then_some(key)
    })
}

fn epoch(lab: &Lab) -> Option<u64> {
    lab.status()?["session"]["live"]["epoch"].as_u64()
}

#[test]
fn a_node_renews_its_certificate_again_and_again_and_its_programs_see_nothing_of_it() {
    let mut lab = short_lived("10s");
    lab.start_node(None);
    let first = until("a session", || {
        epoch(&lab)?;
        Some(lab.status()?["node"]["fingerprint"].as_str()?.to_owned())
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
    let now = lab.status().expect("a daemon");
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
        let conditions = lab.status()?["conditions"].as_array()?.clone();
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
    lab.lose_journal();
    lab.start_node(None);
    until("a birth", || lab.status()?["journal"]["birth"].as_str().map(drop));
    let program = lab.enqueue_program("one", "");
    assert_eq!(lab.ended(&program).state, "succeeded", "{}", lab.logs());
    assert_eq!(lab.runs("one"), 1);
}

fn told(lab: &Lab, kind: &str) -> Option<Value> {
    let told = lab.told().into_iter().find(|event| event.kind == kind)?;
    Some(told.body)
}

#[test]
fn a_newer_trust_bundle_comes_in_a_session_and_its_gateways_are_dialed_next() {
    let mut lab = short_lived("24h");
    lab.start_node(None);
    let first =
        until("a session", || lab.status()?["session"]["live"]["gateway_id"].as_str().map(str::to_owned));
    let before = std::fs::read(lab.path("node/identity.json")).expect("an identity");
    let _second = lab.gateway_beside("second", &[]);
    let taken = until("the event", || told(&lab, "trust-bundle.taken"));
    assert!(taken["version"].as_u64() >= Some(2), "{taken}");
    assert_ne!(std::fs::read(lab.path("node/identity.json")).expect("an identity"), before);
    assert_eq!(epoch(&lab), Some(1), "the session went on\n{}", lab.logs());
    lab.kill_gateway_beside();
    until("a session with the second gateway", || {
        let gateway = lab.status()?["session"]["live"]["gateway_id"].as_str()?.to_owned();
        (gateway != first).then_some(())
    });
    assert_eq!(told_at(&lab, "second", "trust-bundle-refused"), 0);
}

fn told_at(lab: &Lab, gateway: &str, kind: &str) -> usize {
    let Some(Response::NodeEvents(events)) =
        lab.try_ask_at(gateway, &Request::NodeEvents { node: None, after: 0 })
    else {
        panic!("{gateway} did not answer\n{}", lab.logs());
    };
    events.iter().filter(|event| event.kind == kind).count()
}

#[test]
fn a_certificate_that_the_join_service_has_revoked_is_never_used_again() {
    let mut lab = short_lived("24h");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    let node = lab.node_id();
    let Told::Signed(revocation) = lab.order(&Order::RevokeForGood(node.clone())) else {
        panic!("not signed")
    };
    lab.ask(&Request::Revoke { node: node.clone(), revocation: Some(revocation) });
    let revoked = |lab: &Lab| {
        until("the end of the session", || {
            let now = lab.status()?;
            let end = now["session"]["last_end"].clone();
            let local = end["kind"] == "local" && end["reason"] == "certificate-revoked";
            (local && now["session"]["live"].is_null()).then_some(end)
        })
    };
    let end = revoked(&lab);
    assert!(end["detail"].as_str().expect("text").contains("join again"), "{end}");
    // What the gateway forgets, the node does not; nor does its next process.
    lab.order(&Order::Unrevoke(node.clone()));
    lab.ask(&Request::Unrevoke { node });
    assert!(lab.node().terminate().success());
    lab.start_node(None);
    revoked(&lab);
    let connected = lab.events().iter().filter(|event| event.kind == "node.connected").count();
    assert_eq!(connected, 1, "{}", lab.logs());
}

#[test]
fn a_certificate_that_was_revoked_for_good_while_its_node_was_down_is_never_used_again() {
    let mut lab = short_lived("24h");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    let node = lab.node_id();
    assert!(lab.node().terminate().success());
    let Told::Signed(revocation) = lab.order(&Order::RevokeForGood(node.clone())) else {
        panic!("not signed")
    };
    let told = lab.ask(&Request::Revoke { node: node.clone(), revocation: Some(revocation) });
    assert!(matches!(told, Response::Done), "{told:?}");
    lab.start_node(None);
    let local = |lab: &Lab| {
        until("the node's own word that it is revoked", || {
            let end = lab.status()?["session"]["last_end"].clone();
            (end["kind"] == "local" && end["reason"] == "certificate-revoked").then_some(())
        });
    };
    local(&lab);
    let kept = || {
        let text = std::fs::read_to_string(lab.path("node/identity.json")).ok()?;
        let identity: Value = serde_json::from_str(&text).ok()?;
        identity["revocation"].is_object().then_some(())
    };
    until("the revocation on the disk", kept);
    // What the gateway forgets, the node does not; nor does its next process.
    lab.order(&Order::Unrevoke(node.clone()));
    lab.ask(&Request::Unrevoke { node });
    assert!(lab.node().terminate().success());
    lab.start_node(None);
    local(&lab);
    let connected = lab.events().iter().filter(|event| event.kind == "node.connected").count();
    assert_eq!(connected, 1, "{}", lab.logs());
}

#[test]
fn a_mark_that_lies_ahead_is_set_right_by_a_signed_answer() {
    let mut lab = short_lived("24h");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    let floors = lab.path("node/floors.json");
    let mut text: Value = until("floors", || serde_json::from_slice(&std::fs::read(&floors).ok()?).ok());
    assert!(lab.node().terminate().success());
    let mark = |text: &Value| ServerTime::parse(text["server_time_mark"].as_str()?);
    let honest = mark(&text).expect("a mark");
    text["server_time_mark"] = json!(honest.plus(Duration::from_secs(2 * 3600)).to_string());
    std::fs::write(&floors, text.to_string()).expect("floors");
    lab.start_node(None);
    // The gateway says a time before the mark, twice; its join service then says which of the two is wrong.
    until("a session", || epoch(&lab));
    let log = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    assert!(log.contains("time-backwards") && log.contains("why=Doubt"), "{}", lab.logs());
    until("the mark on the disk", || {
        let text: Value = serde_json::from_slice(&std::fs::read(&floors).ok()?).ok()?;
        (mark(&text)? < honest.plus(Duration::from_secs(3600))).then_some(())
    });
    lab.probe();
}

#[test]
fn a_gateway_that_lies_about_the_time_is_not_believed_after_the_renewal_either() {
    let mut lab = short_lived("24h");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    assert!(lab.node().terminate().success());
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--welcome-behind", "1h"]);
    lab.start_node(None);
    let first = until("a status", || Some(lab.status()?["node"]["fingerprint"].clone()));
    until("a renewal for the doubt", || {
        let log = std::fs::read_to_string(lab.path("node.log")).ok()?;
        (log.contains("why=Doubt") && log.contains("the certificate is renewed")).then_some(())
    });
    let end = until("the refusal after it", || {
        let now = lab.status()?;
        let renewed = now["node"]["fingerprint"] != first;
        let end = now["session"]["last_end"]["reason"].as_str()? == "time-backwards";
        (renewed && end).then(|| now["session"]["live"].clone())
    });
    assert!(end.is_null(), "{end}");
    let asked = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    assert_eq!(asked.matches("why=Doubt").count(), 1, "once in ten minutes");
}

#[test]
fn a_revoked_certificate_is_not_renewed() {
    let mut lab = short_lived("12s");
    lab.start_node(None);
    until("a session", || epoch(&lab));
    lab.ask(&Request::Revoke { node: lab.node_id(), revocation: None });
    until("a refusal", || {
        let log = std::fs::read_to_string(lab.path("node.log")).ok()?;
        let mut failures = log.lines().filter(|line| line.contains("the certificate was not renewed"));
        failures.any(|line| line.contains("certificate-revoked")).then_some(())
    });
    let connected = lab.events().iter().filter(|event| event.kind == "node.connected").count();
    assert_eq!(connected, 1, "{}", lab.logs());
}
