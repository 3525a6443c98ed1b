//! `bcd sim`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;

use super::{fail, note, print};
use crate::model::Exit;
use crate::mutant;
use crate::sim::chaos::Level;
use crate::sim::foreign::Foreign;
use crate::sim::report::Report;
use crate::sim::{self, Options, SimError};
use crate::wire::link::Endpoint;

/// Runs real agents against the reference gateway, breaks both at random, and checks the invariants.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    question: Option<Question>,
    /// Agents
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: u32,
    /// Gateways over one store, a process each
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    gateways: u32,
    /// Somebody else's gateway instead: only what the agents themselves show is judged
    #[arg(long, value_name = "HOST:PORT", requires = "ticket", conflicts_with = "gateways")]
    gateway: Option<Endpoint>,
    /// File with a join ticket of that gateway, for as many machines as there are nodes
    #[arg(long, value_name = "FILE", requires = "gateway")]
    ticket: Option<PathBuf>,
    /// How long commands are given and faults happen, such as 20s or 2m
    #[arg(long, default_value = "20s", value_parser = duration)]
    duration: Duration,
    /// Fixes the commands, the faults and the agents' own chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How much is broken
    #[arg(long, value_enum, default_value_t = Chaos::Light)]
    chaos: Chaos,
    /// Percentage of the agents that are older builds: they speak fewer versions and lack a kind of command
    #[arg(long, value_name = "PERCENT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=100))]
    skew: u8,
    /// Commands given a second, all agents together [default: two an agent, in virtual time one a minute]
    #[arg(long, value_parser = rate)]
    commands_per_second: Option<f64>,
    /// In virtual time: one thread, no sockets, no processes; one seed gives one history
    #[arg(long = "virtual")]
    virtual_time: bool,
    /// Where the log of events of a virtual run is kept [default: only that of a run that failed]
    #[arg(long, value_name = "FILE", requires = "virtual_time")]
    log: Option<PathBuf>,
    /// Interval of heartbeats, 1s to 60s [default: a second for each hundred nodes, at most 10s; in virtual
    /// time 10s]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    heartbeat_interval: Option<Duration>,
    /// Agents in one process at most [default: as many as the descriptor limit allows]
    #[arg(long, value_name = "N", hide = true)]
    per_process: Option<usize>,
    /// Writes the report as a page with plots to this file
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Prints the report as one JSON object, the last line of standard output
    #[arg(long)]
    json: bool,
}

/// Commands a second and agent where none is asked for: in real time so many that seconds show something, in virtual
/// time as on a host.
const REAL_RATE: f64 = 2.0;
const VIRTUAL_RATE: f64 = 1.0 / 60.0;
/// Heartbeats in virtual time, as on a host.
const VIRTUAL_HEARTBEAT: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Subcommand)]
enum Question {
    /// Prints the log of a virtual run around what went wrong
    Explain {
        /// The log that the run has left
        file: PathBuf,
    },
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Chaos {
    /// Nothing
    None,
    /// Each agent loses its daemon or its link some times a minute, each gateway dies about every 12 s
    Light,
    /// Every fault there is, each agent struck about every 4 s, each gateway about every 14 s
    Heavy,
    /// As heavy, and the gateways lie: they forge, replay, reorder, withhold, ack what they did not store, turn time
    Hostile,
}

fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number.parse().map_err(|_| "write a number and a unit, such as 20s".to_owned())?;
    let seconds = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{unit:?} is no unit; use ms, s, m or h")),
    };
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if time > Duration::ZERO => Ok(time),
        _ => Err("must be more than nothing".to_owned()),
    }
}

/// Three intervals without a frame end a session: a machine that runs many agents needs time to send each its frames.
fn heartbeat(nodes: u32) -> Duration {
    Duration::from_secs(u64::from(nodes.div_ceil(100)).clamp(1, 10))
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 100_000.0 => Ok(rate),
        _ => Err("must lie above 0 and at most at 100000".to_owned()),
    }
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<Exit, Exit> {
    if let Some(Question::Explain { file }) = &args.question {
        return explain(file);
    }
    if let Err(error) = mutant::chosen() {
        return Err(fail(error, Exit::Usage));
    }
    let (rate, heartbeat) = match args.virtual_time {
        true => (VIRTUAL_RATE, VIRTUAL_HEARTBEAT),
        false => (REAL_RATE, heartbeat(args.nodes)),
    };
    let nodes = usize::try_from(args.nodes).unwrap_or(usize::MAX);
    let per_process = match sim::agents_per_process(nodes) {
        Ok(_) if args.virtual_time => nodes,
        found => found.map_err(|error| fail(&error, Exit::Failed))?,
    };
    let options = Options {
        nodes,
        heartbeat: args.heartbeat_interval.unwrap_or(heartbeat),
        per_process: args.per_process.unwrap_or(per_process).min(per_process),
        gateways: usize::try_from(args.gateways).unwrap_or(1),
        duration: args.duration,
        seed: args.seed,
        chaos: match args.chaos {
            Chaos::None => Level::None,
            Chaos::Light => Level::Light,
            Chaos::Heavy => Level::Heavy,
            Chaos::Hostile => Level::Hostile,
        },
        skew: args.skew,
        page: args.report.clone(),
        foreign: args
            .gateway
            .as_ref()
            .zip(args.ticket.clone())
            .map(|(gateway, ticket)| Foreign { gateway: gateway.to_string(), ticket }),
        commands_per_second: args.commands_per_second.unwrap_or(rate * f64::from(args.nodes)),
        virtual_time: args.virtual_time,
    };
    let exe = std::env::current_exe().map_err(|error| fail(&error, Exit::Failed))?;
    let work = work_dir(args.virtual_time).map_err(|error| {
        note("bcd: cannot make a directory for the run's files; TMPDIR says where");
        fail(&error, Exit::CannotWrite)
    })?;
    if args.virtual_time {
        return in_virtual_time(args, options, &work);
    }
    let log =
        std::fs::File::create(work.join("agents.log")).map_err(|error| fail(&error, Exit::CannotWrite))?;
    crate::log::start_in_file(tracing::Level::INFO, log);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| fail(&error, Exit::Failed))?;
    let ended = runtime.block_on(async {
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => None,
            ended = simulate(options, exe, &work) => Some(ended),
        }
    });
    // A killed agent's last blocking write may still be under way.
    runtime.shutdown_timeout(Duration::from_secs(5));
    conclude(args, ended, &work)
}

