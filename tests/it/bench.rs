//! `bcd bench` as an operator runs it. Its ratios are for a quiet machine; what is held here are counts and manners.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// A directory on the disk that the build is on: /tmp may lie in memory.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn bench(name: &str, state: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bcd"));
    command.args(["bench", name, "--state"]).arg(state).args(more).output().unwrap()
}

fn figures(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    // 2: measured, and an aim is missed, as it may be in a build that is not optimised.
    assert!(matches!(output.status.code(), Some(0 | 2)), "{output:?}");
    let report: Value = serde_json::from_str(&text).unwrap();
    report["figures"].as_array().unwrap().clone()
}

#[test]
fn a_bench_in_memory_is_refused_and_says_where_to_point_it() {
    let memory = Path::new("/dev/shm");
    if !memory.is_dir() {
        return;
    }
    let output = bench("journal", memory, &[]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{words}");
    assert!(words.contains("/dev/shm lies in memory") && words.contains("--state"), "{words}");
}

#[test]
fn a_directory_that_is_not_there_is_not_made() {
    let dir = on_disk();
    let output = bench("journal", &dir.path().join("missing"), &[]);
    let words = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(73), "{words}");
    assert!(words.contains("missing") && words.contains("--state"), "{words}");
    assert!(!dir.path().join("missing").exists());
}

#[test]
fn an_accept_is_one_sync_of_the_real_disk_and_the_bench_leaves_nothing_behind() {
    let dir = on_disk();
    let figures = figures(&bench("journal", dir.path(), &["--rounds", "1", "--accepts", "8", "--json"]));
    let syncs = figures.iter().find(|figure| figure["name"] == "syncs an accept").unwrap();
    assert_eq!(syncs["ratio"]["median"], 1.0, "{syncs}");
    assert_eq!(figures.len(), 8, "{figures:?}");
    assert!(figures.iter().all(|figure| figure["ratio"]["median"].as_f64().is_some_and(|ratio| ratio > 0.0)));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_round_trip_is_measured_against_an_empty_call_on_its_own_connection() {
    let dir = on_disk();
    let figures = figures(&bench("session", dir.path(), &["--rounds", "1", "--json"]));
    let ratio = figures[0]["ratio"]["median"].as_f64().unwrap();
    // Three commits are three syncs, and a result is an answer: less than the floor would be a wrong measurement.
    assert!(ratio > 1.0, "{ratio}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
