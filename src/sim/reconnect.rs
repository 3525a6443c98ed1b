//! How long nodes were away: from a restart to the next Welcome, by the gateway's events.

use std::collections::BTreeMap;

use super::history::Evidence;
use crate::model::NodeId;

/// A restart, in ms of this machine's wall clock, which the gateway on it shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restart {
    /// One agent.
    Agent(usize, i64),
    /// The gateway: every agent has to come back.
    Gateway(i64),
}

/// Times from a restart to the node's next `node.connected`, ms. A restart that another one overtakes before the
/// node is back counts for nothing: the later one counts.
pub fn times(evidence: &Evidence, nodes: &[NodeId], restarts: &[Restart]) -> Vec<i64> {
    let mut connected = BTreeMap::<&str, Vec<i64>>::new();
    for event in evidence.events.iter().filter(|event| event.kind == "node.connected") {
        connected.entry(event.node.as_str()).or_default().push(event.at_ms);
    }
    let mut times = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let mut own: Vec<i64> = restarts
            .iter()
            .filter_map(|restart| match *restart {
                Restart::Agent(agent, at) => (agent == index).then_some(at),
                Restart::Gateway(at) => Some(at),
            })
            .collect();
        own.sort_unstable();
        let back = connected.remove(node.as_str()).unwrap_or_default();
        times.extend(own.iter().enumerate().filter_map(|(nth, from)| {
            let next = own.get(nth + 1).copied().unwrap_or(i64::MAX);
            back.iter().find(|at| (*from..next).contains(*at)).map(|at| at - from)
        }));
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::control::EventView;

    #[test]
    fn a_restart_lasts_until_the_next_welcome_unless_another_one_overtakes_it() {
        let event = |node: &str, at_ms| EventView {
            seq: 0,
            at_ms,
            kind: "node.connected".into(),
            node: node.into(),
            detail: serde_json::Value::Null,
        };
        let events = vec![event("n-0", 10), event("n-1", 11), event("n-0", 130), event("n-1", 450)];
        let evidence = Evidence { events, ..Evidence::default() };
        let nodes = ["n-0", "n-1"].map(|id| NodeId::new(id).expect("an id"));
        let restarts = [Restart::Gateway(100), Restart::Agent(1, 300)];
        assert_eq!(times(&evidence, &nodes, &restarts), [30, 150]);
    }
}
