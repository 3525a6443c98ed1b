//! `bcd sim --virtual` as its user runs it.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use super::sim;

/// Ten agents under everything that there is, with the log in `log`.
fn run(seed: &str, duration: &str, log: &Path) -> Output {
    let shape = ["--virtual", "--nodes", "10", "--gateways", "2", "--duration", duration, "--chaos", "heavy"];
    let log = log.to_str().expect("a path");
    let rest = ["--commands-per-second", "3", "--seed", seed, "--log", log, "--json"];
    sim(&[&shape[..], &rest[..]].concat()).0
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn one_seed_gives_one_history_and_every_invariant_holds_in_it() {
    let tmp = tempfile::tempdir().expect("a directory");
    let runs = [("7", "1m"), ("7", "1m"), ("8", "15s")];
    let log = |nth: usize| tmp.path().join(nth.to_string());
    let outputs: Vec<Output> = std::thread::scope(|scope| {
        let started = runs.iter().enumerate().map(|(nth, (seed, duration))| {
            let log = log(nth);
            scope.spawn(move || run(seed, duration, &log))
        });
        let started: Vec<_> = started.collect();
        started.into_iter().map(|run| run.join().expect("no panic")).collect()
    });
    for output in &outputs {
        assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    }
    let [first, second, other] = [0, 1, 2].map(|nth| std::fs::read_to_string(log(nth)).expect("a log"));
    let differs = first.lines().zip(second.lines()).enumerate().find(|(_, (one, two))| one != two);
    if let Some((at, (one, two))) = differs {
        panic!("the first line that differs is {}:\n{one}\n{two}", at + 1);
    }
    assert_eq!(first.lines().count(), second.lines().count());
    let begin = |log: &str| log.lines().take(30).map(str::to_owned).collect::<Vec<_>>();
    assert_ne!(begin(&first), begin(&other), "another seed has another history");
    assert!(first.lines().count() > 300, "{first}");

    let report: Value = serde_json::from_str(text(&outputs[0].stdout).lines().last().expect("a last line"))
        .expect("one object");
    let faults = report["faults"].as_object().expect("an object");
    for fault in ["daemon-kill", "reboot", "gateway-kill", "link-cut", "link-half-open", "link-latency"] {
        assert!(faults.get(fault).and_then(Value::as_u64) > Some(0), "{fault}: {faults:?}");
    }
}

#[test]
fn a_run_that_fails_leaves_its_log_and_explain_says_what_failed() {
    let tmp = tempfile::tempdir().expect("a directory");
    let log = tmp.path().join("events.log");
    let log = log.to_str().expect("a path");
    // So short that nothing is handed over but a probe: a check that checks nothing has not held.
    let short = ["--virtual", "--nodes", "1", "--duration", "1s", "--chaos", "none", "--log", log];
    let (output, _) = sim(&[&short[..], &["--commands-per-second", "0.1", "--seed", "2"]].concat());
    let stderr = text(&output.stderr);
    assert!(!output.status.success(), "{}", text(&output.stdout));
    assert!(stderr.contains(&format!("what led to it: bcd sim explain {log}")), "{stderr}");
    let kept = stderr.lines().find_map(|line| line.strip_prefix("the run's files are kept in "));
    std::fs::remove_dir_all(kept.expect("files that are kept")).expect("removed");
    let (explained, _) = sim(&["explain", log]);
    assert!(explained.status.success());
    assert!(text(&explained.stdout).contains("I2 there was nothing to check"), "{}", text(&explained.stdout));
}

#[test]
fn a_log_that_cannot_be_read_is_named_and_sockets_have_no_log() {
    let (missing, _) = sim(&["explain", "/nowhere/events.log"]);
    assert!(text(&missing.stderr).contains("/nowhere/events.log"), "{}", text(&missing.stderr));
    assert_eq!(missing.status.code(), Some(65));
    let (usage, _) = sim(&["--log", "x"]);
    assert_eq!(usage.status.code(), Some(64), "{}", text(&usage.stderr));
}
