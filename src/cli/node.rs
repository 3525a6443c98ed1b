//! `bcd node`.

use std::sync::Arc;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::{ConfigArgs, fail};
use crate::clock::{self, SystemClock};
use crate::model::Exit;
use crate::node::{Node, Options};
use crate::systemd::Notifier;

/// Run the daemon: one session to a gateway, until SIGTERM.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let config = args.config.load_and_log()?;
    let boot_id = clock::boot_id().map_err(|error| fail(&error, Exit::Failed))?;
    let mut options = Options::new(&config, Arc::new(SystemClock), StdRng::from_os_rng(), boot_id);
    options.notifier = Arc::new(notifier());
    let node = Node::build(options).map_err(|error| fail(&error, error.exit()))?;
    super::runtime()?.block_on(async {
        let signals = Signals::listen().map_err(|error| fail(&error, Exit::Failed))?;
        let (say_stop, stop) = watch::channel(false);
        let run = node.run(stop);
        tokio::pin!(run);
        tokio::select! {
            exit = &mut run => return Ok(exit),
            () = signals.asked_to_stop() => {}
        }
        // Nobody is there to hear it only when the node has ended by itself.
        let _ = say_stop.send(true);
        Ok(run.await)
    })
}

/// A supervisor that cannot be told is no reason not to run: it ends a unit that is never ready by itself.
fn notifier() -> Notifier {
    Notifier::from_environment(|name| std::env::var_os(name)).unwrap_or_else(|error| {
        let error: &dyn std::error::Error = &error;
        tracing::error!(error, "NOTIFY_SOCKET cannot be reached; systemd hears neither READY nor WATCHDOG");
        Notifier::default()
    })
}

/// SIGPIPE is ignored by Rust's own start-up; a broken pipe is an error of its write.
struct Signals {
    term: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn asked_to_stop(mut self) {
        loop {
            let name = tokio::select! {
                _ = self.term.recv() => "SIGTERM",
                _ = self.interrupt.recv() => "SIGINT",
                _ = self.hangup.recv() => {
                    tracing::info!("SIGHUP changes nothing; restart the daemon to read bcd.toml again");
                    continue;
                }
            };
            tracing::info!(signal = name, "stopping");
            return;
        }
    }
}
