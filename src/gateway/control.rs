//! The control socket of the reference gateway: what people ask of it. What commands a node is signed by the worker
//! before it comes here ([`Operator`] does both).

mod client;
mod operator;
mod serve;

pub use super::lines::ClientError;
pub use client::Client;
pub use operator::Operator;
pub(super) use serve::{answer, serve};

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::model::{CommandId, NodeId};
use crate::wire::dsse::Envelope;

/// What may be asked.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Puts a command into its node's queue.
    Enqueue {
        /// As the worker has signed it.
        command: Envelope,
    },
    /// Cancels a command.
    Cancel {
        /// Which.
        id: CommandId,
        /// As the worker has signed it.
        cancellation: Envelope,
    },
    /// One command.
    Show {
        /// Which.
        id: CommandId,
    },
    /// Waits until a command is terminal, or the time is over; then as `show`.
    Wait {
        /// Which.
        id: CommandId,
        /// At most this long, ms.
        timeout_ms: u64,
    },
    /// Commands, newest first.
    List {
        /// Of this node only.
        #[serde(default)]
        node: Option<NodeId>,
        /// At most so many.
        limit: u32,
    },
    /// Every command with its times and counts, oldest first, for the simulator's invariants.
    History,
    /// The nodes.
    Nodes,
    /// Events of the gateway behind a number.
    Events {
        /// The last number seen; 0 for all.
        after: u64,
        /// Waits up to this long for one, ms.
        #[serde(default)]
        wait_ms: u64,
    },
    /// Events of the nodes behind a number of the gateway's, in the order in which they came.
    NodeEvents {
        /// Of this node only.
        #[serde(default)]
        node: Option<NodeId>,
        /// The last number seen; 0 for all.
        after: u64,
    },
    /// Revokes a node's certificates, and ends its session.
    Revoke {
        /// The worker's word for it, to be relayed: the node keeps it, and no `unrevoke` brings it back.
        #[serde(default)]
        revocation: Option<Envelope>,
        /// Whose.
        node: NodeId,
    },
    /// Takes the revocation of a node's certificates back, a quarantine's too.
    Unrevoke {
        /// Whose.
        node: NodeId,
    },
    /// Deletes a node and ends its open commands.
    Delete {
        /// Which.
        node: NodeId,
    },
    /// Empties the gateway: sessions are told to redial elsewhere, new ones are refused.
    Drain {
        /// Spread over this long, ms.
        max_delay_ms: u32,
    },
    /// Ends a drain.
    Undrain,
    /// The worker's directory.
    Worker,
    /// Counts.
    Stats,
    /// Ends the lies of a gateway, and its sessions with them.
    Reform,
    /// An outage of the store, for the simulator: its write lock is held, so that no gateway can write.
    StopStore {
        /// For so long, ms; at most a minute.
        ms: u64,
    },
}

/// What is answered.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Response {
    /// The id of an enqueued command.
    Enqueued(CommandId),
    /// Done.
    Done,
    /// One command; absent: not known here.
    Command(Option<Box<CommandView>>),
    /// Commands.
    Commands(Vec<CommandView>),
    /// Nodes.
    Nodes(Vec<NodeView>),
    /// Events.
    Events(Vec<EventView>),
    /// Events of nodes.
    NodeEvents(Vec<NodeEventView>),
    /// The worker's directory; absent: it stands within the gateway's process.
    Worker(Option<PathBuf>),
    /// Counts.
    Stats(Stats),
    /// Not done; why.
    Error(String),
}

/// One command, as the gateway knows it. Times are ms since the Unix epoch by the gateway's clock.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommandView {
    /// The command.
    pub id: CommandId,
    /// For whom.
    pub node: NodeId,
    /// Its kind.
    pub kind: String,
    /// `pending`, `dispatched`, `accepted`, `running`, `succeeded`, `failed`, `cancelled`, `rejected`, `expired`.
    pub state: String,
    /// Reason token; empty for none.
    pub reason: String,
    /// For people.
    pub message: String,
    /// `none`, `complete`, `unknown`; empty before the end.
    pub effect: String,
    /// Deliveries.
    pub deliveries: u32,
    /// Executions, as the node says.
    pub attempt: u32,
    /// The kind's output, JSON; empty for none.
    pub output: String,
    /// How often its terminal state changed; more than once breaks I1.
    pub terminal_changes: u32,
    /// Results that came after it had ended and said the same or otherwise (late facts).
    pub late_facts: u32,
    /// What the worker has made of the signed result: `verified`, or the token of why it does not hold; empty where none
    /// is asked for, or not yet.
    #[serde(default)]
    pub verdict: String,
    /// Times.
    pub enqueued_ms: i64,
    /// First dispatch; 0 for none.
    pub dispatched_ms: i64,
    /// First ACCEPTED; 0 for none.
    pub accepted_ms: i64,
    /// The end; 0 for none.
    pub ended_ms: i64,
}

/// One node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeView {
    /// The node.
    pub node: NodeId,
    /// `connected`, `disconnected` or `unreachable`.
    pub state: String,
    /// Its epoch.
    pub epoch: u64,
    /// Where it stands.
    pub site: String,
    /// Boot id of its last Hello.
    pub boot_id: String,
    /// Its daemon's version.
    pub version: String,
    /// Age of its last frame, ms.
    pub last_seen_age_ms: u64,
    /// Free credits as last reported.
    pub free_credits: BTreeMap<String, u32>,
    /// The gateway that had its newest session; empty before the first.
    #[serde(default)]
    pub gateway: String,
    /// What the operator calls it.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// One event of the gateway.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventView {
    /// Its number.
    pub seq: u64,
    /// When, ms since the Unix epoch by the gateway's clock.
    pub at_ms: i64,
    /// Its type, such as `node.connected`.
    pub kind: String,
    /// About whom.
    pub node: String,
    /// What, JSON.
    pub detail: serde_json::Value,
}

/// One event of a node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct NodeEventView {
    /// The gateway's number, in the order in which they came.
    pub number: u64,
    /// Whose.
    pub node: String,
    /// The journal that numbered it.
    pub journal: String,
    /// Its number in that journal.
    pub seq: u64,
    /// `transition`, `security`, `log`, `metric` or `unknown`.
    pub class: String,
    /// Its type, such as `command.done`.
    pub kind: String,
    /// What, JSON; null where it was over the limit.
    pub body: serde_json::Value,
    /// The node's wall clock when it was written, ms since the Unix epoch. Advisory.
    pub at_ms: i64,
    /// Age when it was sent, ms; absent when it was written in an earlier boot.
    pub age_ms: Option<u64>,
    /// When it came, ms since the Unix epoch by the gateway's clock.
    pub received_ms: i64,
    /// First and last of the numbers right before it that the node has dropped.
    pub dropped: Option<(u64, u64)>,
}

/// Counts since the store was made, over every gateway that shares it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Stats {
    /// Connected nodes.
    pub sessions: u64,
    /// Connected nodes by gateway; one that has none may be absent.
    #[serde(default)]
    pub gateways: BTreeMap<String, u64>,
    /// Nodes joined.
    pub nodes: u64,
    /// Commands by state.
    pub commands: BTreeMap<String, u64>,
    /// Hello transactions.
    pub hellos: u64,
    /// Refusals by token.
    pub refused: BTreeMap<String, u64>,
}
