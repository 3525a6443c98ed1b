//! How long nodes were away: from the moment at which one could come back to its next Welcome, by the gateways' events.

use std::collections::BTreeMap;

use super::faults::{Blow, Outage};
use super::history::{Evidence, Moment, Struck};

/// Times from a moment to the node's next `node.connected`, ms. One that another moment overtakes before the node is
/// back counts for nothing: the later one counts.
pub fn times(evidence: &Evidence) -> Vec<i64> {
    let mut connected = BTreeMap::<&str, Vec<i64>>::new();
    for event in evidence.events.iter().filter(|event| event.kind == "node.connected") {
        connected.entry(event.node.as_str()).or_default().push(event.at_ms);
    }
    let mut times = Vec::new();
    for (index, node) in evidence.agents.iter().enumerate() {
        let away = |moment: &Moment| match moment.what {
            Struck::Agent(agent, blow) => agent == index && loses_session(blow),
            // Of several gateways nobody knows here which one the node was with.
            Struck::Gateway(_, Outage::Kill) => evidence.gateways == 1,
            Struck::Gateway(..) => false,
        };
        let mut own: Vec<i64> =
            evidence.moments.iter().filter(|moment| away(moment)).map(|moment| moment.at_ms).collect();
        own.sort_unstable();
        let back = connected.remove(node.as_str()).unwrap_or_default();
        times.extend(own.iter().enumerate().filter_map(|(nth, from)| {
            let next = own.get(nth + 1).copied().unwrap_or(i64::MAX);
            back.iter().find(|at| (*from..next).contains(*at)).map(|at| at - from)
        }));
    }
    times
}

/// Whether a node certainly has to dial again.
fn loses_session(blow: Blow) -> bool {
    match blow {
        Blow::Kill | Blow::KillAt(_) | Blow::Reboot | Blow::RebootCommand | Blow::JournalLoss | Blow::Cut => {
            true
        }
        Blow::DiskFull
        | Blow::ClockJump(_)
        | Blow::Clone
        | Blow::HalfOpen
        | Blow::Latency(_)
        | Blow::Loss => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::control::EventView;
    use crate::model::NodeId;

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
        let agents = ["n-0", "n-1"].map(|id| NodeId::new(id).expect("an id")).to_vec();
        let moments = [
            (100, Struck::Gateway(0, Outage::Kill)),
            (300, Struck::Agent(1, Blow::Kill)),
            (440, Struck::Agent(1, Blow::DiskFull)),
        ];
        let moments = moments.map(|(at_ms, what)| Moment { at_ms, what }).to_vec();
        let evidence = Evidence { events, agents, moments, gateways: 1, ..Evidence::default() };
        assert_eq!(times(&evidence), [30, 150]);
        let several = Evidence { gateways: 3, ..evidence };
        assert_eq!(times(&several), [150]);
    }
}
