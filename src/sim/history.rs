//! What can be seen from outside at the end of a run: the gateway's account and the programs' own.

use std::collections::BTreeMap;
use std::path::Path;

use super::load::Planned;
use crate::gateway::control::{CommandView, EventView, NodeEventView};
use crate::model::CommandId;

/// A command that the simulator tried to hand over.
#[derive(Debug, Clone)]
pub struct Handed {
    /// What it is.
    pub planned: Planned,
    /// Whether the gateway said that it has it. Without that it may have it or not.
    pub acknowledged: bool,
}

/// Everything that the invariants are judged by.
#[derive(Debug, Default)]
pub struct Evidence {
    /// What was handed over.
    pub handed: BTreeMap<CommandId, Handed>,
    /// How the gateway says that it ended.
    pub commands: Vec<CommandView>,
    /// The runs that the programs themselves wrote down: attempt numbers, by command.
    pub witness: BTreeMap<String, Vec<String>>,
    /// The gateway's events, in order.
    pub events: Vec<EventView>,
    /// The nodes' own events, in the order in which they came.
    pub told: Vec<NodeEventView>,
}

impl Evidence {
    /// Lines that a command's program left.
    pub fn runs(&self, id: &CommandId) -> usize {
        self.witness.get(id.as_str()).map_or(0, Vec::len)
    }

    /// Commands whose end came from their node: it told of it in an event too.
    pub fn ended_by_nodes(&self) -> impl Iterator<Item = &CommandView> {
        let by_node = |row: &&CommandView| {
            row.state == "succeeded" || matches!(&*row.reason, "exit-status" | "interrupted")
        };
        self.commands.iter().filter(by_node)
    }

    /// How often its node told of a command's end, by command.
    pub fn told_ends(&self) -> BTreeMap<&str, usize> {
        let mut ends = BTreeMap::new();
        for event in self.told.iter().filter(|event| event.kind == "command.done") {
            let id = event.body.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
            *ends.entry(id).or_default() += 1;
        }
        ends
    }

    /// Epochs in the order in which they were given, by node.
    pub fn epochs(&self) -> impl Iterator<Item = (&str, u64)> {
        let connected = self.events.iter().filter(|event| event.kind == "node.connected");
        connected.map(|event| {
            (event.node.as_str(), event.detail.get("epoch").and_then(serde_json::Value::as_u64).unwrap_or(0))
        })
    }
}

/// Reads a witness file; a missing one is empty. Blocks.
///
/// # Errors
/// It cannot be read.
pub fn read_witness(path: &Path) -> std::io::Result<BTreeMap<String, Vec<String>>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let mut runs = BTreeMap::<String, Vec<String>>::new();
    for line in text.lines() {
        let (id, attempt) = line.split_once(' ').unwrap_or((line, ""));
        runs.entry(id.to_owned()).or_default().push(attempt.to_owned());
    }
    Ok(runs)
}
