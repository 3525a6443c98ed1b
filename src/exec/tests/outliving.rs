//! Programs that outlive their daemon, by what the next one makes of them.

use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use super::*;
use crate::clock::{Clock as _, SystemClock};
use crate::journal::begun::{Record, Supervisor};

/// A program that ends once [`Bench::let_go`] was called.
const UNTIL_LET_GO: &str = r#"echo $$ > "$0.pid"; while ! [ -e "$0.go" ]; do sleep 0.02; done; echo out"#;

impl Bench {
    /// A command with such a script, whose `$0` is a path in the state directory.
    fn script(&self, command: &str, script: &str, more: Value) -> Value {
        let script = format!("printf x >> {}; {script}", self.witness().display());
        let zero = self.dir.path().join(command);
        let mut args = json!({"argv": ["/bin/sh", "-c", script, zero], "grace_s": 1});
        let (Value::Object(into), Value::Object(from)) = (&mut args, more) else { panic!("objects") };
        into.extend(from);
        body(command, "node.exec", args)
    }

    async fn running(&mut self, body: &Value) {
        self.deliver(body).await;
        while !matches!(self.answer().await, Said::Running(1)) {}
        self.effect_has_started().await;
    }

    /// A program as `script` has it, `more` among its arguments, that runs on while no daemon does.
    async fn left_running(script: &str, more: Value) -> (TempDir, Value) {
        let mut bench = Self::new();
        let command = bench.script("c-1", script, more);
        bench.running(&command).await;
        (bench.crash().await, command)
    }

    /// Ends the program of [`Bench::left_running`], and waits for its supervisor's end.
    async fn ended(dir: &Path) {
        let supervisor = supervisor(dir, "c-1.json");
        Self::let_go(dir, "c-1");
        until("the supervisor's end", || !lives(supervisor.pid)).await;
    }

    fn let_go(dir: &Path, command: &str) {
        std::fs::write(dir.join(format!("{command}.go")), "").expect("a file");
    }
}

fn supervisor(dir: &Path, file: &str) -> Supervisor {
    let text = std::fs::read(dir.join("begun").join(file)).expect("a record");
    serde_json::from_slice::<Record>(&text).expect("a record").supervisor.expect("a supervisor")
}

fn pid(of: i32) -> Pid {
    Pid::from_raw(of).expect("a pid")
}

/// Whether a process is there and not only waiting to be reaped.
fn lives(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}/exe")).exists()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited in vain: {what}");
}

async fn program_of(dir: &Path, command: &str) -> i32 {
    let file = dir.join(format!("{command}.pid"));
    let read = || std::fs::read_to_string(&file).ok()?.trim().parse().ok();
    until("the program's pid", || read().is_some()).await;
    read().expect("a pid")
}

#[tokio::test]
async fn a_program_that_outlives_its_daemon_is_in_flight_at_the_next_and_its_true_result_is_delivered() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({})).await;

    let mut bench = Bench::over(dir, "i-2");
    assert_eq!(bench.lanes.running_ids(), [id("c-1")]);
    assert_eq!(bench.lanes.free()[&Lane::Work], 1, "it holds its credit");
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Running(1), "a redelivery starts nothing");
    Bench::let_go(bench.dir.path(), "c-1");
    let outcome = bench.result().await;
    assert_eq!((outcome.state, outcome.attempt), (Terminal::Succeeded, 1));
    let output: Value = serde_json::from_slice(&outcome.output).expect("JSON");
    assert_eq!(output["stdout"]["head"], data_encoding::BASE64.encode(b"out\n"));
    assert!(outcome.finished > outcome.started);
    assert_eq!(bench.effects(), 1);
    bench.credits_are_back().await;
    assert!(bench.lanes.running_ids().is_empty());
}

#[tokio::test]
async fn a_program_that_ends_while_no_daemon_runs_is_done_at_the_next_start() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({})).await;
    Bench::ended(dir.path()).await;

    let mut bench = Bench::over(dir, "i-2");
    assert!(bench.lanes.running_ids().is_empty());
    bench.deliver(&command).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_time_limit_that_passes_while_no_daemon_runs_ends_the_program() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({"time_limit_s": 1})).await;
    let program = program_of(dir.path(), "c-1").await;
    until("the program's end", || !lives(program)).await;

    let mut bench = Bench::over(dir, "i-2");
    bench.deliver(&command).await;
    let outcome = bench.result().await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Failed, Some(Reason::TimeLimit)));
}

#[tokio::test]
async fn a_program_of_an_earlier_daemon_is_ended_by_a_cancellation() {
    let (dir, _) = Bench::left_running(UNTIL_LET_GO, json!({})).await;
    let program = program_of(dir.path(), "c-1").await;

    let mut bench = Bench::over(dir, "i-2");
    bench.cancel("c-1").await;
    let outcome = bench.result().await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Cancelled, Some(Reason::Cancelled)));
    assert!(!lives(program));
}

