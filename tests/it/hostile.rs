//! Each lie of a gateway that was taken over, told by the real gateway to the real node, which takes signed commands
//! alone: what the node answers, and that nothing was done. Those about the time stand in [`crate::lies`] as well.

use bcd::gateway::control::EventView;
use bcd::gateway::lies::{AHEAD, ANSWERED, FORGED, TOLD};
use bcd::model::NodeId;
use serde_json::{Value, json};

use crate::lab::{Lab, until};

/// So many answers show that it was no chance.
const OFTEN: usize = 3;

/// A lab whose node wants signatures and has run one program, `once`, for an honest gateway.
fn honest() -> Lab {
    let mut lab = Lab::joined();
    lab.policy = "all";
    lab.start_node(None);
    let id = lab.enqueue_program("once", "");
    let view = lab.ended(&id);
    assert_eq!(view.state, "succeeded", "{view:?}\n{}", lab.logs());
    lab
}

/// The gateway is taken over, and tells this lie wherever it can.
fn taken_over(lab: &mut Lab, lie: &str) {
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--lie", lie]);
}

/// An honest gateway over the same state; the node works for it as before, and has run `once` once.
fn put_right(lab: &mut Lab) {
    lab.kill_gateway();
    lab.start_gateway(None);
    lab.probe();
    assert_eq!(lab.runs("once"), 1);
    let forged: Vec<String> = taken(lab).into_iter().filter(|id| id.starts_with(FORGED)).collect();
    assert_eq!(forged, Vec::<String>::new(), "the node has a trace of what nobody ordered");
}

/// Commands that the node told of.
fn taken(lab: &Lab) -> Vec<String> {
    let ids = lab.told().into_iter().filter_map(|event| event.body["id"].as_str().map(str::to_owned));
    ids.collect()
}

fn noted(lab: &Lab, kind: &str, lie: &str) -> Vec<EventView> {
    let events = lab.events().into_iter();
    events.filter(|event| event.kind == kind && event.detail["lie"] == lie).collect()
}

/// What the gateway noted of a lie that it has told often enough.
fn told(lab: &Lab, lie: &str, often: usize) -> Vec<Value> {
    let events = until(&format!("the lie {lie}"), || {
        Some(noted(lab, TOLD, lie)).filter(|events| events.len() >= often)
    });
    events.into_iter().map(|event| event.detail).collect()
}

/// What the node answered to it.
fn answers(lab: &Lab, lie: &str, often: usize) -> Vec<String> {
    let events = until(&format!("answers to the lie {lie}\n{}", lab.logs()), || {
        Some(noted(lab, ANSWERED, lie)).filter(|events| events.len() >= often)
    });
    let text = |event: EventView| event.detail["answer"].as_str().expect("an answer").to_owned();
    events.into_iter().map(text).collect()
}

fn is_answered_by(lie: &str, token: &str) {
    let mut lab = honest();
    taken_over(&mut lab, lie);
    let answers = answers(&lab, lie, OFTEN);
    assert!(answers.iter().all(|answer| answer == token), "{answers:?}");
    put_right(&mut lab);
}

/// The node's own event of this type.
fn event(lab: &Lab, kind: &str) -> Value {
    until(&format!("the event {kind}\n{}", lab.logs()), || {
        lab.told().into_iter().find(|event| event.kind == kind).map(|event| event.body)
    })
}

fn identity(lab: &Lab) -> Vec<u8> {
    std::fs::read(lab.path("node/identity.json")).expect("an identity")
}

fn epoch(lab: &Lab) -> Option<u64> {
    lab.status()?["session"]["live"]["epoch"].as_u64()
}

/// Joins another machine to the lab, which is never started.
fn another_node(lab: &Lab) -> NodeId {
    let ours = lab.node_id();
    let joined = lab.join_command(&lab.ticket(1), None).env("BCD_STATE", lab.path("other")).output();
    assert!(joined.expect("bcd starts").status.success());
    let other = lab.nodes().into_iter().find(|node| node.node != ours);
    other.expect("another node").node
}

