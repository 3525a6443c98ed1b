//! `bcd hold` and `bcd release`: the operator's veto over everything that is not admitted yet.

use std::thread::sleep;
use std::time::Duration;

use super::{ConfigArgs, fail, note, print};
use crate::clock::SystemClock;
use crate::config::Config;
use crate::journal::{self, OpenError};
use crate::model::Exit;
use crate::state_dir::{StateDir, StateError};
use crate::status::socket::{AskError, Changed, Question, ask};
use crate::upkeep::hold::{self, Held, WHY_BYTES};

/// A daemon that holds the journal and does not answer is starting or stopping, or has another run directory. It is asked so
/// often, so long apart.
const TRIES: (u32, Duration) = (25, Duration::from_millis(200));

/// Admit no more commands on this machine, whatever the control plane signs, until `bcd release`.
///
/// Programs that run go on, and so does the session: `bcd status` shows the hold, and commands that come get `busy`
/// with the why `held`. It outlives a restart, and can be set while no daemon runs. Exit code 0: held, also where it was
/// before; 73: the hold cannot be kept; 75: kept for the next start, but the daemon that runs was not reached and admits
/// commands; 77: this is another user's daemon.
#[derive(Debug, clap::Args)]
pub(super) struct HoldArgs {
    /// For whoever reads the status: a line of at most 200 bytes.
    #[arg(long, value_name = "TEXT", default_value = "", value_parser = line)]
    why: String,
    #[command(flatten)]
    config: ConfigArgs,
}

/// End what `bcd hold` began: commands are admitted again.
///
/// Exit code 0: not held, also where it was not before; 73: the hold cannot be ended and stands; 75: it stands, since the
/// daemon that runs was not reached; 77: this is another user's daemon.
#[derive(Debug, clap::Args)]
pub(super) struct ReleaseArgs {
    #[command(flatten)]
    config: ConfigArgs,
}

fn line(text: &str) -> Result<String, String> {
    if text.len() > WHY_BYTES || text.chars().any(char::is_control) {
        return Err(format!("it is not one line of at most {WHY_BYTES} bytes"));
    }
    Ok(text.to_owned())
}

pub(super) fn run(args: &HoldArgs) -> Result<Exit, Exit> {
    let config = args.config.load()?;
    let held = Held::now(&SystemClock, args.why.clone());
    let keep = || hold::keep(&config.state, &held).map_err(|error| fail(&error, error.exit()));
    print(match change(&config, &Question::Hold(args.why.clone()), keep)? {
        Change::ByDaemon { before: true } => "held before; bcd release ends it\n",
        Change::ByDaemon { before: false } => "held: no command is admitted until bcd release\n",
        Change::OfFile { before: true } => {
            "held before; no daemon runs, and the next one admits nothing until bcd release\n"
        }
        Change::OfFile { before: false } => {
            "held; no daemon runs, and the next one admits nothing until bcd release\n"
        }
        Change::Unreached(error) => {
            keep()?;
            return Err(unreached("kept", &error));
        }
    })?;
    Ok(Exit::Done)
}

pub(super) fn release(args: &ReleaseArgs) -> Result<Exit, Exit> {
    let config = args.config.load()?;
    let end = || hold::end(&config.state).map_err(|error| fail(&error, error.exit()));
    print(match change(&config, &Question::Release, end)? {
        Change::ByDaemon { before: true } => "released: commands are admitted again\n",
        Change::OfFile { before: true } => "released; no daemon runs\n",
        Change::ByDaemon { before: false } | Change::OfFile { before: false } => "was not held\n",
        Change::Unreached(error) => return Err(unreached("the hold stands", &error)),
    })?;
    Ok(Exit::Done)
}

/// Who did it; `before`: whether the node was held before.
enum Change {
    ByDaemon {
        before: bool,
    },
    OfFile {
        before: bool,
    },
    /// Nobody: a daemon that does not answer holds the journal.
    Unreached(OpenError),
}

fn unreached(done: &str, error: &OpenError) -> Exit {
    note(&format!(
        "bcd: {done}; the running daemon was not reached, and goes on as before: name its run directory (--run DIR)"
    ));
    fail(error, Exit::TryLater)
}

/// By the daemon; or where none runs, or it waits for its disk, by way of the file alone. The journal is claimed for that:
/// that nobody listens on the socket is no proof that no daemon runs, and none is to start in between.
fn change(
    config: &Config,
    question: &Question,
    of_file: impl FnOnce() -> Result<bool, Exit>,
) -> Result<Change, Exit> {
    let mut tried = 0;
    loop {
        if let Some(before) = ask_daemon(config, question)? {
            return Ok(Change::ByDaemon { before });
        }
        // A lock's file is made only in a state directory that is there, and this user's.
        let state = StateDir::open(&config.state);
        let state = state.and_then(|dir| dir.ok_or_else(|| StateError::none(&config.state)));
        state.map_err(|error| fail(&error, error.exit()))?;
        match journal::claim(&config.state) {
            Ok(_claimed) => return Ok(Change::OfFile { before: of_file()? }),
            Err(OpenError::Held { .. }) if tried < TRIES.0 => sleep(TRIES.1),
            Err(error @ OpenError::Held { .. }) => return Ok(Change::Unreached(error)),
            Err(error) => return Err(fail(&error, error.exit())),
        }
        tried += 1;
    }
}

/// Absent where no daemon can do it.
fn ask_daemon(config: &Config, question: &Question) -> Result<Option<bool>, Exit> {
    let bytes = match ask(&config.run, question) {
        Ok(bytes) => bytes,
        Err(AskError::NoDaemon(_)) => return Ok(None),
        Err(error) => return Err(fail(&error, error.exit())),
    };
    match serde_json::from_slice(&bytes) {
        Ok(Changed::Before(before)) => Ok(Some(before)),
        Ok(Changed::Waiting) => Ok(None),
        Ok(Changed::Error(error)) => {
            let kept = match question {
                Question::Release => "the hold stands",
                _ => "held, but only until this daemon ends",
            };
            note(&format!("bcd: {kept}: {error}"));
            Err(Exit::CannotWrite)
        }
        Err(error) => {
            note("bcd: the daemon's answer cannot be read; restart it after replacing the binary");
            Err(fail(&error, Exit::Unknown))
        }
    }
}
