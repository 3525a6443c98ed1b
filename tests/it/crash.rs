//! kill -9 of the real binary at every named step of a command's life, and at random moments.
//!
//! The program writes the witness file itself. What has to hold after every kill: the killed side recovers by
//! being started again and nothing else, the command ends once, its program ran at most once, its result is
//! acked, and the node goes on working.

use std::sync::Mutex;

use bcd::failpoint;
use bcd::gateway::control::CommandView;

use crate::lab::{Lab, shown, until};

mod random;

/// How a command ends whose node died at a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The step lies before RUNNING is durable, or after DONE is: the kill costs nothing.
    Succeeds,
    /// RUNNING is durable and DONE is not: nobody knows how far it came.
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
    (failpoint::BEGUN_CREATED, End::Interrupted),
    (failpoint::BEGUN, End::Interrupted),
    (failpoint::RUNNING_SENT, End::Either),
    (failpoint::EFFECT_STARTED, End::Interrupted),
    (failpoint::EFFECT_ENDED, End::Interrupted),
    (failpoint::DONE_WRITTEN, End::Interrupted),
    (failpoint::DONE, End::Succeeds),
    (failpoint::RESULT_SENT, End::Succeeds),
    (failpoint::ACK_RECEIVED, End::Succeeds),
    (failpoint::TOMBSTONE, End::Succeeds),
];

const GATEWAY_STEPS: &[failpoint::Step] = &[
    failpoint::GATEWAY_DISPATCHED,
    failpoint::GATEWAY_SENT,
    failpoint::GATEWAY_UPDATE,
    failpoint::GATEWAY_STORED,
    failpoint::GATEWAY_ACKED,
    failpoint::GATEWAY_HELLO,
];

const JOIN_STEPS: &[failpoint::Step] = &[
    failpoint::JOIN_KEY,
    failpoint::JOIN_PENDING,
    failpoint::JOIN_ANSWERED,
    failpoint::JOIN_JOURNAL,
    failpoint::JOIN_IDENTITY,
];

/// Labs at work at once: a case is mostly waiting.
const AT_ONCE: usize = 4;

/// Runs a case for each step, some at a time, and fails with every step that failed.
fn for_each<T: Sync>(steps: &[T], case: impl Fn(&T) + Sync) {
    let (next, panicked) = (Mutex::new(steps.iter()), Mutex::new(0));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
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
    let others = GATEWAY_STEPS.iter().chain(JOIN_STEPS).map(|step| step.name());
    let covered: Vec<&str> = node.chain(others).chain([failpoint::GATEWAY_JOINED.name()]).collect();
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
fn a_join_killed_at_any_step_and_repeated_gives_one_working_identity() {
    for_each(JOIN_STEPS, |step| {
        let step = step.name();
        let mut lab = Lab::new();
        let ticket = lab.ticket(1);
        let killed = lab.join_command(&ticket, Some(step)).output().expect("bcd starts");
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&killed.status),
            Some(9),
            "{step}: {}",
            shown(&killed)
        );
        let again = lab.join(&ticket);
        assert!(again.status.success(), "{step}: {}", shown(&again));
        lab.start_node(None);
        lab.probe();
    });
}

#[test]
fn a_gateway_killed_within_a_join_gives_the_repeated_join_the_same_node() {
    let mut lab = Lab::new();
    let ticket = lab.ticket(1);
    lab.kill_gateway();
    let step = failpoint::GATEWAY_JOINED.name();
    lab.start_gateway(Some(step));
    let mut join = lab.join_command(&ticket, None).spawn().expect("bcd starts");
    lab.gateway.as_mut().expect("a gateway").wait_killed(step);
    lab.start_gateway(None);
    let status = join.wait().expect("a child to wait for");
    assert!(status.success(), "the join keeps trying: {status}\n{}", lab.logs());
    lab.start_node(None);
    lab.probe();
}

#[test]
fn a_program_that_outlives_its_killed_node_is_ended_and_reported_interrupted() {
    let mut lab = Lab::joined();
    let pid_file = lab.path("pid");
    let id = lab.enqueue_program("one", &format!("; echo $$ > {}; exec sleep 600", pid_file.display()));
    lab.start_node(None);
    let pid = until("the program's pid", || {
        let text = std::fs::read_to_string(&pid_file).ok()?;
        text.trim().parse::<u32>().ok()
    });
    lab.kill_node();
    let alive = || std::path::Path::new(&format!("/proc/{pid}/exe")).exists();
    assert!(alive(), "a killed node takes no program with it");
    lab.start_node(None);
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.reason.as_str()), ("failed", "interrupted"), "{}", lab.logs());
    assert!(!alive(), "the leftover was ended before its command was");
    assert_eq!(lab.runs("one"), 1);
    lab.probe();
}
