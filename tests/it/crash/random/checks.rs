//! What has to hold when the kills are over.

use std::collections::BTreeMap;

use bcd::gateway::control::{NodeEventView, Request, Response};
use bcd::sim::history::{Evidence, read_witness};
use bcd::sim::invariants::judge;
use bcd::sim::load::Class;

use super::super::nothing_is_owed;
use super::Deaths;
use super::campaign::Campaign;
use super::programs;
use crate::lab::{Lab, until};

/// An end is written down in steps of 10 ms, before its result is on its way.
const ROUNDING_MS: i64 = 20;

/// Waits until all that was handed over has ended, and judges.
pub(super) fn settled(campaign: &mut Campaign, deaths: &Deaths) {
    let replay = &campaign.replay;
    let lab = &campaign.lab;
    for id in campaign.handed.keys() {
        lab.ended(id);
    }
    lab.probe();
    until("the end of every program and supervisor", || {
        (programs::running(lab).is_empty() && programs::supervisors(lab).is_empty()).then_some(())
    });
    let mut evidence = Evidence { handed: std::mem::take(&mut campaign.handed), ..Evidence::default() };
    gather(lab, &mut evidence);
    // Ends of programs are held against their own words below, and what a node owes last: both closer than the others.
    for verdict in judge(&evidence).into_iter().filter(|verdict| !["I5", "I8"].contains(&verdict.id)) {
        assert!(
            verdict.held(),
            "{} broken: {:#?}\n{replay}\n{}{}",
            verdict.id,
            verdict.broken,
            about(lab, &evidence, &verdict.broken),
            lab.logs()
        );
    }
    let supervisors =
        deaths.iter().filter(|(name, _)| name.starts_with("supervisor.")).map(|(_, count)| count);
    let broken = untrue_ends(lab, &evidence, supervisors.sum());
    let about = about(lab, &evidence, &broken);
    assert!(broken.is_empty(), "ends broken: {broken:#?}\n{replay}\n{about}{}", lab.logs());
    nothing_is_owed(&mut campaign.lab, &campaign.replay);
}

fn gather(lab: &Lab, evidence: &mut Evidence) {
    until("the last node.connected event", || {
        lab.events().iter().any(|event| event.kind == "node.connected").then_some(())
    });
    let Response::Commands(commands) = lab.ask(&Request::History) else { panic!("no history") };
    // The probe is the lab's own.
    let (handed, own): (Vec<_>, Vec<_>) =
        commands.into_iter().partition(|row| evidence.handed.contains_key(&row.id));
    evidence.commands = handed;
    let is_own = |event: &NodeEventView| own.iter().any(|row| event.body["id"] == row.id.as_str());
    evidence.witness = read_witness(&lab.path("witness")).expect("a witness file");
    evidence.events = lab.events();
    // The last results may be acked before the events that tell of them.
    until("the nodes' own word of every end", || {
        evidence.told = lab.told();
        evidence
            .told
            .iter_mut()
            .filter(|event| is_own(event))
            .for_each(|event| event.kind = "lab.probe".into());
        let ends = evidence.told_ends();
        evidence.ended_by_nodes().all(|row| ends.contains_key(row.id.as_str())).then_some(())
    });
}

/// What the programs wrote down of their ends, against what was said of them.
fn untrue_ends(lab: &Lab, evidence: &Evidence, supervisors_killed: usize) -> Vec<String> {
    let ends = programs::ends(lab);
    let mut broken = Vec::new();
    let mut cut_short = Vec::new();
    for row in &evidence.commands {
        if evidence.handed[&row.id].planned.class == Class::Probe {
            continue;
        }
        let begun = evidence.witness.get(row.id.as_str()).map_or(&[][..], |runs| &runs.begun);
        let attempts = counted(begun.iter().map(String::as_str));
        let own = ends.get(row.id.as_str()).map_or(&[][..], Vec::as_slice);
        for (attempt, starts) in &attempts {
            let ended = own.iter().filter(|(of, _)| of.to_string() == **attempt).count();
            if *starts > 1 || ended > *starts {
                broken.push(format!("{}: attempt {attempt} started {starts} times, ended {ended}", row.id));
            }
        }
        let whole = row.state == "succeeded" || row.reason == "exit-status";
        if whole && !own.iter().any(|(attempt, _)| u64::from(*attempt) == u64::from(row.attempt)) {
            broken.push(format!("{}: {} of attempt {}, which never ended", row.id, row.state, row.attempt));
        }
        let last = own.iter().map(|(_, at)| *at).max();
        if let Some(late) = last.map(|at| at - row.ended_ms).filter(|late| *late > ROUNDING_MS) {
            broken.push(format!(
                "{}: {} {}, and {late} ms later its program ran",
                row.id, row.state, row.reason
            ));
        }
        if row.reason == "interrupted" && !attempts.is_empty() {
            cut_short.push(row.id.to_string());
        }
    }
    // Whatever becomes of the daemon, a program that has its supervisor has its true result.
    if cut_short.len() > supervisors_killed {
        broken.push(format!(
            "{supervisors_killed} supervisors were killed, and these lost theirs: {cut_short:?}"
        ));
    }
    broken
}

fn counted<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<&'a str, usize> {
    let mut counts = BTreeMap::new();
    words.for_each(|word| *counts.entry(word).or_default() += 1);
    counts
}

/// The logs' lines about every command that a complaint names.
fn about(lab: &Lab, evidence: &Evidence, broken: &[String]) -> String {
    let named = |id: &str| broken.iter().any(|text| text.contains(id));
    evidence.handed.keys().filter(|id| named(id.as_str())).map(|id| lab.logs_about(id)).collect()
}