async fn simulate(options: Options, exe: PathBuf, work: &Path) -> Result<Report, SimError> {
    match options.foreign.clone() {
        Some(foreign) => sim::foreign::run(options, &foreign, exe, work).await,
        None => sim::run(options, exe, work).await,
    }
}

/// Runs a share of a simulator's agents; started by the simulator alone.
pub fn run_agents() -> Result<Exit, Exit> {
    sim::agents_per_process(1).map_err(|error| fail(&error, Exit::Failed))?;
    crate::log::start(tracing::Level::INFO, crate::config::LogFormat::Text);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|error| fail(&error, Exit::Failed))?;
    let ended = runtime.block_on(sim::work());
    runtime.shutdown_timeout(Duration::from_secs(5));
    ended.map(|()| Exit::Done).map_err(|error| fail(&error, Exit::Failed))
}

/// Prints the report and says what becomes of the files; None: interrupted from the keyboard.
fn conclude(args: &Args, ended: Option<Result<Report, SimError>>, work: &Path) -> Result<Exit, Exit> {
    let kept = || note(&format!("the run's files are kept in {}", work.display()));
    let report = match ended {
        None => {
            kept();
            return Err(Exit::Failed);
        }
        Some(Err(error)) => {
            kept();
            return Err(fail(&error, Exit::Failed));
        }
        Some(Ok(report)) => report,
    };
    print(&report.table())?;
    if args.json {
        print(&format!("{}\n", report.json()))?;
    }
    if !report.held() {
        kept();
        return Ok(Exit::Failed);
    }
    if let Err(error) = std::fs::remove_dir_all(work) {
        note(&format!("bcd: the run's files cannot be removed from {}: {error}", work.display()));
    }
    Ok(Exit::Done)
}

/// In this thread. Nothing of it would hear an interrupt from the keyboard, which therefore ends the process.
fn in_virtual_time(args: &Args, options: Options, work: &Path) -> Result<Exit, Exit> {
    let path = args.log.clone().unwrap_or_else(|| work.join("events.log"));
    let cannot_write = |error| {
        note(&format!("bcd: cannot write the log of events {}", path.display()));
        fail(&error, Exit::CannotWrite)
    };
    let log = std::fs::File::create(&path).map_err(cannot_write)?;
    let ended = sim::virtual_time::run(options, work, log);
    if !ended.as_ref().is_ok_and(Report::held) {
        note(&format!("what led to it: bcd sim explain {}", path.display()));
    }
    conclude(args, Some(ended), work)
}

fn explain(file: &Path) -> Result<Exit, Exit> {
    let text = std::fs::read_to_string(file).map_err(|error| {
        note(&format!("bcd: cannot read the log of events {}", file.display()));
        fail(&error, Exit::BadInput)
    })?;
    print(&sim::explain::explain(&text))?;
    Ok(Exit::Done)
}

/// Where a sync costs nothing: virtual time proves the order of what is written, not the disk.
const MEMORY: &str = "/dev/shm";

/// A new directory, 0700.
fn work_dir(in_memory: bool) -> std::io::Result<PathBuf> {
    let parent = match Path::new(MEMORY) {
        memory if in_memory && memory.is_dir() => memory.to_owned(),
        _ => std::env::temp_dir(),
    };
    Ok(nix::unistd::mkdtemp(&parent.join("bcd-sim-XXXXXX"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_a_number_and_a_unit() {
        assert_eq!(duration("20s"), Ok(Duration::from_secs(20)));
        assert_eq!(duration("1.5m"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("3"), Ok(Duration::from_secs(3)));
        for bad in ["", "s", "0s", "-1s", "3x", "1e400s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }
}
