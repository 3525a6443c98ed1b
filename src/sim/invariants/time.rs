//! Whose clock decides.

use std::collections::BTreeSet;

use super::Verdict;
use crate::gateway::control::{CommandView, NodeEventView};
use crate::gateway::lies::Lie;
use crate::model::{CommandId, Reason};
use crate::sim::history::{Evidence, Handed};

/// How a node ends a session, or does not begin one, for a time that somebody told it.
const OF_TIME: [Reason; 4] =
    [Reason::TimeBackwards, Reason::TimeAhead, Reason::IdentityExpired, Reason::CertificateExpired];

/// I4: no command ends as expired before its time by the control plane's clock, whatever the clocks of machines say and
/// gateways lie; none is begun that came when it had expired; and no node refuses a session for its time unless a gateway
/// lied to it about that.
pub(super) fn one_clock_decides(evidence: &Evidence) -> Verdict {
    let mut broken = Vec::new();
    for row in &evidence.commands {
        let expired = row.state == "expired" || row.reason == Reason::Expired.token();
        if let Some(handed) = evidence.handed.get(&row.id)
            && expired
            && too_early(handed, row)
        {
            broken.push(format!("{} on {} expired before its time", row.id, row.node));
        }
    }
    // What another node was given meanwhile is not this clock's to judge.
    let told_of = |lie| evidence.lies().filter(move |told| told.lie == lie);
    let swapped: BTreeSet<&str> = told_of(Lie::SwapNodes).map(|told| told.command()).collect();
    let took = ["command.accepted", "command.running"];
    let taken: BTreeSet<(&str, &str)> = evidence
        .told
        .iter()
        .filter(|event| took.contains(&event.kind.as_str()))
        .filter_map(|event| Some((event.node.as_str(), event.body["id"].as_str()?)))
        .collect();
    for told in told_of(Lie::Withhold) {
        let row = evidence.commands.iter().find(|row| row.id.as_str() == told.command());
        let ran = !swapped.contains(told.command())
            && CommandId::new(told.command()).is_ok_and(|id| evidence.runs(&id) > 0);
        // Some effects leave no other trace.
        let taken = taken.contains(&(told.node, told.command()));
        if row.is_some_and(|row| row.deliveries == 0) && (ran || taken) {
            broken.push(format!("{} came to {} when it had expired, and ran", told.command(), told.node));
        }
    }
    let opened = || evidence.told.iter().filter(|event| event.kind == "session.opened");
    for event in opened().filter(|event| refused_for_time(event)) {
        let lied = evidence.lies().any(|told| {
            causes(told.lie, event) && told.node == event.node && told.at_ms <= event.received_ms
        });
        if !lied {
            let why = &event.body["last_end"];
            broken.push(format!("{} ended a session {why}, and no gateway lied to it", event.node));
        }
    }
    Verdict::new("I4", evidence.commands.len() + opened().count(), "deadlines and sessions", broken)
}

/// Whether such a lie may have ended a session so. A time that was pushed is the node's own from then on.
fn causes(lie: Lie, event: &NodeEventView) -> bool {
    let end = event.body["last_end"].as_str();
    match lie {
        Lie::TimePushed => true,
        Lie::TimeAhead => end == Some(Reason::TimeAhead.token()),
        Lie::TimeBehind => end == Some(Reason::TimeBackwards.token()),
        _ => false,
    }
}

/// A gateway's clock ended it, and no other may: a node's wall clock has jumped by years.
fn too_early(handed: &Handed, row: &CommandView) -> bool {
    let ttl_ms =
        i64::try_from(handed.planned.ttl_s()).map_or(i64::MAX, |seconds| seconds.saturating_mul(1000));
    row.ended_ms < handed.signed_ms.saturating_add(ttl_ms)
}

fn refused_for_time(event: &NodeEventView) -> bool {
    event.body["last_end"].as_str().is_some_and(|end| OF_TIME.iter().any(|reason| reason.token() == end))
}
