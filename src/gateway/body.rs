//! The JSON bodies of commands and cancellations, which the worker signs and a gateway relays.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::model::{CommandId, ExecArgs, Kind, Lane, NodeId, RetrySafe, ServerTime, strict};

pub use crate::wire::dsse::COMMAND_TYPE;

/// A command's body.
#[derive(Debug, Serialize)]
pub struct CommandBody<'a> {
    /// The deployment's name.
    pub trust_domain: &'a str,
    /// For whom.
    pub node_id: &'a NodeId,
    /// The command.
    pub id: &'a CommandId,
    /// Its kind's name; also one that no node knows.
    pub kind: &'a str,
    /// Now.
    pub issued_at: ServerTime,
    /// Until when it may be accepted.
    pub not_after: ServerTime,
    /// Nothing is ever asked for here before desired state exists.
    pub min_generation: u64,
    /// As the caller wrote them.
    pub args: &'a RawValue,
}

/// A cancellation's body.
#[derive(Debug, Serialize)]
pub struct CancelBody<'a> {
    /// The deployment's name.
    pub trust_domain: &'a str,
    /// For whom.
    pub node_id: &'a NodeId,
    /// The command.
    pub command_id: &'a CommandId,
    /// Now.
    pub issued_at: ServerTime,
}

/// What a gateway reads of a command that it relays: enough to route it. Whether it holds is the node's to judge.
#[derive(Debug, Deserialize)]
pub struct Relayed {
    /// For whom.
    pub node_id: NodeId,
    /// The command.
    pub id: CommandId,
    /// Its kind's name; also one that no node knows.
    pub kind: String,
    /// Until when it may be accepted.
    pub not_after: ServerTime,
    /// As the operator wrote them.
    pub args: Box<RawValue>,
}

/// Reads it.
///
/// # Errors
/// The body is none of a command.
pub fn read(body: &[u8]) -> serde_json::Result<Relayed> {
    serde_json::from_slice(body)
}

/// A body's JSON.
pub fn text(body: &impl Serialize) -> String {
    // Ids, times and verbatim JSON cannot fail to serialise.
    serde_json::to_string(body).unwrap_or_default()
}

/// The lane of a kind and whether this command of it may run twice. A kind that is unknown here, or arguments that
/// cannot be read, will be rejected by the node; until then they count as work that may not.
pub fn routing(kind: &str, args: &RawValue) -> (Lane, bool) {
    let Some(kind) = Kind::from_name(kind) else { return (Lane::Work, false) };
    let properties = kind.properties();
    let retry_safe = match properties.retry_safe {
        RetrySafe::Yes => true,
        RetrySafe::No => false,
        RetrySafe::AsArgumentsSay => {
            strict::parse::<ExecArgs>(args.get().as_bytes()).is_ok_and(|args| args.retry_safe)
        }
    };
    (properties.lane, retry_safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn raw(json: &str) -> Box<RawValue> {
        RawValue::from_string(json.into()).expect("json")
    }

    #[test]
    fn a_kind_is_routed_by_its_table_and_its_arguments() {
        assert_eq!(routing("node.probe", &raw("{}")), (Lane::Control, true));
        assert_eq!(routing("node.exec", &raw(r#"{"argv":["x"]}"#)), (Lane::Work, false));
        assert_eq!(routing("node.exec", &raw(r#"{"argv":["x"],"retry_safe":true}"#)), (Lane::Work, true));
        assert_eq!(routing("node.exec", &raw(r#"{"retry_safe":true}"#)), (Lane::Work, false));
        assert_eq!(routing("disk.wipe", &raw("{}")), (Lane::Work, false));
    }

    #[test]
    fn a_body_is_what_a_node_reads() {
        let (node, id) = (NodeId::new("n-1").expect("id"), CommandId::new("c-1").expect("id"));
        let args = raw(r#"{"argv":["/bin/true"]}"#);
        let at = ServerTime(1_790_000_000_123);
        let body = CommandBody {
            trust_domain: "lab.example",
            node_id: &node,
            id: &id,
            kind: "node.exec",
            issued_at: at,
            not_after: at,
            min_generation: 0,
            args: &args,
        };
        let command = crate::model::Command::parse(text(&body).into()).expect("a header");
        assert_eq!((command.header.issued_at, command.header.id.as_str()), (at, "c-1"));
        command.body(Kind::NodeExec).expect("a body");
    }
}
