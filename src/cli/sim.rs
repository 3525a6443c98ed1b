//! `bcd sim`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::model::Exit;
use crate::sim::chaos::Level;
use crate::sim::report::Report;
use crate::sim::{self, Options, SimError};

/// Runs real agents against the reference gateway, kills both at random, and checks the invariants.
#[derive(Debug, Args)]
pub struct SimArgs {
    /// Agents
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    nodes: u32,
    /// How long commands are given and kills happen, such as 20s or 2m
    #[arg(long, default_value = "20s", value_parser = duration)]
    duration: Duration,
    /// Fixes the commands, the kills and the agents' own chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How much is killed
    #[arg(long, value_enum, default_value_t = Chaos::Light)]
    chaos: Chaos,
    /// Commands given a second, all agents together [default: one an agent]
    #[arg(long, value_parser = rate)]
    commands_per_second: Option<f64>,
    /// Prints the report as one JSON object, the last line of standard output
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Chaos {
    /// Nothing
    None,
    /// An agent twice a minute, the gateway every 8 s
    Light,
    /// An agent every 8 s, the gateway every 4 s
    Heavy,
}

fn duration(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let seconds = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("{unit:?} is no unit; use ms, s, m or h")),
    };
    let number: f64 = number.parse().map_err(|_| "write a number and a unit, such as 20s".to_owned())?;
    match Duration::try_from_secs_f64(number * seconds) {
        Ok(time) if time > Duration::ZERO => Ok(time),
        _ => Err("must be more than nothing".to_owned()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate > 0.0 && rate <= 100_000.0 => Ok(rate),
        _ => Err("must lie above 0 and at most at 100000".to_owned()),
    }
}

/// Runs the subcommand. Blocks.
///
/// # Errors
/// The run could not be made; its files are kept and named.
pub fn run(args: &SimArgs) -> anyhow::Result<Exit> {
    use anyhow::Context as _;

    let options = Options {
        nodes: usize::try_from(args.nodes)?,
        duration: args.duration,
        seed: args.seed,
        chaos: match args.chaos {
            Chaos::None => Level::None,
            Chaos::Light => Level::Light,
            Chaos::Heavy => Level::Heavy,
        },
        commands_per_second: args.commands_per_second.unwrap_or(f64::from(args.nodes)),
    };
    let exe = std::env::current_exe().context("cannot find this program's own file")?;
    let work = work_dir().context("cannot make a directory for the run's files (TMPDIR says where)")?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => None,
            ended = sim::run(options, exe, &work) => Some(ended),
        }
    });
    runtime.shutdown_timeout(Duration::from_secs(5));
    conclude(args, ended, &work)
}

/// Prints the report and says what becomes of the files; None: interrupted from the keyboard.
fn conclude(args: &SimArgs, ended: Option<Result<Report, SimError>>, work: &Path) -> anyhow::Result<Exit> {
    let kept = || eprintln!("the run's files are kept in {}", work.display());
    let report = match ended {
        None => {
            kept();
            return Ok(Exit::Failed);
        }
        Some(Err(error)) => {
            kept();
            return Err(error.into());
        }
        Some(Ok(report)) => report,
    };
    crate::cli::print(&report.table());
    if args.json {
        crate::cli::print(&format!("{}\n", report.json()));
    }
    if report.held() {
        std::fs::remove_dir_all(work)?;
        return Ok(Exit::Done);
    }
    kept();
    Ok(Exit::Failed)
}

/// A new directory, 0700.
fn work_dir() -> std::io::Result<PathBuf> {
    Ok(nix::unistd::mkdtemp(&std::env::temp_dir().join("bcd-sim-XXXXXX"))?)
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