#[tokio::test]
async fn what_a_killed_supervisor_had_started_is_ended_and_the_command_is_interrupted() {
    let mut bench = Bench::new();
    let script = format!("setsid env -i sleep 60 & echo $! > \"$0.child\"; {UNTIL_LET_GO}");
    let command = bench.script("c-1", &script, json!({}));
    bench.running(&command).await;
    let program = program_of(bench.dir.path(), "c-1").await;
    let supervisor = supervisor(bench.dir.path(), "c-1.json");
    kill_process(pid(supervisor.pid), Signal::KILL).expect("a signal");
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
    until("the program's end", || !lives(program)).await;
    if !supervisor.groups.is_empty() {
        let child = std::fs::read_to_string(bench.dir.path().join("c-1.child")).expect("a pid");
        let child = child.trim().parse().expect("a pid");
        until("the end of a child that cleared its environment", || !lives(child)).await;
        assert!(supervisor.groups.iter().all(|group| !group.exists()), "{:?}", supervisor.groups);
    }
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_supervisor_that_died_with_its_daemon_leaves_an_interrupted_command_that_never_runs_again() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({})).await;
    let program = program_of(dir.path(), "c-1").await;
    kill_process(pid(supervisor(dir.path(), "c-1.json").pid), Signal::KILL).expect("a signal");

    let mut bench = Bench::over(dir, "i-2");
    until("the program's end", || !lives(program)).await;
    bench.deliver(&command).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_retry_safe_program_whose_supervisor_is_gone_too_runs_again_as_attempt_2() {
    let mut bench = Bench::new();
    let script = r#"[ -e "$0.again" ] || { touch "$0.again"; sleep 60; }"#;
    let command = bench.script("c-1", script, json!({"retry_safe": true}));
    bench.running(&command).await;
    let again = bench.dir.path().join("c-1.again");
    until("its first run", || again.exists()).await;
    let dir = bench.crash().await;
    kill_process(pid(supervisor(dir.path(), "c-1~1.json").pid), Signal::KILL).expect("a signal");

    let mut bench = Bench::over(dir, "i-2");
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Running(2));
    let outcome = bench.result().await;
    assert_eq!((outcome.state, outcome.attempt), (Terminal::Succeeded, 2));
}

#[tokio::test]
async fn a_retry_safe_program_that_waits_to_run_again_is_ended_by_a_cancellation() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({"retry_safe": true})).await;
    kill_process(pid(supervisor(dir.path(), "c-1~1.json").pid), Signal::KILL).expect("a signal");

    let mut bench = Bench::over(dir, "i-2");
    bench.cancel("c-1").await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::Unknown));
    bench.deliver(&command).await;
    assert_eq!(bench.result().await, outcome);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_torn_outcome_record_is_no_outcome() {
    let (dir, command) = Bench::left_running(UNTIL_LET_GO, json!({})).await;
    Bench::ended(dir.path()).await;
    let record = dir.path().join("outcome/c-1.json");
    let whole = std::fs::read(&record).expect("an outcome");
    std::fs::write(&record, &whole[..whole.len() / 2]).expect("torn");

    let mut bench = Bench::over(dir, "i-2");
    bench.deliver(&command).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_lost_journal_finds_its_running_program_and_its_ended_one_by_their_records() {
    let mut bench = Bench::new();
    let (runs, ends) =
        (bench.script("c-1", UNTIL_LET_GO, json!({})), bench.script("c-2", "exit 7", json!({})));
    bench.running(&runs).await;
    bench.deliver(&ends).await;
    assert_eq!(bench.result().await.reason, Some(Reason::ExitStatus));
    let dir = bench.crash().await;
    std::fs::remove_file(dir.path().join("journal.db")).expect("lost");

    let mut bench = Bench::over(dir, "i-2");
    assert_eq!(bench.lanes.running_ids(), [id("c-1")]);
    bench.deliver(&ends).await;
    assert_eq!(bench.result().await.reason, Some(Reason::ExitStatus));
    Bench::let_go(bench.dir.path(), "c-1");
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
    assert_eq!(bench.effects(), 2);
}

#[tokio::test]
async fn a_record_that_a_supervisor_is_about_to_make_is_waited_for() {
    let dir = Bench::new().crash().await;
    let lock = leftovers::records(dir.path()).expect("a directory");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).expect("a lock");
    let made = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        drop(lock);
    });
    let from = SystemClock.boot();
    drop(Bench::over(dir, "i-2"));
    assert!(SystemClock.boot() - from >= Duration::from_millis(250));
    made.join().expect("no panic");
}
