//! The worker's process, beside a gateway and apart from it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use bcd::gateway::worker::{Draft, Order, Told};
use bcd::model::NodeId;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use serde_json::value::RawValue;

use crate::lab::{Lab, say_to, until, workers_of};

fn said(socket: &Path, request: &impl serde::Serialize) -> Told {
    say_to(socket, request).expect("the worker answers")
}

fn order() -> Order {
    let draft = Draft {
        node: NodeId::new("n-1").expect("an id"),
        kind: "node.probe".into(),
        args: RawValue::from_string("{}".into()).expect("JSON"),
        ttl_s: 60,
        id: None,
    };
    Order::Command(draft)
}

#[test]
fn what_only_the_operator_may_order_is_no_request_where_gateways_ask() {
    let lab = Lab::new();
    let worker = lab.path("gateway/worker");
    assert!(matches!(said(&worker.join("operator.sock"), &order()), Told::Signed(_)));
    let refused = said(&worker.join("relay.sock"), &order());
    assert!(matches!(&refused, Told::Failed(why) if why.contains("not a request")), "{refused:?}");
    let garbage = said(&worker.join("operator.sock"), &json!({ "ticket": 1 }));
    assert!(matches!(&garbage, Told::Failed(why) if why.contains("not a request")), "{garbage:?}");
    for socket in ["operator.sock", "relay.sock"] {
        let mode = std::fs::metadata(worker.join(socket)).expect("there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
}

#[test]
fn a_killed_worker_is_started_again_and_its_gateway_goes_on() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    let gateway = lab.gateway.as_ref().expect("it runs").id();
    let [worker] = workers_of(gateway)[..] else { panic!("not one worker: {:?}", workers_of(gateway)) };
    kill(Pid::from_raw(worker), Signal::SIGKILL).expect("killed");
    until("another worker", || {
        matches!(workers_of(gateway)[..], [another] if another != worker).then_some(())
    });
    lab.probe();
}

#[test]
fn a_worker_apart_serves_its_gateways_and_none_of_them_holds_a_key() {
    let mut lab = Lab::apart();
    lab.start_gateway_with(None, &["--worker", &lab.path("worker").to_string_lossy()]);
    lab.join_with_a_ticket();
    lab.start_node(None);
    lab.probe();
    let gateway = lab.gateway.as_ref().expect("it runs").id();
    assert_eq!(workers_of(gateway), Vec::<i32>::new(), "it runs none of its own");
    let files: Vec<String> = std::fs::read_dir(lab.path("gateway"))
        .expect("its directory")
        .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with("gateway.db"))
        .collect();
    let mut files: Vec<&str> = files.iter().map(String::as_str).collect();
    files.sort_unstable();
    assert_eq!(files, ["control.sock", "id", "lock", "store.lock"]);
}

#[test]
fn an_operators_word_about_a_node_is_the_workers_too() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    let (gateway, node) = (lab.path("gateway"), lab.node_id());
    let ctl = |lab: &Lab, what: &str| {
        let said =
            lab.bcd(&["ctl", "--gateway", &gateway.to_string_lossy(), what, node.as_str()], None).output();
        let said = said.expect("bcd starts");
        assert!(said.status.success(), "{what}: {said:?}");
    };
    let counted = |what: &str| -> i64 {
        let db = rusqlite::Connection::open(gateway.join("worker/worker.db")).expect("the worker's tables");
        db.query_row(what, [node.as_str()], |row| row.get(0)).expect("a count")
    };
    let revoked = "SELECT count(*) FROM certificates WHERE node_id = ? AND revoked <> 0";
    let known = "SELECT count(*) FROM nodes JOIN joins USING (node_id) WHERE node_id = ?";
    ctl(&lab, "revoke");
    assert!(counted(revoked) > 0);
    ctl(&lab, "unrevoke");
    assert_eq!((counted(revoked), counted(known)), (0, 1));
    lab.kill_node();
    lab.start_node(None);
    lab.probe();
    ctl(&lab, "delete");
    assert_eq!(counted(known), 0, "the ticket that it used lets it in no more");
}
