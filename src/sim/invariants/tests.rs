//! Each invariant has a run in which it breaks, and no other does.

use super::*;
use std::time::Duration;

use crate::gateway::control::{EventView, NodeEventView, NodeView};
use crate::gateway::worker::FactView;
use crate::model::{CommandId, NodeId};
use crate::sim::faults::Blow;
use crate::sim::history::{Handed, Moment, Runs, Struck};
use crate::sim::load::{Class, Planned};

fn view(id: &str, state: &str, reason: &str) -> CommandView {
    CommandView {
        id: CommandId::new(id).expect("an id"),
        node: NodeId::new("n-1").expect("an id"),
        kind: "node.exec".into(),
        state: state.into(),
        reason: reason.into(),
        message: String::new(),
        effect: "complete".into(),
        deliveries: 1,
        attempt: 1,
        output: String::new(),
        terminal_changes: 1,
        late_facts: 0,
        verdict: "verified".into(),
        enqueued_ms: 1,
        dispatched_ms: 2,
        accepted_ms: 3,
        ended_ms: 4,
    }
}

fn epoch(seq: u64, epoch: u64) -> EventView {
    let detail = serde_json::json!({ "epoch": epoch });
    EventView { seq, at_ms: 1, kind: "node.connected".into(), node: "n-1".into(), detail }
}

fn told(seq: u64, id: &str) -> NodeEventView {
    NodeEventView {
        number: seq,
        node: "n-1".into(),
        journal: "j-1".into(),
        seq,
        class: "transition".into(),
        kind: "command.done".into(),
        body: serde_json::json!({ "id": id }),
        at_ms: 1,
        age_ms: None,
        received_ms: 2,
        dropped: None,
    }
}

/// A run in which all is well: one command of each class, one line each.
fn good() -> Evidence {
    let mut evidence = Evidence::default();
    let classes = [
        ("c-0", Class::Succeeds),
        ("c-1", Class::Fails),
        ("c-2", Class::RetrySafe),
        ("c-3", Class::Hurried),
        ("c-4", Class::Sleeps(Duration::from_secs(1))),
    ];
    for (id, class) in classes {
        let planned = Planned { id: CommandId::new(id).expect("an id"), agent: 0, class };
        evidence.handed.insert(planned.id.clone(), Handed { planned, acknowledged: true, signed_ms: 1 });
        let (state, reason) =
            if class == Class::Fails { ("failed", "exit-status") } else { ("succeeded", "") };
        evidence.commands.push(view(id, state, reason));
        let runs = Runs { begun: vec!["1".into()], ended: vec!["1".into()] };
        evidence.witness.insert(id.into(), runs);
    }
    let credits = std::collections::BTreeMap::from([("work".to_owned(), 16)]);
    evidence.agents = vec![NodeId::new("n-1").expect("an id")];
    (evidence.boots, evidence.owed) = (vec![0], vec![0]);
    evidence.nodes = vec![NodeView {
        node: NodeId::new("n-1").expect("an id"),
        state: "connected".into(),
        epoch: 2,
        gateway: "g-1".into(),
        site: "sim".into(),
        boot_id: String::new(),
        version: String::new(),
        last_seen_age_ms: 1,
        free_credits: credits.clone(),
        labels: BTreeMap::new(),
    }];
    evidence.credits = credits;
    evidence.events = vec![epoch(1, 1), epoch(2, 2)];
    evidence.told = (0..5).map(|id| format!("c-{id}")).zip(1..).map(|(id, seq)| told(seq, &id)).collect();
    evidence
}

fn broken(change: impl FnOnce(&mut Evidence)) -> Vec<&'static str> {
    let mut evidence = good();
    change(&mut evidence);
    judge(&evidence).iter().filter(|verdict| !verdict.held()).map(|verdict| verdict.id).collect()
}

fn witness_again(evidence: &mut Evidence, id: &str) {
    evidence.witness.get_mut(id).expect("a witness").begun.push("2".into());
}

#[test]
fn a_run_in_which_all_is_well_holds() {
    assert_eq!(broken(|_| ()), [""; 0]);
    assert_eq!(broken(|evidence| witness_again(evidence, "c-2")), [""; 0], "a retry-safe one may run twice");
}

