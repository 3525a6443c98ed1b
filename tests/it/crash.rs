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

const JOIN_STEPS: &[failpoint::Step] = &[
    failpoint::JOIN_KEY,
    failpoint::JOIN_PENDING,
    failpoint::JOIN_ANSWERED,
    failpoint::JOIN_JOURNAL,
    failpoint::JOIN_IDENTITY,
];

const RESET_STEPS: &[failpoint::Step] =
    &[failpoint::RESET_IDENTITY, failpoint::RESET_HALF, failpoint::RESET_DONE];

/// A leave ends with the steps of a reset.
const LEAVE_STEPS: &[failpoint::Step] = &[
    failpoint::LEAVE_RECORDED,
    failpoint::LEAVE_TOLD,
    failpoint::RESET_IDENTITY,
    failpoint::RESET_HALF,
    failpoint::RESET_DONE,
];

/// The last of them comes when a session moves to the certificate.
const RENEW_STEPS: &[failpoint::Step] = &[
    failpoint::RENEW_ANSWERED,
    failpoint::RENEW_KEY,
    failpoint::RENEW_IDENTITY,
    failpoint::RENEW_KEYS_REMOVED,
    failpoint::RENEW_TIME,
    failpoint::RENEW_MOVES,
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
    let others = GATEWAY_STEPS
        .iter()
        .chain(JOIN_STEPS)
        .chain(RESET_STEPS)
        .chain(LEAVE_STEPS)
        .chain(RENEW_STEPS)
        .map(|step| step.name());
    let covered: Vec<&str> = node
        .chain(supervisor)
        .chain(others)
        .chain([
            failpoint::GATEWAY_JOINED.name(),
            failpoint::GATEWAY_LEAVES.name(),
            failpoint::GATEWAY_LEFT.name(),
            failpoint::SEAL_IDENTITY.name(),
            failpoint::SUPERVISOR_STARTED.name(),
            failpoint::JOURNAL_HALF_ASIDE.name(),
        ])
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
fn a_reset_killed_at_any_step_is_finished_by_the_next_join_and_its_ticket_is_used_once() {
    for_each(RESET_STEPS, |step| {
        let step = step.name();
        let mut lab = Lab::joined();
        // A journal with rows, which a join would not replace.
        let id = lab.enqueue_program("one", "");
        lab.start_node(None);
        lab.ended(&id);
        assert!(lab.node().terminate().success(), "{step}\n{}", lab.logs());
        let ticket = lab.ticket(1);
        let mut reset = lab.join_command(&ticket, Some(step));
        let killed = reset.args(["--reset", "--yes"]).output().expect("bcd starts");
        let signal = std::os::unix::process::ExitStatusExt::signal(&killed.status);
        assert_eq!(signal, Some(9), "{step}: {}", shown(&killed));
        let joined = lab.join(&ticket);
        assert!(joined.status.success(), "{step}: {}", shown(&joined));
        let aside = std::fs::read_dir(lab.path("node")).expect("a directory").map(Result::unwrap);
        let aside: Vec<String> = aside.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        let stamps: std::collections::BTreeSet<&str> =
            aside.iter().filter_map(|name| name.split_once(".reset-")).map(|(_, stamp)| stamp).collect();
        assert_eq!(stamps.len(), 1, "{step}: {aside:?}");
        for name in ["identity.json.", "keys.", "journal.db.", "begun.", "outcome."] {
            assert_eq!(aside.iter().filter(|aside| aside.starts_with(name)).count(), 1, "{step}: {aside:?}");
        }
        lab.start_node(None);
        until(&format!("{step}: a session"), || lab.status()?["session"]["live"].as_object().map(drop));
        assert!(lab.node().terminate().success(), "{step}\n{}", lab.logs());
    });
}

#[test]
fn a_join_with_a_reset_killed_at_any_step_and_repeated_goes_on_with_its_ticket_and_is_one_node() {
    for_each(JOIN_STEPS, |step| {
        let step = step.name();
        let mut lab = Lab::joined();
        let ticket = lab.ticket(1);
        let join = |step| {
            let mut join = lab.join_command(&ticket, step);
            join.args(["--reset", "--yes"]).output().expect("bcd starts")
        };
        let killed = join(Some(step));
        let signal = std::os::unix::process::ExitStatusExt::signal(&killed.status);
        assert_eq!(signal, Some(9), "{step}: {}", shown(&killed));
        let again = join(None);
        assert!(again.status.success(), "{step}: {}", shown(&again));
        assert_eq!(lab.nodes().len(), 2, "{step}: the one that it was, and the one that it is");
        lab.start_node(None);
        until(&format!("{step}: a session"), || lab.status()?["session"]["live"].as_object().map(drop));
    });
}

#[test]
fn a_join_that_was_killed_after_a_reset_is_moved_aside_by_the_next_reset_and_cannot_leave() {
    for_each(&[failpoint::JOIN_PENDING, failpoint::JOIN_JOURNAL], |step| {
        let step = step.name();
        let lab = Lab::joined();
        let bcd = |arguments: &[&str]| lab.bcd(arguments, None).output().expect("bcd starts");
        let reset = || bcd(&["join", "--reset", "--yes"]);
        let asides = || {
            let entries = std::fs::read_dir(lab.path("node")).expect("a directory").map(Result::unwrap);
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            names.filter(|name| name.contains(".reset-")).collect::<std::collections::BTreeSet<String>>()
        };
        assert!(reset().status.success(), "{step}");
        let first = asides();
        let killed = lab.join_command(&lab.ticket(1), Some(step)).output().expect("bcd starts");
        let signal = std::os::unix::process::ExitStatusExt::signal(&killed.status);
        assert_eq!(signal, Some(9), "{step}: {}", shown(&killed));

        for leave in [&["leave"][..], &["leave", "--force"]] {
            let refused = bcd(leave);
            assert_eq!(refused.status.code(), Some(78), "{step}: {}", shown(&refused));
            assert!(shown(&refused).contains("a join has begun in"), "{step}: {}", shown(&refused));
        }
        assert!(
            asides() == first && lab.path("node/join-pending.json").exists(),
            "{step}: nothing was moved"
        );

        let again = reset();
        assert!(again.status.success(), "{step}: {}", shown(&again));
        let both = asides();
        assert!(first.is_subset(&both) && both.len() > first.len(), "{step}: {first:?} {both:?}");
        assert!(!lab.path("node/join-pending.json").exists() && !lab.path("node/keys").exists(), "{step}");
        let joined = lab.join(&lab.ticket(1));
        assert!(joined.status.success(), "{step}: {}", shown(&joined));
    });
}

/// Whether the state directory has an identity or a journal in its place.
fn is_a_node(lab: &Lab) -> bool {
    ["identity.json", "journal.db"].iter().any(|name| lab.path("node").join(name).exists())
}

#[test]
fn a_leave_killed_at_any_step_and_repeated_leaves_once_and_moves_everything_aside() {
    for_each(LEAVE_STEPS, |step| {
        let step = step.name();
        let lab = Lab::joined();
        let killed = lab.bcd(&["leave"], Some(step)).output().expect("bcd starts");
        let signal = std::os::unix::process::ExitStatusExt::signal(&killed.status);
        assert_eq!(signal, Some(9), "{step}: {}", shown(&killed));
        let again = lab.bcd(&["leave"], None).output().expect("bcd starts");
        if step == failpoint::RESET_DONE.name() {
            assert_eq!(again.status.code(), Some(78), "{step}: {}", shown(&again));
        } else {
            assert!(again.status.success(), "{step}: {}", shown(&again));
        }
        assert!(!is_a_node(&lab), "{step}: {}", shown(&again));
        assert!(lab.nodes().is_empty(), "{step}: the control plane has heard\n{}", lab.logs());
    });
}

#[test]
fn a_gateway_killed_within_a_leave_knows_the_node_no_more_and_the_leave_ends() {
    for_each(&[failpoint::GATEWAY_LEAVES, failpoint::GATEWAY_LEFT], |step| {
        let mut lab = Lab::joined();
        lab.kill_gateway();
        let step = step.name();
        lab.start_gateway(Some(step));
        let mut leave = lab.bcd(&["leave"], None).spawn().expect("bcd starts");
        lab.gateway.as_mut().expect("a gateway").wait_killed(step);
        lab.start_gateway(None);
        let status = leave.wait().expect("a child to wait for");
        assert!(status.success(), "{step}: {status}\n{}", lab.logs());
        assert!(!is_a_node(&lab) && lab.nodes().is_empty(), "{step}\n{}", lab.logs());
    });
}

#[test]
fn a_seal_killed_in_the_middle_leaves_no_identity_and_is_finished_by_the_next() {
    let lab = Lab::joined();
    let seal = |step| lab.bcd(&["image", "seal", "--yes"], step).output().expect("bcd starts");
    let killed = seal(Some(failpoint::SEAL_IDENTITY.name()));
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&killed.status), Some(9), "{}", shown(&killed));
    assert!(!lab.path("node/identity.json").exists() && lab.path("node/journal.db").exists());
    let sealed = seal(None);
    assert!(sealed.status.success(), "{}", shown(&sealed));
    assert_eq!(std::fs::read_dir(lab.path("node")).expect("a directory").count(), 0);
}

