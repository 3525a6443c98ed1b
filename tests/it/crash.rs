//! kill -9 of the real binary at every named step of a command's life, and at random moments.
//!
//! The program writes the witness file itself. What has to hold after every kill: the killed side recovers by
//! being started again and nothing else, the command ends once, its program ran at most once, its result is
//! acked, and the node goes on working.

use std::sync::Mutex;

use bcd::failpoint;
use bcd::gateway::control::CommandView;

use crate::lab::{Lab, until};

mod enrolment;
mod leaving;
mod random;
mod updates;

/// How a command ends whose node died at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The step lies before RUNNING is durable, or behind the program's begun record: the kill costs nothing.
    Succeeds,
    /// RUNNING is durable and there is no begun record: nothing ran, and nobody knows that.
    Interrupted,
    /// The wire does not wait for the journal, nor the journal for the wire: either, as the race went.
    Either,
}

/// Every step of a node, with the end of the command that was killed there.
const NODE_STEPS: &[(failpoint::Step, End)] = &[
    (failpoint::RECEIVED, End::Succeeds),
    (failpoint::ACCEPT_WRITTEN, End::Succeeds),
    (failpoint::ACCEPTED, End::Succeeds),
    (failpoint::ACCEPTED_SENT, End::Either),
    (failpoint::RUN_WRITTEN, End::Succeeds),
    (failpoint::RUNNING, End::Interrupted),
    (failpoint::SUPERVISED, End::Succeeds),
    (failpoint::RUNNING_SENT, End::Either),
    (failpoint::EFFECT_STARTED, End::Succeeds),
    (failpoint::EFFECT_ENDED, End::Succeeds),
    (failpoint::DONE_WRITTEN, End::Succeeds),
    (failpoint::DONE, End::Succeeds),
    (failpoint::RESULT_SENT, End::Succeeds),
    (failpoint::ACK_RECEIVED, End::Succeeds),
    (failpoint::TOMBSTONE, End::Succeeds),
];

/// Every step of a supervisor, with the end of the command whose supervisor died there, and how often it ran.
const SUPERVISOR_STEPS: &[(failpoint::Step, End, usize)] = &[
    (failpoint::BEGUN_CREATED, End::Interrupted, 0),
    (failpoint::BEGUN, End::Interrupted, 0),
    (failpoint::PROGRAM_STARTED, End::Interrupted, 1),
    (failpoint::PROGRAM_ENDED, End::Interrupted, 1),
    (failpoint::OUTCOME_WRITTEN, End::Interrupted, 1),
    (failpoint::OUTCOME, End::Succeeds, 1),
];

const GATEWAY_STEPS: &[failpoint::Step] = &[
    failpoint::GATEWAY_DISPATCHED,
    failpoint::GATEWAY_SENT,
    failpoint::GATEWAY_UPDATE,
    failpoint::GATEWAY_STORED,
    failpoint::GATEWAY_ACKED,
    failpoint::GATEWAY_HELLO,
];

/// Labs at work at once: a case is mostly waiting.
const AT_ONCE: usize = 4;

/// Runs a case for each step, some at a time, and fails with every step that failed.
fn for_each<T: Sync>(steps: &[T], case: impl Fn(&T) + Sync) {
    for_each_of(AT_ONCE, steps, case);
}

fn for_each_of<T: Sync>(at_once: usize, steps: &[T], case: impl Fn(&T) + Sync) {
    let (next, panicked) = (Mutex::new(steps.iter()), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let step = next.lock().expect("no case panics with the lock").next();
                    let Some(step) = step else { return };
                    // The panic's own message has been printed with its step.
                    if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(step))).is_err() {
                        *panicked.lock().expect("no case panics with the lock") += 1;
                    }
                }
            });
        }
    });
    let panicked = panicked.into_inner().expect("no case panics with the lock");
    assert_eq!(panicked, 0, "{panicked} of {} steps failed; their messages stand above", steps.len());
}

