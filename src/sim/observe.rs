//! Questions to the gateway, and the evidence at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::SimError;
use super::gateway_process::GatewayProcess;
use super::history::{Evidence, Handed, read_witness};
use super::invariants::is_terminal;
use crate::blocking;
use crate::gateway::control::{Request, Response, Stats};
use crate::model::CommandId;

/// An event is a round trip behind its result; this is many of them, and more than one redial.
const TELLING: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(200);
/// The ticket outlives every run.
const TICKET_TTL_S: u64 = 24 * 3600;

/// A ticket for so many machines.
///
/// # Errors
/// The gateway gave none.
pub async fn ticket(gateway: &GatewayProcess, nodes: usize) -> Result<String, SimError> {
    let uses = u32::try_from(nodes).unwrap_or(u32::MAX);
    let request = Request::Ticket { uses, ttl_s: TICKET_TTL_S, site: "sim".into() };
    match gateway.ask(&request).await? {
        Response::Ticket(ticket) => Ok(ticket),
        _ => Err(SimError::Answer("ticket")),
    }
}

/// Waits until every node has a session and every command has ended; false when the time is over.
pub async fn settled(gateway: &GatewayProcess, nodes: usize, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    let nodes = u64::try_from(nodes).unwrap_or(u64::MAX);
    loop {
        if let Ok(Response::Stats(stats)) = gateway.ask(&Request::Stats).await
            && stats.sessions == nodes
            && open(&stats) == 0
        {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        sleep(POLL).await;
    }
}

/// Commands that have not ended.
pub fn open(stats: &Stats) -> u64 {
    stats.commands.iter().filter(|(state, _)| !is_terminal(state)).map(|(_, count)| count).sum()
}

/// Nodes that have a session.
///
/// # Errors
/// The gateway did not answer.
pub async fn connected(gateway: &GatewayProcess) -> Result<usize, SimError> {
    match gateway.ask(&Request::Nodes).await? {
        Response::Nodes(nodes) => Ok(nodes.iter().filter(|node| node.state == "connected").count()),
        _ => Err(SimError::Answer("nodes")),
    }
}

/// Everything that the invariants are judged by.
///
/// # Errors
/// The gateway did not answer, or the witness file cannot be read.
pub async fn collect(
    gateway: &GatewayProcess,
    handed: BTreeMap<CommandId, Handed>,
    witness: &Path,
) -> Result<Evidence, SimError> {
    let Response::Commands(commands) = gateway.ask(&Request::History).await? else {
        return Err(SimError::Answer("history"));
    };
    let mut events = Vec::new();
    loop {
        let after = events.last().map_or(0, |event: &crate::gateway::control::EventView| event.seq);
        match gateway.ask(&Request::Events { after, wait_ms: 0 }).await? {
            Response::Events(page) if page.is_empty() => break,
            Response::Events(page) => events.extend(page),
            _ => return Err(SimError::Answer("events")),
        }
    }
    let mut evidence = Evidence { handed, commands, events, ..Evidence::default() };
    let until = Instant::now() + TELLING;
    loop {
        read_told(gateway, &mut evidence).await?;
        let ends = evidence.told_ends();
        if evidence.ended_by_nodes().all(|row| ends.contains_key(row.id.as_str())) || Instant::now() >= until
        {
            break;
        }
        sleep(POLL).await;
    }
    let path = witness.to_owned();
    let read = blocking::run(move || read_witness(&path)).await;
    let runs = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    evidence.witness = runs.map_err(|source| SimError::Witness { path: witness.to_owned(), source })?;
    Ok(evidence)
}

/// Reads on in the nodes' events.
async fn read_told(gateway: &GatewayProcess, evidence: &mut Evidence) -> Result<(), SimError> {
    loop {
        let after = evidence.told.last().map_or(0, |event| event.number);
        match gateway.ask(&Request::NodeEvents { node: None, after }).await? {
            Response::NodeEvents(page) if page.is_empty() => return Ok(()),
            Response::NodeEvents(page) => evidence.told.extend(page),
            _ => return Err(SimError::Answer("node-events")),
        }
    }
}
