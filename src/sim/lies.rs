//! What the gateways of a run lied about, by the events in which they noted it.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::faults::Counts;
use super::history::Evidence;
use crate::gateway::control::EventView;
use crate::gateway::lies::{ANSWERED, Lie, TOLD};

/// A lie that was told.
#[derive(Debug, Clone, Copy)]
pub struct Told<'a> {
    /// Which.
    pub lie: Lie,
    /// To whom.
    pub node: &'a str,
    /// When, by the gateways' clock, ms.
    pub at_ms: i64,
    detail: &'a Value,
}

impl<'a> Told<'a> {
    fn read(event: &'a EventView) -> Option<Self> {
        let lie = Lie::from_name(event.detail.get("lie")?.as_str()?)?;
        Some(Self { lie, node: &event.node, at_ms: event.at_ms, detail: &event.detail })
    }

    /// The command that it was about; empty for none.
    pub fn command(&self) -> &'a str {
        self.text("command")
    }

    /// What the node made of it; empty where this is no answer.
    pub fn answer(&self) -> &'a str {
        self.text("answer")
    }

    /// How far ahead the time was that it named, ms.
    pub fn ahead_ms(&self) -> i64 {
        let said = self.detail.get("said_ms").and_then(Value::as_i64);
        said.map_or(0, |said| said.saturating_sub(self.at_ms))
    }

    fn text(&self, field: &str) -> &'a str {
        self.detail.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    fn number(&self, field: &str) -> u64 {
        self.detail.get(field).and_then(Value::as_u64).unwrap_or(0)
    }
}

impl Evidence {
    /// Every lie that was told, in order.
    pub fn lies(&self) -> impl Iterator<Item = Told<'_>> {
        self.events.iter().filter(|event| event.kind == TOLD).filter_map(Told::read)
    }

    /// What nodes made of commands that were lies.
    pub fn answers(&self) -> impl Iterator<Item = Told<'_>> {
        self.events.iter().filter(|event| event.kind == ANSWERED).filter_map(Told::read)
    }

    /// How often each lie was told, as a fault.
    pub fn lie_counts(&self) -> Counts {
        let mut counts = Counts::new();
        for told in self.lies() {
            *counts.entry(format!("lie-{}", told.lie.name())).or_default() += 1;
        }
        counts
    }

    /// What gateways have acked and thrown away.
    pub fn swallowed(&self) -> Swallowed<'_> {
        let mut swallowed = Swallowed::default();
        for told in self.lies() {
            match told.lie {
                Lie::AckResult => drop(swallowed.results.insert(told.command())),
                Lie::AckEvents => {
                    let ends = told.detail.get("ends").and_then(Value::as_array).into_iter().flatten();
                    swallowed.ends.extend(ends.filter_map(Value::as_str));
                    let numbers = told.number("from")..=told.number("to");
                    swallowed.events.entry((told.node, told.text("journal"))).or_default().extend(numbers);
                }
                _ => {}
            }
        }
        swallowed
    }
}

/// Facts that a gateway has acked and thrown away: their nodes owe them to nobody any more.
#[derive(Debug, Default)]
pub struct Swallowed<'a> {
    /// Commands whose results they were.
    pub results: BTreeSet<&'a str>,
    /// Commands of whose ends the events told.
    pub ends: BTreeSet<&'a str>,
    events: BTreeMap<(&'a str, &'a str), BTreeSet<u64>>,
}

impl Swallowed<'_> {
    /// Whether this event of a node's journal was among them.
    pub fn event(&self, node: &str, journal: &str, seq: u64) -> bool {
        self.events.get(&(node, journal)).is_some_and(|numbers| numbers.contains(&seq))
    }
}
