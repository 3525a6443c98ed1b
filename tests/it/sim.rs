//! `bcd sim` as its user runs it.

mod virtual_time;

use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::lab::until;

fn sim(arguments: &[&str]) -> (Output, tempfile::TempDir) {
    let tmp = tempfile::Builder::new().prefix("bcd-sim-test-").tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bcd"));
    command.arg("sim").args(arguments).env("TMPDIR", tmp.path()).env_remove("BCD_FAILPOINT");
    (command.output().expect("bcd starts"), tmp)
}

fn left_behind(tmp: &tempfile::TempDir) -> usize {
    std::fs::read_dir(tmp.path()).expect("the directory").count()
}

/// The last line of standard output of a run that held, as JSON.
fn held(output: &Output) -> Value {
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    let report: Value =
        serde_json::from_str(stdout.lines().last().expect("a last line")).expect("one object");
    for one in report["invariants"].as_array().expect("a list") {
        assert!(one["held"] == true && one["checks"].as_u64() > Some(0), "{one}");
    }
    report
}

fn ids(report: &Value) -> Vec<&str> {
    let invariants = report["invariants"].as_array().expect("a list");
    invariants.iter().filter_map(|one| one["id"].as_str()).collect()
}

#[test]
fn a_short_run_under_faults_holds_every_invariant_and_leaves_nothing_behind() {
    let page = tempfile::NamedTempFile::new().expect("a file");
    let name = page.path().to_string_lossy();
    let run = "--nodes 6 --gateways 2 --duration 6s --seed 3 --chaos light --commands-per-second 100 --json --report";
    let (output, tmp) = sim(&run.split(' ').chain([&*name]).collect::<Vec<_>>());
    let report = held(&output);
    assert_eq!((report["schema"].as_u64(), report["seed"].as_u64()), (Some(1), Some(3)));
    assert_eq!(ids(&report), ["I1", "I2", "I3", "I4", "I5", "I7", "I8", "I9"]);
    for fault in ["gateway-kill", "daemon-kill", "clock-jump"] {
        assert!(report["faults"][fault].as_u64() > Some(0), "{fault}: {report}");
    }
    assert!(report["latency_ms"]["accept"]["samples"].as_u64() > Some(0), "{report}");
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(stdout.contains("every invariant held; replay: bcd sim --nodes 6 --gateways 2"), "{stdout}");
    let page = std::fs::read_to_string(page.path()).expect("the page");
    assert!(page.starts_with("<!doctype html>") && page.contains("every invariant held"), "{page}");
    assert_eq!(left_behind(&tmp), 0, "the run's files are removed");
}

#[test]
fn agents_in_several_processes_with_older_builds_among_them_hold_every_invariant() {
    let run = "--nodes 5 --per-process 2 --skew 40 --duration 4s --seed 5 --chaos none --commands-per-second 40 --json";
    let (output, _tmp) = sim(&run.split(' ').collect::<Vec<_>>());
    let report = held(&output);
    assert_eq!(report["connected"].as_u64(), Some(5));
    assert!(
        report["commands"]["failed"].as_u64() > Some(0),
        "an older build rejects what it lacks: {report}"
    );
}

#[test]
fn against_somebody_elses_gateway_only_what_the_agents_show_is_judged_and_the_report_says_so() {
    let lab = crate::lab::Lab::new();
    let (address, ticket) = (lab.address(), lab.ticket(3));
    let ticket = ticket.to_string_lossy();
    let run = ["--gateway", &address, "--ticket", &ticket, "--nodes", "3", "--duration", "3s", "--json"];
    let (output, tmp) = sim(&run);
    let report = held(&output);
    assert_eq!(ids(&report), ["I3", "I8"]);
    assert_eq!(report["not_judged"], serde_json::json!(["I1", "I2", "I4", "I5", "I7", "I9"]));
    assert_eq!(report["connected"].as_u64(), Some(3));
    assert_eq!(lab.nodes().len(), 3, "they joined there");
    assert_eq!(left_behind(&tmp), 0, "the run's files are removed");
}

#[test]
fn a_killed_simulator_takes_its_gateway_with_it() {
    let tmp = tempfile::Builder::new().prefix("bcd-sim-test-").tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bcd"));
    command.args(["sim", "--nodes", "1", "--duration", "10m", "--chaos", "none"]);
    command.env("TMPDIR", tmp.path()).env_remove("BCD_FAILPOINT").stdout(Stdio::null()).stderr(Stdio::null());
    let mut sim = command.spawn().expect("bcd starts");
    let socket = until("the gateway's control socket", || {
        let run = std::fs::read_dir(tmp.path()).expect("the directory").next()?.expect("an entry");
        Some(run.path().join("gateway-0/control.sock")).filter(|socket| UnixStream::connect(socket).is_ok())
    });
    sim.kill().expect("a running child");
    sim.wait().expect("a child to wait for");
    until("the gateway's end", || UnixStream::connect(&socket).err());
}

#[test]
fn more_nodes_than_the_descriptor_limit_allows_are_refused_with_the_number_needed() {
    let script = format!("ulimit -n 300; exec {} sim --nodes 1000 --duration 1s", env!("CARGO_BIN_EXE_bcd"));
    let tmp = tempfile::tempdir().expect("a directory");
    let mut command = Command::new("/bin/sh");
    let output = command.args(["-c", &script]).env("TMPDIR", tmp.path()).output().expect("a shell");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        stderr.contains("1000 nodes in 16 processes need 1012 file descriptors each and the limit is 300"),
        "{stderr}"
    );
    assert_eq!(left_behind(&tmp), 0, "nothing was begun");
}

#[test]
fn a_wrong_duration_is_a_usage_error_that_says_how_to_write_it() {
    let (output, _tmp) = sim(&["--duration", "soon"]);
    assert_eq!(output.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&output.stderr).contains("such as 20s"));
}
