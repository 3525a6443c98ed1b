//! `bcd bench`.

#[cfg(feature = "fakehw")]
mod fleet;

use std::path::PathBuf;

use super::{fail, note, print, runtime};
use crate::bench::journal::{self, JournalBenchError};
use crate::bench::{self, Figure, PlaceError};
use crate::model::Exit;

/// Measure what the node costs, each figure as a ratio of two things measured side by side.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, clap::Subcommand)]
enum Bench {
    /// What a durable accept costs on a disk, against the disk itself: is this disk fit for a node?
    Journal {
        /// A directory on the disk that is asked about; a new one in it is written to, and removed
        #[arg(long, value_name = "DIR", default_value = "/var/lib/bcd")]
        state: PathBuf,
        /// A command's signed body, bytes
        #[arg(long, value_name = "BYTES", default_value_t = 512, value_parser = clap::value_parser!(u32).range(256..=65_536))]
        size: u32,
        /// Accepts in a row of one round
        #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(4..=400))]
        accepts: u32,
        #[command(flatten)]
        how: How,
    },
    /// The round trip of a command, against an empty call on the same connection and three raw syncs.
    #[cfg(feature = "fakehw")]
    Session {
        /// A directory on the disk for the journal; a new one in it is written to, and removed
        #[arg(long, value_name = "DIR", default_value = "/var/lib/bcd")]
        state: PathBuf,
        #[command(flatten)]
        how: How,
    },
    /// What a node weighs while it is idle, how it starts, and how many fit into a GiB.
    #[cfg(feature = "fakehw")]
    Agent {
        /// A directory on the disk for the journals; a new one in it is written to, and removed
        #[arg(long, value_name = "DIR", default_value = "/var/lib/bcd")]
        state: PathBuf,
        /// The node's program, such as one built for distribution [default: this one]
        #[arg(long, value_name = "FILE")]
        program: Option<PathBuf>,
        /// How long the idle node is looked at
        #[arg(long, value_name = "TIME", default_value = "2m", value_parser = super::gateway::duration)]
        duration: std::time::Duration,
        /// Nodes in one process
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=5000))]
        nodes: u32,
        #[command(flatten)]
        how: How,
    },
    /// What a gateway holds: sessions, dispatch, memory, and how long until all are back after it was killed.
    #[cfg(feature = "fakehw")]
    Gateway {
        /// A directory on the disk for the journals; a new one in it is written to, and removed
        #[arg(long, value_name = "DIR", default_value = "/var/lib/bcd")]
        state: PathBuf,
        /// Nodes
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=5000))]
        nodes: u32,
        /// How long the sessions are held
        #[arg(long, value_name = "TIME", default_value = "1m", value_parser = super::gateway::duration)]
        duration: std::time::Duration,
        /// Commands given a second, all nodes together
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        commands_per_second: u32,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// How long the nodes of a gateway are away after it was killed, where others beside it take them.
    #[cfg(feature = "fakehw")]
    Rehome {
        /// A directory on the disk for the journals; a new one in it is written to, and removed
        #[arg(long, value_name = "DIR", default_value = "/var/lib/bcd")]
        state: PathBuf,
        /// Nodes
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=5000))]
        nodes: u32,
        /// Gateways, one of which is killed
        #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=8))]
        gateways: u32,
        /// Print one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Nodes in one process, or bare sessions of theirs; started by another bench alone.
    #[cfg(feature = "fakehw")]
    #[command(hide = true)]
    Fleet(fleet::Args),
}

/// What all benches have in common.
#[derive(Debug, clap::Args)]
struct How {
    /// Rounds; the median of their ratios is what counts
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Take ratios up to 1.15 times their aim, and fail (exit code 1) on what lies beyond; counts have no margin, and what
    /// is marked as held by no check is only shown
    #[arg(long)]
    check: bool,
}

