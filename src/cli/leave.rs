//! `bcd leave`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::join::moved;
use super::node::{LEFT_BEHIND, boot, traces};
use super::{ConfigArgs, fail, note, print};
use crate::clock::SystemClock;
use crate::config::Config;
use crate::failpoint;
use crate::identity::{self, LoadError};
use crate::model::Exit;
use crate::node::{BuildError, LeaveError, Node, Options};

/// Retire this machine: what runs ends, the control plane is told, identity and journal are moved aside.
///
/// The daemon must have been stopped. Killed or failed in between, it can be repeated.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// How long running programs and the gateway are waited for, seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    try_for: u64,
    /// Moves identity and journal aside in any case: though no gateway was told, or programs still run.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Debug, thiserror::Error)]
enum Untold {
    #[error(
        "a join has begun in {state} and is not done, so there is no node that could leave; go on with it: bcd join --state {state} --ticket FILE, with the same ticket; or give it up: bcd join --state {state} --reset --yes",
        state = .0.display()
    )]
    Joining(PathBuf),
    #[error(transparent)]
    Build(#[from] BuildError),
    #[error(transparent)]
    Leave(#[from] LeaveError),
}

impl Untold {
    fn exit(&self) -> Exit {
        match self {
            Self::Joining(_) => Exit::Configuration,
            Self::Build(error) => error.exit(),
            Self::Leave(error) => error.exit(),
        }
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let config = args.config.load_and_log()?;
    let told = tell(args, &config)?;
    match &told {
        Ok(()) => failpoint::hit(failpoint::LEAVE_TOLD),
        Err(error @ Untold::Build(BuildError::Identity(LoadError::NotJoined(_)))) => {
            return finish(&config.state, error);
        }
        Err(error) if args.force => drop(fail(error, error.exit())),
        Err(error) => return Err(fail(error, error.exit())),
    }
    let aside = identity::reset(&config.state);
    let aside = aside.map_err(|error| fail(&error, error.exit()))?;
    match told {
        Ok(()) => {}
        Err(Untold::Build(BuildError::Copied { node_id, .. })) => note(&format!(
            "bcd: {node_id} is another machine's and goes on there: it must not be deleted at the control plane"
        )),
        Err(_) => note("bcd: the control plane still counts on this node: have it deleted there"),
    }
    print(&moved(&aside)).map(|()| Exit::Done)
}

/// Where there is no identity: a leave that was killed while it moved things aside is finished, and a join is not a
/// node that could leave.
fn finish(state: &Path, not_joined: &Untold) -> Result<Exit, Exit> {
    let failed = |error: &Untold| Err(fail(error, error.exit()));
    match identity::pending_join(state) {
        Ok(None) => {}
        Ok(Some(_)) => return failed(&Untold::Joining(state.to_owned())),
        Err(error) => return failed(&Untold::Build(LoadError::from(error).into())),
    }
    let aside = identity::finish_reset(state).map_err(|error| fail(&error, error.exit()))?;
    if aside.moved.is_empty() {
        return failed(not_joined);
    }
    print(&moved(&aside)).map(|()| Exit::Done)
}

/// Runs the node to its end.
fn tell(args: &Args, config: &Config) -> Result<Result<(), Untold>, Exit> {
    // A reboot would not be this machine's last: nothing that asks for one is admitted.
    let (say_stop, _) = tokio::sync::watch::channel(false);
    let (boot_id, reboot) = boot(&say_stop).map_err(|error| fail(&error, Exit::Failed))?;
    let mut options = Options::new(config, Arc::new(SystemClock), StdRng::from_os_rng(), boot_id, reboot);
    // A copy must not speak for the machine that it was made of.
    options.machine = traces();
    let node = match Node::build(options) {
        Ok(node) => node,
        Err(error) => return Ok(Err(error.into())),
    };
    let runtime = super::runtime()?;
    let told = runtime.block_on(node.leave(Duration::from_secs(args.try_for)));
    runtime.shutdown_timeout(LEFT_BEHIND);
    Ok(told.map_err(Untold::from))
}
