//! A node whose certificate ran out while it was away joins again by itself, with the key of it.

use bcd::gateway::control::Request;
use bcd::gateway::worker::{Order, Told};
use bcd::model::CommandId;
use serde_json::Value;

use crate::lab::{Lab, copy, until};

const HOUR_S: i64 = 3600;

/// The gateway, and its worker, come back so many hours later.
fn gateway_later(lab: &mut Lab, hours: i64, options: &[&str]) {
    lab.kill_gateway();
    lab.variables = vec![("BCD_FAKE_CLOCK_OFF_S", (hours * HOUR_S).to_string())];
    lab.start_gateway_with(None, options);
    lab.variables.clear();
}

fn generation(lab: &Lab, wanted: u64) -> Value {
    until(&format!("a session of generation {wanted}"), || {
        let status = lab.status()?;
        status["session"]["live"].as_object()?;
        (status["node"]["generation"] == wanted).then_some(status)
    })
}

/// What stands as the reason why the node is not let in again.
fn refused(lab: &Lab) -> String {
    until("the refusal", || {
        let conditions = lab.status()?["conditions"].as_array()?.clone();
        let stands = conditions.into_iter().find(|condition| condition["token"] == "rejoin-refused")?;
        Some(stands["detail"].as_str()?.to_owned())
    })
}

fn connected(lab: &Lab) -> usize {
    lab.events().iter().filter(|event| event.kind == "node.connected").count()
}

/// A program that has started, whose result nobody hears of while the gateway is away.
fn owes_a_result(lab: &mut Lab) -> CommandId {
    let go = lab.path("go");
    let id = lab.enqueue_program("one", &format!("; while ! [ -e {} ]; do sleep 0.02; done", go.display()));
    lab.start_node(None);
    until("the program", || (lab.runs("one") == 1).then_some(()));
    lab.kill_gateway();
    std::fs::write(go, "").expect("a file");
    until("a result that is owed", || {
        let owed = lab.bcd(&["journal", "show", "--json"], None).output().expect("bcd starts");
        let journal: Value = serde_json::from_slice(&owed.stdout).ok()?;
        (journal["counts"]["done"] == 1).then_some(())
    });
    id
}

#[test]
fn a_node_that_was_away_for_25_hours_joins_again_as_itself_and_delivers_the_result_that_it_owes() {
    let mut lab = Lab::joined();
    let id = owes_a_result(&mut lab);
    let before = lab.status().expect("a daemon");
    lab.kill_node();
    gateway_later(&mut lab, 25, &[]);
    lab.start_node(None);
    let after = generation(&lab, 2);
    for same in ["/node/id", "/journal/id", "/node/site"] {
        assert_eq!(before.pointer(same), after.pointer(same), "{same}: {after}");
        assert!(before.pointer(same).is_some(), "{same}: {before}");
    }
    assert_ne!(before["node"]["fingerprint"], after["node"]["fingerprint"]);
    let ended = lab.ended(&id);
    assert_eq!((ended.state.as_str(), lab.runs("one")), ("succeeded", 1), "{ended:?}\n{}", lab.logs());
    assert_eq!(lab.nodes().len(), 1, "it is the node that it was");
    assert_eq!(std::fs::read_dir(lab.path("node/keys")).expect("keys").count(), 1);
    lab.probe();
}

#[test]
fn a_daemon_whose_certificate_runs_out_under_it_offers_it_no_more_and_is_back_when_a_gateway_is() {
    let mut lab = Lab::new();
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--certificate-life", "6s"]);
    lab.join_with_a_ticket();
    let id = owes_a_result(&mut lab);
    let end = until("the end of the certificate", || {
        let end = lab.status()?["session"]["last_end"].clone();
        (end["reason"] == "identity-expired").then_some(end)
    });
    let told = end["detail"].as_str().expect("text");
    assert!(told.contains("joins again by itself") && told.contains("--reset --yes --ticket FILE"), "{told}");
    lab.start_gateway_with(None, &["--certificate-life", "1h"]);
    generation(&lab, 2);
    let ended = lab.ended(&id);
    assert_eq!((ended.state.as_str(), lab.runs("one")), ("succeeded", 1), "{ended:?}\n{}", lab.logs());
    lab.probe();
    let log = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    assert!(log.contains("why=Expired"), "{}", lab.logs());
}

#[test]
fn a_node_that_was_revoked_while_it_was_away_is_not_let_in_again_until_that_is_taken_back() {
    for quarantined in [false, true] {
        let mut lab = Lab::joined();
        let node = lab.node_id();
        if quarantined {
            // What alternating copies lead to stands in the gateways' store, and the worker does not know of it.
            lab.ask(&Request::Revoke { node: node.clone(), revocation: None });
        } else {
            assert!(matches!(lab.order(&Order::Revoke(node.clone())), Told::Done));
        }
        gateway_later(&mut lab, 25, &[]);
        lab.start_node(None);
        let told = refused(&lab);
        assert!(
            told.contains("certificate-revoked") && told.contains("--reset --yes --ticket FILE"),
            "{told}"
        );
        assert_eq!(connected(&lab), 0, "{}", lab.logs());
        lab.order(&Order::Unrevoke(node.clone()));
        lab.ask(&Request::Unrevoke { node });
        assert!(lab.node().terminate().success());
        lab.start_node(None);
        generation(&lab, 2);
        lab.probe();
    }
}

#[test]
fn a_node_that_was_away_longer_than_the_join_service_allows_joins_with_a_new_ticket_alone() {
    let mut lab = Lab::joined();
    gateway_later(&mut lab, 26, &["--rejoin-within", "1h"]);
    lab.start_node(None);
    let told = refused(&lab);
    assert!(told.contains("rejoin-too-late") && told.contains("--reset --yes --ticket FILE"), "{told}");
    assert!(lab.node().terminate().success());
    // Its window is counted from the end of the certificate, and 2 hours of it are not over.
    gateway_later(&mut lab, 26, &["--rejoin-within", "3h"]);
    lab.start_node(None);
    generation(&lab, 2);
}

#[test]
fn an_old_identity_whose_node_has_joined_again_since_is_superseded_and_cannot_join_again() {
    let mut lab = Lab::joined();
    copy(&lab.path("node"), &lab.path("restored"));
    gateway_later(&mut lab, 25, &[]);
    lab.start_node(None);
    generation(&lab, 2);
    assert!(lab.node().terminate().success());
    std::fs::rename(lab.path("node"), lab.path("newer")).expect("renamed");
    std::fs::rename(lab.path("restored"), lab.path("node")).expect("renamed");
    lab.start_node(None);
    let told = refused(&lab);
    assert!(told.contains("identity-superseded") && told.contains("--reset --yes --ticket FILE"), "{told}");
    assert_eq!(connected(&lab), 1, "{}", lab.logs());
}
