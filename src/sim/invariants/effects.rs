//! What commands did, by the witness of their programs and of the machines.

use std::collections::BTreeSet;

use super::{Verdict, lost_journals, renamed_journals};
use crate::gateway::control::CommandView;
use crate::gateway::lies::FORGED;
use crate::model::{CommandId, NodeId};
use crate::sim::faults::Blow;
use crate::sim::history::{Evidence, Handed, Runs};
use crate::sim::load::Class;

/// I2: the effect of a command that may not run twice happens at most once, and its result tells the truth.
pub(super) fn at_most_one(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    for id in evidence.witness.keys() {
        let known = CommandId::new(id.as_str()).is_ok_and(|id| evidence.handed.contains_key(&id));
        if !known && !id.starts_with(FORGED) {
            broken.push(format!("{id:?} left a line and was never handed over"));
        }
    }
    let of_twins: BTreeSet<&CommandId> =
        evidence.commands.iter().filter(|row| evidence.had_twin(row)).map(|row| &row.id).collect();
    for (id, handed) in evidence.handed.iter().filter(|(id, _)| !of_twins.contains(id)) {
        let runs = evidence.runs(id);
        if runs > 1 && !handed.planned.class.retry_safe() {
            broken.push(format!("{id} may not run twice and ran {runs} times"));
        }
    }
    for row in evidence.commands.iter().filter(|row| !of_twins.contains(&row.id)) {
        if let Some(handed) = evidence.handed.get(&row.id)
            && let Some(lie) = lie(evidence, handed, row)
        {
            broken.push(format!("{} on {}: {lie}", row.id, row.node));
        }
    }
    let boots: usize = evidence.boots.iter().sum();
    for (agent, boots) in evidence.boots.iter().enumerate() {
        broken.extend(
            evidence.agents.get(agent).and_then(|node| too_many_boots(evidence, agent, node, *boots)),
        );
    }
    let effects: usize = evidence.witness.values().map(|runs| runs.begun.len()).sum();
    Verdict::new("I2", effects + boots, "effects witnessed", broken)
}

/// A machine restarts when chaos has it do so, and once a command to.
fn too_many_boots(evidence: &Evidence, agent: usize, node: &NodeId, boots: usize) -> Option<String> {
    let struck = evidence.blows(node, |blow| blow == Blow::Reboot).count();
    let asked = |handed: &&Handed| handed.planned.agent == agent && handed.planned.class == Class::Reboot;
    let commands = evidence.handed.values().filter(asked).count();
    (boots > struck + commands).then(|| {
        format!("the machine of {node} booted {boots} times: {struck} times by itself, {commands} commands")
    })
}

/// What a result says that the witness does not bear out, or that nothing has asked for. How often it ran is judged
/// elsewhere.
fn lie(evidence: &Evidence, handed: &Handed, row: &CommandView) -> Option<String> {
    let (class, runs) = (handed.planned.class, evidence.runs(&row.id));
    let witnessed = !class.leaves_witness() || runs > 0;
    let lacks = class == Class::Barrier && evidence.old.contains(&handed.planned.agent);
    // To the control plane a journal of another id is one that was lost.
    let new_journals = || lost_journals(evidence, &row.node).chain(renamed_journals(evidence, &row.node));
    let lost = || new_journals().any(|at| at <= row.ended_ms);
    let filled = || evidence.blows(&row.node, |blow| matches!(blow, Blow::DiskFull)).next().is_some();
    match (row.state.as_str(), row.reason.as_str()) {
        ("succeeded", _) if class == Class::Fails => Some("SUCCEEDED, and it was asked to fail".into()),
        ("succeeded", _) if !witnessed => Some("SUCCEEDED without an effect".into()),
        ("failed", "exit-status") if class != Class::Fails => Some("failed, and was not asked to".into()),
        ("failed", "exit-status") if !witnessed => Some("ran to its end without an effect".into()),
        ("failed", "exit-status" | "interrupted") => None,
        // By the shutdown of its machine.
        ("failed", "signal") if rebooted_meanwhile(evidence, row) => None,
        ("failed" | "rejected", "journal-lost") if lost() => None,
        // A look at all that it holds is a look into the journal, which shares a commit with what a full disk refuses.
        ("failed", "inventory-unknown") if class == Class::Barrier && filled() => None,
        ("rejected", "denied-by-operator") if lacks => None,
        _ if lacks && row.state != "cancelled" => Some(format!("{}, and its node cannot do that", row.state)),
        ("cancelled", _) if matches!(class, Class::Cancelled(_)) => None,
        ("failed" | "rejected" | "cancelled", reason) if reason != "expired" => {
            Some(format!("{} {reason}, and nothing asked for that: {}", row.state, row.message))
        }
        _ if row.effect == "none" && runs > 0 => Some(format!("{runs} effects, reported as none")),
        _ => None,
    }
}

/// I5, over what exists: no death of a daemon, lost link, lost journal or dead gateway ends a program that runs, or has
/// its node give it up for ended. Only a reboot of its machine does, and a cancellation.
pub(super) fn none_ended_unasked(evidence: &Evidence) -> Verdict {
    let (mut checks, mut broken) = (0, Vec::new());
    for row in &evidence.commands {
        let Some(handed) = evidence.handed.get(&row.id) else { continue };
        let none = Runs::default();
        let runs = evidence.witness.get(row.id.as_str()).unwrap_or(&none);
        checks += runs.begun.len();
        let sleeps = matches!(handed.planned.class, Class::Sleeps(_));
        let what = if sleeps && runs.begun.len() > runs.ended.len() {
            "ended"
        } else if row.reason == "interrupted" && !runs.begun.is_empty() {
            "given up"
        } else {
            continue;
        };
        if !rebooted_meanwhile(evidence, row) && !evidence.had_twin(row) {
            broken.push(format!(
                "the program of {} on {} was {what}, and its machine was not rebooted; {} {} {}",
                row.id, row.node, row.state, row.reason, row.message
            ));
        }
    }
    Verdict::new("I5", checks, "programs", broken)
}

/// A machine is noted as rebooted up to a moment after its daemon told of it.
const NOTED_MS: i64 = 5000;

fn rebooted_meanwhile(evidence: &Evidence, row: &CommandView) -> bool {
    let reboots = evidence.blows(&row.node, |blow| matches!(blow, Blow::Reboot | Blow::RebootCommand));
    let (from, to) = (row.dispatched_ms, row.ended_ms.saturating_add(NOTED_MS));
    reboots.into_iter().any(|at| (from..=to).contains(&at))
}
