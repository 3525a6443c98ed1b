//! `bcd config`.

use std::fmt::Write as _;

use serde_json::json;

use super::ConfigArgs;
use crate::config::Config;
use crate::model::Exit;

/// Check or show the configuration.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Read bcd.toml, environment and flags, and say what is wrong or strange. Exit code 2: warnings only.
    Check {
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Print every effective value with the place that it came from.
    Show {
        /// As JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    match &args.action {
        Action::Check { config } => check(&config.load()?),
        Action::Show { json: true, config } => {
            let values = config.load()?.effective().into_iter().map(|(key, value, source)| {
                json!({ "key": key.name, "value": value, "source": source.to_string(), "meaning": key.meaning })
            });
            super::print_json(&values.collect::<Vec<_>>())?;
            Ok(Exit::Done)
        }
        Action::Show { json: false, config } => {
            super::print(&as_toml(&config.load()?))?;
            Ok(Exit::Done)
        }
    }
}

fn check(config: &Config) -> Result<Exit, Exit> {
    let warnings = config.warnings();
    for warning in &warnings {
        super::note(&format!("bcd: warning: {warning}"));
    }
    if !warnings.is_empty() {
        return Ok(Exit::Warnings);
    }
    super::print("the configuration is good\n")?;
    Ok(Exit::Done)
}

fn as_toml(config: &Config) -> String {
    let mut out = String::new();
    let mut last = "";
    for (key, value, source) in config.effective() {
        let (section, name) = key.name.split_once('.').unwrap_or(("", key.name));
        if section != last {
            let gap = if last.is_empty() { "" } else { "\n" };
            let _ = writeln!(out, "{gap}[{section}]");
            last = section;
        }
        let line = format!("{name} = {value}");
        let _ = writeln!(out, "{line:<44} # {source}");
    }
    out
}
