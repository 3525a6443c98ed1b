//! kill -9 at every step of a join and of a renewal, of the node and of the side that answers.

use bcd::failpoint;

use super::for_each;
use crate::lab::{Lab, shown, until};

mod kills;

pub(super) const JOIN_STEPS: &[failpoint::Step] = &[
    failpoint::JOIN_KEY,
    failpoint::JOIN_PENDING,
    failpoint::JOIN_ANSWERED,
    failpoint::JOIN_JOURNAL,
    failpoint::JOIN_IDENTITY,
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

/// Those of a re-join come before those of a renewal.
const REJOIN_STEPS: &[failpoint::Step] = &[failpoint::REJOIN_KEY, failpoint::REJOIN_PROVEN];

/// Of the gateway, or of the worker beside it, for whatever certificate is asked.
const SERVICE_STEPS: &[failpoint::Step] =
    &[failpoint::WORKER_LETS_IN, failpoint::WORKER_ISSUED, failpoint::GATEWAY_JOINED];

/// The names of all that is killed here.
pub(super) fn steps() -> impl Iterator<Item = &'static str> {
    [JOIN_STEPS, RENEW_STEPS, REJOIN_STEPS, SERVICE_STEPS].into_iter().flatten().map(|step| step.name())
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
