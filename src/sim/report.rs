//! The closing table and its JSON form.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Options;
use super::faults::Counts;
use super::history::Evidence;
use super::invariants::Verdict;
use super::load::Class;
use super::reconnect;
use crate::model::CommandId;

/// How commands ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Ends {
    succeeded: usize,
    failed: usize,
    /// How often each reason, of those that nobody asked to fail.
    unasked: BTreeMap<String, usize>,
    interrupted: usize,
    expired: usize,
    unended: usize,
    duplicates: usize,
    lost: usize,
}

/// Durations in ms, sorted.
#[derive(Debug, Clone, Default)]
pub struct Samples(Vec<i64>);

impl Samples {
    /// From durations in any order.
    pub fn new(mut ms: Vec<i64>) -> Self {
        ms.sort_unstable();
        Self(ms)
    }

    /// The smallest value that at least `percent` of the samples do not exceed; absent without samples.
    pub fn percentile(&self, percent: usize) -> Option<i64> {
        let rank = (self.0.len() * percent).div_ceil(100);
        self.0.get(rank.saturating_sub(1)).copied()
    }

    fn json(&self) -> Value {
        json!({ "samples": self.0.len(), "p50": self.percentile(50), "p99": self.percentile(99) })
    }

    fn text(&self) -> String {
        let shown = |percent| match self.percentile(percent) {
            None => "-".to_owned(),
            Some(ms) if ms >= 1000 => format!("{}.{} s", ms / 1000, ms % 1000 / 100),
            Some(ms) => format!("{ms} ms"),
        };
        format!("p50 {} p99 {}", shown(50), shown(99))
    }
}

/// Everything that a run has shown.
#[derive(Debug)]
pub struct Report {
    /// What was asked for.
    pub options: Options,
    /// Agents connected when the run ended.
    pub connected: usize,
    /// How often each fault was carried out, by name.
    pub faults: Counts,
    /// A gateway's taking of a command to its first dispatch.
    pub dispatch: Samples,
    /// First dispatch to the gateway's receipt of ACCEPTED.
    pub accept: Samples,
    /// ACCEPTED to the result, at the gateway; commands that sleep are left out.
    pub result: Samples,
    /// From a restart or a cut to the node's next Welcome.
    pub reconnect: Samples,
    /// Growth of this process's resident memory, KiB an agent.
    pub memory_kib: u64,
    /// What became of the invariants.
    pub verdicts: Vec<Verdict>,
    /// Invariants that nothing is said about, since only the gateway could show whether they held.
    pub not_judged: Vec<&'static str>,
    /// Whatever else went wrong: an agent that stopped by itself, a run that did not settle.
    pub troubles: Vec<String>,
    ends: Ends,
}

impl Report {
    /// From what was seen.
    pub fn new(options: Options, evidence: &Evidence, verdicts: Vec<Verdict>) -> Self {
        let span = |from: i64, to: i64| (from > 0 && to > 0).then(|| (to - from).max(0));
        let quick = |id| evidence.handed.get(id).is_some_and(|handed| handed.planned.class.is_quick());
        let rows = &evidence.commands;
        let dispatch = rows.iter().filter_map(|row| span(row.enqueued_ms, row.dispatched_ms));
        let accept = rows.iter().filter_map(|row| span(row.dispatched_ms, row.accepted_ms));
        let result =
            rows.iter().filter(|row| quick(&row.id)).filter_map(|row| span(row.accepted_ms, row.ended_ms));
        Self {
            dispatch: Samples::new(dispatch.collect()),
            accept: Samples::new(accept.collect()),
            result: Samples::new(result.collect()),
            ends: ends(evidence),
            options,
            verdicts,
            connected: evidence.nodes.iter().filter(|node| node.state == "connected").count(),
            faults: Counts::new(),
            reconnect: Samples::new(reconnect::times(evidence)),
            memory_kib: 0,
            troubles: Vec::new(),
            not_judged: Vec::new(),
        }
    }

    /// Whether every invariant held and nothing else went wrong.
    pub fn held(&self) -> bool {
        self.troubles.is_empty() && self.verdicts.iter().all(Verdict::held)
    }