/// What a check takes on a noisy machine.
const MARGIN: f64 = 1.15;

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    match &args.bench {
        Bench::Journal { state, size, accepts, how } => {
            let options = journal::Options {
                state: state.clone(),
                size: usize::try_from(*size).unwrap_or(usize::MAX),
                rounds: usize::try_from(how.rounds).unwrap_or(usize::MAX),
                accepts: usize::try_from(*accepts).unwrap_or(usize::MAX),
            };
            let measured = runtime()?.block_on(uninterrupted(journal::run(&options)))?;
            let figures = measured.map_err(|error| fail(&error, journal_exit(&error)))?;
            show("journal", &figures, how)
        }
        #[cfg(feature = "fakehw")]
        Bench::Session { state, how } => {
            let rounds = usize::try_from(how.rounds).unwrap_or(usize::MAX);
            let measured = runtime()?.block_on(uninterrupted(crate::bench::session::run(state, rounds)))?;
            show("session", &measured.map_err(|error| fail(&error, Exit::Failed))?, how)
        }
        #[cfg(feature = "fakehw")]
        Bench::Agent { state, program, duration, nodes, how } => {
            crate::sim::agents_per_process(0).map_err(|error| fail(&error, Exit::Failed))?;
            let options = crate::bench::agent::Options {
                state: state.clone(),
                program: program.clone(),
                duration: *duration,
                nodes: usize::try_from(*nodes).unwrap_or(usize::MAX),
                rounds: usize::try_from(how.rounds).unwrap_or(usize::MAX),
            };
            let measured = runtime()?.block_on(uninterrupted(crate::bench::agent::run(&options)))?;
            show("agent", &measured.map_err(|error| fail(&error, Exit::Failed))?, how)
        }
        #[cfg(feature = "fakehw")]
        Bench::Gateway { state, nodes, duration, commands_per_second, json } => {
            crate::sim::agents_per_process(0).map_err(|error| fail(&error, Exit::Failed))?;
            let options = crate::bench::gateway::Options {
                state: state.clone(),
                nodes: usize::try_from(*nodes).unwrap_or(usize::MAX),
                duration: *duration,
                commands_per_second: *commands_per_second,
            };
            let measured = runtime()?.block_on(uninterrupted(crate::bench::gateway::run(&options)))?;
            let how = How { rounds: 1, json: *json, check: false };
            show("gateway", &measured.map_err(|error| fail(&error, Exit::Failed))?, &how)
        }
        #[cfg(feature = "fakehw")]
        Bench::Rehome { state, nodes, gateways, json } => {
            crate::sim::agents_per_process(0).map_err(|error| fail(&error, Exit::Failed))?;
            let options = crate::bench::rehome::Options {
                state: state.clone(),
                nodes: usize::try_from(*nodes).unwrap_or(usize::MAX),
                gateways: usize::try_from(*gateways).unwrap_or(usize::MAX),
            };
            let measured = runtime()?.block_on(uninterrupted(crate::bench::rehome::run(&options)))?;
            let how = How { rounds: 1, json: *json, check: false };
            show("rehome", &measured.map_err(|error| fail(&error, Exit::Failed))?, &how)
        }
        #[cfg(feature = "fakehw")]
        Bench::Fleet(args) => fleet::run(args),
    }
}

/// Ctrl-C ends the bench, and its directory goes with it.
async fn uninterrupted<T>(bench: impl Future<Output = T>) -> Result<T, Exit> {
    tokio::select! {
        biased;
        _ = tokio::signal::ctrl_c() => {
            note("bcd: interrupted");
            Err(Exit::Failed)
        }
        measured = bench => Ok(measured),
    }
}

fn show(name: &str, figures: &[Figure], how: &How) -> Result<Exit, Exit> {
    let margin = if how.check { MARGIN } else { 1.0 };
    if how.json {
        super::print_json(&bench::json(name, figures))?;
    } else {
        print(&bench::table(figures, margin))?;
    }
    let met = figures.iter().all(|figure| if how.check { figure.passes(margin) } else { figure.met(1.0) });
    Ok(match (met, how.check) {
        (true, _) => Exit::Done,
        (false, true) => Exit::Failed,
        (false, false) => Exit::Warnings,
    })
}

fn journal_exit(error: &JournalBenchError) -> Exit {
    match error {
        JournalBenchError::Place(PlaceError::InMemory(_)) => Exit::Usage,
        JournalBenchError::Open(error) => error.exit(),
        JournalBenchError::Place(_) | JournalBenchError::Raw(_) | JournalBenchError::Write(_) => {
            Exit::CannotWrite
        }
        JournalBenchError::Refused(_) => Exit::Failed,
    }
}
