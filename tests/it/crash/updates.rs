//! The gateway killed at each update of one command, and a node killed while it answers from a tombstone.

use bcd::failpoint::{self, Step};

use super::{check_once, for_each, nothing_is_owed};
use crate::lab::Lab;

/// The gateway dies at a step the n-th time; what its store then says of the command. ACCEPTED and RUNNING come
/// close behind each other and may share a transaction; the slow program keeps the result away from both.
const UPDATES: &[(Step, u32, &[&str])] = &[
    (failpoint::GATEWAY_UPDATE, 1, &["dispatched"]),
    (failpoint::GATEWAY_STORED, 1, &["accepted", "running"]),
    (failpoint::GATEWAY_UPDATE, 2, &["dispatched", "accepted"]),
    (failpoint::GATEWAY_STORED, 2, &["running"]),
    (failpoint::GATEWAY_UPDATE, 3, &["running"]),
    (failpoint::GATEWAY_STORED, 3, &["succeeded"]),
    (failpoint::GATEWAY_ACKED, 1, &["succeeded"]),
];

#[test]
fn a_gateway_killed_at_any_update_of_a_command_knows_what_it_had_stored_and_ends_it_once() {
    for_each(UPDATES, |(step, nth, stored)| {
        let step = format!("{}:{nth}", step.name());
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("one", "; sleep 1");
        lab.kill_gateway();
        lab.start_gateway(Some(&step));
        lab.start_node(None);
        lab.gateway.as_mut().expect("a gateway").wait_killed(&step);
        let state = lab.stored_state(&id);
        assert!(stored.contains(&&*state), "{step}: {state}\n{}", lab.logs());
        lab.start_gateway(None);
        let view = lab.ended(&id);
        check_once(&lab, &step, "one", &view);
        assert_eq!(view.state, "succeeded", "{step}: the node never died\n{}", lab.logs());
        lab.probe();
        nothing_is_owed(&mut lab, &step);
    });
}

/// Steps of a replay's answer: the frame came, the answer left, its ack came.
const REPLAY: &[Step] = &[failpoint::RECEIVED, failpoint::RESULT_SENT, failpoint::ACK_RECEIVED];

#[test]
fn a_node_killed_while_it_answers_from_a_tombstone_runs_nothing() {
    for_each(REPLAY, |step| {
        let step = step.name();
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("one", "");
        lab.kill_gateway();
        lab.keep_gateway();
        lab.start_gateway(None);
        lab.start_node(None);
        assert_eq!(lab.ended(&id).state, "succeeded", "{}", lab.logs());
        nothing_is_owed(&mut lab, step);

        // A gateway restored from before the command delivers it once more.
        lab.kill_gateway();
        lab.restore_gateway();
        lab.start_gateway(None);
        lab.start_node(Some(step));
        lab.node().wait_killed(step);
        lab.start_node(None);
        let view = lab.ended(&id);
        check_once(&lab, step, "one", &view);
        assert_eq!((&*view.state, &*view.message), ("succeeded", "already-done"), "{step}\n{}", lab.logs());
        lab.probe();
        nothing_is_owed(&mut lab, step);
    });
}