#[test]
fn a_lost_unended_or_twice_ended_command_breaks_i1() {
    assert_eq!(broken(|evidence| drop(evidence.commands.remove(0))), ["I1"]);
    assert_eq!(broken(|evidence| evidence.commands[0].state = "running".into()), ["I1", "I7", "I8"]);
    assert_eq!(broken(|evidence| evidence.commands[0].terminal_changes = 2), ["I1"]);
    assert_eq!(broken(|evidence| evidence.commands.push(view("c-0", "succeeded", ""))), ["I1"]);
    let unknown = |evidence: &mut Evidence| evidence.commands.push(view("c-9", "rejected", "expired"));
    assert_eq!(broken(unknown), ["I1"]);
}

#[test]
fn a_command_whose_handing_over_was_never_answered_may_be_missing() {
    let change = |evidence: &mut Evidence| {
        let row = evidence.commands.remove(0);
        evidence.handed.get_mut(&row.id).expect("handed").acknowledged = false;
    };
    assert_eq!(broken(change), [""; 0]);
}

#[test]
fn a_second_run_breaks_i2_whatever_the_result_says() {
    for id in ["c-0", "c-1", "c-3"] {
        assert_eq!(broken(|evidence| witness_again(evidence, id)), ["I2"], "{id}");
    }
    let interrupted = |evidence: &mut Evidence| {
        witness_again(evidence, "c-0");
        evidence.commands[0] = view("c-0", "failed", "interrupted");
    };
    assert_eq!(broken(interrupted), ["I2", "I5"]);
}

#[test]
fn a_result_that_the_witness_does_not_bear_out_breaks_i2() {
    assert_eq!(broken(|evidence| drop(evidence.witness.remove("c-0"))), ["I2"]);
    assert_eq!(broken(|evidence| evidence.commands[1] = view("c-1", "succeeded", "")), ["I2"]);
    assert_eq!(broken(|evidence| evidence.commands[0] = view("c-0", "failed", "exit-status")), ["I2"]);
    for state in ["rejected", "expired"] {
        let at = |ended_ms| CommandView { ended_ms, late_facts: 1, ..view("c-0", state, "expired") };
        assert_eq!(broken(|evidence| evidence.commands[0] = at(60_000)), ["I4"], "{state} before its time");
        assert_eq!(broken(|evidence| evidence.commands[0] = at(60_001)), [""; 0], "{state}");
    }
    assert_eq!(broken(|evidence| drop(evidence.witness.insert("x".into(), Runs::default()))), ["I2"]);
    let none = |evidence: &mut Evidence| {
        let row = view("c-3", "rejected", "expired");
        evidence.commands[3] = CommandView { effect: "none".into(), ended_ms: 60_001, ..row };
    };
    assert_eq!(broken(none), ["I2"]);
}

#[test]
fn a_look_at_what_a_node_holds_may_fail_where_its_disk_was_full_and_nowhere_else() {
    let failed = |evidence: &mut Evidence| {
        let planned = Planned { id: CommandId::new("c-5").expect("an id"), agent: 0, class: Class::Barrier };
        let row = view("c-5", "failed", "inventory-unknown");
        evidence.handed.insert(row.id.clone(), Handed { planned, acknowledged: true, signed_ms: 1 });
        evidence.told.push(told(u64::try_from(evidence.told.len()).expect("few") + 1, "c-5"));
        evidence.commands.push(row);
    };
    assert_eq!(broken(failed), ["I2"]);
    let on_a_full_disk = |evidence: &mut Evidence| {
        failed(evidence);
        evidence.moments.push(Moment { at_ms: 1, what: Struck::Agent(0, Blow::DiskFull) });
    };
    assert_eq!(broken(on_a_full_disk), [""; 0]);
}

#[test]
fn an_event_that_is_missing_doubled_or_out_of_order_breaks_i7() {
    assert_eq!(broken(|evidence| drop(evidence.told.remove(1))), ["I7"]);
    assert_eq!(broken(|evidence| evidence.told.push(told(5, "c-4"))), ["I7"]);
    assert_eq!(broken(|evidence| evidence.told.swap(1, 2)), ["I7"]);
    assert_eq!(broken(|evidence| evidence.told.clear()), ["I7", "I9"], "which has nothing to check either");
    assert_eq!(broken(|evidence| evidence.told[3].kind = "node.load".into()), ["I7"], "an end untold");
}