#[test]
fn a_command_that_nobody_signed_is_refused_signature_required_and_not_run() {
    is_answered_by("forge-unsigned", "signature-required");
}

#[test]
fn a_command_under_a_certificate_of_the_gateways_own_is_refused_signature_invalid_and_not_run() {
    is_answered_by("forge-signed", "signature-invalid");
}

#[test]
fn a_signature_under_other_bytes_is_refused_signature_invalid_and_they_are_not_run() {
    is_answered_by("alter-body", "signature-invalid");
}

#[test]
fn another_nodes_command_is_refused_wrong_node_and_not_run_and_the_node_tells_of_it() {
    let mut lab = honest();
    let (ours, theirs) = (lab.node_id(), another_node(&lab));
    let id = lab.enqueue_for(theirs, "node.exec", lab.program("theirs", ""), 3600);
    taken_over(&mut lab, "swap-nodes");
    let answers = answers(&lab, "swap-nodes", OFTEN);
    assert!(answers.iter().all(|answer| answer == "wrong-node"), "{answers:?}");
    let detail = event(&lab, "wrong-node")["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains("the body is for node"), "{detail}");
    assert_eq!((lab.runs("theirs"), lab.runs("once")), (0, 1));
    assert!(!taken(&lab).contains(&id.to_string()), "{ours} has taken it");
    assert_eq!(lab.show(&id).expect("a command").state, "pending", "its own node may have it yet");
}

#[test]
fn an_ended_command_that_comes_again_is_answered_by_its_result_and_not_run_again() {
    let mut lab = honest();
    taken_over(&mut lab, "replay-ended");
    let answers = answers(&lab, "replay-ended", OFTEN);
    assert!(answers.iter().all(|answer| answer == "succeeded"), "{answers:?}");
    // Another process knows it, too.
    lab.kill_node();
    lab.start_node(None);
    let before = answers.len();
    until("answers of the next process", || {
        (noted(&lab, ANSWERED, "replay-ended").len() >= before + OFTEN).then_some(())
    });
    put_right(&mut lab);
}

#[test]
fn commands_whose_order_is_turned_run_once_each() {
    let mut lab = honest();
    taken_over(&mut lab, "reorder");
    let ids = [lab.enqueue_program("first", ""), lab.enqueue_program("second", "")];
    let told = told(&lab, "reorder", 1);
    assert_eq!((&told[0]["command"], &told[0]["behind"]), (&json!(ids[0]), &json!(ids[1])));
    for (id, name) in ids.iter().zip(["first", "second"]) {
        let view = lab.ended(id);
        assert_eq!(
            (view.state.as_str(), view.terminal_changes, lab.runs(name)),
            ("succeeded", 1, 1),
            "{view:?}"
        );
    }
    put_right(&mut lab);
}

#[test]
fn a_command_that_is_kept_back_for_a_while_costs_that_while_alone() {
    let mut lab = honest();
    taken_over(&mut lab, "reorder");
    // Nothing comes that could overtake it.
    let id = lab.enqueue_program("late", "");
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.deliveries, lab.runs("late")), ("succeeded", 1, 1), "{view:?}");
    let waited_ms = view.ended_ms - view.enqueued_ms;
    assert!(waited_ms >= 4_000, "it was not kept back: {waited_ms} ms");
    assert_eq!(noted(&lab, TOLD, "reorder").len(), 0);
    put_right(&mut lab);
}

#[test]
fn a_command_that_comes_when_it_has_expired_is_answered_expired_and_not_run() {
    let mut lab = honest();
    taken_over(&mut lab, "withhold");
    // The command lives two seconds: the node is back before it is given. A probe lives too long to be kept back.
    lab.probe();
    let id = lab.enqueue_for(lab.node_id(), "node.exec", lab.program("withheld", ""), 2);
    assert_eq!(answers(&lab, "withhold", 1), ["expired"]);
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.deliveries, view.terminal_changes), ("expired", 0, 1), "{view:?}");
    assert_eq!(lab.runs("withheld"), 0);
    put_right(&mut lab);
}

