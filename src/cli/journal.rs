//! `bcd journal`.

use std::fmt::Write as _;

use super::{ConfigArgs, fail, print};
use crate::config::Config;
use crate::journal::inspect::{self, CommandLine, InspectError, Snapshot};
use crate::model::{Exit, ServerTime};
use crate::status::socket::{AskError, Question, ask};

/// Look at the journal.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Print what stands in it: from the daemon, or from its file when none runs. Changes nothing.
    Show {
        /// As JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let Action::Show { json, config } = &args.action;
    let snapshot = snapshot(&config.load()?)?;
    if *json {
        super::print_json(&snapshot)?;
    } else {
        print(&text(&snapshot))?;
    }
    Ok(Exit::Done)
}

fn snapshot(config: &Config) -> Result<Snapshot, Exit> {
    let bytes = match ask(&config.run, Question::Journal) {
        Ok(bytes) => bytes,
        Err(AskError::NoDaemon(_)) => {
            return inspect::read(&config.state).map_err(|error| fail(&error, exit_of(&error)));
        }
        Err(error) => return Err(fail(&error, error.exit())),
    };
    serde_json::from_slice(&bytes).map_err(|_| {
        let words = String::from_utf8_lossy(&bytes[..bytes.len().min(400)]).into_owned();
        super::note(&format!("bcd: the daemon cannot show its journal: {words}"));
        Exit::Unknown
    })
}

fn exit_of(error: &InspectError) -> Exit {
    match error {
        InspectError::Missing(_) => Exit::Configuration,
        InspectError::Held { .. } => Exit::Unknown,
        InspectError::Open(error) => error.exit(),
    }
}

fn text(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    let counts = snapshot.counts;
    let time = |time: Option<ServerTime>| time.map_or("none".into(), |time| time.to_string());
    let _ = writeln!(
        out,
        "journal  {} of {} (schema {})",
        snapshot.journal_id, snapshot.node_id, snapshot.schema
    );
    let _ = writeln!(out, "birth    {}", time(snapshot.birth));
    let _ = writeln!(out, "mark     {}", time(snapshot.mark));
    let _ = writeln!(out, "signed   {}", time(snapshot.signed));
    let _ = writeln!(out, "epoch    {}", snapshot.last_epoch);
    let _ = writeln!(out, "bytes    {} and {} of log", snapshot.db_bytes, snapshot.wal_bytes);
    let _ = writeln!(
        out,
        "commands {} accepted, {} running, {} done and not acked, {} tombstones",
        counts.accepted, counts.running, counts.done, counts.tombstones
    );
    for command in &snapshot.commands {
        let _ = writeln!(out, "{}", line(command));
    }
    if snapshot.commands_left_out > 0 {
        let _ = writeln!(out, "and {} older ones", snapshot.commands_left_out);
    }
    out
}

fn line(command: &CommandLine) -> String {
    let mut line =
        format!("  {} {} {} attempt {}", command.id, command.kind, word(&command.state), command.attempt);
    if let Some(end) = &command.end {
        let _ = write!(line, " {}", word(&end.state));
        if let Some(reason) = end.reason {
            let _ = write!(line, " {reason}");
        }
        if let Some(finished) = end.finished {
            let _ = write!(line, " at {finished}");
        }
    }
    line
}

/// A state's name as the journal and the wire have it, such as SUCCEEDED.
fn word(state: &impl std::fmt::Debug) -> String {
    format!("{state:?}").to_ascii_uppercase()
}