/// What holds for every ended command of a program that may not run twice.
fn check_once(lab: &Lab, step: &str, name: &str, view: &CommandView) {
    let runs = lab.runs(name);
    let place = || format!("{step}: {view:?}, {runs} runs\n{}", lab.logs());
    assert_eq!(view.terminal_changes, 1, "{}", place());
    match (view.state.as_str(), view.reason.as_str()) {
        ("succeeded", _) => assert_eq!(runs, 1, "{}", place()),
        ("failed", "interrupted") => assert!(runs <= 1 && view.effect == "unknown", "{}", place()),
        _ => panic!("{}", place()),
    }
}

#[test]
fn every_step_is_killed_somewhere() {
    let node = NODE_STEPS.iter().map(|(step, _)| step.name());
    let supervisor = SUPERVISOR_STEPS.iter().map(|(step, ..)| step.name());
    let gateway = GATEWAY_STEPS.iter().map(|step| step.name());
    let apart = [failpoint::SUPERVISOR_STARTED, failpoint::JOURNAL_HALF_ASIDE].map(failpoint::Step::name);
    let covered: Vec<&str> = node
        .chain(supervisor)
        .chain(gateway)
        .chain(enrolment::steps())
        .chain(leaving::steps())
        .chain(apart)
        .collect();
    let missing: Vec<_> =
        failpoint::ALL.iter().map(|step| step.name()).filter(|name| !covered.contains(name)).collect();
    assert_eq!(missing, [""; 0]);
}

#[test]
fn a_node_killed_at_any_step_runs_the_command_at_most_once_and_ends_it() {
    for_each(NODE_STEPS, |(step, end)| {
        let step = step.name();
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("one", "");
        lab.start_node(Some(step));
        lab.node().wait_killed(step);
        lab.start_node(None);
        let view = lab.ended(&id);
        check_once(&lab, step, "one", &view);
        let ended = if view.state == "succeeded" { End::Succeeds } else { End::Interrupted };
        if *end != End::Either {
            assert_eq!(ended, *end, "{step}: {view:?}\n{}", lab.logs());
        }
        lab.probe();
        nothing_is_owed(&mut lab, step);
    });
}

#[test]
fn a_node_killed_with_two_commands_in_flight_ends_both() {
    for_each(NODE_STEPS, |(step, _)| {
        let step = step.name();
        let mut lab = Lab::joined();
        let ids =
            [("one", lab.enqueue_program("one", "")), ("two", lab.enqueue_program("two", "; sleep 0.1"))];
        lab.start_node(Some(step));
        lab.node().wait_killed(step);
        lab.start_node(None);
        for (name, id) in &ids {
            let view = lab.ended(id);
            check_once(&lab, step, name, &view);
        }
        lab.probe();
        nothing_is_owed(&mut lab, step);
    });
}

/// The result was acked: the journal of the stopped node owes nothing.
fn nothing_is_owed(lab: &mut Lab, step: &str) {
    until(&format!("{step}: the last result's ack"), || {
        let shown = lab.bcd(&["journal", "show", "--json"], None).output().expect("bcd starts");
        let journal: serde_json::Value = serde_json::from_slice(&shown.stdout).ok()?;
        let counts = &journal["counts"];
        let ended = ["accepted", "running", "done"].iter().all(|state| counts[state] == 0);
        (ended && counts["tombstones"].as_u64() > Some(0)).then_some(())
    });
    let status = lab.node().terminate();
    assert!(status.success(), "{step}: a clean stop ended with {status}\n{}", lab.logs());
}

#[test]
fn a_gateway_killed_at_any_step_loses_no_command_and_repeats_none() {
    for_each(GATEWAY_STEPS, |step| {
        let step = step.name();
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("one", "");
        lab.kill_gateway();
        lab.start_gateway(Some(step));
        lab.start_node(None);
        lab.gateway.as_mut().expect("a gateway").wait_killed(step);
        lab.start_gateway(None);
        let view = lab.ended(&id);
        check_once(&lab, step, "one", &view);
        assert_eq!(view.state, "succeeded", "{step}: the node never died\n{}", lab.logs());
        lab.probe();
        nothing_is_owed(&mut lab, step);
    });
}