/// A time that a Welcome names is refused by this token, and no command comes with it.
fn time_is_refused_by(lie: &str, token: &str) {
    let mut lab = honest();
    taken_over(&mut lab, lie);
    let id = lab.enqueue_program("waits", "");
    told(&lab, lie, OFTEN);
    until(&format!("an end by {token}"), || {
        (lab.status()?["session"]["last_end"]["reason"] == token).then_some(())
    });
    let view = lab.show(&id).expect("a command");
    assert_eq!((view.state.as_str(), view.deliveries, lab.runs("waits")), ("pending", 0, 0), "{view:?}");
    put_right(&mut lab);
    assert_eq!((lab.ended(&id).state.as_str(), lab.runs("waits")), ("succeeded", 1));
}

#[test]
fn a_time_long_past_is_refused_time_backwards_and_nothing_comes_with_it() {
    time_is_refused_by("time-behind", "time-backwards");
}

#[test]
fn a_time_after_the_certificate_is_refused_time_ahead_and_nothing_comes_with_it() {
    time_is_refused_by("time-ahead", "time-ahead");
}

#[test]
fn a_result_that_was_acked_and_not_stored_is_told_again_and_its_command_not_run_again() {
    let mut lab = honest();
    taken_over(&mut lab, "ack-result");
    let id = lab.enqueue_program("swallowed", "");
    assert_eq!(told(&lab, "ack-result", 1)[0]["command"], json!(id));
    until("the program", || (lab.runs("swallowed") == 1).then_some(()));
    let view = lab.show(&id).expect("a command");
    assert!(!bcd::sim::invariants::is_terminal(&view.state), "{view:?}");
    lab.kill_gateway();
    lab.start_gateway(None);
    let view = lab.ended(&id);
    assert_eq!(
        (view.state.as_str(), view.terminal_changes, lab.runs("swallowed")),
        ("succeeded", 1, 1),
        "{view:?}"
    );
    put_right(&mut lab);
}

/// A gateway that is killed before its ack left is told the same events once more.
fn acked(lab: &Lab) {
    until("acks of every event", || {
        let shown = lab.bcd(&["journal", "show", "--json"], None).output().expect("bcd starts");
        let journal: Value = serde_json::from_slice(&shown.stdout).ok()?;
        (journal["events"]["unacked"] == 0).then_some(())
    });
}

#[test]
fn events_that_were_acked_and_not_stored_are_lost_and_those_behind_them_come_once_in_order() {
    let mut lab = honest();
    until("what the program told", || {
        lab.told().iter().any(|event| event.kind == "command.done").then_some(())
    });
    acked(&lab);
    taken_over(&mut lab, "ack-events");
    let id = lab.enqueue_program("unheard", "");
    assert_eq!(lab.ended(&id).state, "succeeded");
    until("the end among what is thrown away", || {
        let told = noted(&lab, TOLD, "ack-events");
        told.iter().any(|event| event.detail["ends"] == json!([id])).then_some(())
    });
    acked(&lab);
    put_right(&mut lab);
    assert_eq!(lab.runs("unheard"), 1);
    let events = until("an event behind the gap", || {
        let events = lab.told();
        let done = events.iter().filter(|event| event.kind == "command.done").count();
        (done >= 2).then_some(events)
    });
    let lies = noted(&lab, TOLD, "ack-events");
    let thrown_away = |seq: u64| {
        let number = |event: &EventView, name: &str| event.detail[name].as_u64().expect("a number");
        lies.iter().any(|event| (number(event, "from")..=number(event, "to")).contains(&seq))
    };
    let seqs: Vec<u64> = events.iter().map(|event| event.seq).collect();
    assert!(seqs.is_sorted_by(|one, next| one < next), "{seqs:?}");
    let last = *seqs.last().expect("an event");
    for seq in 1..=last {
        assert_ne!(seqs.contains(&seq), thrown_away(seq), "{seq} of {seqs:?}");
    }
}

