//! `bcd image`.

use super::{ConfigArgs, fail, note, print};
use crate::identity;
use crate::model::Exit;

/// Prepare this machine's disk for a golden image.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Image,
}

#[derive(Debug, clap::Subcommand)]
enum Image {
    /// Delete identity, keys and journal, what was moved aside too: machines made from the image join as new ones.
    ///
    /// The daemon must have been stopped. A node that is to end for good leaves first: bcd leave.
    Seal(SealArgs),
}

#[derive(Debug, clap::Args)]
struct SealArgs {
    /// What is deleted is not wanted any more.
    #[arg(long, required = true)]
    yes: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let Image::Seal(args) = &args.command;
    let config = args.config.load_and_log()?;
    let sealed = identity::seal(&config.state).map_err(|error| fail(&error, error.exit()))?;
    for left in &sealed.left {
        note(&format!("bcd: {} is not bcd's and was left", left.display()));
    }
    let state = config.state.display();
    print(&format!(
        "{} files and directories of {state} are gone; the image holds no node\n",
        sealed.removed
    ))?;
    Ok(Exit::Done)
}
