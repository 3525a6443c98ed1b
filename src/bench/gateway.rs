//! What one gateway holds: so many nodes at heartbeats of 10 s, commands among them, then a kill.
//!
//! The gateway is a process, the nodes are processes of a thousand each, commands go in at its control socket and are
//! timed by its own clock from there to the receipt of ACCEPTED.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::value::RawValue;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::fleet;
use super::lab::{Lab, LabError};
use super::proc::{Process, Usage};
use super::{Aim, Figure, Part};
use crate::gateway::control::{NodeView, Request, Response};
use crate::gateway::worker::Draft;
use crate::model::NodeId;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// A directory on the disk for journals.
    pub state: PathBuf,
    /// Nodes.
    pub nodes: usize,
    /// How long their sessions are held.
    pub duration: Duration,
    /// Commands given a second.
    pub commands_per_second: u32,
}

/// Nodes of one process: each has a thread, a socket and three files.
const IN_A_PROCESS: usize = 1000;
/// Opens a second that the gateway admits.
pub(super) const ADMITTED: f64 = 200.0;
/// The figures of the seeds for 5,000 sessions: p99 of a dispatch, ms, and memory of the gateway, MiB.
const SEED_P99_MS: f64 = 26.0;
const SEED_MIB: f64 = 1240.0;
const SEED_SESSIONS: f64 = 5000.0;
/// Between two looks at the sessions.
const LOOK: Duration = Duration::from_secs(2);
const TTL_S: u64 = 600;

/// Measures.
///
/// # Errors
/// See [`LabError`].
pub async fn run(options: &Options) -> Result<Vec<Figure>, LabError> {
    let mut lab = Lab::start(&options.state, "10s").await?;
    lab.join("nodes", options.nodes, fleet::WAL_BYTES).await?;
    let mut fleets = start_nodes(&lab, options.nodes)?;
    lab.sessions(options.nodes).await?;
    let held = hold(&lab, options).await?;
    let (ours, theirs) =
        (rss_mib(lab.gateway()), fleets.iter().map(|fleet| rss_mib(fleet.id())).sum::<f64>());
    let from = Instant::now();
    lab.restart().await?;
    lab.sessions(options.nodes).await?;
    let back = from.elapsed().as_secs_f64();
    fleets.iter_mut().for_each(Process::end);
    Ok(figures(number(options.nodes), &held, (ours, theirs), back))
}

pub(super) fn number(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::NAN, f64::from)
}

pub(super) fn start_nodes(lab: &Lab, nodes: usize) -> Result<Vec<Process>, LabError> {
    let mut fleets = Vec::new();
    for first in (0..nodes).step_by(IN_A_PROCESS) {
        let count = IN_A_PROCESS.min(nodes - first);
        let mut command = Command::new(lab.exe());
        command.args([
            "bench",
            "fleet",
            "--first",
            &first.to_string(),
            "--count",
            &count.to_string(),
            "--folder",
        ]);
        let mut fleet = lab.run(command.arg(lab.at("nodes")), "fleet.log")?;
        fleet.begin()?;
        fleets.push(fleet);
    }
    Ok(fleets)
}

/// What was seen while the sessions were held.
struct Held {
    /// The fewest at any look.
    fewest: u64,
    /// From the queue to the receipt of ACCEPTED, ms, sorted.
    dispatch: Vec<i64>,
    given: usize,
}

async fn hold(lab: &Lab, options: &Options) -> Result<Held, LabError> {
    let nodes = nodes(lab).await?;
    let mut rng = StdRng::seed_from_u64(1);
    let mut next = interval(Duration::from_secs(1) / options.commands_per_second.max(1));
    next.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut look = interval(LOOK);
    let until = Instant::now() + options.duration;
    let mut held = Held { fewest: u64::MAX, dispatch: Vec::new(), given: 0 };
    while Instant::now() < until {
        tokio::select! {
            biased;
            _ = look.tick() => held.fewest = held.fewest.min(lab.count_sessions().await?),
            _ = next.tick() => {
                let Some(node) = nodes.get(rng.random_range(0..nodes.len().max(1))) else { continue };
                give(lab, &node.node).await?;
                held.given += 1;
            }
        }
    }
    // The last ones are on their way.
    tokio::time::sleep(LOOK).await;
    let Response::Commands(commands) = lab.ask(&Request::History).await? else {
        return Err(LabError::Answer);
    };
    held.dispatch = commands
        .iter()
        .filter(|command| command.accepted_ms > 0)
        .map(|command| command.accepted_ms.saturating_sub(command.enqueued_ms))
        .collect();
    held.dispatch.sort_unstable();
    Ok(held)
}