#[test]
fn an_ack_of_what_was_never_sent_costs_a_session_and_a_birth_and_loses_and_repeats_nothing() {
    let mut lab = honest();
    let id = lab.enqueue_program("goes-on", "; sleep 3; echo \"$1-to-its-end\" >> \"$2\"");
    until("the program", || (lab.runs("goes-on") == 1).then_some(()));
    taken_over(&mut lab, "ack-ahead");
    told(&lab, "ack-ahead", OFTEN);
    until("an end by old-copy", || {
        (lab.status()?["session"]["last_end"]["reason"] == "old-copy").then_some(())
    });
    put_right(&mut lab);
    let body = event(&lab, "journal.old-copy");
    assert_eq!((&body["acked"], &body["gaps"]), (&json!(AHEAD), &json!(0)), "{body}");
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.terminal_changes), ("succeeded", 1), "{view:?}\n{}", lab.logs());
    assert_eq!((lab.runs("goes-on"), lab.runs("goes-on-to-its-end")), (1, 1));
    // The join service gives the journal a birth again, and it takes what may not run twice.
    let after = lab.enqueue_program("after", "");
    assert_eq!((lab.ended(&after).state.as_str(), lab.runs("after")), ("succeeded", 1), "{}", lab.logs());
    acked(&lab);
    let ends = lab.told().into_iter();
    let ends = ends.filter(|event| event.kind == "command.done" && event.body["id"] == json!(id));
    let journals: Vec<String> = ends.map(|event| event.journal).collect();
    let distinct: std::collections::BTreeSet<&String> = journals.iter().collect();
    assert!(!journals.is_empty() && journals.len() == distinct.len(), "once a journal: {journals:?}");
}

/// The node, without a journal and thus with a reason to ask for a certificate at once, beside what it has of identity.
fn asks_for_a_certificate(lab: &mut Lab, variables: &[(&str, &str)]) {
    lab.kill_node();
    let state = variables.iter().find(|(name, _)| *name == "BCD_STATE");
    let state = state.map_or_else(|| lab.path("node"), |(_, state)| state.into());
    for file in ["journal.db", "journal.db-wal"] {
        let _ = std::fs::remove_file(state.join(file));
    }
    lab.start_node_with(None, variables);
}

fn keys(lab: &Lab) -> usize {
    std::fs::read_dir(lab.path("node/keys")).expect("keys").count()
}

