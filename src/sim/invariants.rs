//! The invariants, a function each, over evidence from outside the agents. A check that finds nothing to check
//! has not held.

use std::collections::BTreeMap;

use super::history::{Evidence, Handed};
use super::load::Class;
use crate::gateway::control::CommandView;
use crate::model::CommandId;

/// What became of one invariant.
#[derive(Debug)]
pub struct Verdict {
    /// `I1` and so on.
    pub id: &'static str,
    /// How many things were checked.
    pub checks: usize,
    /// What they were.
    pub unit: &'static str,
    /// What broke it, each with the ids to look for; empty when it held.
    pub broken: Vec<String>,
}

impl Verdict {
    /// Whether it held.
    pub fn held(&self) -> bool {
        self.broken.is_empty()
    }
}

/// All that this simulator judges.
pub fn judge(evidence: &Evidence) -> Vec<Verdict> {
    vec![
        one_terminal_state(evidence),
        at_most_one_effect(evidence),
        epochs_rise(evidence),
        told_once(evidence),
    ]
}

/// Whether a state is an end.
pub fn is_terminal(state: &str) -> bool {
    matches!(state, "succeeded" | "failed" | "cancelled" | "rejected" | "expired")
}

/// I1: every command that the gateway took reaches exactly one terminal state.
fn one_terminal_state(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    let mut rows = BTreeMap::<&str, Vec<&CommandView>>::new();
    for row in &evidence.commands {
        rows.entry(row.id.as_str()).or_default().push(row);
        if !evidence.handed.contains_key(&row.id) {
            broken.push(format!("{} is in the gateway's history and was never handed over", row.id));
        }
    }
    for (id, handed) in &evidence.handed {
        match rows.get(id.as_str()).map(Vec::as_slice) {
            None if handed.acknowledged => broken.push(format!("{id} was acknowledged and is lost")),
            None => {}
            Some([row]) if !is_terminal(&row.state) => {
                broken.push(format!("{id} on {} has not ended: {}", row.node, row.state));
            }
            Some([row]) if row.terminal_changes > 1 => {
                broken.push(format!("{id} on {} ended {} times", row.node, row.terminal_changes));
            }
            Some([_]) => {}
            Some(more) => broken.push(format!("{id} is in the gateway's history {} times", more.len())),
        }
    }
    Verdict { id: "I1", checks: rows.len(), unit: "commands", broken: or_nothing(broken, rows.len()) }
}

/// I2: the effect of a command that may not run twice happens at most once, and its result tells the truth.
fn at_most_one_effect(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    for id in evidence.witness.keys() {
        let known = CommandId::new(id.as_str()).is_ok_and(|id| evidence.handed.contains_key(&id));
        if !known {
            broken.push(format!("{id:?} left a line and was never handed over"));
        }
    }
    for (id, handed) in &evidence.handed {
        let runs = evidence.runs(id);
        if runs > 1 && !handed.planned.class.retry_safe() {
            broken.push(format!("{id} may not run twice and ran {runs} times"));
        }
    }
    for row in &evidence.commands {
        if let Some(handed) = evidence.handed.get(&row.id)
            && let Some(lie) = lie(handed, row, evidence.runs(&row.id))
        {
            broken.push(format!("{} on {}: {lie}", row.id, row.node));
        }
    }
    let effects = evidence.witness.values().map(Vec::len).sum();
    Verdict { id: "I2", checks: effects, unit: "effects witnessed", broken: or_nothing(broken, effects) }
}

/// What a result says that the witness does not bear out. How often it ran is judged elsewhere.
fn lie(handed: &Handed, row: &CommandView, runs: usize) -> Option<String> {
    let class = handed.planned.class;
    let witnessed = !class.leaves_witness() || runs > 0;
    match (row.state.as_str(), row.reason.as_str()) {
        ("succeeded", _) if class == Class::Fails => Some("SUCCEEDED, and it was asked to fail".into()),
        ("succeeded", _) if !witnessed => Some("SUCCEEDED without an effect".into()),
        ("failed", "exit-status") if class != Class::Fails => Some("failed, and was not asked to".into()),
        ("failed", "exit-status") if !witnessed => Some("ran to its end without an effect".into()),
        ("failed", "exit-status" | "interrupted") => None,
        ("failed" | "rejected" | "cancelled", reason) if class != Class::Hurried || reason != "expired" => {
            Some(format!("{} {reason}, and nothing asked for that: {}", row.state, row.message))
        }
        _ if row.effect == "none" && runs > 0 => Some(format!("{runs} effects, reported as none")),
        _ => None,
    }
}

/// I3: epochs of a node only rise.
fn epochs_rise(evidence: &Evidence) -> Verdict {
    let (mut last, mut checks, mut broken) = (BTreeMap::<&str, u64>::new(), 0, Vec::new());
    for (node, epoch) in evidence.epochs() {
        checks += 1;
        let before = last.insert(node, epoch).unwrap_or(0);
        if epoch <= before {
            broken.push(format!("{node} was given epoch {epoch} after {before}"));
        }
    }
    Verdict { id: "I3", checks, unit: "epochs", broken: or_nothing(broken, checks) }
}

