//! What gateways made up.

use std::collections::BTreeMap;

use super::Verdict;
use crate::gateway::lies::{FORGED, FORGED_VERSION, Lie};
use crate::model::Reason;
use crate::sim::history::Evidence;
use crate::sim::load::Class;

/// I9: nothing that a gateway alone can make causes an effect, a cancellation, or a move of identity. A node takes the
/// commands that were handed over for it and no others, by its own events; nothing forged left a line of its own; every
/// forgery that was answered was refused; and nothing was cancelled that nobody cancelled.
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
    let forgeries = evidence.lies().filter(|told| told.lie.forges()).count();
    Verdict::new("I9", forgeries + transitions, "forgeries and transitions", broken)
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
