//! How long the nodes of a gateway are away after it was killed, where others beside it take them.
//!
//! The gateways are processes over one store and one worker. Away is from the kill to the gateways' event that a node is
//! connected again, which is written at its first heartbeat.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::gateway::{ADMITTED, nodes, number, percentile, start_nodes};
use super::lab::{Lab, LabError, PATIENCE};
use super::proc::Process;
use super::{Aim, Figure, Part, fleet};
use crate::clock::{Clock as _, SystemClock};
use crate::gateway::control::{EventView, Request, Response};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// A directory on the disk for journals.
    pub state: PathBuf,
    /// Nodes.
    pub nodes: usize,
    /// Gateways, one of which is killed.
    pub gateways: usize,
}

/// The seeds' p99 with one of three gateways killed: nodes, and s.
const SEEDS: [(f64, f64); 2] = [(1000.0, 1.0), (10_000.0, 13.25)];
/// Longer than a heartbeat: by then a session is one that holds.
const SETTLES: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(200);

/// Measures.
///
/// # Errors
/// See [`LabError`].
pub async fn run(options: &Options) -> Result<Vec<Figure>, LabError> {
    let lab = Lab::start(&options.state, "10s").await?;
    let mut others = Vec::new();
    for number in 1..options.gateways {
        others.push(lab.beside(&format!("gateway-{number}")).await?);
    }
    lab.join("nodes", options.nodes, fleet::WAL_BYTES).await?;
    let mut fleets = start_nodes(&lab, options.nodes)?;
    lab.sessions(options.nodes).await?;
    sleep(SETTLES).await;
    let gone = std::fs::read_to_string(lab.at("gateway-1").join("id"))?;
    let held = nodes(&lab).await?.into_iter().filter(|node| node.gateway == gone.trim());
    let mut lost: BTreeSet<String> = held.map(|node| node.node.to_string()).collect();
    let count = lost.len();
    let mut last = last_event(&lab).await?;
    let killed = SystemClock.wall_ms();
    if let Some(gateway) = others.first_mut() {
        gateway.end();
    }
    let mut away = Vec::new();
    let until = Instant::now() + PATIENCE;
    while !lost.is_empty() {
        if Instant::now() > until {
            return Err(LabError::Slow { what: "every node of the gateway that was killed" });
        }
        for event in events(&lab, last).await? {
            last = event.seq;
            if event.kind == "node.connected" && lost.remove(&event.node) {
                away.push(event.at_ms.saturating_sub(killed));
            }
        }
        sleep(POLL).await;
    }
    fleets.iter_mut().for_each(Process::end);
    away.sort_unstable();
    Ok(figures(options, count, &away))
}

async fn events(lab: &Lab, after: u64) -> Result<Vec<EventView>, LabError> {
    match lab.ask(&Request::Events { after, wait_ms: 0 }).await? {
        Response::Events(events) => Ok(events),
        _ => Err(LabError::Answer),
    }
}

async fn last_event(lab: &Lab) -> Result<u64, LabError> {
    let mut last = 0;
    loop {
        match events(lab, last).await?.last() {
            Some(event) => last = event.seq,
            None => return Ok(last),
        }
    }
}

/// The seeds' p99 for so many nodes, ms, on the line through their two figures.
fn seeds_ms(nodes: f64) -> f64 {
    let [(few, first), (many, second)] = SEEDS;
    (first + (nodes - few).max(0.0) / (many - few) * (second - first)) * 1e3
}

fn figures(options: &Options, lost: usize, away: &[i64]) -> Vec<Figure> {
    let one = |what: &str, unit, value| Part::new(what, unit, vec![value]);
    let left = number(options.gateways.saturating_sub(1));
    let admitted = number(lost) / (ADMITTED * left) * 1e3;
    let nodes = number(options.nodes);
    vec![
        Figure::new(
            "nodes that come back",
            one("to another gateway", "", number(away.len())),
            one("that the killed one had", "", number(lost)),
            Aim::Exactly(1.0),
        ),
        Figure::new(
            "re-homing, p50",
            one("from the kill to the first heartbeat elsewhere", "ms", percentile(away, 50)),
            one("all of them at the limit of admission", "ms", admitted),
            Aim::Shown,
        ),
        Figure::new(
            "re-homing, p99",
            one("from the kill to the first heartbeat elsewhere", "ms", percentile(away, 99)),
            one("the seeds', for as many nodes", "ms", seeds_ms(nodes)),
            Aim::AtMost(1.0),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_figures_are_those_of_1000_and_of_10_000_nodes() {
        let near = |nodes, ms: f64| (seeds_ms(nodes) - ms).abs() < 1e-6;
        assert!(near(1000.0, 1000.0) && near(10_000.0, 13_250.0) && near(100.0, 1000.0));
    }

    #[test]
    fn a_node_that_stays_away_or_is_slower_than_the_seeds_misses_its_aim() {
        let options = Options { state: PathBuf::new(), nodes: 1000, gateways: 3 };
        let met = |lost, away: &[i64]| {
            let figures = figures(&options, lost, away);
            figures.iter().map(|figure| figure.met(1.0)).collect::<Vec<_>>()
        };
        assert_eq!(met(2, &[100, 900]), [true; 3]);
        assert_eq!(met(3, &[100, 900]), [false, true, true]);
        assert_eq!(met(2, &[100, 1100]), [true, true, false]);
    }
}
