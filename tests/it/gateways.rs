//! Gateways as processes over one store: one that is stopped, and one that is killed.

use std::thread::sleep;
use std::time::Duration;

use bcd::gateway::control::{NodeView, Request, Response};
use bcd::model::CommandId;
use nix::sys::signal::Signal;
use serde_json::value::RawValue;

use crate::lab::{Lab, Process, until};

/// Short, so that a test can outwait it.
const LEASE: &[&str] = &["--lease-life", "2s"];
const PAST_THE_LEASE: Duration = Duration::from_millis(2_500);

/// Two gateways and a node that is connected, by whichever of them the ticket names first.
fn lab() -> (Lab, Process) {
    let mut lab = Lab::new();
    lab.kill_gateway();
    lab.start_gateway_with(None, LEASE);
    let second = lab.gateway_beside("second", LEASE);
    let joined = lab.join(&lab.ticket(1));
    assert!(joined.status.success(), "{}", lab.logs());
    lab.start_node(None);
    until("the node", || node_at(&lab).filter(|node| node.state == "connected"));
    (lab, second)
}

/// The node, as the second gateway sees it.
fn node_at(lab: &Lab) -> Option<NodeView> {
    match lab.try_ask_at("second", &Request::Nodes)? {
        Response::Nodes(nodes) => nodes.into_iter().next(),
        other => panic!("{other:?}"),
    }
}

fn probe(lab: &Lab) -> CommandId {
    let args = RawValue::from_string("{}".into()).expect("JSON");
    let node = node_at(lab).expect("a node").node;
    let request = Request::Enqueue { node, kind: "node.probe".into(), args, ttl_s: 3600, id: None };
    match lab.try_ask_at("second", &request) {
        Some(Response::Enqueued(id)) => id,
        other => panic!("not enqueued: {other:?}\n{}", lab.logs()),
    }
}

#[test]
fn a_gateway_stopped_beyond_its_lease_routes_nothing_when_it_goes_on() {
    let (mut lab, _second) = lab();
    let before = node_at(&lab).expect("a node");
    let first = lab.gateway.as_ref().expect("it runs");
    // Stopped in the middle of a commit it would hold the store's lock, which is an outage and no zombie.
    loop {
        first.signal(Signal::SIGSTOP);
        let free = rusqlite::Connection::open(lab.path("gateway/gateway.db")).expect("the store");
        free.busy_timeout(Duration::from_millis(500)).expect("a time");
        if free.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_ok() {
            break;
        }
        first.signal(Signal::SIGCONT);
    }
    let id = probe(&lab);
    sleep(PAST_THE_LEASE);
    first.signal(Signal::SIGCONT);
    let view = lab.ended(&id);
    assert_eq!((&*view.state, view.deliveries), ("succeeded", 1), "{}", lab.logs());
    let after = node_at(&lab).expect("a node");
    assert!(after.epoch > before.epoch, "no session outlives its gateway's lease");
    let lost = |reason: &str| ["gateway-lost", "gateway-fenced"].contains(&reason);
    let ends: Vec<_> = lab.events().into_iter().filter(|event| event.kind == "node.disconnected").collect();
    let reasons: Vec<_> = ends.iter().filter_map(|event| event.detail["reason"].as_str()).collect();
    assert!(reasons.iter().any(|reason| lost(reason)), "{reasons:?}");
    // It takes a lease again and is a gateway like any other.
    lab.kill_node();
    lab.start_node(None);
    lab.probe();
}

#[test]
fn a_killed_gateways_node_goes_on_at_the_other_one() {
    let (mut lab, _second) = lab();
    let long = lab.enqueue_program("long", "; sleep 2");
    until("its start", || (lab.runs("long") == 1).then_some(()));
    lab.kill_gateway();
    let id = probe(&lab);
    let ended = |id: &CommandId| match lab.try_ask_at("second", &Request::Show { id: id.clone() })? {
        Response::Command(view) => view.filter(|view| view.ended_ms != 0),
        other => panic!("{other:?}"),
    };
    assert_eq!(until("the probe's end", || ended(&id)).state, "succeeded");
    assert_eq!(until("the program's end", || ended(&long)).state, "succeeded");
    assert_eq!(lab.runs("long"), 1);
}