/// I7: a node's events came once each, in order, with no number missing that was not told as dropped, and tell of
/// every end that its result tells of.
fn told_once(evidence: &Evidence) -> Verdict {
    let (mut last, mut broken) = (BTreeMap::<(&str, &str), u64>::new(), Vec::new());
    for event in &evidence.told {
        let place = last.entry((&event.node, &event.journal)).or_insert(0);
        let missing = (*place + 1 < event.seq).then(|| (*place + 1, event.seq - 1));
        if event.seq <= *place {
            broken.push(format!("{} told {} of {} after {place}", event.node, event.seq, event.journal));
        } else if let Some((from, to)) = missing
            && event.dropped.is_none_or(|(first, last)| first > from || last < to)
        {
            broken.push(format!("{} never told {from} to {to} of {}", event.node, event.journal));
        }
        *place = event.seq.max(*place);
    }
    let ends = evidence.told_ends();
    for row in evidence.ended_by_nodes() {
        let count = ends.get(row.id.as_str()).copied().unwrap_or(0);
        if count != 1 {
            broken.push(format!("{} told of the end of {} in {count} events", row.node, row.id));
        }
    }
    let checks = evidence.told.len();
    Verdict { id: "I7", checks, unit: "events told", broken: or_nothing(broken, checks) }
}

fn or_nothing(mut broken: Vec<String>, checks: usize) -> Vec<String> {
    if checks == 0 {
        broken.push("there was nothing to check".into());
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::control::{EventView, NodeEventView};
    use crate::model::NodeId;
    use crate::sim::load::Planned;

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
        ];
        for (id, class) in classes {
            let planned = Planned { id: CommandId::new(id).expect("an id"), agent: 0, class };
            evidence.handed.insert(planned.id.clone(), Handed { planned, acknowledged: true });
            let (state, reason) =
                if class == Class::Fails { ("failed", "exit-status") } else { ("succeeded", "") };
            evidence.commands.push(view(id, state, reason));
            evidence.witness.insert(id.into(), vec!["1".into()]);
        }
        evidence.events = vec![epoch(1, 1), epoch(2, 2)];
        evidence.told = ["c-0", "c-1", "c-2", "c-3"].iter().zip(1..).map(|(id, seq)| told(seq, id)).collect();
        evidence
    }

    fn broken(change: impl FnOnce(&mut Evidence)) -> Vec<&'static str> {
        let mut evidence = good();
        change(&mut evidence);
        judge(&evidence).iter().filter(|verdict| !verdict.held()).map(|verdict| verdict.id).collect()
    }

    fn witness_again(evidence: &mut Evidence, id: &str) {
        evidence.witness.get_mut(id).expect("a witness").push("2".into());
    }

    #[test]
    fn a_run_in_which_all_is_well_holds() {
        assert_eq!(broken(|_| ()), [""; 0]);
        assert_eq!(
            broken(|evidence| witness_again(evidence, "c-2")),
            [""; 0],
            "a retry-safe one may run twice"
        );
    }

    #[test]
    fn a_lost_unended_or_twice_ended_command_breaks_i1() {
        assert_eq!(broken(|evidence| drop(evidence.commands.remove(0))), ["I1"]);
        assert_eq!(broken(|evidence| evidence.commands[0].state = "running".into()), ["I1"]);
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
        assert_eq!(broken(interrupted), ["I2"]);
    }

    #[test]
    fn a_result_that_the_witness_does_not_bear_out_breaks_i2() {
        assert_eq!(broken(|evidence| drop(evidence.witness.remove("c-0"))), ["I2"]);
        assert_eq!(broken(|evidence| evidence.commands[1] = view("c-1", "succeeded", "")), ["I2"]);
        assert_eq!(broken(|evidence| evidence.commands[0] = view("c-0", "failed", "exit-status")), ["I2"]);
        assert_eq!(broken(|evidence| evidence.commands[0] = view("c-0", "rejected", "expired")), ["I2"]);
        assert_eq!(broken(|evidence| drop(evidence.witness.insert("x".into(), vec![]))), ["I2"]);
        let none = |evidence: &mut Evidence| {
            evidence.commands[3] =
                CommandView { effect: "none".into(), ..view("c-3", "rejected", "expired") };
        };
        assert_eq!(broken(none), ["I2"]);
    }

    #[test]
    fn an_event_that_is_missing_doubled_or_out_of_order_breaks_i7() {
        assert_eq!(broken(|evidence| drop(evidence.told.remove(1))), ["I7"]);
        assert_eq!(broken(|evidence| evidence.told.push(told(4, "c-3"))), ["I7"]);
        assert_eq!(broken(|evidence| evidence.told.swap(1, 2)), ["I7"]);
        assert_eq!(broken(|evidence| evidence.told.clear()), ["I7"]);
        assert_eq!(
            broken(|evidence| evidence.told[3].body = serde_json::Value::Null),
            ["I7"],
            "an end untold"
        );
    }

    #[test]
    fn a_gap_that_is_told_breaks_nothing() {
        let told_gap = |evidence: &mut Evidence| {
            evidence.told.push(NodeEventView {
                dropped: Some((5, 8)),
                kind: "node.load".into(),
                ..told(9, "")
            });
        };
        assert_eq!(broken(told_gap), [""; 0]);
        let too_short = |evidence: &mut Evidence| {
            evidence.told.push(NodeEventView {
                dropped: Some((6, 8)),
                kind: "node.load".into(),
                ..told(9, "")
            });
        };
        assert_eq!(broken(too_short), ["I7"]);
    }

    #[test]
    fn an_epoch_that_does_not_rise_breaks_i3() {
        assert_eq!(broken(|evidence| evidence.events.push(epoch(3, 2))), ["I3"]);
        assert_eq!(broken(|evidence| evidence.events.clear()), ["I3"]);
    }
}
