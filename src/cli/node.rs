//! `bcd node`.

#[cfg(not(feature = "fakehw"))]
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use super::{ConfigArgs, fail};
use crate::clock::{self, SystemClock};
#[cfg(feature = "fakehw")]
use crate::host::fake_machine::{self, FakeMachine, FakeReboot};
use crate::host::machine;
#[cfg(not(feature = "fakehw"))]
use crate::host::reboot::SystemReboot;
use crate::model::{BootId, Exit, Machine};
use crate::node::{Options, build_when_the_disk_allows};
use crate::ports::Reboot;
use crate::systemd::Notifier;

/// After a stop of at most 9 s: how long threads that wait for the kernel may take to come back.
pub(super) const LEFT_BEHIND: Duration = Duration::from_millis(500);

/// Run the daemon: one session to a gateway, until SIGTERM.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let config = args.config.load_and_log()?;
    let (say_stop, stop) = watch::channel(false);
    let (boot_id, reboot) = boot(&say_stop).map_err(|error| fail(&error, Exit::Failed))?;
    let mut options = Options::new(&config, Arc::new(SystemClock), StdRng::from_os_rng(), boot_id, reboot);
    options.machine = traces();
    options.notifier = Arc::new(notifier());
    let runtime = super::runtime()?;
    let exit = runtime.block_on(async {
        let signals = Signals::listen().map_err(|error| fail(&error, Exit::Failed))?;
        let run = async {
            match build_when_the_disk_allows(options, stop.clone()).await {
                Ok(Some(node)) => Ok(node.run(stop).await),
                Ok(None) => Ok(Exit::Done),
                Err(error) => Err(fail(&error, error.exit())),
            }
        };
        tokio::pin!(run);
        tokio::select! {
            biased;
            exit = &mut run => return exit,
            () = signals.asked_to_stop() => {}
        }
        // Nobody is there to hear it only when the node has ended by itself.
        let _ = say_stop.send(true);
        run.await
    });
    // A resolver or a disk that does not answer must not hold up the stop: its thread is left to its fate.
    runtime.shutdown_timeout(LEFT_BEHIND);
    exit
}

/// This boot, and who ends it.
#[cfg(not(feature = "fakehw"))]
pub(super) fn boot(_stop: &watch::Sender<bool>) -> std::io::Result<(BootId, Arc<dyn Reboot>)> {
    Ok((clock::boot_id()?, Arc::new(SystemReboot::of_this_machine())))
}

/// This boot, or a fake machine's; who ends it never ends the real one.
#[cfg(feature = "fakehw")]
pub(super) fn boot(stop: &watch::Sender<bool>) -> std::io::Result<(BootId, Arc<dyn Reboot>)> {
    match std::env::var_os(fake_machine::VARIABLE) {
        Some(file) => {
            let machine = FakeMachine::new(file.into());
            Ok((machine.boot_id()?, Arc::new(machine.port(stop.clone()))))
        }
        None => Ok((clock::boot_id()?, Arc::new(FakeReboot::none()))),
    }
}

/// What tells this machine from others.
#[cfg(not(feature = "fakehw"))]
pub(super) fn traces() -> Machine {
    machine::read(Path::new("/"))
}

/// What tells this machine from others, or a fake one whose files stand under `BCD_FAKE_ROOT`.
#[cfg(feature = "fakehw")]
pub(super) fn traces() -> Machine {
    machine::read(&std::env::var_os("BCD_FAKE_ROOT").map_or_else(|| "/".into(), std::path::PathBuf::from))
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
                biased;
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
