//! How a machine becomes a node, and how it ends being one: the real program with a real gateway.

use std::process::Stdio;

use crate::lab::{Lab, until};

#[test]
fn a_join_that_waits_outlasts_a_gateway_that_is_not_there_yet_and_tells_of_every_attempt() {
    let mut lab = Lab::new();
    let ticket = lab.ticket(1);
    lab.kill_gateway();
    let told = lab.path("join.log");
    let log = std::fs::File::create(&told).expect("a log");
    let mut join = lab.join_command(&ticket, None);
    let mut join = join.arg("--wait").stdout(Stdio::null()).stderr(log).spawn().expect("bcd starts");
    let attempts = || std::fs::read_to_string(&told).expect("a log").matches("next attempt in").count();
    until("two attempts", || (attempts() >= 2).then_some(()));
    assert!(join.try_wait().expect("a child").is_none(), "it waits");
    lab.start_gateway(None);
    let status = join.wait().expect("a child to wait for");
    assert!(status.success(), "{status}\n{}", std::fs::read_to_string(&told).expect("a log"));
    lab.start_node(None);
    lab.probe();
}