    /// The closing table.
    pub fn table(&self) -> String {
        let Ends { succeeded, failed, interrupted, expired, unended, duplicates, lost, .. } =
            self.ends.clone();
        let total = succeeded + failed + interrupted + expired + unended;
        let reasons: Vec<String> =
            self.ends.unasked.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        let asked = if reasons.is_empty() {
            "all asked to".to_owned()
        } else {
            format!("not asked to: {}", reasons.join(", "))
        };
        let options = &self.options;
        let mut text = format!(
            "nodes     {} ({} connected)   gateways {}   seed {}   {} s   chaos {}\n",
            options.nodes,
            self.connected,
            options.gateways,
            options.seed,
            options.duration.as_secs(),
            options.chaos.name(),
        );
        let _ = write!(
            text,
            "commands  {}   succeeded {}   failed {} ({asked})   interrupted {}   expired {}   duplicates {}   lost {}\n\
             faults    {}\n\
             latency   taken→dispatched {}   dispatch→accepted {}   accepted→result {}   reconnect {}\n\
             memory    {} KiB an agent\n",
            grouped(total),
            grouped(succeeded),
            grouped(failed),
            grouped(interrupted),
            grouped(expired),
            grouped(duplicates),
            grouped(lost),
            self.faults_text(),
            self.dispatch.text(),
            self.accept.text(),
            self.result.text(),
            self.reconnect.text(),
            self.memory_kib,
        );
        let verdicts = self.verdicts.iter().map(|verdict| {
            let held = if verdict.held() { "held" } else { "BROKEN" };
            format!("{} {held} ({} {})", verdict.id, grouped(verdict.checks), verdict.unit)
        });
        let _ = writeln!(text, "{}", verdicts.collect::<Vec<_>>().join("   "));
        for what in
            self.verdicts.iter().flat_map(|verdict| verdict.broken.iter().map(|what| (verdict.id, what)))
        {
            let _ = writeln!(text, "{} broken: {}", what.0, what.1);
        }
        if !self.not_judged.is_empty() {
            let ids = self.not_judged.join(", ");
            let _ = writeln!(
                text,
                "not judged: {ids}; only the gateway's own history could show whether they held"
            );
        }
        for trouble in &self.troubles {
            let _ = writeln!(text, "trouble: {trouble}");
        }
        let result = if self.held() {
            if self.not_judged.is_empty() {
                "every invariant held"
            } else {
                "every invariant that was judged held"
            }
        } else {
            "NOT every invariant held"
        };
        let _ = writeln!(text, "{result}; replay: {}", options.command_line());
        text
    }

    /// A few to a line.
    fn faults_text(&self) -> String {
        const A_LINE: usize = 5;
        let each: Vec<String> =
            self.faults.iter().map(|(name, count)| format!("{name} {}", grouped(*count))).collect();
        match each.is_empty() {
            true => "none".into(),
            false => {
                each.chunks(A_LINE).map(|line| line.join("   ")).collect::<Vec<_>>().join("\n          ")
            }
        }
    }

    /// One object in one line.
    pub fn json(&self) -> Value {
        let invariants = self.verdicts.iter().map(|verdict| {
            json!({ "id": verdict.id, "held": verdict.held(), "checks": verdict.checks, "broken": verdict.broken })
        });
        let Ends { succeeded, failed, interrupted, expired, unended, duplicates, lost, .. } =
            self.ends.clone();
        json!({
            "schema": 1,
            "seed": self.options.seed,
            "nodes": self.options.nodes,
            "connected": self.connected,
            "invariants": invariants.collect::<Vec<_>>(),
            "commands": {
                "succeeded": succeeded, "failed": failed, "interrupted": interrupted, "expired": expired,
                "unended": unended, "duplicates": duplicates, "lost": lost,
            },
            "faults": self.faults,
            "latency_ms": {
                "dispatch": self.dispatch.json(), "accept": self.accept.json(), "result": self.result.json(), "reconnect": self.reconnect.json(),
            },
            "memory": { "kib_per_agent": self.memory_kib },
            "not_judged": self.not_judged,
            "troubles": self.troubles,
            "replay": self.options.command_line(),
        })
    }
}

fn ends(evidence: &Evidence) -> Ends {
    let mut ends = Ends::default();
    for row in &evidence.commands {
        let class = evidence.handed.get(&row.id).map(|handed| handed.planned.class);
        match (row.state.as_str(), row.reason.as_str()) {
            ("succeeded", _) => ends.succeeded += 1,
            ("failed", "interrupted") => ends.interrupted += 1,
            ("expired", _) | (_, "expired") => ends.expired += 1,
            ("failed" | "rejected" | "cancelled", _) => {
                ends.failed += 1;
                let asked = matches!(class, Some(Class::Fails | Class::Cancelled(_)));
                let known = matches!(&*row.reason, "journal-lost" | "denied-by-operator");
                if !asked && !known {
                    let reason = if row.reason.is_empty() { &row.state } else { &row.reason };
                    *ends.unasked.entry(reason.clone()).or_default() += 1;
                }
            }
            _ => ends.unended += 1,
        }
    }
    let known: BTreeSet<&CommandId> = evidence.commands.iter().map(|row| &row.id).collect();
    for (id, handed) in &evidence.handed {
        ends.duplicates += usize::from(!handed.planned.class.retry_safe() && evidence.runs(id) > 1);
        ends.lost += usize::from(handed.acknowledged && !known.contains(id));
    }
    ends.lost += ends.unended;
    ends
}

/// A count with its thousands set apart.
fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_sample_and_none_without_samples() {
        let samples = Samples::new((1..=100).rev().collect());
        assert_eq!((samples.percentile(50), samples.percentile(99)), (Some(50), Some(99)));
        assert_eq!(Samples::new(vec![7]).percentile(50), Some(7));
        assert_eq!(Samples::default().percentile(99), None);
        assert_eq!(Samples::new(vec![1234]).text(), "p50 1.2 s p99 1.2 s");
    }

    #[test]
    fn thousands_stand_apart() {
        assert_eq!([0, 999, 1000, 1_234_567].map(grouped), ["0", "999", "1,000", "1,234,567"]);
    }
}