#[test]
fn a_gap_that_is_told_breaks_nothing() {
    let told_gap = |evidence: &mut Evidence| {
        evidence.told.push(NodeEventView { dropped: Some((6, 8)), kind: "node.load".into(), ..told(9, "") });
    };
    assert_eq!(broken(told_gap), [""; 0]);
    let too_short = |evidence: &mut Evidence| {
        evidence.told.push(NodeEventView { dropped: Some((7, 8)), kind: "node.load".into(), ..told(9, "") });
    };
    assert_eq!(broken(too_short), ["I7"]);
}

#[test]
fn an_epoch_that_does_not_rise_breaks_i3() {
    assert_eq!(broken(|evidence| evidence.events.push(epoch(3, 2))), ["I3"]);
    assert_eq!(broken(|evidence| evidence.events.clear()), ["I3"]);
}

/// The node's agent is struck at this time; commands are dispatched at 2 and end at 4.
fn struck(evidence: &mut Evidence, at_ms: i64, blow: Blow) {
    evidence.moments.push(Moment { at_ms, what: Struck::Agent(0, blow) });
}

#[test]
fn a_program_that_is_cut_short_breaks_i5_unless_its_machine_was_rebooted_meanwhile() {
    let cut_short = |evidence: &mut Evidence| {
        evidence.witness.get_mut("c-4").expect("a witness").ended.clear();
        evidence.commands[4] = view("c-4", "failed", "interrupted");
    };
    assert_eq!(broken(cut_short), ["I5"]);
    for (at, blow, held) in [
        (3, Blow::Kill, false),
        (3, Blow::JournalLoss, false),
        (1, Blow::Reboot, false),
        (3, Blow::Reboot, true),
        (3, Blow::RebootCommand, true),
    ] {
        let broken = broken(|evidence| {
            cut_short(evidence);
            struck(evidence, at, blow);
        });
        assert_eq!(broken.is_empty(), held, "{blow:?} at {at}: {broken:?}");
    }
    assert_eq!(broken(|evidence| drop(evidence.witness.remove("c-4"))), ["I2"], "it never began");
}

#[test]
fn a_program_that_is_given_up_breaks_i5_unless_its_machine_was_rebooted_meanwhile() {
    let given_up = |evidence: &mut Evidence| evidence.commands[0] = view("c-0", "failed", "interrupted");
    assert_eq!(broken(given_up), ["I5"]);
    let rebooted = |evidence: &mut Evidence| {
        given_up(evidence);
        struck(evidence, 3, Blow::Reboot);
    };
    assert_eq!(broken(rebooted), [""; 0]);
    let never_began = |evidence: &mut Evidence| {
        given_up(evidence);
        evidence.witness.remove("c-0");
    };
    assert_eq!(broken(never_began), [""; 0]);
}

#[test]
fn an_end_that_was_told_and_whose_result_never_came_breaks_i7() {
    let late = |evidence: &mut Evidence, late_facts, state, reason: &str| {
        evidence.commands[0] = CommandView { late_facts, ended_ms: 60_001, ..view("c-0", state, reason) };
    };
    assert_eq!(broken(|evidence| late(evidence, 0, "expired", "expired")), ["I7"]);
    assert_eq!(broken(|evidence| late(evidence, 1, "expired", "expired")), [""; 0], "it came later");
    let lost = |evidence: &mut Evidence, at| {
        late(evidence, 0, "failed", "journal-lost");
        struck(evidence, at, Blow::JournalLoss);
    };
    assert_eq!(broken(|evidence| lost(evidence, 3)), [""; 0], "it was in the journal");
    assert_eq!(broken(|evidence| lost(evidence, 1)), ["I7"], "before the command came");
}

