//! Questions to the gateway, and the evidence at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::SimError;
use super::gateway_process::GatewayError;
use super::gateways::Gateways;
use super::history::{Evidence, read_witness};
use super::invariants::{every_end_told, every_result_judged, is_terminal};
use crate::blocking;
use crate::gateway::control::{CommandView, EventView, NodeView, Request, Response, Stats};
use crate::gateway::lies::Lie;
use crate::gateway::worker::TicketTerms;
use crate::model::NodeId;

/// An event is a round trip behind its result; this is many of them, and more than one redial.
const TELLING: Duration = Duration::from_secs(20);
/// A gateway hands results over within seconds, a page after the other.
const JUDGING: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);
/// The ticket outlives every run.
const TICKET_TTL_S: u64 = 24 * 3600;

/// A ticket for so many machines.
///
/// # Errors
/// The gateway gave none.
pub async fn ticket(gateway: &Gateways, nodes: usize) -> Result<String, SimError> {
    let uses = u32::try_from(nodes).unwrap_or(u32::MAX);
    let ticket = gateway.desk.ticket(TicketTerms::new(uses, TICKET_TTL_S, "sim")).await;
    ticket.map_err(|error| SimError::Gateway(error.into()))
}

/// How the fleet stands, as the gateways see it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct State {
    /// Nodes that have a session.
    pub connected: usize,
    /// Commands that have not ended.
    pub open: u64,
    /// Sessions beyond each node's first.
    pub reconnects: u64,
    /// Nodes that hold all their credits, as they last said.
    pub idle: usize,
}

/// Asks for it.
///
/// # Errors
/// No gateway answered.
pub async fn state(gateways: &Gateways) -> Result<State, SimError> {
    let nodes = nodes(gateways).await?;
    let Response::Stats(stats) = gateways.ask(&Request::Stats).await? else {
        return Err(SimError::Answer("stats"));
    };
    let whole = credits();
    Ok(State {
        connected: nodes.iter().filter(|node| node.state == "connected").count(),
        open: open(&stats),
        reconnects: stats.hellos.saturating_sub(stats.nodes),
        idle: nodes.iter().filter(|node| node.free_credits == whole).count(),
    })
}

fn open(stats: &Stats) -> u64 {
    stats.commands.iter().filter(|(state, _)| !is_terminal(state)).map(|(_, count)| count).sum()
}

/// What a gateway gives a node that does nothing.
pub fn credits() -> BTreeMap<String, u32> {
    let lanes = crate::gateway::lane_credits();
    lanes.into_iter().map(|(lane, credits)| (lane.name().to_owned(), credits)).collect()
}

/// The nodes, each by the gateway that has heard of it last: the others know its credits only by what that one wrote
/// down.
async fn nodes(gateways: &Gateways) -> Result<Vec<NodeView>, SimError> {
    let mut latest = BTreeMap::<NodeId, NodeView>::new();
    for response in gateways.ask_each(&Request::Nodes).await {
        let Response::Nodes(nodes) = response else { return Err(SimError::Answer("nodes")) };
        for view in nodes {
            match latest.get(&view.node) {
                Some(known) if known.last_seen_age_ms <= view.last_seen_age_ms => {}
                _ => drop(latest.insert(view.node.clone(), view)),
            }
        }
    }
    match latest.is_empty() {
        true => Err(GatewayError::Down.into()),
        false => Ok(latest.into_values().collect()),
    }
}

/// The nodes once each is seen at rest, or as they are when the time is over.
async fn nodes_at_rest(gateways: &Gateways) -> Result<Vec<NodeView>, SimError> {
    let (until, whole) = (Instant::now() + TELLING, credits());
    loop {
        let nodes = nodes(gateways).await?;
        let at_rest = |node: &NodeView| node.state == "connected" && node.free_credits == whole;
        if nodes.iter().all(at_rest) || Instant::now() >= until {
            return Ok(nodes);
        }
        sleep(POLL).await;
    }
}

