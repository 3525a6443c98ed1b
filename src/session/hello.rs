//! Hello: what this node is, and what it owes.

use crate::journal::Journal;
use crate::model::{BootId, CommandId, Incarnation, Kind, NodeId, Role};
use crate::wire::pb;
use crate::wire::version::Range;

/// What every Hello of this process says.
#[derive(Debug, Clone)]
pub struct HelloFacts {
    /// This node.
    pub node_id: NodeId,
    /// host or ramdisk.
    pub role: Role,
    /// This boot.
    pub boot_id: BootId,
    /// This process.
    pub incarnation: Incarnation,
    /// This build.
    pub daemon_version: String,
    /// Versions that it says it speaks; a simulation has older builds among others.
    pub protocol: Range,
}

/// The frame. The journal's own facts are read now; `last_epoch` is what this process knows beside it.
pub(super) fn hello(
    facts: &HelloFacts,
    journal: &Journal,
    running: &[CommandId],
    results: Vec<pb::CommandUpdate>,
    (last_epoch, attempt, trust_version): (u64, u32, u64),
) -> pb::NodeFrame {
    let hello = pb::Hello {
        node_id: facts.node_id.to_string(),
        role: facts.role.name().into(),
        boot_id: facts.boot_id.to_string(),
        journal_id: journal.id().to_string(),
        incarnation: facts.incarnation.to_string(),
        journal_birth_ms: journal.birth().map_or(0, |birth| birth.0),
        daemon_version: facts.daemon_version.clone(),
        proto_min: facts.protocol.min(),
        proto_max: facts.protocol.max(),
        last_epoch: journal.last_epoch().max(last_epoch),
        kinds: Kind::ALL.into_iter().map(|kind| kind.name().to_owned()).collect(),
        running_command_ids: running.iter().map(ToString::to_string).collect(),
        done_results: results,
        pending_events: journal.pending_events().borrow().count,
        reconnect_attempt: attempt,
        trust_version,
        ..Default::default()
    };
    pb::NodeFrame { frame: Some(pb::node_frame::Frame::Hello(hello)) }
}
