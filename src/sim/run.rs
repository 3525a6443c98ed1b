//! One run, from the first join to the report.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::agent::{Agent, AgentError, Ground, Means};
use super::cable::Weather;
use super::drive::Drive;
use super::faults::Tally;
use super::fleet::Fleet;
use super::gateway_process::GatewayError;
use super::gateways::Gateways;
use super::history::Evidence;
use super::invariants::judge;
use super::live::{self, Counts};
use super::observe;
use super::report::Report;
use super::{Options, seed};
use crate::clock::SystemClock;

/// Why a run says nothing about the invariants.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The gateway.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// An agent could not join.
    #[error("an agent could not join")]
    Join(#[source] AgentError),
    /// A directory below the run's.
    #[error("cannot make {path}")]
    Work {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The witness file.
    #[error("cannot read the witness file {path}")]
    Witness {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The gateway answered something else than what was asked.
    #[error("the gateway's answer to {0} was of another kind")]
    Answer(&'static str),
}

/// Longest wait for the first connections.
const CONNECT: Duration = Duration::from_secs(30);
/// Longest wait, once faults have stopped, until every command has ended and every node is back.
const SETTLE: Duration = Duration::from_secs(90);

/// What a run takes place in.
pub struct World {
    /// Where agents stand.
    pub ground: Ground,
    /// What they dial.
    pub gateways: Gateways,
    /// Between two live lines.
    pub pause: Duration,
}

/// Runs it with sockets, processes and real time, with all files below `work`. `exe` is this program: the gateways are
/// started from it.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run(options: Options, exe: PathBuf, work: &Path) -> Result<Report, SimError> {
    let mut gateway_chance = seed::stream(options.seed, "gateway", 0);
    let gateways = Gateways::start(&exe, work, options.gateways, &mut gateway_chance).await?;
    let ground = Ground {
        nodes: homes(work)?,
        seed: options.seed,
        clock: Arc::new(SystemClock),
        climate: Weather::default(),
        means: Box::new(|_, cable| Means::real(cable)),
    };
    run_in(World { ground, gateways, pause: live::pause() }, options, work).await
}

/// The directory of the agents' state directories, made.
pub fn homes(work: &Path) -> Result<PathBuf, SimError> {
    let path = work.join("nodes");
    match std::fs::create_dir(&path) {
        Ok(()) => Ok(path),
        Err(source) => Err(SimError::Work { path, source }),
    }
}

/// Runs it in any world.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run_in(world: World, options: Options, work: &Path) -> Result<Report, SimError> {
    let World { ground, gateways, pause } = world;
    let (gateways, clock) = (Arc::new(gateways), Arc::clone(&ground.clock));
    let agents: Vec<Agent> = (0..options.nodes).map(|index| Agent::new(&ground, index)).collect();
    let ticket = observe::ticket(&gateways, options.nodes).await?;
    let nodes = Fleet::join(&agents, &ticket).await.map_err(SimError::Join)?;

    let before_kib = resident_kib();
    let (counts, tally) = (Arc::new(Counts::default()), Arc::new(Tally::default()));
    let fleet = Fleet::start(agents, &clock, &tally);
    let line = live::show(options.nodes, pause, gateways.clone(), counts.clone(), tally.clone());
    let line = tokio::spawn(line);
    let mut troubles = Vec::new();
    if !observe::settled(&gateways, options.nodes, CONNECT).await {
        troubles.push(format!("not every node was connected {} s after its start", CONNECT.as_secs()));
    }

    let witness = work.join("witness");
    let drive = Drive {
        options: &options,
        gateways: &gateways,
        fleet: &fleet,
        counts: &counts,
        tally: &tally,
        clock: &*clock,
        nodes: &nodes,
        witness: &witness,
    };
    let driven = drive.run().await?;
    let grown_kib = resident_kib().saturating_sub(before_kib);
    if !observe::settled(&gateways, options.nodes, SETTLE).await {
        troubles.push(format!("not everything had settled {} s after the last fault", SETTLE.as_secs()));
    }
    line.abort();
    live::clear();

    let mut moments = driven.moments;
    moments.extend(fleet.moments());
    moments.sort_by_key(|moment| moment.at_ms);
    let evidence = Evidence { handed: driven.handed, agents: nodes, moments, ..Evidence::default() };
    let mut evidence = observe::collect(&gateways, evidence, &witness).await?;
    let diary = fleet.stop().await;
    evidence.boots = diary.boots;
    troubles.extend(driven.troubles);
    troubles.extend(diary.troubles);

    let agents = u64::try_from(options.nodes.max(1)).unwrap_or(u64::MAX);
    let mut report = Report::new(options, &evidence, judge(&evidence));
    report.faults = tally.counts();
    report.memory_kib = grown_kib / agents;
    report.troubles = troubles;
    Ok(report)
}

/// Resident memory of this process, KiB; 0 where the kernel does not say.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse().ok()).unwrap_or(0)
}