#[test]
fn a_machine_that_boots_without_a_reason_breaks_i2() {
    assert_eq!(broken(|evidence| evidence.boots[0] = 1), ["I2"]);
    let rebooted = |evidence: &mut Evidence| {
        evidence.boots[0] = 1;
        struck(evidence, 3, Blow::Reboot);
    };
    assert_eq!(broken(rebooted), [""; 0]);
    let once_commanded = |evidence: &mut Evidence, boots| {
        evidence.boots[0] = boots;
        let mut handed = evidence.handed[&evidence.commands[0].id].clone();
        handed.planned.class = Class::Reboot;
        handed.acknowledged = false;
        handed.planned.id = CommandId::new("c-9").expect("an id");
        evidence.handed.insert(handed.planned.id.clone(), handed);
    };
    assert_eq!(broken(|evidence| once_commanded(evidence, 1)), [""; 0]);
    assert_eq!(broken(|evidence| once_commanded(evidence, 2)), ["I2"]);
}

#[test]
fn only_a_lost_journal_excuses_a_journal_lost_and_an_end_untold() {
    let lost = |evidence: &mut Evidence| evidence.commands[0] = view("c-0", "failed", "journal-lost");
    assert_eq!(broken(lost), ["I2", "I7"]);
    let excused = |evidence: &mut Evidence| {
        lost(evidence);
        struck(evidence, 3, Blow::JournalLoss);
    };
    assert_eq!(broken(excused), [""; 0]);
    let untold = |evidence: &mut Evidence, at| {
        evidence.told[0].kind = "node.load".into();
        struck(evidence, at, Blow::JournalLoss);
    };
    assert_eq!(broken(|evidence| untold(evidence, 3)), [""; 0]);
    assert_eq!(broken(|evidence| untold(evidence, 1)), ["I7"], "before the command came");
}

#[test]
fn an_ack_ahead_excuses_a_journal_lost_and_a_second_journal_and_no_end_untold() {
    let ahead = |evidence: &mut Evidence| {
        let lie =
            lie(crate::gateway::lies::TOLD, serde_json::json!({ "lie": "ack-ahead", "journal": "j-1" }));
        evidence.events.push(EventView { at_ms: 3, ..lie });
    };
    let lost = |evidence: &mut Evidence| evidence.commands[0] = view("c-0", "failed", "journal-lost");
    let again = |evidence: &mut Evidence| {
        let (number, id) = (evidence.told.len() as u64 + 1, "c-1");
        evidence.told.push(NodeEventView { number, journal: "j-2".into(), ..told(1, id) });
    };
    let untold = |evidence: &mut Evidence| evidence.told[0].kind = "node.load".into();
    assert_eq!(broken(again), ["I7"]);
    assert_eq!(broken(|evidence| (again(evidence), ahead(evidence)).1), [""; 0]);
    assert_eq!(broken(|evidence| (untold(evidence), ahead(evidence)).1), ["I7"]);
    // The end that its node told of came from nobody else.
    assert_eq!(broken(|evidence| (lost(evidence), ahead(evidence)).1), ["I7"]);
}

#[test]
fn a_node_that_is_away_or_holds_a_credit_at_the_end_breaks_i8() {
    assert_eq!(broken(|evidence| evidence.nodes[0].state = "disconnected".into()), ["I8"]);
    assert_eq!(broken(|evidence| evidence.nodes.clear()), ["I8"]);
    assert_eq!(broken(|evidence| evidence.owed[0] = 1), ["I8"]);
    let held = |evidence: &mut Evidence| {
        evidence.nodes[0].free_credits.insert("work".into(), 15);
    };
    assert_eq!(broken(held), ["I8"]);
}

#[test]
fn what_was_open_while_two_machines_had_one_identity_is_not_held_against_either() {
    let twice = |evidence: &mut Evidence, from, to| {
        witness_again(evidence, "c-0");
        evidence.witness.get_mut("c-4").expect("a witness").ended.clear();
        evidence.told[0].kind = "node.load".into();
        struck(evidence, from, Blow::Clone);
        struck(evidence, to, Blow::Clone);
    };
    assert_eq!(broken(|evidence| twice(evidence, 3, 30)), [""; 0]);
    assert_eq!(broken(|evidence| twice(evidence, 5, 30)), ["I2", "I5"], "all had ended by then");
}

fn lie(kind: &str, detail: serde_json::Value) -> EventView {
    EventView { seq: 9, at_ms: 1, kind: kind.into(), node: "n-1".into(), detail }
}

