//! Gateways that lie about the time, hang up, or allow upgrades alone, as processes over real sockets.

use bcd::gateway::control::CommandView;
use bcd::model::{CommandId, ServerTime};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::lab::{Lab, until};

const MINUTE_MS: i64 = 60_000;

fn probe(lab: &Lab) -> CommandId {
    lab.enqueue("node.probe", RawValue::from_string("{}".into()).expect("JSON"))
}

/// A lab whose node has had a session with an honest gateway.
fn worked() -> Lab {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    lab
}

/// Another gateway over the same state.
fn restart(lab: &mut Lab, options: &[&str]) {
    lab.kill_gateway();
    lab.start_gateway_with(None, options);
}

fn server_time(status: &Value) -> ServerTime {
    serde_json::from_value(status["server_time"].clone()).expect("a time")
}

/// The node's status once its last session, or attempt, has ended by this token.
fn ended_by(lab: &Lab, token: &str) -> Value {
    until(&format!("an end by {token}"), || {
        let status = lab.status()?;
        (status["session"]["last_end"]["reason"] == token).then_some(status)
    })
}

/// The command once the gateway has noted this word of the node.
fn answered(lab: &Lab, id: &CommandId, word: &str) -> CommandView {
    until(&format!("the answer {word}"), || lab.show(id).filter(|view| view.message.contains(word)))
}

#[test]
fn a_gateway_that_rewinds_time_is_refused_and_an_honest_one_after_it_is_not() {
    let mut lab = worked();
    let before = server_time(&until("a status", || lab.status()));
    restart(&mut lab, &["--welcome-behind", "10m"]);
    let status = ended_by(&lab, "time-backwards");
    assert!(server_time(&status) >= before, "{status}");
    let id = probe(&lab);
    restart(&mut lab, &[]);
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.terminal_changes), ("succeeded", 1), "{view:?}\n{}", lab.logs());
}

#[test]
fn a_gateway_that_runs_past_the_certificate_is_refused_and_moves_no_clock() {
    let mut lab = worked();
    let before = server_time(&until("a status", || lab.status()));
    restart(&mut lab, &["--welcome-ahead", "48h"]);
    let status = ended_by(&lab, "time-ahead");
    let moved = server_time(&status).0 - before.0;
    assert!((0..10 * MINUTE_MS).contains(&moved), "moved by {moved} ms: {status}");
    restart(&mut lab, &[]);
    lab.probe();
}

#[test]
fn a_gateway_that_pushes_the_clock_ahead_ends_no_command() {
    let mut lab = worked();
    let witness = lab.enqueue_program("before", "");
    assert_eq!(lab.ended(&witness).state, "succeeded");
    // Commands of this lab hold for an hour; the certificate for a day.
    restart(&mut lab, &["--welcome-ahead", "12h"]);
    let id = lab.enqueue_program("pushed", "");
    let view = answered(&lab, &id, "expired");
    assert_eq!((view.state.as_str(), view.terminal_changes), ("pending", 0), "{view:?}\n{}", lab.logs());
    assert_eq!(lab.runs("pushed"), 0);
    // The lie costs sessions with an honest gateway, never a restart of the clock and never the tombstone.
    restart(&mut lab, &[]);
    ended_by(&lab, "time-backwards");
    let shown = lab.bcd(&["journal", "show", "--json"], None).output().expect("bcd starts");
    let journal: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let ids: Vec<&str> = journal["commands"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|command| command["id"].as_str())
        .collect();
    assert!(ids.contains(&witness.as_str()), "a tombstone was pruned by a gateway's word: {journal}");
    assert!(!ids.contains(&id.as_str()), "a refused command left a trace: {journal}");
}

#[test]
fn an_upgrade_only_session_refuses_other_kinds_and_ends_none_of_them() {
    let mut lab = Lab::joined();
    restart(&mut lab, &["--upgrade-only"]);
    lab.start_node(None);
    let id = probe(&lab);
    let view = answered(&lab, &id, "upgrade-required");
    assert_eq!((view.state.as_str(), view.terminal_changes), ("pending", 0), "{view:?}");
    // The session is as alive as any.
    until("an acked heartbeat", || {
        let status = lab.status()?;
        status["session"]["live"]["acked_boot_ms"].as_u64()
    });
    restart(&mut lab, &[]);
    let view = lab.ended(&id);
    assert_eq!(view.state, "succeeded", "{view:?}\n{}", lab.logs());
}

#[test]
fn a_gateway_that_hangs_up_after_each_welcome_is_left_for_ever_longer() {
    let mut lab = Lab::joined();
    restart(&mut lab, &["--hang-up"]);
    lab.start_node(None);
    let attempts = until("a third attempt", || {
        let status = lab.status()?;
        status["session"]["attempt"].as_u64().filter(|attempts| *attempts >= 3)
    });
    assert!(attempts >= 3);
    restart(&mut lab, &[]);
    lab.probe();
}