#[test]
fn a_node_killed_at_any_step_of_a_renewal_has_the_old_identity_or_the_new_one_and_renews_again() {
    for_each(RENEW_STEPS, |step| {
        let mut lab = Lab::new();
        let moves = *step == failpoint::RENEW_MOVES;
        let step = step.name();
        lab.kill_gateway();
        lab.start_gateway_with(None, &["--certificate-life", if moves { "15s" } else { "24h" }]);
        let joined = lab.join(&lab.ticket(1));
        assert!(joined.status.success(), "{step}: {}", shown(&joined));
        // A journal without a birth asks for a renewal at once.
        lab.lose_journal();
        lab.start_node(Some(step));
        lab.node().wait_killed(step);
        let identity = std::fs::read(lab.path("node/identity.json")).expect("an identity");
        lab.start_node(None);
        until(&format!("{step}: a birth"), || {
            let shown = lab.bcd(&["journal", "show", "--json"], None).output().expect("bcd starts");
            let journal: serde_json::Value = serde_json::from_slice(&shown.stdout).ok()?;
            journal["birth"].as_str().map(drop)
        });
        let again = std::fs::read(lab.path("node/identity.json")).expect("an identity");
        let kept = [failpoint::RENEW_TIME, failpoint::RENEW_MOVES].iter().any(|kept| kept.name() == step);
        assert!(kept || identity != again, "{step}: it was not renewed\n{}", lab.logs());
        lab.probe();
        let program = lab.enqueue_program("one", "");
        assert_eq!(lab.ended(&program).state, "succeeded", "{step}\n{}", lab.logs());
        if !moves {
            let keys = std::fs::read_dir(lab.path("node/keys")).expect("keys").count();
            assert_eq!(keys, 1, "{step}: a key was left");
        }
        assert!(lab.node().terminate().success(), "{step}\n{}", lab.logs());
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