#[test]
fn a_supervisor_killed_at_any_step_runs_the_command_at_most_once_and_the_node_ends_it() {
    for_each(SUPERVISOR_STEPS, |(step, end, most)| {
        let step = step.name();
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("one", "");
        lab.start_node(Some(step));
        let view = lab.ended(&id);
        check_once(&lab, step, "one", &view);
        let ended = if view.state == "succeeded" { End::Succeeds } else { End::Interrupted };
        assert_eq!(ended, *end, "{step}: {view:?}\n{}", lab.logs());
        assert!(lab.runs("one") <= *most, "{step}: {}", lab.logs());
        lab.probe();
        nothing_is_owed(&mut lab, step);
    });
}

#[test]
fn a_supervisor_that_dies_before_its_record_has_started_nothing_and_another_is_tried() {
    let mut lab = Lab::joined();
    let id = lab.enqueue_program("one", "");
    lab.start_node(Some(failpoint::SUPERVISOR_STARTED.name()));
    until("a second try", || {
        let log = std::fs::read_to_string(lab.path("node.log")).ok()?;
        (log.matches("it ended before it had made its record").count() > 1).then_some(())
    });
    assert_eq!(lab.runs("one"), 0);
    let view = lab.show(&id).expect("a command");
    assert!(!bcd::sim::invariants::is_terminal(&view.state), "{view:?}");
    lab.kill_node();
    lab.start_node(None);
    let view = lab.ended(&id);
    check_once(&lab, "supervisor.started", "one", &view);
    lab.probe();
}

/// A program that has started and ends once a file is there.
fn waiting_program(lab: &Lab) -> (bcd::model::CommandId, std::path::PathBuf) {
    waiting_program_named(lab, "one", "up")
}

/// The same under a name, telling its pid in a file of the lab.
fn waiting_program_named(lab: &Lab, name: &str, up: &str) -> (bcd::model::CommandId, std::path::PathBuf) {
    let (up, go) = (lab.path(up), lab.path("go"));
    let rest = format!(
        "; echo $$ > {}; while ! [ -e {} ]; do sleep 0.02; done; echo true result",
        up.display(),
        go.display()
    );
    (lab.enqueue_program(name, &rest), go)
}

fn program_is_up(lab: &Lab) -> u32 {
    pid_in(lab, "up")
}

fn pid_in(lab: &Lab, up: &str) -> u32 {
    until("the program's pid", || {
        let text = std::fs::read_to_string(lab.path(up)).ok()?;
        text.trim().parse::<u32>().ok()
    })
}

fn alive(pid: u32) -> bool {
    std::path::Path::new(&format!("/proc/{pid}/exe")).exists()
}

fn check_true_result(lab: &Lab, id: &bcd::model::CommandId) {
    let view = lab.ended(id);
    check_once(lab, "outliving", "one", &view);
    assert_eq!(view.state, "succeeded", "{view:?}\n{}", lab.logs());
    lab.probe();
}

#[test]
fn a_program_survives_the_kill_of_its_node_and_the_next_one_delivers_its_true_result() {
    let mut lab = Lab::joined();
    let (id, go) = waiting_program(&lab);
    lab.start_node(None);
    let pid = program_is_up(&lab);
    for _ in 0..3 {
        lab.kill_node();
        assert!(alive(pid), "a killed node takes no program with it");
        lab.start_node(None);
        lab.probe();
        assert!(alive(pid), "a started node ends no program that has its supervisor");
    }
    let view = lab.show(&id).expect("a command");
    assert_eq!(view.state, "running", "{view:?}\n{}", lab.logs());
    std::fs::write(go, "").expect("a file");
    check_true_result(&lab, &id);
}