/// Everything that the invariants are judged by, beside what is known of the agents already.
///
/// # Errors
/// The gateway did not answer, or the witness file cannot be read.
pub async fn collect(
    gateway: &Gateways,
    mut evidence: Evidence,
    witness: &Path,
) -> Result<Evidence, SimError> {
    evidence.nodes = nodes_at_rest(gateway).await?;
    evidence.commands = history(gateway).await?;
    evidence.events = events(gateway).await?;
    evidence.credits = credits();
    evidence.gateways = gateway.count();
    let until = Instant::now() + TELLING;
    loop {
        read_told(gateway, &mut evidence).await?;
        if every_end_told(&evidence) || Instant::now() >= until {
            break;
        }
        sleep(POLL).await;
    }
    let until = Instant::now() + JUDGING;
    loop {
        // Again: a result goes before its event, so that those of all events are here by now.
        evidence.commands = history(gateway).await?;
        if every_result_judged(&evidence) || Instant::now() >= until {
            break;
        }
        sleep(POLL).await;
    }
    read_facts(gateway, &mut evidence).await?;
    let path = witness.to_owned();
    let read = blocking::run(move || read_witness(&path)).await;
    let runs = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    evidence.witness = runs.map_err(|source| SimError::Witness { path: witness.to_owned(), source })?;
    Ok(evidence)
}

async fn events(gateway: &Gateways) -> Result<Vec<EventView>, SimError> {
    let mut events = Vec::<EventView>::new();
    loop {
        let after = events.last().map_or(0, |event| event.seq);
        match gateway.ask(&Request::Events { after, wait_ms: 0 }).await? {
            Response::Events(page) if page.is_empty() => return Ok(events),
            Response::Events(page) => events.extend(page),
            _ => return Err(SimError::Answer("events")),
        }
    }
}

/// A node whose clock a gateway has pushed far is refused by every honest one until the join service has told it the time,
/// which it asks for once in ten minutes.
const DOUBT_EVERY: Duration = Duration::from_secs(600);
/// What a node makes nothing of, ms.
const ALLOWED_MS: i64 = 300_000;

/// How much longer nodes may need to come back, for what gateways told them of the time.
///
/// # Errors
/// No gateway answered.
pub async fn forgiven_after(gateways: &Gateways) -> Result<Duration, SimError> {
    let known = Evidence { events: events(gateways).await?, ..Evidence::default() };
    let far = known.lies().any(|told| told.lie == Lie::TimePushed && told.ahead_ms() > ALLOWED_MS);
    Ok(if far { DOUBT_EVERY } else { Duration::ZERO })
}

async fn history(gateway: &Gateways) -> Result<Vec<CommandView>, SimError> {
    match gateway.ask(&Request::History).await? {
        Response::Commands(commands) => Ok(commands),
        _ => Err(SimError::Answer("history")),
    }
}

/// Reads what the worker has made of signed results.
async fn read_facts(gateways: &Gateways, evidence: &mut Evidence) -> Result<(), SimError> {
    loop {
        let after = evidence.facts.last().map_or(0, |fact| fact.number);
        let page = gateways.desk.facts(after).await;
        let page = page.map_err(|error| SimError::Gateway(error.into()))?;
        if page.is_empty() {
            return Ok(());
        }
        evidence.facts.extend(page);
    }
}

/// Reads on in the nodes' events.
async fn read_told(gateway: &Gateways, evidence: &mut Evidence) -> Result<(), SimError> {
    loop {
        let after = evidence.told.last().map_or(0, |event| event.number);
        match gateway.ask(&Request::NodeEvents { node: None, after }).await? {
            Response::NodeEvents(page) if page.is_empty() => return Ok(()),
            Response::NodeEvents(page) => evidence.told.extend(page),
            _ => return Err(SimError::Answer("node-events")),
        }
    }
}
