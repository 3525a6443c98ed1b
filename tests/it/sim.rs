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

#[test]
fn a_short_run_under_kills_holds_every_invariant_and_leaves_nothing_behind() {
    let (output, tmp) = sim(&[
        "--nodes",
        "6",
        "--duration",
        "6s",
        "--seed",
        "3",
        "--chaos",
        "heavy",
        "--commands-per-second",
        "30",
        "--json",
    ]);
    let stdout = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{stdout}\n{}", String::from_utf8_lossy(&output.stderr));
    let report: Value =
        serde_json::from_str(stdout.lines().last().expect("a last line")).expect("one object");
    assert_eq!((report["schema"].as_u64(), report["seed"].as_u64()), (Some(1), Some(3)));
    let invariants = report["invariants"].as_array().expect("a list");
    let ids: Vec<_> = invariants.iter().filter_map(|one| one["id"].as_str()).collect();
    assert_eq!(ids, ["I1", "I2", "I3", "I5", "I7", "I8"]);
    for one in invariants {
        assert!(one["held"] == true && one["checks"].as_u64() > Some(0), "{one}");
    }
    assert!(report["faults"]["gateway-kill"].as_u64() > Some(0), "{report}");
    assert!(report["faults"]["daemon-kill"].as_u64() > Some(0), "{report}");
    assert!(report["latency_ms"]["accept"]["samples"].as_u64() > Some(0), "{report}");
    assert!(stdout.contains("every invariant held; replay: bcd sim --nodes 6"), "{stdout}");
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
        Some(run.path().join("gateway/control.sock")).filter(|socket| UnixStream::connect(socket).is_ok())
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
