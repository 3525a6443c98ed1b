//! What nodes told of themselves.

use std::collections::BTreeMap;

use super::{Verdict, is_terminal, lost_journals, renamed_journals};
use crate::gateway::control::CommandView;
use crate::model::NodeId;
use crate::sim::history::Evidence;

/// I7: a journal's events came once each, in order, with no number missing that was not told as dropped, and tell of
/// every end that a result tells of, as a result came of every end that they tell of; only what a lost journal held, and
/// what a gateway acked and threw away, may be untold.
pub(super) fn once(evidence: &Evidence) -> Verdict {
    let (mut last, mut broken) = (BTreeMap::<(&str, &str), u64>::new(), Vec::new());
    let swallowed = evidence.swallowed();
    for event in &evidence.told {
        let place = last.entry((&event.node, &event.journal)).or_insert(0);
        let missing = (*place + 1 < event.seq).then(|| (*place + 1, event.seq - 1));
        if event.seq <= *place {
            broken.push(format!("{} told {} of {} after {place}", event.node, event.seq, event.journal));
        } else if let Some((from, to)) = missing
            && (from..=to).any(|seq| {
                let dropped = event.dropped.is_some_and(|(first, last)| (first..=last).contains(&seq));
                !dropped && !swallowed.event(&event.node, &event.journal, seq)
            })
        {
            broken.push(format!("{} never told {from} to {to} of {}", event.node, event.journal));
        }
        *place = event.seq.max(*place);
    }
    let (ends, none) = (evidence.told_ends(), BTreeMap::new());
    // Looked up once: a long run has tens of thousands of rows and of lies.
    let renamed: BTreeMap<&NodeId, Vec<i64>> =
        evidence.agents.iter().map(|node| (node, renamed_journals(evidence, node).collect())).collect();
    for row in evidence.ended_by_nodes().filter(|row| !evidence.had_twin(row)) {
        let told = ends.get(row.id.as_str()).unwrap_or(&none);
        for (journal, count) in told.iter().filter(|(_, count)| **count > 1) {
            broken.push(format!("{} told of the end of {} in {count} events of {journal}", row.node, row.id));
        }
        // A journal that comes after a lost one tells again of what its records say, and one with a new id of what was not acked.
        let losses = losses_since(evidence, row).count();
        let renamed = renamed.get(&row.node).into_iter().flatten();
        let renamed = renamed.filter(|at| **at >= row.dispatched_ms).count();
        let (at_most, lost) = (1 + losses + renamed, losses > 0);
        let untold = told.is_empty() && !lost && !swallowed.ends.contains(row.id.as_str());
        if told.len() > at_most || untold {
            broken.push(format!("{} told of the end of {} in {} journals", row.node, row.id, told.len()));
        }
    }
    for row in evidence.commands.iter().filter(|row| no_result_came(row) && !evidence.had_twin(row)) {
        let lost =
            losses_since(evidence, row).next().is_some() || swallowed.results.contains(row.id.as_str());
        if ends.contains_key(row.id.as_str()) && !lost {
            broken.push(format!("{} told of the end of {}, and its result never came", row.node, row.id));
        }
    }
    Verdict::new("I7", evidence.told.len(), "events told", broken)
}

/// Whether nothing that the gateways know of a command is its node's word on its end: they ended it themselves, or it has
/// not ended.
fn no_result_came(row: &CommandView) -> bool {
    let by_node = match row.state.as_str() {
        "expired" => false,
        "failed" => row.reason != "journal-lost",
        state => is_terminal(state),
    };
    !by_node && row.late_facts == 0
}

/// Whether there is no more to wait for before [`once`] is judged.
pub fn every_end_told(evidence: &Evidence) -> bool {
    let (ends, swallowed) = (evidence.told_ends(), evidence.swallowed());
    let told = |id: &str| ends.contains_key(id) || swallowed.ends.contains(id);
    evidence
        .ended_by_nodes()
        .filter(|row| !evidence.had_twin(row))
        .all(|row| told(row.id.as_str()) || losses_since(evidence, row).next().is_some())
}

/// Journals lost since the command came to its node: each may have held its end.
pub(super) fn losses_since<'a>(
    evidence: &'a Evidence,
    row: &'a CommandView,
) -> impl Iterator<Item = i64> + 'a {
    let since = row.dispatched_ms;
    lost_journals(evidence, &row.node).filter(move |at| *at >= since)
}
