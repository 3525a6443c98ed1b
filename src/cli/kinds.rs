//! `bcd kinds`.

use std::fmt::Write as _;

use serde_json::json;

use crate::model::kind::{DoneBy, Properties};
use crate::model::{Exit, Kind, RetrySafe, Role};

/// Print the kinds of commands that this bcd runs, with their properties.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let kinds = Kind::ALL.map(Kind::properties);
    if args.json {
        super::print_json(&kinds.iter().map(as_json).collect::<Vec<_>>())?;
        return Ok(Exit::Done);
    }
    let mut out = format!(
        "{:<12} {:<8} {:<16} {:<12} {:<17} {:<13} {:<10} {:>8} {:>9}  {}\n",
        "KIND",
        "LANE",
        "RETRY-SAFE",
        "DESTRUCTIVE",
        "SELF-TERMINATING",
        "ROLES",
        "DONE BY",
        "DEFAULT",
        "MAXIMUM",
        "DOES"
    );
    for kind in kinds {
        let _ = writeln!(
            out,
            "{:<12} {:<8} {:<16} {:<12} {:<17} {:<13} {:<10} {:>6} s {:>7} s  {}",
            kind.name,
            kind.lane.name(),
            retry_safe(kind.retry_safe),
            yes(kind.destructive),
            yes(kind.self_terminating),
            roles(kind.roles).join(","),
            done_by(kind.unprivileged),
            kind.default_run_time.as_secs(),
            kind.max_run_time.as_secs(),
            kind.does
        );
    }
    super::print(&out)?;
    Ok(Exit::Done)
}

fn as_json(kind: &Properties) -> serde_json::Value {
    json!({
        "name": kind.name,
        "lane": kind.lane,
        "retry_safe": retry_safe(kind.retry_safe),
        "destructive": kind.destructive,
        "self_terminating": kind.self_terminating,
        "roles": roles(kind.roles),
        "unprivileged_done_by": done_by(kind.unprivileged),
        "default_run_time_s": kind.default_run_time.as_secs(),
        "max_run_time_s": kind.max_run_time.as_secs(),
        "does": kind.does,
    })
}

fn retry_safe(retry_safe: RetrySafe) -> &'static str {
    match retry_safe {
        RetrySafe::Yes => "yes",
        RetrySafe::No => "no",
        RetrySafe::AsArgumentsSay => "as-arguments-say",
    }
}

fn done_by(done_by: DoneBy) -> &'static str {
    match done_by {
        DoneBy::Node => "node",
        DoneBy::Helper => "helper",
    }
}

fn yes(is: bool) -> &'static str {
    if is { "yes" } else { "no" }
}

fn roles(roles: &[Role]) -> Vec<&'static str> {
    roles.iter().map(|role| role.name()).collect()
}
