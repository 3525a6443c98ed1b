//! One run, from the first join to the report.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::agent::{Ground, Plan};
use super::drive::{Drive, Driven};
use super::faults::Tally;
use super::fleet::Diary;
use super::gateway_process::{GatewayError, Shape};
use super::gateways::Gateways;
use super::history::{Evidence, Moment};
use super::invariants::judge;
use super::live::{self, Counts};
use super::observe;
use super::page;
use super::report::Report;
use super::settle::settled;
use super::spread::{Agents, ChildStart, SpreadError};
use super::{Options, seed, skew};
use crate::clock::Clock;
use crate::model::NodeId;

/// Why a run says nothing about the invariants.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    /// The gateway.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// The agents.
    #[error(transparent)]
    Agents(#[from] SpreadError),
    /// There is no port for a gateway.
    #[error("no free port for a gateway")]
    Port(#[source] io::Error),
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
    /// The ticket of somebody else's gateway.
    #[error("cannot read the ticket {path}")]
    Ticket {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The worker of a virtual run.
    #[error("cannot open the worker")]
    Worker(#[source] crate::gateway::worker::WorkerError),
    /// The report's page.
    #[error("cannot write the report to {path}")]
    Page {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The gateway answered something else than what was asked.
    #[error("the gateway's answer to {0} was of another kind")]
    Answer(&'static str),
}

/// Longest wait for the first connections, and until all is done after the last fault; longer by the time in which so
/// many nodes are admitted.
const CONNECT: Duration = Duration::from_secs(30);
pub(super) const SETTLE: Duration = Duration::from_secs(180);
const ADMITTED_A_SECOND: usize = 100;

/// At least so long, and longer for many nodes.
pub(super) fn patience(least: Duration, nodes: usize) -> Duration {
    least + Duration::from_secs(u64::try_from(nodes / ADMITTED_A_SECOND).unwrap_or(0))
}

/// Runs it, with all files below `work`. `exe` is this program: gateways, and agents beyond what one process may hold,
/// are started from it.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run(options: Options, exe: PathBuf, work: &Path) -> Result<Report, SimError> {
    let mut chance = seed::stream(options.seed, "gateway", 0);
    let shape = Shape::new(options.gateways, options.heartbeat, options.chaos.lies(), &mut chance)
        .map_err(SimError::Port)?;
    let gateways = Gateways::start(&exe, work, &shape).await?;
    let world = World {
        ground: Arc::new(Ground::real()),
        gateways,
        addresses: shape.addresses,
        pause: live::pause(),
    };
    run_in(world, options, &exe, work).await
}

/// What a run takes place in.
pub struct World {
    /// What agents stand on.
    pub ground: Arc<Ground>,
    /// What they dial.
    pub gateways: Gateways,
    /// host:port of each.
    pub addresses: Vec<String>,
    /// Between two live lines.
    pub pause: Duration,
}

/// Runs it in any world.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run_in(world: World, options: Options, exe: &Path, work: &Path) -> Result<Report, SimError> {
    let pause = world.pause;
    let run = Run::start(world, &options, exe, work).await?;
    let mut troubles = Vec::new();
    let line = live::show(options.nodes, pause, run.gateways.clone(), run.counts.clone(), run.tally.clone());
    let line = tokio::spawn(line);
    let connect = patience(CONNECT, options.nodes);
    if !settled(&run.gateways, options.nodes, connect).await {
        troubles.push(format!("not every node was connected {} s after its start", connect.as_secs()));
    }
    let witness = work.join("witness");
    let (driven, diary, grown_kib) = run.broken(&options, &witness).await?;
    troubles.extend(driven.troubles);
    let settle = patience(SETTLE, options.nodes) + observe::forgiven_after(&run.gateways).await?;
    if !settled(&run.gateways, options.nodes, settle).await {
        troubles.push(format!("not everything had settled {} s after the last fault", settle.as_secs()));
    }
    line.abort();
    live::clear();

    let old = (0..options.nodes).filter(|agent| skew::is_old(*agent, options.skew)).collect();
    let moments = in_order(&driven.moments, diary.moments);
    let known = Evidence { handed: driven.handed, agents: run.nodes, moments, old, ..Evidence::default() };
    let mut evidence = observe::collect(&run.gateways, known, &witness).await?;
    let diary = run.agents.stop().await?;
    (evidence.boots, evidence.owed) = (diary.boots, diary.owed);
    // Whoever was down when the faults stopped has felt the last blow since.
    evidence.moments = in_order(&driven.moments, diary.moments);
    troubles.extend(diary.troubles);
    let mut report = Report::new(options, &evidence, judge(&evidence));
    report.faults = run.tally.counts();
    report.faults.extend(evidence.lie_counts());
    report.memory_kib = grown_kib / u64::try_from(report.options.nodes.max(1)).unwrap_or(u64::MAX);
    report.troubles = troubles;
    if let Some(path) = report.options.page.clone() {
        let html = page::page(&report, &evidence);
        std::fs::write(&path, html).map_err(|source| SimError::Page { path, source })?;
    }
    Ok(report)
}

fn in_order(of_gateways: &[Moment], of_agents: Vec<Moment>) -> Vec<Moment> {
    let mut moments = of_agents;
    moments.extend(of_gateways);
    moments.sort_by_key(|moment| moment.at_ms);
    moments
}

/// What runs.
struct Run {
    clock: Arc<dyn Clock>,
    gateways: Arc<Gateways>,
    agents: Agents,
    nodes: Vec<NodeId>,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
}

impl Run {
    /// Joins and starts agents.
    async fn start(world: World, options: &Options, exe: &Path, work: &Path) -> Result<Self, SimError> {
        let World { ground, gateways, addresses, .. } = world;
        let (clock, gateways) = (Arc::clone(&ground.clock), Arc::new(gateways));
        let plan = Plan {
            homes: make_dir(work, "nodes")?,
            seed: options.seed,
            skew: options.skew,
            gateways: addresses,
            run: None,
        };
        let ticket = observe::ticket(&gateways, options.nodes).await?;
        let (counts, tally) = (Arc::new(Counts::default()), Arc::new(Tally::default()));
        let start = ChildStart { exe, work, ground: &ground, tally: &tally };
        let (mut agents, nodes) =
            Agents::join(&plan, options.nodes, options.per_process, start, &ticket).await?;
        agents.start(&clock, &tally).await?;
        Ok(Self { clock, gateways, agents, nodes, counts, tally })
    }

    /// Load and chaos; then what the agents wrote down, and by how much their processes have grown, KiB.
    async fn broken(&self, options: &Options, witness: &Path) -> Result<(Driven, Diary, u64), SimError> {
        let drive = Drive {
            options,
            gateways: &self.gateways,
            agents: &self.agents,
            counts: &self.counts,
            tally: &self.tally,
            clock: &*self.clock,
            nodes: &self.nodes,
            witness,
        };
        let driven = drive.run().await?;
        let (diary, grown_kib) = self.agents.told().await?;
        Ok((driven, diary, grown_kib))
    }
}

/// A directory of a run.
///
/// # Errors
/// It cannot be made.
pub fn make_dir(work: &Path, name: &str) -> Result<PathBuf, SimError> {
    let path = work.join(name);
    match std::fs::create_dir(&path) {
        Ok(()) => Ok(path),
        Err(source) => Err(SimError::Work { path, source }),
    }
}
