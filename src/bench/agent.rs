//! What a node weighs while it has nothing to do, against a bare client of the same stack that holds one session.
//!
//! Gateway, node and bare client are processes of their own on one machine, looked at from outside (/proc), so that a
//! node of another build can be weighed too.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde_json::Value;
use tokio::time::{Instant, sleep};

use super::fill::{self, FillError};
use super::fleet;
use super::lab::{Lab, LabError};
use super::proc::{Process, Usage};
use super::{Aim, Figure, Part};
use crate::node::WAL_BYTES;
use crate::status::socket::{Question, ask};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// A directory on the disk for journals.
    pub state: PathBuf,
    /// The node's program; absent: this one.
    pub program: Option<PathBuf>,
    /// How long the idle node is looked at; memory after an hour wants an hour.
    pub duration: Duration,
    /// Nodes in one process.
    pub nodes: usize,
    /// Starts of a node.
    pub rounds: usize,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum AgentBenchError {
    /// Gateway and nodes.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The journal of the start.
    #[error("a journal could not be filled")]
    Fill(#[from] FillError),
    /// Somebody died.
    #[error("{what} ended by itself; the last of its log: {log}")]
    Ended {
        /// Who.
        what: &'static str,
        /// Its log's end.
        log: String,
    },
    /// The program cannot be looked at.
    #[error("cannot look at {program}", program = program.display())]
    Program {
        /// Which.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// As the gateway asks for it by default.
const HEARTBEAT: Duration = Duration::from_secs(10);
/// Memory of a start is not that of an idle node: this long after it the first look is taken.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// A start that takes longer has failed.
const START: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(2);
/// What a bare client of tokio, tonic and rusqlite took on disk when it was built in the same profile, MiB.
const BARE_MIB: f64 = 4.2;
/// Sessions of a bare client in a GiB, when they were measured without anything else.
const KIB_A_GIB: f64 = 1_048_576.0;

/// Measures.
///
/// # Errors
/// See [`AgentBenchError`].
pub async fn run(options: &Options) -> Result<Vec<Figure>, AgentBenchError> {
    let mut figures = idle(options).await?;
    figures.extend(start(options).await?);
    figures.extend(many(options).await?);
    Ok(figures)
}

/// A child that has a name and a log.
struct Watched {
    what: &'static str,
    log: String,
    process: Process,
}

impl Watched {
    fn usage(&self, lab: &Lab) -> Result<Usage, AgentBenchError> {
        let gone = || AgentBenchError::Ended { what: self.what, log: lab.log(&self.log) };
        Usage::of(self.process.id()).filter(|usage| usage.rss_kib > 0).ok_or_else(gone)
    }
}

fn watched(lab: &Lab, what: &'static str, command: &mut Command) -> Result<Watched, AgentBenchError> {
    let log = format!("{}.log", what.replace(' ', "-"));
    let process = lab.run(command, &log)?;
    Ok(Watched { what, log, process })
}

fn program(options: &Options, lab: &Lab) -> PathBuf {
    options.program.clone().unwrap_or_else(|| lab.exe().to_owned())
}

fn node(options: &Options, lab: &Lab, state: &std::path::Path, run: &std::path::Path) -> Command {
    let mut command = Command::new(program(options, lab));
    // No configuration of this machine.
    command.args(["node", "--config", "/dev/null"]);
    command.arg("--state").arg(state).arg("--run").arg(run).args(["--log-format", "text"]);
    command
}

fn bare(lab: &Lab, folder: &str, count: usize, database: bool) -> Command {
    let mut command = Command::new(lab.exe());
    command.args(["bench", "fleet", "--bare", "--folder"]).arg(lab.at(folder));
    command.args(["--count", &count.to_string()]);
    if database {
        command.arg("--database").arg(lab.at("bare.db"));
    }
    command
}

fn mib(kib: u64) -> f64 {
    u32::try_from(kib).map_or(f64::NAN, |kib| f64::from(kib) / 1024.0)
}

fn one(what: &str, unit: &'static str, value: f64) -> Part {
    Part::new(what, unit, vec![value])
}

async fn idle(options: &Options) -> Result<Vec<Figure>, AgentBenchError> {
    let lab = Lab::start(&options.state, "10s").await?;
    lab.join("node", 1, WAL_BYTES).await?;
    lab.join("bare", 1, WAL_BYTES).await?;
    let mut command = node(options, &lab, &lab.at("node/0"), &lab.at("run"));
    let ours = watched(&lab, "the node", &mut command)?;
    let mut floor = watched(&lab, "the bare client", &mut bare(&lab, "bare", 1, true))?;
    floor.process.begin().map_err(LabError::File)?;
    lab.sessions(2).await?;
    sleep(FIRST_LOOK).await;
    let before = (ours.usage(&lab)?, floor.usage(&lab)?);
    let minute = options.duration.min(Duration::from_secs(60));
    sleep(minute).await;
    let first = ours.usage(&lab)?;
    sleep(options.duration.saturating_sub(minute)).await;
    let after = (ours.usage(&lab)?, floor.usage(&lab)?);

    let beats = options.duration.as_secs_f64() / HEARTBEAT.as_secs_f64();
    let cpu = |from: Usage, to: Usage| to.cpu.saturating_sub(from.cpu).as_secs_f64() * 1e3 / beats;
    let minutes = options.duration.as_secs_f64() / 60.0;
    let switches = |from: Usage, to: Usage| {
        u32::try_from(to.voluntary.saturating_sub(from.voluntary)).map_or(f64::NAN, f64::from) / minutes
    };
    let (rss, bare_rss) = (mib(after.0.rss_kib), mib(after.1.rss_kib));
    let beside = "of a bare client with one session and a database";
    let path = program(options, &lab);
    let size =
        std::fs::metadata(&path).map_err(|source| AgentBenchError::Program { program: path, source })?.len();
    // This program is a simulation build with its symbols: what it takes says nothing of what hosts run.
    let of_hosts = |figure: Figure| if options.program.is_some() { figure } else { figure.without_margin() };
    Ok(vec![
        Figure::new("idle memory", one("RSS", "MiB", rss), one(beside, "MiB", bare_rss), Aim::AtMost(2.0)),
        of_hosts(Figure::new(
            "idle memory, most",
            one("RSS", "MiB", rss),
            one(beside, "MiB", bare_rss),
            Aim::Below(16.0),
        )),
        Figure::new(
            "idle memory, growth",
            one("RSS at the end", "MiB", rss),
            one("after the first minute", "MiB", mib(first.rss_kib)),
            Aim::AtMost(1.25),
        ),
        Figure::new(
            "CPU a heartbeat",
            one("everything that an idle node does", "ms", cpu(before.0, after.0)),
            one(beside, "ms", cpu(before.1, after.1)),
            Aim::AtMost(2.0),
        )
        .without_margin(),
        Figure::new(
            "waits a minute",
            one("voluntary context switches", "", switches(before.0, after.0)),
            one(beside, "", switches(before.1, after.1)),
            Aim::Shown,
        ),
        of_hosts(Figure::new(
            "binary",
            one("the node's program", "MiB", mib(size / 1024)),
            one("a bare client, as once built", "MiB", BARE_MIB),
            Aim::AtMost(2.0),
        )),
    ])
}

/// Start to a live session, with an empty journal and with a full one.
async fn start(options: &Options) -> Result<Vec<Figure>, AgentBenchError> {
    let lab = Lab::start(&options.state, "10s").await?;
    lab.join("nodes", 2, WAL_BYTES).await?;
    let (mut empty, mut full) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        empty.push(start_once(options, &lab, "nodes/0").await?);
        // A session that lives a moment has sent some, and had them acked.
        fill::node(&lab.at("nodes/1")).await?;
        full.push(start_once(options, &lab, "nodes/1").await?);
    }
    Ok(vec![
        Figure::new(
            "start, full journal",
            Part::new("start to a live session with 10,000 events, 64 MiB", "ms", full),
            Part::new("with an empty journal", "ms", empty),
            Aim::Below(1000.0),
        )
        .without_margin(),
    ])
}

/// From the start of the process until its status says so; a crash ends it.
async fn start_once(options: &Options, lab: &Lab, state: &str) -> Result<f64, AgentBenchError> {
    let run = lab.at("run");
    let from = Instant::now();
    let mut command = node(options, lab, &lab.at(state), &run);
    let mut started = watched(lab, "the node", &mut command)?;
    loop {
        let asked = tokio::task::spawn_blocking({
            let run = run.clone();
            move || ask(&run, &Question::Status)
        });
        if let Ok(Ok(answer)) = asked.await
            && is_live(&answer)
        {
            return Ok(from.elapsed().as_secs_f64() * 1e3);
        }
        if started.process.has_ended() || from.elapsed() > START {
            return Err(AgentBenchError::Ended { what: "the node", log: lab.log(&started.log) });
        }
        sleep(POLL).await;
    }
}

fn is_live(status: &[u8]) -> bool {
    let status: Value = serde_json::from_slice(status).unwrap_or_default();
    status["session"]["state"] == "live"
}

/// Nodes in one process, each with its journal, and bare sessions in another.
async fn many(options: &Options) -> Result<Vec<Figure>, AgentBenchError> {
    let lab = Lab::start(&options.state, "10s").await?;
    lab.join("nodes", options.nodes, fleet::WAL_BYTES).await?;
    let count = options.nodes.to_string();
    let mut fleet = Command::new(lab.exe());
    fleet.args(["bench", "fleet", "--count", &count, "--folder"]).arg(lab.at("nodes"));
    let ours = grown(&lab, "the fleet", &mut fleet, options.nodes).await?;
    let floor =
        grown(&lab, "the bare fleet", &mut bare(&lab, "nodes", options.nodes, false), options.nodes).await?;
    let a_gib = |kib_each: f64| KIB_A_GIB / kib_each;
    Ok(vec![
        Figure::new(
            "memory of one of many",
            one("each with its journal", "KiB", ours),
            one("bare sessions", "KiB", floor),
            Aim::Shown,
        ),
        Figure::new(
            "nodes in a GiB",
            one("each with its journal", "", a_gib(ours)),
            one("bare sessions", "", a_gib(floor)),
            Aim::Above(5000.0),
        ),
    ])
}

/// KiB by which a process has grown for each of its sessions.
async fn grown(
    lab: &Lab,
    what: &'static str,
    command: &mut Command,
    sessions: usize,
) -> Result<f64, AgentBenchError> {
    lab.sessions(0).await?;
    // It waits for a line before it opens anything.
    let mut fleet = watched(lab, what, command)?;
    sleep(Duration::from_millis(300)).await;
    let before = fleet.usage(lab)?;
    fleet.process.begin().map_err(LabError::File)?;
    if let Err(error) = lab.sessions(sessions).await {
        fleet.usage(lab)?;
        return Err(error.into());
    }
    sleep(FIRST_LOOK).await;
    let grown = fleet.usage(lab)?.rss_kib.saturating_sub(before.rss_kib);
    let sessions = u32::try_from(sessions).map_or(f64::NAN, f64::from);
    Ok(u32::try_from(grown).map_or(f64::NAN, f64::from) / sessions)
}