fn node_told(kind: &str, body: serde_json::Value) -> NodeEventView {
    NodeEventView { kind: kind.into(), body, ..told(6, "") }
}

#[test]
fn a_forgery_that_ran_was_answered_or_told_of_breaks_i9() {
    let ran = |evidence: &mut Evidence| drop(evidence.witness.insert("forged-1".into(), Runs::default()));
    assert_eq!(broken(ran), ["I9"]);
    let answered = |lie_name: &'static str, answer: &'static str| {
        move |evidence: &mut Evidence| {
            let detail = serde_json::json!({ "lie": lie_name, "command": "forged-1", "answer": answer });
            evidence.events.push(lie(crate::gateway::lies::ANSWERED, detail));
        }
    };
    for (name, token) in [
        ("forge-unsigned", "signature-required"),
        ("forge-signed", "signature-invalid"),
        ("alter-body", "signature-invalid"),
        ("swap-nodes", "wrong-node"),
    ] {
        assert_eq!(broken(answered(name, token)), [""; 0], "{name}");
        for answer in ["accepted", "running", "succeeded", "unknown-kind"] {
            assert_eq!(broken(answered(name, answer)), ["I9"], "{name} {answer}");
        }
    }
    assert_eq!(broken(answered("replay-ended", "succeeded")), [""; 0]);
    for (kind, body) in [
        ("command.accepted", serde_json::json!({ "id": "forged-1" })),
        ("trust-bundle.taken", serde_json::json!({ "version": crate::gateway::lies::FORGED_VERSION })),
        ("identity.revoked", serde_json::json!({ "serial": "01" })),
    ] {
        assert_eq!(broken(|evidence| evidence.told.push(node_told(kind, body))), ["I9"], "{kind}");
    }
    let true_one = serde_json::json!({ "version": 2 });
    assert_eq!(broken(|evidence| evidence.told.push(node_told("trust-bundle.taken", true_one))), [""; 0]);
}

fn fact(command: &str, node: &str, state: &str, refused: &str) -> FactView {
    FactView {
        number: 1,
        at_ms: 1,
        command: CommandId::new(command).expect("an id"),
        node: NodeId::new(node).expect("an id"),
        state: state.into(),
        reason: String::new(),
        effect: "complete".into(),
        attempt: 1,
        serial: "0a".into(),
        refused: refused.into(),
        detail: String::new(),
    }
}

#[test]
fn a_forged_result_that_the_worker_holds_true_breaks_i9_and_one_that_it_refused_does_not() {
    let holds = |node: &'static str, state: &'static str, refused: &'static str| {
        move |evidence: &mut Evidence| {
            let end = evidence.told.iter_mut().find(|event| event.body["id"] == "c-0").expect("an end");
            end.body["state"] = "SUCCEEDED".into();
            evidence.facts.push(fact("c-0", node, state, refused));
        }
    };
    assert_eq!(broken(holds("n-1", "succeeded", "")), [""; 0]);
    assert_eq!(broken(holds("n-1", "failed", "")), ["I9"]);
    assert_eq!(broken(holds("n-2", "succeeded", "")), ["I9"], "another node's");
    assert_eq!(broken(holds("n-1", "failed", "result-altered")), [""; 0]);
    let after_a_loss = |evidence: &mut Evidence| {
        holds("n-1", "failed", "")(evidence);
        struck(evidence, 3, Blow::JournalLoss);
    };
    assert_eq!(broken(after_a_loss), [""; 0], "the lost journal may have told of it");
}

