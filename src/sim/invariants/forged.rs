//! What gateways made up.

use std::collections::{BTreeMap, BTreeSet};

use super::Verdict;
use super::telling::losses_since;
use crate::gateway::VERIFIED;
use crate::gateway::control::CommandView;
use crate::gateway::lies::{FORGED, FORGED_VERSION, Lie};
use crate::model::{Kind, Reason};
use crate::sim::history::Evidence;
use crate::sim::load::Class;

/// I9: nothing that a gateway alone can make causes an effect, a cancellation, or a move of identity. A node takes the
/// commands that were handed over for it and no others, by its own events; nothing forged left a line of its own; every
/// forgery that was answered was refused; nothing was cancelled that nobody cancelled; and the worker has judged every
/// signed result, and holds true of them what their nodes have said, and all of that.
pub(super) fn nothing_forged_counts(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    for id in evidence.witness.keys().filter(|id| id.starts_with(FORGED)) {
        broken.push(format!("{id} was forged by a gateway, and ran"));
    }
    for answer in evidence.answers().filter(|answer| !is_refusal(answer.lie, answer.answer())) {
        let (node, id, lie) = (answer.node, answer.command(), answer.lie.name());
        broken.push(format!("{node} answered {id} with {}, and it was a lie ({lie})", answer.answer()));
    }
    let stored = evidence.commands.iter().map(|row| (row.id.as_str(), row.node.as_str()));
    // What a gateway has lost since is another's to judge.
    let handed = evidence
        .handed
        .iter()
        .filter_map(|(id, handed)| Some((id.as_str(), evidence.agents.get(handed.planned.agent)?.as_str())));
    let home: BTreeMap<&str, &str> = handed.chain(stored).collect();
    let mut transitions = 0;
    for event in &evidence.told {
        match event.kind.as_str() {
            "command.accepted" | "command.running" | "command.done" => {
                transitions += 1;
                let id = event.body["id"].as_str().unwrap_or("a command without an id");
                if home.get(id) != Some(&event.node.as_str()) {
                    broken.push(format!("{} took {id}, which was never handed over for it", event.node));
                }
            }
            "trust-bundle.taken" if event.body["version"].as_u64() >= Some(FORGED_VERSION) => {
                broken.push(format!("{} took a forged trust bundle", event.node));
            }
            "identity.revoked" => {
                broken.push(format!("{} believed a revocation, and nobody revoked it", event.node));
            }
            _ => {}
        }
    }
    for row in evidence.commands.iter().filter(|row| row.state == "cancelled") {
        let asked = evidence
            .handed
            .get(&row.id)
            .is_some_and(|handed| matches!(handed.planned.class, Class::Cancelled(_)));
        if !asked {
            broken.push(format!("{} on {} was cancelled by nobody", row.id, row.node));
        }
    }
    let facts = verified_as_told(evidence, &home, &mut broken);
    // No forgery by itself: a run in which there was nothing else to judge has shown nothing.
    broken.extend(ill_judged(evidence));
    let forgeries = evidence.lies().filter(|told| told.lie.forges()).count();
    Verdict::new("I9", forgeries + transitions + facts, "forgeries, transitions and signed results", broken)
}

/// What the worker holds true of results is what their nodes have told of the same ends. How many it was asked of.
fn verified_as_told(evidence: &Evidence, home: &BTreeMap<&str, &str>, broken: &mut Vec<String>) -> usize {
    let swallowed = evidence.swallowed();
    // Two journals may tell of two ends, and one of the two may be lost.
    let unsure = evidence.commands.iter().filter(|row| {
        evidence.had_twin(row)
            || losses_since(evidence, row).next().is_some()
            || swallowed.ends.contains(row.id.as_str())
    });
    let unsure: BTreeSet<&str> = unsure.map(|row| row.id.as_str()).collect();
    let mut told = BTreeMap::<&str, BTreeSet<String>>::new();
    for event in evidence.told.iter().filter(|event| event.kind == "command.done") {
        let text = |field: &str| event.body[field].as_str().unwrap_or_default();
        told.entry(text("id")).or_default().insert(text("state").to_lowercase());
    }
    for fact in &evidence.facts {
        let id = fact.command.as_str();
        if !fact.refused.is_empty() {
            continue;
        }
        if home.get(id) != Some(&fact.node.as_str()) {
            broken.push(format!("the worker took a result of {id} from {}, which never had it", fact.node));
        }
        let said = told.get(id).filter(|_| !unsure.contains(id));
        if said.is_some_and(|states| !states.contains(&fact.state)) {
            broken.push(format!("the worker took {id} for {}, and its node never said so", fact.state));
        }
    }
    evidence.facts.len()
}

/// Commands whose results the worker has to judge: their nodes sign them, and they came. Two journals may tell of two ends,
/// a lost one may have held what came, and what was swallowed never came.
fn owed_a_verdict(evidence: &Evidence) -> impl Iterator<Item = &CommandView> {
    let swallowed = evidence.swallowed();
    let rejected = evidence.commands.iter().filter(|row| row.state == "rejected");
    evidence.ended_by_nodes().chain(rejected).filter(move |row| {
        Kind::signs_results(&row.kind)
            && !evidence.had_twin(row)
            && losses_since(evidence, row).next().is_none()
            && !swallowed.results.contains(row.id.as_str())
    })
}

/// Whether there is no more to wait for before the verdicts are held against the lies.
pub fn every_result_judged(evidence: &Evidence) -> bool {
    owed_a_verdict(evidence).all(|row| !row.verdict.is_empty())
}

/// Results that were left unjudged, and those that were refused though nobody had lied about them.
fn ill_judged(evidence: &Evidence) -> Vec<String> {
    let lies = evidence.lies().filter(|told| matches!(told.lie, Lie::AlterResult | Lie::SwapResults));
    let lied_about: BTreeSet<&str> = lies.map(|told| told.command()).collect();
    let ill = |row: &CommandView| {
        let (id, node) = (&row.id, &row.node);
        match row.verdict.as_str() {
            VERIFIED => None,
            "" => Some(format!("the result of {id} on {node} was never judged")),
            _ if lied_about.contains(id.as_str()) => None,
            refused => Some(format!(
                "the worker refused the result of {id} on {node} ({refused}), and it was no lie"
            )),
        }
    };
    owed_a_verdict(evidence).filter_map(ill).collect()
}

/// Whether a node may answer a forgery so. A node that stops, or is flooded, looks at nothing. What another node was sent is
/// held to be what it is only while its signer's certificate holds, by a clock that a gateway may have pushed.
fn is_refusal(lie: Lie, answer: &str) -> bool {
    let tokens: &[Reason] = match lie {
        Lie::ForgeUnsigned => &[Reason::SignatureRequired],
        Lie::ForgeSigned | Lie::AlterBody => &[Reason::SignatureInvalid],
        Lie::SwapNodes => &[Reason::WrongNode, Reason::SignatureInvalid],
        _ => return true,
    };
    answer == Reason::Busy.token() || tokens.iter().any(|reason| reason.token() == answer)
}
