//! kill -9 at every step of a reset, a leave and a seal.

use bcd::failpoint;

use super::enrolment::JOIN_STEPS;
use super::for_each;
use crate::lab::{Lab, shown, until};

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

/// The names of all that is killed here.
pub(super) fn steps() -> impl Iterator<Item = &'static str> {
    let apart = [failpoint::GATEWAY_LEAVES, failpoint::GATEWAY_LEFT, failpoint::SEAL_IDENTITY];
    RESET_STEPS.iter().chain(LEAVE_STEPS).copied().chain(apart).map(failpoint::Step::name)
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
        assert!(!lab.path("node/join-pending.json").exists(), "{step}: nothing is left to go on with");
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