pub(super) async fn nodes(lab: &Lab) -> Result<Vec<NodeView>, LabError> {
    match lab.ask(&Request::Nodes).await? {
        Response::Nodes(nodes) => Ok(nodes),
        _ => Err(LabError::Answer),
    }
}

async fn give(lab: &Lab, node: &NodeId) -> Result<(), LabError> {
    let args = RawValue::from_string("{}".to_owned()).map_err(|_| LabError::Answer)?;
    let draft = Draft { node: node.clone(), kind: "node.probe".into(), args, ttl_s: TTL_S, id: None };
    lab.enqueue(draft).await.map_err(LabError::from)
}

fn rss_mib(pid: u32) -> f64 {
    let kib = Usage::of(pid).map_or(0, |usage| usage.rss_kib);
    u32::try_from(kib).map_or(f64::NAN, |kib| f64::from(kib) / 1024.0)
}

/// The value that so many of a hundred do not exceed.
pub(super) fn percentile(sorted: &[i64], percent: usize) -> f64 {
    let rank = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(rank).and_then(|ms| i32::try_from(*ms).ok()).map_or(f64::NAN, f64::from)
}

fn figures(nodes: f64, held: &Held, (gateway, fleets): (f64, f64), back: f64) -> Vec<Figure> {
    let one = |what: &str, unit, value| Part::new(what, unit, vec![value]);
    let fewest = u32::try_from(held.fewest).map_or(f64::NAN, f64::from);
    let share = nodes / SEED_SESSIONS;
    vec![
        Figure::new(
            "sessions held",
            one("fewest at any look", "", fewest),
            one("nodes", "", nodes),
            Aim::Exactly(1.0),
        ),
        Figure::new(
            "commands accepted",
            one("with an ACCEPTED", "", number(held.dispatch.len())),
            one("given", "", number(held.given)),
            Aim::Exactly(1.0),
        ),
        Figure::new(
            "dispatch, p50",
            one("from the queue to the receipt of ACCEPTED", "ms", percentile(&held.dispatch, 50)),
            one("the seeds' p99", "ms", SEED_P99_MS),
            Aim::Shown,
        ),
        Figure::new(
            "dispatch, p99",
            one("from the queue to the receipt of ACCEPTED", "ms", percentile(&held.dispatch, 99)),
            one("the seeds'", "ms", SEED_P99_MS),
            Aim::AtMost(1.0),
        ),
        Figure::new(
            "memory of the gateway",
            one("RSS", "MiB", gateway),
            one("the seeds', for as many sessions", "MiB", SEED_MIB * share),
            Aim::AtMost(0.33),
        ),
        Figure::new(
            "memory of the nodes",
            one("RSS of all of them", "MiB", fleets),
            one("nodes", "", nodes),
            Aim::Shown,
        ),
        Figure::new(
            "back after a kill",
            one("kill to the last session", "s", back),
            one("at the limit of admission, 200 a second", "s", nodes / ADMITTED),
            Aim::AtMost(1.1),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_or_a_command_that_is_missing_misses_its_aim() {
        let met = |held: &Held| {
            let figures = figures(10.0, held, (0.5, 1.0), 0.05);
            figures.iter().map(|figure| figure.met(1.15)).collect::<Vec<_>>()
        };
        let whole = Held { fewest: 10, dispatch: vec![1, 2, 3], given: 3 };
        assert_eq!(met(&whole), [true; 7]);
        let lost = Held { fewest: 9, dispatch: vec![1, 2], ..whole };
        assert_eq!(met(&lost)[..2], [false, false]);
    }

    #[test]
    fn a_percentile_of_nothing_meets_no_aim() {
        assert!(percentile(&[], 99).is_nan());
        assert!((percentile(&[1, 2, 30], 99) - 30.0).abs() < f64::EPSILON);
        assert!((percentile(&[1, 2, 30], 50) - 2.0).abs() < f64::EPSILON);
    }
}
