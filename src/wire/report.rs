//! What a node says under its own key, for workers: a gateway carries it and cannot make it up.

use serde::{Deserialize, Serialize};

use super::dsse::Document;
use crate::model::{NodeId, ServerTime};

/// The payload type of every report; the body's own `type` tells which it is.
pub const TYPE: &str = "application/vnd.bcd.v1.report";

/// A machine that is no node any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Tells it from other reports.
    #[serde(rename = "type")]
    pub kind: LeaveKind,
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it was.
    pub node_id: NodeId,
    /// The working clock.
    pub issued_at: ServerTime,
    /// It counts for nothing afterwards: a machine that has not left in time has stayed.
    pub not_after: ServerTime,
}

/// The `type` of a [`Leave`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LeaveKind {
    /// `leave`.
    Leave,
}

impl Document for Leave {
    const TYPE: &'static str = TYPE;

    fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    fn node_id(&self) -> Option<&NodeId> {
        Some(&self.node_id)
    }
}
