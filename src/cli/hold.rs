//! `bcd hold` and `bcd release`: the operator's veto over everything that is not admitted yet.

use super::{ConfigArgs, fail, note, print};
use crate::clock::SystemClock;
use crate::config::Config;
use crate::model::Exit;
use crate::state_dir::StateError;
use crate::status::socket::{AskError, Changed, Question, ask};
use crate::upkeep::hold::{self, Held, WHY_BYTES};

/// Admit no more commands on this machine, whatever the control plane signs, until `bcd release`.
///
/// Programs that run go on, and so does the session: `bcd status` shows the hold, and commands that come get `busy`
/// with the why `held`. It outlives a restart, and can be set while no daemon runs. Exit code 0: held, also where it was
/// before; 73: the hold cannot be kept; 77: this is another user's daemon.
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
/// Exit code 0: not held, also where it was not before; 73: the hold cannot be ended and stands; 77: this is another
/// user's daemon.
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
    let change = change(&config, &Question::Hold(args.why.clone()), || hold::keep(&config.state, &held))?;
    print(match (change.before, change.daemon) {
        (true, true) => "held before; bcd release ends it\n",
        (false, true) => "held: no command is admitted until bcd release\n",
        (true, false) => "held before; no daemon runs, and the next one admits nothing until bcd release\n",
        (false, false) => "held; no daemon runs, and the next one admits nothing until bcd release\n",
    })?;
    Ok(Exit::Done)
}

pub(super) fn release(args: &ReleaseArgs) -> Result<Exit, Exit> {
    let config = args.config.load()?;
    let change = change(&config, &Question::Release, || hold::end(&config.state))?;
    print(match (change.before, change.daemon) {
        (true, true) => "released: commands are admitted again\n",
        (true, false) => "released; no daemon runs\n",
        (false, _) => "was not held\n",
    })?;
    Ok(Exit::Done)
}

/// What was done.
struct Change {
    /// Whether the node was held before.
    before: bool,
    /// Whether a daemon has done it.
    daemon: bool,
}

/// By the daemon; or where none runs, or it waits for its disk, by way of the file alone.
fn change(
    config: &Config,
    question: &Question,
    of_file: impl FnOnce() -> Result<bool, StateError>,
) -> Result<Change, Exit> {
    if let Some(before) = ask_daemon(config, question)? {
        return Ok(Change { before, daemon: true });
    }
    let before = of_file().map_err(|error| fail(&error, error.exit()))?;
    // One that has started meanwhile may have looked before the file was changed.
    let daemon = ask_daemon(config, question)?.is_some();
    Ok(Change { before, daemon })
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