/// An answer that the gateway has made, or kept, is refused with these words, and the identity is what it was.
fn renewal_is_refused(lab: &mut Lab, ours: NodeId, lie: &str, words: &str) {
    let before = (identity(lab), keys(lab));
    asks_for_a_certificate(lab, &[]);
    told(lab, lie, 1);
    let detail = event(lab, "renewal-refused")["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains(words), "{detail}");
    assert_eq!((identity(lab), keys(lab)), before);
    assert!(lab.status().expect("a daemon")["journal"]["birth"].is_null(), "its time was believed");
    lab.kill_gateway();
    lab.start_gateway(None);
    // The next process asks at once.
    lab.kill_node();
    assert_eq!(identity(lab), before.0);
    lab.start_node(None);
    until("a renewal", || (identity(lab) != before.0).then_some(()));
    let id = lab.enqueue_for(ours, "node.exec", lab.program("after", ""), 3600);
    assert_eq!(lab.ended(&id).state, "succeeded", "{}", lab.logs());
    assert_eq!((lab.runs("after"), lab.runs("once")), (1, 1));
}

/// Waits for a true renewal of whoever has this file.
fn renews(lab: &mut Lab, file: &str, variables: &[(&str, &str)]) {
    let path = lab.path(file);
    let before = std::fs::read(&path).expect("an identity");
    asks_for_a_certificate(lab, variables);
    until("a renewal", || (std::fs::read(&path).ok()? != before).then_some(()));
}

#[test]
fn a_renewal_that_the_gateway_answers_itself_is_refused_and_moves_no_identity() {
    let mut lab = honest();
    let ours = lab.node_id();
    taken_over(&mut lab, "renew-forged");
    renewal_is_refused(&mut lab, ours, "renew-forged", "no signature of the key");
}

#[test]
fn an_answer_to_an_earlier_renewal_is_refused_and_moves_no_identity() {
    let mut lab = honest();
    let ours = lab.node_id();
    taken_over(&mut lab, "renew-stale");
    renews(&mut lab, "node/identity.json", &[]);
    renewal_is_refused(&mut lab, ours, "renew-stale", "another request than the one that was sent");
}

#[test]
fn an_answer_to_another_nodes_renewal_is_refused_and_moves_no_identity() {
    let mut lab = honest();
    let ours = lab.node_id();
    another_node(&lab);
    taken_over(&mut lab, "renew-swapped");
    let (state, run) = (lab.path("other"), lab.path("other-run"));
    let other = [("BCD_STATE", &*state.to_string_lossy()), ("BCD_RUN", &*run.to_string_lossy())];
    renews(&mut lab, "other/identity.json", &other);
    renewal_is_refused(&mut lab, ours, "renew-swapped", "another request than the one that was sent");
}

#[test]
fn a_cancellation_that_no_worker_signed_ends_nothing() {
    let mut lab = honest();
    taken_over(&mut lab, "forge-cancel");
    let id = lab.enqueue_program("goes-on", "; sleep 2; echo \"$1-to-its-end\" >> \"$2\"");
    assert_eq!(told(&lab, "forge-cancel", 1)[0]["command"], json!(id));
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), view.terminal_changes), ("succeeded", 1), "{view:?}\n{}", lab.logs());
    assert_eq!((lab.runs("goes-on"), lab.runs("goes-on-to-its-end")), (1, 1));
    let log = std::fs::read_to_string(lab.path("node.log")).expect("a log");
    let refused = log.lines().find(|line| line.contains("a cancellation is refused")).expect("a line");
    assert!(refused.contains("signature-invalid") && refused.contains(id.as_str()), "{refused}");
    put_right(&mut lab);
}

/// A document of the join service that the gateway has made is refused by an event of this type, and changes nothing.
fn document_is_refused(lie: &str, kind: &str) {
    let mut lab = honest();
    let before = identity(&lab);
    taken_over(&mut lab, lie);
    told(&lab, lie, 1);
    let first = until("a session", || epoch(&lab));
    told(&lab, lie, OFTEN);
    let detail = event(&lab, kind)["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains("no signature of the key"), "{detail}");
    assert_eq!(epoch(&lab), Some(first), "the session goes on\n{}", lab.logs());
    assert_eq!(identity(&lab), before);
    put_right(&mut lab);
    lab.kill_node();
    lab.start_node(None);
    lab.probe();
    assert_eq!(identity(&lab), before, "the next process finds what it had");
}

#[test]
fn a_trust_bundle_of_another_key_is_refused_and_moves_no_identity() {
    document_is_refused("forge-bundle", "trust-bundle-refused");
}

#[test]
fn a_revocation_of_another_key_is_refused_and_the_certificate_is_used_on() {
    document_is_refused("forge-revocation", "revocation-refused");
}

#[test]
fn a_lie_that_there_is_not_is_a_usage_error_that_names_those_that_there_are() {
    let lab = Lab::joined();
    let output =
        lab.bcd(&["gateway", "--state", "nowhere", "--lie", "truth"], None).output().expect("bcd starts");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64), "{stderr}");
    assert!(stderr.contains("truth") && stderr.contains("forge-unsigned"), "{stderr}");
}
