//! `bcd journal`.

use std::fmt::Write as _;

use super::{ConfigArgs, fail, print};
use crate::config::Config;
use crate::identity::Identity;
use crate::journal::check::Check;
use crate::journal::export::Cursor;
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
    /// Print everything in it, the begun records too, as JSON lines with a `type` each. Changes nothing.
    ///
    /// Outputs of results that are not acked are in base64. From a running daemon the lines come in pages: each line is
    /// whole, and commands that end meanwhile may be shown before or after their end.
    Export {
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Check that it is sound: the file's integrity, and what must hold between its rows and the begun records.
    ///
    /// Exit code 0: sound; 1: problems were found; 3: could not tell; 79: it is another node's or a newer release's.
    Check {
        /// As JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    match &args.action {
        Action::Show { json, config } => show(*json, &config.load()?),
        Action::Export { config } => export(&config.load()?),
        Action::Check { json, config } => check(*json, &config.load()?),
    }
}

fn show(json: bool, config: &Config) -> Result<Exit, Exit> {
    let snapshot: Snapshot = match from_daemon(config, &Question::Journal)? {
        Some(bytes) => read(&bytes)?,
        None => inspect::read(&config.state).map_err(|error| fail(&error, exit_of(&error)))?,
    };
    if json {
        super::print_json(&snapshot)?;
    } else {
        print(&text(&snapshot))?;
    }
    Ok(Exit::Done)
}

fn export(config: &Config) -> Result<Exit, Exit> {
    let mut cursor = Cursor::Commands(None);
    loop {
        let Some(bytes) = from_daemon(config, &Question::Export(cursor))? else {
            return export_file(config);
        };
        let (head, lines) =
            bytes.split_at(bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1));
        let head: Head = read(head)?;
        print(&String::from_utf8_lossy(lines))?;
        match head.next.map(|next| next.parse()) {
            None => return Ok(Exit::Done),
            Some(Ok(next)) => cursor = next,
            Some(Err(())) => {
                super::note("bcd: the daemon's answer cannot be read; restart it after replacing the binary");
                return Err(Exit::Unknown);
            }
        }
    }
}

/// Of a page of the daemon.
#[derive(serde::Deserialize)]
struct Head {
    next: Option<String>,
}

fn export_file(config: &Config) -> Result<Exit, Exit> {
    let mut printed = Ok(());
    let exported = inspect::export(&config.state, |lines| {
        printed = print(lines);
        printed.is_ok()
    });
    exported.map_err(|error| fail(&error, exit_of(&error)))?;
    printed.map(|()| Exit::Done)
}

fn check(json: bool, config: &Config) -> Result<Exit, Exit> {
    let found: Check = match from_daemon(config, &Question::Check)? {
        Some(bytes) => read(&bytes)?,
        None => {
            // Without an identity there is nobody whose journal it should be.
            let node = Identity::load(&config.state).ok().map(|identity| identity.node_id);
            inspect::check(&config.state, node.as_ref())
                .map_err(|error| fail(&error, checked_exit(&error)))?
        }
    };
    if json {
        super::print_json(&found)?;
    } else {
        let counts = found.counts;
        let commands = counts.accepted + counts.running + counts.done + counts.tombstones;
        let words = if found.problems.is_empty() { "sound".into() } else { found.problems.join("\n") };
        print(&format!(
            "{words}\n{commands} commands, {} begun records, {} bytes and {} of log\n",
            found.begun, found.db_bytes, found.wal_bytes
        ))?;
    }
    Ok(if found.problems.is_empty() { Exit::Done } else { Exit::Failed })
}

/// Its answer; nothing when no daemon runs.
fn from_daemon(config: &Config, question: &Question) -> Result<Option<Vec<u8>>, Exit> {
    match ask(&config.run, question) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(AskError::NoDaemon(_)) => Ok(None),
        Err(error) => Err(fail(&error, error.exit())),
    }
}

fn read<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Exit> {
    // An error has this form too, and would be taken for a page without a next.
    let error =
        serde_json::from_slice::<serde_json::Value>(bytes).ok().filter(|found| found.get("error").is_some());
    let found = if error.is_some() { None } else { serde_json::from_slice(bytes).ok() };
    found.ok_or_else(|| {
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

/// Damage so great that nothing can be read is what was looked for.
fn checked_exit(error: &InspectError) -> Exit {
    match error {
        InspectError::Open(error) if error.is_damage() => Exit::Failed,
        InspectError::Open(error) if error.exit() == Exit::ForeignState => Exit::ForeignState,
        _ => Exit::Unknown,
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
