//! The invariants, a function each, over evidence from outside the agents. A check that finds nothing to check
//! has not held.

mod effects;
mod forged;
mod telling;
#[cfg(test)]
mod tests;
mod time;

use std::collections::BTreeMap;

use super::faults::Blow;
use super::history::Evidence;
use crate::gateway::control::CommandView;
use crate::gateway::lies::Lie;
use crate::model::NodeId;

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
    /// A verdict over so many checks; none at all is broken.
    pub fn new(id: &'static str, checks: usize, unit: &'static str, mut broken: Vec<String>) -> Self {
        if checks == 0 {
            broken.push("there was nothing to check".into());
        }
        Self { id, checks, unit, broken }
    }

    /// Whether it held.
    pub fn held(&self) -> bool {
        self.broken.is_empty()
    }
}

/// All that this simulator judges.
pub fn judge(evidence: &Evidence) -> Vec<Verdict> {
    vec![
        one_terminal_state(evidence),
        effects::at_most_one(evidence),
        epochs_rise(evidence),
        time::one_clock_decides(evidence),
        effects::none_ended_unasked(evidence),
        telling::once(evidence),
        converged(evidence),
        forged::nothing_forged_counts(evidence),
    ]
}

pub use forged::every_result_judged;
pub use telling::every_end_told;

/// Whether a state is an end.
pub fn is_terminal(state: &str) -> bool {
    matches!(state, "succeeded" | "failed" | "cancelled" | "rejected" | "expired")
}

/// When a node lost its journal. One that finds itself to be a copy may be older than it was.
fn lost_journals<'a>(evidence: &'a Evidence, node: &NodeId) -> impl Iterator<Item = i64> + use<'a> {
    evidence.blows(node, |blow| matches!(blow, Blow::JournalLoss | Blow::Clone))
}

/// When a gateway had a node believe that its journal is a copy: it has another id from then on, and all that it had.
fn renamed_journals<'a>(evidence: &'a Evidence, node: &'a NodeId) -> impl Iterator<Item = i64> + 'a {
    let told = evidence.lies().filter(|told| told.lie == Lie::AckAhead && told.node == node.as_str());
    told.map(|told| told.at_ms)
}

/// I1: every command that a gateway took reaches exactly one terminal state.
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
    Verdict::new("I1", rows.len(), "commands", broken)
}

/// I3: epochs of a node only rise, whichever gateway gives them: none routes to a node that another has taken.
fn epochs_rise(evidence: &Evidence) -> Verdict {
    let (mut last, mut checks, mut broken) = (BTreeMap::<&str, u64>::new(), 0, Vec::new());
    for (node, epoch) in evidence.epochs() {
        checks += 1;
        let before = last.insert(node, epoch).unwrap_or(0);
        if epoch <= before {
            broken.push(format!("{node} was given epoch {epoch} after {before}"));
        }
    }
    Verdict::new("I3", checks, "epochs", broken)
}

/// I8: once faults have stopped every node is connected and owes nothing: no command is open,
/// no result waits in a journal, and all credits are back.
fn converged(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    for id in &evidence.agents {
        let Some(node) = evidence.nodes.iter().find(|node| node.node == *id) else {
            broken.push(format!("{id} is not known to the gateways"));
            continue;
        };
        if node.state != "connected" {
            broken.push(format!("{id} did not come back: {}", node.state));
        }
        if node.free_credits != evidence.credits {
            broken.push(format!("{id} holds credits: free are {:?}", node.free_credits));
        }
    }
    for (agent, owed) in evidence.owed.iter().enumerate().filter(|(_, owed)| **owed > 0) {
        let node = evidence.agents.get(agent).map_or("a node", NodeId::as_str);
        broken.push(format!("{node} still has {owed} results in its journal to deliver"));
    }
    for row in evidence.commands.iter().filter(|row| !is_terminal(&row.state)) {
        broken.push(format!("{} is still {} on {}", row.id, row.state, row.node));
    }
    Verdict::new("I8", evidence.agents.len(), "nodes", broken)
}
