//! What can be seen from outside at the end of a run: the gateway's account and the programs' own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::faults::{Blow, Outage};
use super::load::Planned;
use crate::gateway::control::{CommandView, EventView, NodeEventView, NodeView};
use crate::gateway::worker::FactView;
use crate::model::{CommandId, NodeId};

/// A command that the simulator tried to hand over.
#[derive(Debug, Clone)]
pub struct Handed {
    /// What it is.
    pub planned: Planned,
    /// Whether the gateway said that it has it. Without that it may have it or not.
    pub acknowledged: bool,
    /// Not after it was signed, ms of the wall clock that the worker shares: its life is counted from then.
    pub signed_ms: i64,
}

/// So long after a twin's end its node may still find that its journal is a copy.
const TWIN_FELT_MS: i64 = 15_000;

/// A fault that was carried out, at the moment from which a node could come back: of a daemon that died, its next
/// start; of a link that was cut, the cut. ms of this machine's wall clock, which the gateways on it share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// When.
    pub at_ms: i64,
    /// What.
    pub what: Struck,
}

/// What was struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Struck {
    /// The agent of this number.
    Agent(usize, Blow),
    /// The gateway of this number.
    Gateway(usize, Outage),
}

/// The runs of one command that its program wrote down.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    /// Numbers of runs, as they began.
    pub begun: Vec<String>,
    /// Numbers of runs that came to their own end.
    pub ended: Vec<String>,
}

/// Everything that the invariants are judged by.
#[derive(Debug, Default)]
pub struct Evidence {
    /// What was handed over.
    pub handed: BTreeMap<CommandId, Handed>,
    /// How the gateways say that it ended.
    pub commands: Vec<CommandView>,
    /// The runs that the programs themselves wrote down, by command.
    pub witness: BTreeMap<String, Runs>,
    /// The gateways' events, in order.
    pub events: Vec<EventView>,
    /// The nodes' own events, in the order in which they came.
    pub told: Vec<NodeEventView>,
    /// What the worker has made of the results that nodes have signed.
    pub facts: Vec<FactView>,
    /// The nodes at the end, as the gateways know them.
    pub nodes: Vec<NodeView>,
    /// How many gateways there were.
    pub gateways: usize,
    /// Credits of a node that does nothing, by lane.
    pub credits: BTreeMap<String, u32>,
    /// Node ids by the agents' numbers.
    pub agents: Vec<NodeId>,
    /// Numbers of the agents that are older builds.
    pub old: BTreeSet<usize>,
    /// How often each agent's machine booted anew.
    pub boots: Vec<usize>,
    /// Results in each agent's journal that were not acked, after its stop.
    pub owed: Vec<u64>,
    /// Faults of agents and gateways, in the order in which they were carried out.
    pub moments: Vec<Moment>,
}

impl Evidence {
    /// Runs that a command's program began.
    pub fn runs(&self, id: &CommandId) -> usize {
        self.witness.get(id.as_str()).map_or(0, |runs| runs.begun.len())
    }

    /// Commands whose end came from their node: it told of it in an event too.
    pub fn ended_by_nodes(&self) -> impl Iterator<Item = &CommandView> {
        let by_node = |row: &&CommandView| {
            row.state == "succeeded" || matches!(&*row.reason, "exit-status" | "interrupted")
        };
        self.commands.iter().filter(by_node)
    }

    /// How often its node told of a command's end, by command and journal.
    pub fn told_ends(&self) -> BTreeMap<&str, BTreeMap<&str, usize>> {
        let mut ends = BTreeMap::<&str, BTreeMap<&str, usize>>::new();
        for event in self.told.iter().filter(|event| event.kind == "command.done") {
            let id = event.body.get("id").and_then(serde_json::Value::as_str).unwrap_or_default();
            *ends.entry(id).or_default().entry(&event.journal).or_default() += 1;
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

    /// Whether a command was open while its node had a twin: two machines then had one identity and one journal, each
    /// did what it was sent, and their events had the same numbers.
    pub fn had_twin(&self, row: &CommandView) -> bool {
        let ends: Vec<i64> = self.blows(&row.node, |blow| blow == Blow::Clone).collect();
        let open_until = if row.ended_ms > 0 { row.ended_ms } else { i64::MAX };
        ends.chunks(2).any(|twin| {
            let until = twin.get(1).map_or(i64::MAX, |end| end.saturating_add(TWIN_FELT_MS));
            twin[0] <= open_until && row.enqueued_ms <= until
        })
    }

    /// When a node's agent was struck by a blow that `meant` names.
    pub fn blows(&self, node: &NodeId, meant: fn(Blow) -> bool) -> impl Iterator<Item = i64> + use<'_> {
        let agent = self.agents.iter().position(|id| id == node);
        self.moments.iter().filter_map(move |moment| match moment.what {
            Struck::Agent(struck, blow) if Some(struck) == agent && meant(blow) => Some(moment.at_ms),
            _ => None,
        })
    }
}

/// Reads a witness file; a missing one is empty. Blocks.
///
/// # Errors
/// It cannot be read.
pub fn read_witness(path: &Path) -> std::io::Result<BTreeMap<String, Runs>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        other => other?,
    };
    let mut all = BTreeMap::<String, Runs>::new();
    for line in text.lines() {
        let (id, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (run, word) = rest.split_once(' ').unwrap_or((rest, ""));
        let runs = all.entry(id.to_owned()).or_default();
        // Anything but the words of an end counts as a run: a line that was torn hides none.
        let which = if word == "end" { &mut runs.ended } else { &mut runs.begun };
        which.push(run.to_owned());
    }
    Ok(all)
}
