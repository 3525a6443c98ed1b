//! Gateways as processes over one store: one that is stopped, and one that is killed.

use std::thread::sleep;
use std::time::Duration;

use bcd::gateway::control::{CommandView, NodeView, Request, Response};
use bcd::gateway::worker::Draft;
use bcd::model::CommandId;
use nix::sys::signal::Signal;
use serde_json::value::RawValue;

use crate::lab::{Lab, Process, until};

/// Shorter than the three heartbeat intervals after which the node leaves a gateway that is silent.
const LEASE: &[&str] = &["--lease-life", "2s"];
const PAST_THE_LEASE: Duration = Duration::from_millis(2_500);
/// The directories of the two gateways.
const NAMES: [&str; 2] = ["gateway", "second"];

/// Two gateways and a node that is connected to one of them.
struct Pair {
    lab: Lab,
    second: Process,
}

impl Pair {
    fn new() -> Self {
        let mut lab = Lab::new();
        lab.kill_gateway();
        lab.start_gateway_with(None, LEASE);
        let second = lab.gateway_beside(NAMES[1], LEASE);
        let joined = lab.join(&lab.ticket(1));
        assert!(joined.status.success(), "{}", lab.logs());
        lab.start_node(None);
        let pair = Self { lab, second };
        until("the node", || pair.node(0).filter(|node| node.state == "connected"));
        pair
    }

    /// The node, as one of the gateways sees it.
    fn node(&self, at: usize) -> Option<NodeView> {
        match self.lab.try_ask_at(NAMES[at], &Request::Nodes)? {
            Response::Nodes(nodes) => nodes.into_iter().next(),
            other => panic!("{other:?}"),
        }
    }

    /// Which gateway has the node.
    fn holder(&self, node: &NodeView) -> usize {
        let is_id = |name: &&str| {
            let id = std::fs::read_to_string(self.lab.path(name).join("id")).expect("an id");
            id == node.gateway
        };
        NAMES.iter().position(is_id).expect("one of the two")
    }

    fn signal(&self, gateway: usize, signal: Signal) {
        match gateway {
            0 => self.lab.gateway.as_ref().expect("it runs").signal(signal),
            _ => self.second.signal(signal),
        }
    }

    /// Stops the gateway that has the node; which one, and the node as it is then.
    fn stop_holder(&self) -> (usize, NodeView) {
        loop {
            let node = until("the node", || self.node(0).filter(|node| node.state == "connected"));
            let holder = self.holder(&node);
            self.signal(holder, Signal::SIGSTOP);
            // Stopped in the middle of a commit it would hold the store's lock: an outage and no zombie.
            let store = rusqlite::Connection::open(self.lab.path("gateway/gateway.db")).expect("the store");
            store.busy_timeout(Duration::from_millis(500)).expect("a time");
            let free = store.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_ok();
            if free && self.node(1 - holder).is_some_and(|now| now.epoch == node.epoch) {
                return (holder, node);
            }
            self.signal(holder, Signal::SIGCONT);
        }
    }

    fn probe(&self, at: usize) -> CommandId {
        let args = RawValue::from_string("{}".into()).expect("JSON");
        let node = self.node(at).expect("a node").node;
        let request = self.lab.signed(Draft { node, kind: "node.probe".into(), args, ttl_s: 3600, id: None });
        match self.lab.try_ask_at(NAMES[at], &request) {
            Some(Response::Enqueued(id)) => id,
            other => panic!("not enqueued: {other:?}\n{}", self.lab.logs()),
        }
    }

    fn ended(&self, id: &CommandId, at: usize) -> CommandView {
        until("the command's end", || {
            match self.lab.try_ask_at(NAMES[at], &Request::Show { id: id.clone() })? {
                Response::Command(view) => view.filter(|view| view.ended_ms != 0).map(|view| *view),
                other => panic!("{other:?}"),
            }
        })
    }
}

#[test]
fn a_gateway_stopped_beyond_its_lease_routes_nothing_when_it_goes_on() {
    let pair = Pair::new();
    let (stopped, before) = pair.stop_holder();
    let other = 1 - stopped;
    let id = pair.probe(other);
    sleep(PAST_THE_LEASE);
    pair.signal(stopped, Signal::SIGCONT);
    let view = pair.ended(&id, other);
    assert_eq!(view.state, "succeeded", "{}", pair.lab.logs());
    let events = pair.lab.events();
    let later = events.iter().find(|event| {
        event.kind == "node.connected"
            && event.detail["epoch"].as_u64().is_some_and(|epoch| epoch > before.epoch)
    });
    let later = later.expect("no session outlives its gateway's lease");
    assert!(view.dispatched_ms >= later.at_ms, "it was sent in a session of the stopped gateway: {view:?}");
    let lost = events.iter().filter(|event| event.kind == "node.disconnected").any(|event| {
        ["gateway-lost", "gateway-fenced"].iter().any(|reason| event.detail["reason"] == *reason)
    });
    assert!(lost, "{events:?}");
    // It takes a lease again: commands that are handed to it find the node wherever that is.
    let id = pair.probe(stopped);
    assert_eq!(pair.ended(&id, stopped).state, "succeeded");
}

#[test]
fn a_killed_gateways_node_goes_on_at_the_other_one() {
    let mut pair = Pair::new();
    let long = pair.lab.enqueue_program("long", "; sleep 2");
    until("its start", || (pair.lab.runs("long") == 1).then_some(()));
    pair.lab.kill_gateway_beside();
    let id = pair.probe(1);
    assert_eq!(pair.ended(&id, 1).state, "succeeded");
    assert_eq!(pair.ended(&long, 1).state, "succeeded");
    assert_eq!(pair.lab.runs("long"), 1);
}