#[test]
fn a_result_that_was_never_judged_or_was_refused_without_a_lie_breaks_i9() {
    let verdict =
        |verdict: &'static str| move |evidence: &mut Evidence| evidence.commands[0].verdict = verdict.into();
    assert_eq!(broken(verdict("")), ["I9"]);
    assert_eq!(broken(verdict("signature-invalid")), ["I9"]);
    let with = |verdict: &'static str, change: fn(&mut Evidence)| {
        broken(move |evidence| {
            evidence.commands[0].verdict = verdict.into();
            change(evidence);
        })
    };
    let unsigned = |evidence: &mut Evidence| evidence.commands[0].kind = "node.probe".into();
    assert_eq!(with("", unsigned), [""; 0], "a kind that does not sign");
    let lied = |evidence: &mut Evidence| {
        let detail = serde_json::json!({ "lie": "alter-result", "command": "c-0", "said": "FAILED" });
        evidence.events.push(lie(crate::gateway::lies::TOLD, detail));
    };
    assert_eq!(with("result-altered", lied), [""; 0]);
    assert_eq!(with("", lied), ["I9"], "a lie is judged too");
    let swallowed = |evidence: &mut Evidence| {
        let detail = serde_json::json!({ "lie": "ack-result", "command": "c-0" });
        evidence.events.push(lie(crate::gateway::lies::TOLD, detail));
    };
    assert_eq!(with("", swallowed), [""; 0], "it never came");
    assert_eq!(with("", |evidence| struck(evidence, 3, Blow::JournalLoss)), [""; 0]);
    let rejected =
        |evidence: &mut Evidence| evidence.commands[0] = view("c-0", "rejected", "invalid-arguments");
    assert!(!broken(rejected).contains(&"I9"));
    let unjudged = |evidence: &mut Evidence| {
        rejected(evidence);
        evidence.commands[0].verdict.clear();
    };
    assert!(broken(unjudged).contains(&"I9"));
}

#[test]
fn a_command_of_another_node_breaks_i9_and_one_that_nobody_cancelled_i2_as_well() {
    let theirs = |evidence: &mut Evidence| {
        let event = node_told("command.accepted", serde_json::json!({ "id": "c-0" }));
        evidence.told.push(NodeEventView { node: "n-2".into(), ..event });
    };
    // Its journal begins at no event that anybody saw.
    assert_eq!(broken(theirs), ["I7", "I9"]);
    let cancelled = |evidence: &mut Evidence| evidence.commands[0] = view("c-0", "cancelled", "cancelled");
    assert_eq!(broken(cancelled), ["I2", "I9"]);
}

#[test]
fn a_command_that_ran_when_it_had_expired_and_a_session_refused_for_no_lie_break_i4() {
    let late = |deliveries| {
        move |evidence: &mut Evidence| {
            evidence.commands[3].deliveries = deliveries;
            let detail = serde_json::json!({ "lie": "withhold", "command": "c-3" });
            evidence.events.push(lie(crate::gateway::lies::TOLD, detail));
        }
    };
    assert_eq!(broken(late(0)), ["I4"]);
    assert_eq!(broken(late(1)), [""; 0], "another gateway had delivered it in time");
    let refused = |evidence: &mut Evidence| {
        let body = serde_json::json!({ "last_end": "time-backwards" });
        evidence.told.push(node_told("session.opened", body));
    };
    assert_eq!(broken(refused), ["I4"]);
    let lied = |name: &'static str| {
        move |evidence: &mut Evidence| {
            refused(evidence);
            let detail = serde_json::json!({ "lie": name });
            evidence.events.push(lie(crate::gateway::lies::TOLD, detail));
        }
    };
    assert_eq!(broken(lied("time-behind")), [""; 0]);
    assert_eq!(broken(lied("time-ahead")), ["I4"], "which ends a session by another word");
    let taken = |evidence: &mut Evidence| {
        late(0)(evidence);
        evidence.witness.remove("c-3");
        evidence.told.push(node_told("command.running", serde_json::json!({ "id": "c-3" })));
    };
    assert!(broken(taken).contains(&"I4"), "some effects leave no other trace than the node's own word");
}

#[test]
fn what_a_gateway_acked_and_threw_away_is_missed_by_nobody_and_nothing_else_is() {
    let swallowed = |seq: u64, id: &'static str| {
        move |evidence: &mut Evidence| {
            evidence.told.remove(2);
            let detail = serde_json::json!({
                "lie": "ack-events", "journal": "j-1", "from": seq, "to": seq, "ends": [id],
            });
            evidence.events.push(lie(crate::gateway::lies::TOLD, detail));
        }
    };
    assert_eq!(broken(swallowed(3, "c-2")), [""; 0]);
    assert_eq!(broken(swallowed(4, "c-2")), ["I7"], "another number");
    assert_eq!(broken(swallowed(3, "c-1")), ["I7"], "another end");
}
