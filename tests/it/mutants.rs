//! Each invariant is seen to fail: the real program with one promise broken, and the same run with none
//! (docs/decisions/0074-mutants.md). In virtual time one seed gives one history up to the broken promise.

use std::collections::BTreeSet;
use std::process::{Command, Output};

use bcd::gateway::lies::Lie;
use bcd::mutant::Mutant;
use serde_json::Value;

/// Whether a mutant comes to its moment is chance: as many are tried as that takes.
const SEEDS: [u64; 6] = [2, 8, 1, 3, 5, 6];

/// Small, and long enough for most mutants to come to their moment.
fn run(seed: u64) -> String {
    format!(
        "--virtual --nodes 4 --gateways 2 --duration 60s --seed {seed} --chaos hostile --commands-per-second 9"
    )
}

/// The invariant that sees a broken promise, and what it says. What else is true of such a run, others may say too.
fn caught_by(mutant: Mutant) -> (&'static str, &'static str) {
    match mutant {
        Mutant::EffectBeforeSync | Mutant::DuplicateStarted | Mutant::TombstoneForgotten => {
            ("I2", "may not run twice and ran 2 times")
        }
        Mutant::ResultNotResent => ("I1", "has not ended: accepted"),
        Mutant::BegunSkipped => ("I5", "was given up, and its machine was not rebooted"),
        Mutant::EpochBack => ("I3", "was given epoch 1 after 2"),
        Mutant::EventAckedTooFar => ("I7", "never told"),
        Mutant::BusyTerminal => ("I2", "rejected busy, and nothing asked for that"),
        Mutant::LateFactCounted => ("I1", "ended 2 times"),
        Mutant::SignatureUnchecked => ("I9", "was forged by a gateway, and ran"),
        Mutant::WrongNodeTaken => ("I9", "which was never handed over for it"),
        Mutant::ExpiredTaken => ("I4", "when it had expired, and ran"),
        Mutant::WallClockDecides => ("I4", "expired before its time"),
        Mutant::ResultUnverified => ("I9", "and its node never said so"),
    }
}

/// A run, with a mutant of this name; its files are gone when it returns.
fn sim(run: &str, mutant: Option<&str>) -> Output {
    let tmp = tempfile::Builder::new().prefix("bcd-mutant-").tempdir().expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_bcd"));
    command.arg("sim").args(run.split(' ')).args(["--json", "--log"]).arg(tmp.path().join("events.log"));
    command.env_remove("BCD_FAILPOINT").env_remove("BCD_MUTANT").env("TMPDIR", tmp.path());
    command.envs(mutant.map(|name| ("BCD_MUTANT", name)));
    let output = command.output().expect("bcd starts");
    let stderr = text(&output.stderr);
    if let Some(kept) = stderr.lines().find_map(|line| line.strip_prefix("the run's files are kept in ")) {
        std::fs::remove_dir_all(kept).expect("removed");
    }
    output
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The ids of the invariants that did not hold.
fn failed(stdout: &str) -> BTreeSet<String> {
    let last = stdout.lines().last().expect("a last line");
    let report: Value = serde_json::from_str(last).expect("one object");
    let invariants = report["invariants"].as_array().expect("a list");
    let failed = invariants.iter().filter(|one| one["held"] != true);
    failed.map(|one| one["id"].as_str().expect("an id").to_owned()).collect()
}

fn is_caught(mutant: Mutant) {
    let (id, says) = caught_by(mutant);
    let mut seen = String::new();
    for seed in SEEDS {
        let output = sim(&run(seed), Some(mutant.name()));
        let stdout = text(&output.stdout);
        let failed = failed(&stdout);
        let code = if failed.is_empty() { 0 } else { 1 };
        assert_eq!(output.status.code(), Some(code), "{stdout}\n{}", text(&output.stderr));
        let broken = format!("{id} broken: ");
        if stdout.lines().any(|line| line.starts_with(&broken) && line.contains(says)) {
            assert!(failed.contains(id), "{stdout}");
            let run = run(seed);
            let (run, _) = run.split_once(" --commands").expect("its rate comes last");
            let replay =
                format!("NOT every invariant held; replay: BCD_MUTANT={} bcd sim {run}", mutant.name());
            assert!(stdout.contains(&replay), "{stdout}");
            return;
        }
        seen = stdout;
    }
    panic!("{id} saw it in none of {} runs; the last one: {seen}", SEEDS.len());
}

#[test]
fn with_no_promise_broken_the_runs_of_the_mutants_hold_every_invariant() {
    let told: String = SEEDS[..3]
        .iter()
        .map(|seed| {
            let output = sim(&run(*seed), None);
            let stdout = text(&output.stdout);
            assert!(output.status.success(), "{stdout}\n{}", text(&output.stderr));
            assert_eq!(failed(&stdout), BTreeSet::new());
            assert!(!stdout.contains("BCD_MUTANT"), "{stdout}");
            stdout
        })
        .collect();
    // What is told at a renewal needs more of them than such a run has.
    let long = [Lie::RenewForged, Lie::RenewStale, Lie::RenewSwapped];
    for lie in Lie::ALL.iter().filter(|lie| !long.contains(lie)) {
        assert!(told.contains(&format!("\"lie-{}\":", lie.name())), "{} was never told: {told}", lie.name());
    }
}

#[test]
fn an_effect_before_its_sync_runs_twice() {
    is_caught(Mutant::EffectBeforeSync);
}

#[test]
fn a_result_that_is_not_sent_again_leaves_its_command_open() {
    is_caught(Mutant::ResultNotResent);
}

#[test]
fn a_duplicate_that_is_started_again_runs_twice() {
    is_caught(Mutant::DuplicateStarted);
}

#[test]
fn a_tombstone_that_is_forgotten_lets_a_replay_run() {
    is_caught(Mutant::TombstoneForgotten);
}

#[test]
fn a_program_without_a_begun_record_is_given_up_by_the_next_daemon() {
    is_caught(Mutant::BegunSkipped);
}

#[test]
fn an_epoch_that_goes_back_is_seen() {
    is_caught(Mutant::EpochBack);
}

#[test]
fn an_event_that_is_acked_too_far_is_missing() {
    is_caught(Mutant::EventAckedTooFar);
}

#[test]
fn a_busy_that_is_taken_for_an_end_is_one_that_nothing_asked_for() {
    is_caught(Mutant::BusyTerminal);
}

#[test]
fn a_late_fact_that_counts_ends_its_command_twice() {
    is_caught(Mutant::LateFactCounted);
}

#[test]
fn a_signature_that_is_not_checked_lets_a_gateway_command() {
    is_caught(Mutant::SignatureUnchecked);
}

#[test]
fn a_body_for_another_node_that_is_taken_is_seen() {
    is_caught(Mutant::WrongNodeTaken);
}

#[test]
fn a_command_that_is_begun_after_its_end_is_seen() {
    is_caught(Mutant::ExpiredTaken);
}

#[test]
fn a_machine_whose_own_clock_decides_ends_commands_before_their_time() {
    is_caught(Mutant::WallClockDecides);
}

#[test]
fn a_result_that_the_worker_takes_unverified_is_seen() {
    is_caught(Mutant::ResultUnverified);
}

#[test]
fn a_mutant_that_there_is_not_ends_the_run_before_it_begins() {
    let output = sim(&run(SEEDS[0]), Some("effect-after-sync"));
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(64), "{stderr}");
    assert!(stderr.contains("effect-after-sync") && stderr.contains("effect-before-sync"), "{stderr}");
}
