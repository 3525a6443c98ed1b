//! `bcd bench fleet`: a child of `bcd bench agent`.

use std::io::Read as _;
use std::path::PathBuf;

use super::super::fail;
use crate::bench::fleet;
use crate::model::Exit;

/// Nodes in one process, or bare sessions of theirs. Starts at a line on standard input, and ends with that.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Their state directories are 0, 1 and so on in this one
    #[arg(long, value_name = "DIR")]
    folder: PathBuf,
    /// How many
    #[arg(long)]
    count: usize,
    /// Sessions alone
    #[arg(long)]
    bare: bool,
    /// With this database open beside bare sessions
    #[arg(long, value_name = "FILE", requires = "bare")]
    database: Option<PathBuf>,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    crate::log::start(tracing::Level::WARN, crate::config::LogFormat::Text);
    crate::sim::agents_per_process(0).map_err(|error| fail(&error, Exit::Failed))?;
    let runtime = if args.count == 1 {
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    } else {
        tokio::runtime::Builder::new_multi_thread().enable_all().build()
    };
    let runtime = runtime.map_err(|error| fail(&error, Exit::Failed))?;
    // Whoever started it has looked at its memory by then.
    if !matches!(std::io::stdin().read(&mut [0]), Ok(1)) {
        return Ok(Exit::Done);
    }
    std::thread::spawn(|| {
        // An input that cannot be read has ended as well.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
    let ended = runtime.block_on(async {
        if args.bare {
            fleet::bare(&args.folder, args.count, args.database.as_deref()).await
        } else {
            fleet::nodes(&args.folder, args.count).await
        }
    });
    ended.map(|()| Exit::Done).map_err(|error| fail(&error, Exit::Failed))
}
