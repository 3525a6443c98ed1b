//! `bcd worker`: runs the signing worker of a deployment.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::gateway::{duration, stopped};
use crate::clock::SystemClock;
use crate::config::LogFormat;
use crate::gateway::worker::{self, Options, ServeError, TRUST_DOMAIN};
use crate::model::Exit;

/// Run the worker of a deployment apart from its gateways: it issues certificates, makes tickets and signs commands,
/// and no gateway holds a key of it.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Its directory: the keys, worker.db, relay.sock for gateways (bcd gateway --worker) and operator.sock for
    /// bcd ctl --worker; made when missing.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// The deployment's name.
    #[arg(long, value_name = "NAME", default_value = TRUST_DOMAIN)]
    trust_domain: String,
    /// How long node certificates hold.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    certificate_life: Duration,
    /// How long after its certificate has run out a node may join again with the key of it; 0s: never.
    #[arg(long, value_name = "TIME", default_value = "168h", value_parser = duration)]
    rejoin_within: Duration,
    /// error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: tracing::Level,
    /// Stops when its standard input ends: the end of whoever started it with a pipe is then its own.
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
}

/// Runs the worker until SIGTERM or SIGINT.
pub(super) fn run(args: Args) -> Exit {
    crate::log::start(args.log_level, LogFormat::Text);
    let options = Options {
        state: args.state,
        trust_domain: args.trust_domain,
        certificate_life: args.certificate_life,
        rejoin_within: args.rejoin_within,
    };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("bcd worker: cannot start: {error}");
            return Exit::Failed;
        }
    };
    let result = runtime.block_on(async {
        let stop = stopped(args.until_stdin_ends)?;
        let ready = |dir: &std::path::Path| {
            let dir = dir.display();
            let _ = super::print(&format!(
                "worker serves {dir}\nrun a gateway:    bcd gateway --worker {dir} --state DIR\n"
            ));
        };
        worker::run(options, Arc::new(SystemClock), ready, stop).await.map_err(RunError::from)
    });
    runtime.shutdown_timeout(Duration::from_secs(1));
    match result {
        Ok(()) => Exit::Done,
        Err(error) => super::fail(&error, error.exit()),
    }
}

/// Why `bcd worker` ends.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Serve(#[from] ServeError),
    #[error("cannot wait for signals")]
    Signals(#[from] std::io::Error),
}

impl RunError {
    fn exit(&self) -> Exit {
        match self {
            Self::Signals(_) => Exit::Failed,
            Self::Serve(error) if super::gateway::has_cause(error, std::io::ErrorKind::PermissionDenied) => {
                Exit::Permission
            }
            Self::Serve(_) => Exit::CannotWrite,
        }
    }
}
