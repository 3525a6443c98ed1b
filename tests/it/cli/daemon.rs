//! `bcd node` and those who ask it.

use std::process::Child;
use std::time::{Duration, Instant};

use bcd::failpoint;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Ended, Gateway, Machine};

/// Starts the daemon and waits until it is ready.
fn ready(machine: &Machine) -> Child {
    let child = machine.command(&["node"]).spawn().unwrap();
    eventually("the daemon is ready", || machine.run(&["status", "--brief"]).0.status.code() == Some(0));
    child
}

#[expect(
    clippy::disallowed_methods,
    reason = "a test that waits for another process has no clock to be handed"
)]
fn eventually(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id().try_into().unwrap()), signal).unwrap();
}

#[expect(clippy::disallowed_methods, reason = "as above")]
fn stop(child: Child) -> Ended {
    let start = Instant::now();
    signal(&child, Signal::SIGTERM);
    let ended = Ended(child.wait_with_output().unwrap());
    assert!(start.elapsed() < Duration::from_secs(10), "a clean stop takes at most 10 s");
    ended
}

#[test]
fn a_node_connects_answers_and_stops_cleanly_and_hangups_do_no_harm() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    let child = ready(&machine);
    signal(&child, Signal::SIGHUP);
    signal(&child, Signal::SIGPIPE);

    let text = machine.run(&["status"]).expect(0);
    assert!(text.contains("live with") && text.contains("certificate  holds for 23 h"), "{text}");
    let status: serde_json::Value =
        serde_json::from_str(&machine.run(&["status", "--json"]).expect(0)).unwrap();
    assert_eq!(status["schema"], 1);
    assert_eq!(status["session"]["state"], "live");
    assert_eq!(status["pid"], child.id());
    assert_eq!(status["conditions"], serde_json::json!([]));
    let journal: serde_json::Value =
        serde_json::from_str(&machine.run(&["journal", "show", "--json"]).expect(0)).unwrap();
    assert_eq!(journal["node_id"], status["node"]["id"]);

    stop(child).expect(0);
    machine.run(&["status", "--brief"]).expect(3);
    // Without a daemon the file itself is read.
    let after: serde_json::Value =
        serde_json::from_str(&machine.run(&["journal", "show", "--json"]).expect(0)).unwrap();
    assert_eq!(after["journal_id"], journal["journal_id"]);
}

#[test]
fn a_node_without_a_gateway_is_not_ready_and_says_why() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    drop(gateway);
    let child = machine.command(&["node"]).spawn().unwrap();
    eventually("a failed dial is said", || {
        let ended = machine.run(&["status"]);
        ended.0.status.code() == Some(0) && ended.expect(0).contains("last end")
    });
    let brief = machine.run(&["status", "--brief"]);
    assert!(brief.expect(1).contains("not ready: there is no session"));
    stop(child).expect(0);
}

#[test]
fn a_second_daemon_is_refused_and_names_the_first() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    let child = ready(&machine);
    machine.run(&["node"]).refused(75, &[&format!("pid {}", child.id()), "stop it first"]);
    machine.run(&["status", "--brief"]).expect(0);
    stop(child).expect(0);
}

#[test]
fn the_journal_of_another_node_is_refused_and_left_alone() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let [machine, other] = [Machine::joined(&gateway), Machine::joined(&gateway)];
    let journal = machine.state().join("journal.db");
    std::fs::copy(other.state().join("journal.db"), &journal).unwrap();
    let before = std::fs::read(&journal).unwrap();
    machine.run(&["node"]).refused(79, &["is the journal of node n-", "mv "]);
    assert_eq!(std::fs::read(&journal).unwrap(), before);
}

#[test]
fn a_daemon_that_is_killed_gives_its_journal_back() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    let mut child = ready(&machine);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(machine.path("run/bcd.sock").exists(), "a dead daemon leaves its socket");
    machine.run(&["status"]).refused(3, &["no bcd daemon answers"]);
    stop(ready(&machine)).expect(0);
}

#[test]
fn an_expired_identity_that_a_join_has_replaced_is_used_without_a_restart() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let short = Gateway::certifying_for(gateway_dir.path(), Duration::from_secs(2), |_| {});
    // A join that is cut short has made its key; whoever goes on with it joins as the same node.
    let [machine, anew] = [Machine::new(), Machine::new()];
    let ticket = machine.write_ticket(&short.ticket(1, 3600));
    let join = ["join", "--ticket", &ticket, "--try-for", "5"];
    let cut = machine.command(&join).env("BCD_FAILPOINT", failpoint::JOIN_PENDING.name()).output().unwrap();
    assert_eq!(cut.status.code(), None);
    let copied = std::process::Command::new("cp").arg("-a").args([machine.state(), anew.state()]).status();
    assert!(copied.unwrap().success());
    machine.run(&join).expect(0);
    std::thread::sleep(Duration::from_millis(2_100));
    let listen = short.ready.address;
    drop(short);
    let _gateway = Gateway::start_with(gateway_dir.path(), |options| options.listen = listen);

    let child = machine.command(&["node"]).spawn().unwrap();
    eventually("the certificate is refused", || {
        let status = machine.run(&["status"]);
        status.0.status.code() == Some(0) && status.expect(0).contains("certificate-expired")
    });
    anew.run(&join).expect(0);
    std::fs::rename(anew.state().join("identity.json"), machine.state().join("identity.json")).unwrap();
    eventually("the daemon is ready", || machine.run(&["status", "--brief"]).0.status.code() == Some(0));
    let status: serde_json::Value =
        serde_json::from_str(&machine.run(&["status", "--json"]).expect(0)).unwrap();
    assert_eq!(status["pid"], child.id(), "the same process");
    assert!(status["certificate"]["remaining_s"].as_u64().unwrap() > 3600, "{status}");
    stop(child).expect(0);
}

#[test]
fn an_identity_of_another_node_ends_the_daemon_and_says_why() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let [machine, other] = [Machine::joined(&gateway), Machine::joined(&gateway)];
    let child = ready(&machine);
    let keys = std::fs::read_dir(other.state().join("keys")).unwrap();
    for key in keys.map(|key| key.unwrap().path()) {
        std::fs::copy(&key, machine.state().join("keys").join(key.file_name().unwrap())).unwrap();
    }
    std::fs::rename(other.state().join("identity.json"), machine.state().join("identity.json")).unwrap();
    drop(gateway);
    let ended = Ended(child.wait_with_output().unwrap());
    ended.expect(79);
    assert!(ended.stderr().contains("identity.json is now that of n-"), "{}", ended.stderr());
}

#[test]
fn a_reset_is_refused_while_the_daemon_runs_and_says_how_to_stop_it() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    let child = ready(&machine);
    machine.run(&["join", "--reset", "--yes"]).refused(75, &["systemctl stop bcd", &child.id().to_string()]);
    machine.run(&["status", "--brief"]).expect(0);
    stop(child).expect(0);
    machine.run(&["join", "--reset", "--yes"]).expect(0);
}