#[test]
fn a_program_survives_the_stop_of_its_node_and_ends_while_none_runs() {
    let mut lab = Lab::joined();
    let (id, go) = waiting_program(&lab);
    lab.start_node(None);
    let pid = program_is_up(&lab);
    let status = lab.node().terminate();
    assert!(status.success(), "a clean stop ended with {status}\n{}", lab.logs());
    assert!(alive(pid), "a stopped node takes no program with it");
    std::fs::write(go, "").expect("a file");
    until("the program's end", || (!alive(pid)).then_some(()));
    lab.start_node(None);
    check_true_result(&lab, &id);
}

/// Puts a file of other bytes in the place of `bcd`, as a package does: beside it, then renamed over it.
fn upgrade(lab: &Lab) {
    use std::io::Write as _;
    let new = lab.path("bcd.new");
    std::fs::copy(&lab.program, &new).expect("a copy");
    let mut file = std::fs::OpenOptions::new().append(true).open(&new).expect("a file");
    // Behind what the kernel loads.
    file.write_all(b"another release").expect("written");
    drop(file);
    std::fs::rename(&new, &lab.program).expect("replaced");
}

#[test]
fn programs_survive_the_replacement_of_the_daemons_file_and_the_new_daemon_delivers_their_true_results() {
    let mut lab = Lab::joined();
    let program = lab.path("bcd");
    std::fs::copy(&lab.program, &program).expect("a copy");
    lab.program = program;
    lab.start_node(None);
    let (before, go) = waiting_program_named(&lab, "before", "up-before");
    let first = pid_in(&lab, "up-before");
    upgrade(&lab);
    // The old daemon, of which there is no file any more, starts a supervisor of its own release.
    let (after, _) = waiting_program_named(&lab, "after", "up-after");
    let second = pid_in(&lab, "up-after");
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    lab.start_node(None);
    lab.probe();
    assert!(alive(first) && alive(second), "an upgrade ends no program");
    std::fs::write(go, "").expect("a file");
    for (id, name) in [(before, "before"), (after, "after")] {
        let view = lab.ended(&id);
        check_once(&lab, "upgrade", name, &view);
        assert_eq!(view.state, "succeeded", "{view:?}\n{}", lab.logs());
        let output: serde_json::Value = serde_json::from_str(&view.output).expect("JSON");
        assert_eq!(output["stdout"]["size"], "true result\n".len(), "{output}");
    }
    until("their ends", || (!alive(first) && !alive(second)).then_some(()));
}

#[test]
fn a_node_killed_between_the_two_halves_of_moving_a_journal_aside_keeps_both_and_runs_nothing_twice() {
    let mut lab = Lab::joined();
    let id = lab.enqueue_program("one", "");
    lab.start_node(None);
    lab.ended(&id);
    lab.kill_node();
    // Neither the file nor its log can be read any more; each is told by its length.
    let file = |name: &str| lab.path("node").join(name);
    std::fs::write(file("journal.db"), vec![b'x'; 8191]).unwrap();
    std::fs::write(file("journal.db-wal"), vec![b'y'; 4095]).unwrap();
    let step = failpoint::JOURNAL_HALF_ASIDE.name();
    lab.start_node(Some(step));
    lab.node().wait_killed(step);
    assert!(!lab.path("node/journal.db").exists() && lab.path("node/journal.db-wal").exists());

    lab.start_node(None);
    lab.probe();
    assert_eq!(lab.runs("one"), 1, "{}", lab.logs());
    let entries = std::fs::read_dir(lab.path("node")).unwrap().map(Result::unwrap);
    let mut aside: Vec<(String, u64)> = entries
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()))
        .filter(|(name, _)| name.contains("corrupt") || name.contains("stray"))
        .collect();
    aside.sort();
    let lengths: Vec<u64> = aside.iter().map(|(_, length)| *length).collect();
    assert_eq!(lengths, [8191, 4095], "{aside:?}");
    assert_eq!(aside[1].0, format!("{}-wal", aside[0].0), "the log lies beside its journal");
}
