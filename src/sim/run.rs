//! One run, from the first join to the report.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::agent::{Agent, AgentError};
use super::drive::Drive;
use super::fleet::Fleet;
use super::gateway_process::{GatewayError, GatewayProcess};
use super::invariants::judge;
use super::live::{self, Counts};
use super::observe;
use super::reconnect::{self, Restart};
use super::report::{Faults, Report, Samples};
use super::{Options, seed};
use crate::clock::{Clock, SystemClock};

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

/// Runs it, with all files below `work`. `exe` is this program: the gateway is started from it.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run(options: Options, exe: PathBuf, work: &Path) -> Result<Report, SimError> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let mut gateway_chance = seed::stream(options.seed, "gateway", 0);
    let gateway = Arc::new(GatewayProcess::start(exe, work, &mut gateway_chance).await?);
    let homes = work.join("nodes");
    std::fs::create_dir(&homes).map_err(|source| SimError::Work { path: homes.clone(), source })?;
    let agents: Vec<Agent> =
        (0..options.nodes).map(|index| Agent::new(&homes, options.seed, index)).collect();
    let ticket = observe::ticket(&gateway, options.nodes).await?;
    let nodes = Fleet::join(&agents, &ticket).await.map_err(SimError::Join)?;

    let before_kib = resident_kib();
    let fleet = Fleet::start(agents, &clock);
    let counts = Arc::new(Counts::default());
    let line = tokio::spawn(live::show(options.nodes, gateway.clone(), counts.clone()));
    let mut troubles = Vec::new();
    if !observe::settled(&gateway, options.nodes, CONNECT).await {
        troubles.push(format!("not every node was connected {} s after its start", CONNECT.as_secs()));
    }

    let witness = work.join("witness");
    let drive = Drive {
        options: &options,
        gateway: &gateway,
        fleet: &fleet,
        counts: &counts,
        clock: &*clock,
        nodes: &nodes,
        witness: &witness,
    };
    let driven = drive.run().await?;
    let grown_kib = resident_kib().saturating_sub(before_kib);
    if !observe::settled(&gateway, options.nodes, SETTLE).await {
        troubles.push(format!("not everything had settled {} s after the last fault", SETTLE.as_secs()));
    }
    line.abort();
    live::clear();

    let evidence = observe::collect(&gateway, driven.handed, &witness).await?;
    let connected = observe::connected(&gateway).await?;
    let diary = fleet.stop().await;
    troubles.extend(driven.troubles);
    troubles.extend(diary.troubles);
    let agent_restarts = diary.restarts.iter().map(|(agent, at)| Restart::Agent(*agent, *at));
    let restarts: Vec<Restart> = agent_restarts.chain(driven.gateway_restarts).collect();
    let away = reconnect::times(&evidence, &nodes, &restarts);

    let nodes = u64::try_from(options.nodes.max(1)).unwrap_or(u64::MAX);
    let mut report = Report::new(options, &evidence, judge(&evidence));
    report.connected = connected;
    report.faults = Faults {
        agents: Counts::get(&counts.agents_killed),
        machines: Counts::get(&counts.machines_rebooted),
        gateway: Counts::get(&counts.gateway_killed),
    };
    report.reconnect = Samples::new(away);
    report.memory_kib = grown_kib / nodes;
    report.troubles = troubles;
    Ok(report)
}

/// Resident memory of this process, KiB; 0 where the kernel does not say.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse().ok()).unwrap_or(0)
}
