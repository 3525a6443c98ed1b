//! `bcd gateway`: runs the reference gateway.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use crate::clock::SystemClock;
use crate::config::LogFormat;
use crate::gateway::control::ClientError;
use crate::gateway::lies::Rate;
use crate::gateway::worker::{self, Child, Desk, Link, TicketTerms};
use crate::gateway::{self, GatewayError, Lies, Limits, Options, Ready, ServingFiles};
use crate::model::Exit;
use crate::wire::link::Endpoint;
use crate::wire::version::{self, Range};

/// A ticket written by `--ticket` serves this many machines.
const TICKET_USES: u32 = 1_000;
/// And holds this long: a week.
const TICKET_TTL_S: u64 = 7 * 24 * 3600;
/// Between two looks at the worker beside the gateway.
const LOOK: Duration = Duration::from_millis(200);
/// Before another is started.
const RESTART: Duration = Duration::from_secs(1);

/// Run a reference gateway, to try bcd without a control plane.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Its directory: its id and control socket, and the store unless --store names another; made when missing.
    #[arg(long, value_name = "DIR")]
    state: PathBuf,
    /// The directory of the store, for several gateways beside each other: each has a --state of its own, and all name
    /// the same --store.
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// The directory of a worker that runs already (bcd worker). Default: the gateway runs one beside itself, on `worker`
    /// in the store's directory.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["certificate_life", "rejoin_within"])]
    worker: Option<PathBuf>,
    /// Where it listens; port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:7443")]
    listen: SocketAddr,
    /// Writes a fresh join ticket for many machines to this file (0600).
    #[arg(long, value_name = "FILE")]
    ticket: Option<PathBuf>,
    /// Site in that ticket.
    #[arg(long, value_name = "NAME", default_value = "lab")]
    site: String,
    /// The deployment's name.
    #[arg(long, value_name = "NAME", default_value = worker::TRUST_DOMAIN)]
    trust_domain: String,
    /// host:port that tickets name; may be given several times. Default: the address it listens on.
    #[arg(long = "endpoint", value_name = "HOST:PORT")]
    endpoints: Vec<Endpoint>,
    /// Interval of heartbeats, 1 to 60 s.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    heartbeat_interval: Duration,
    /// How long its lease holds; the gateways of a store have the same.
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = duration, hide = true)]
    lease_life: Duration,
    /// How long node certificates hold.
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = duration)]
    certificate_life: Duration,
    /// How long after its certificate has run out a node may join again with the key of it; 0s: never.
    #[arg(long, value_name = "TIME", default_value = "168h", value_parser = duration)]
    rejoin_within: Duration,
    /// A serving certificate (PEM, leaf first) of one's own, which must chain to a CA that nodes know; read again when it
    /// changes. Default: one of the development CA.
    #[arg(long, value_name = "FILE", requires = "serving_key")]
    serving_certificate: Option<PathBuf>,
    /// Its key (PEM).
    #[arg(long, value_name = "FILE", requires = "serving_certificate")]
    serving_key: Option<PathBuf>,
    /// Session opens and joins a second.
    #[arg(long, value_name = "N", default_value_t = Limits::default().rate)]
    rate: u32,
    /// Sessions at most.
    #[arg(long, value_name = "N", default_value_t = Limits::default().streams)]
    max_streams: usize,
    /// error, warn, info, debug or trace.
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    log_level: tracing::Level,
    /// Lowest protocol version spoken, to see how a node takes another range.
    #[arg(long, value_name = "N", default_value_t = version::MIN, hide = true)]
    proto_min: u32,
    /// Highest protocol version spoken.
    #[arg(long, value_name = "N", default_value_t = version::MAX, hide = true)]
    proto_max: u32,
    /// Makes every session one for upgrades alone, to see what a node does with other commands.
    #[arg(long, hide = true)]
    upgrade_only: bool,
    /// Lies about the time in each Welcome: this far ahead.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration, hide = true)]
    welcome_ahead: Duration,
    /// Lies about the time in each Welcome: this far behind.
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration, hide = true)]
    welcome_behind: Duration,
    /// Hangs up after each Welcome.
    #[arg(long, hide = true)]
    hang_up: bool,
    /// A lie of a gateway that was taken over, and how often it is told where it can be, in thousandths [default: always];
    /// may be given several times.
    #[arg(long = "lie", value_name = "NAME[=PERMILLE]", hide = true)]
    told: Vec<Rate>,
    /// Stops when its standard input ends: the end of whoever started it with a pipe is then its own.
    #[arg(long, hide = true)]
    until_stdin_ends: bool,
    /// Seed of everything random.
    #[arg(long, value_name = "N", hide = true)]
    seed: Option<u64>,
}

/// Runs the gateway until SIGTERM or SIGINT.
pub(super) fn run(args: Args) -> Exit {
    crate::log::start(args.log_level, LogFormat::Text);
    let Ok(protocol) = Range::from_wire(args.proto_min, args.proto_max) else {
        eprintln!("bcd gateway: --proto-min must not lie above --proto-max");
        return Exit::Usage;
    };
    let own = args.worker.is_none().then(|| worker::Options {
        state: args.store.as_ref().unwrap_or(&args.state).join("worker"),
        trust_domain: args.trust_domain.clone(),
        certificate_life: args.certificate_life,
        rejoin_within: args.rejoin_within,
    });
    let works = args.worker.or_else(|| own.as_ref().map(|own| own.state.clone())).unwrap_or_default();
    // Told to `bcd ctl`, which runs elsewhere.
    let works = std::path::absolute(&works).unwrap_or(works);
    let mut lies = Lies::default();
    lies.welcome_ahead = args.welcome_ahead;
    lies.welcome_behind = args.welcome_behind;
    lies.hangs_up = args.hang_up;
    let lies = args.told.iter().fold(lies, |lies, rate| lies.and(*rate));
    let options = Options {
        store: args.store,
        trust_domain: args.trust_domain,
        endpoints: args.endpoints,
        heartbeat_interval: args.heartbeat_interval,
        lease_life: args.lease_life,
        serving: args
            .serving_certificate
            .zip(args.serving_key)
            .map(|(certificate, key)| ServingFiles { certificate, key }),
        limits: Limits { rate: args.rate, streams: args.max_streams, ..Limits::default() },
        protocol,
        upgrade_only: args.upgrade_only,
        lies,
        seed: args.seed,
        ..Options::new(args.state, args.listen, Link::at(&works))
    };
    raise_descriptors();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("bcd gateway: cannot start its threads: {error}");
            return Exit::Failed;
        }
    };
    let ticket = args.ticket.map(|file| Wanted { file, site: args.site, desk: Desk::at(&works) });
    let result = runtime.block_on(serve(options, own, ticket, args.until_stdin_ends));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match result {
        Ok(()) => Exit::Done,
        Err(error) => failed(&error),
    }
}

/// Sessions need a descriptor each; the soft limit is often 1,024.
fn raise_descriptors() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// Why `bcd gateway` ends.
#[derive(Debug, thiserror::Error)]
enum RunError {
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("cannot wait for signals")]
    Signals(#[source] std::io::Error),
}

/// Resolves at the end of standard input. The thread that reads it holds up no exit.
fn stdin_end() -> oneshot::Receiver<()> {
    let (tell, told) = oneshot::channel();
    std::thread::spawn(move || {
        // An input that cannot be read has ended as well.
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = tell.send(());
    });
    told
}

/// A ticket that is to be made at the start.
struct Wanted {
    file: PathBuf,
    site: String,
    desk: Desk,
}

async fn serve(
    options: Options,
    own: Option<worker::Options>,
    ticket: Option<Wanted>,
    until_stdin_ends: bool,
) -> Result<(), RunError> {
    let stop = stopped(until_stdin_ends).map_err(RunError::Signals)?;
    let state = options.state.clone();
    let beside = match own {
        // The directory that the worker's lies in is the gateway's to make, closed to others.
        Some(own) => {
            let parent = options.store.clone().unwrap_or_else(|| state.clone());
            tokio::task::spawn_blocking(move || gateway::make_closed(&parent))
                .await
                .unwrap_or(Ok(()))
                .map_err(GatewayError::from)?;
            Some(tokio::spawn(keep_worker(own)))
        }
        None => None,
    };
    let ready = move |ready: Ready| {
        tokio::spawn(greet(ready, state, ticket));
    };
    let result = gateway::run(options, Arc::new(SystemClock), ready, stop).await;
    if let Some(beside) = beside {
        beside.abort();
        let _ = beside.await;
    }
    result?;
    say("gateway stopped");
    Ok(())
}

/// Runs a worker beside the gateway, and another one when it has ended.
async fn keep_worker(options: worker::Options) {
    loop {
        // This very program, whatever file has its name by now.
        match Child::start(Path::new("/proc/self/exe"), &options, Stdio::inherit()) {
            Ok(mut child) => {
                while child.is_running() {
                    tokio::time::sleep(LOOK).await;
                }
                tracing::warn!("the worker beside the gateway has ended; starting another");
            }
            Err(error) => tracing::error!(%error, "cannot start the worker beside the gateway"),
        }
        tokio::time::sleep(RESTART).await;
    }
}

/// Resolves at SIGTERM or SIGINT, and where asked at the end of standard input.
pub(super) fn stopped(until_stdin_ends: bool) -> std::io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let parent = until_stdin_ends.then(stdin_end);
    Ok(async move {
        tokio::select! {
            biased;
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            () = ended(parent) => {}
        }
    })
}

async fn ended(parent: Option<oneshot::Receiver<()>>) {
    match parent {
        Some(parent) => drop(parent.await),
        None => std::future::pending().await,
    }
}

/// A line for people; one that nobody reads is no failure.
fn say(line: &str) {
    let _ = super::print(&format!("{line}\n"));
}

/// Says where the gateway is and what to type next.
async fn greet(ready: Ready, state: PathBuf, ticket: Option<Wanted>) {
    let dir = state.display();
    say(&format!("gateway listens on {}, control socket {}", ready.address, ready.control.display()));
    match ticket {
        Some(wanted) => match write_ticket(&wanted).await {
            Ok(()) => say(&format!("join a machine:   bcd join --ticket {}", wanted.file.display())),
            Err(error) => {
                super::fail(&error, Exit::CannotWrite);
            }
        },
        None => say(&format!("make a ticket:    bcd ctl --gateway {dir} ticket > FILE")),
    }
    say(&format!("run a program:    bcd ctl --gateway {dir} exec NODE -- uname -a"));
}

/// Why a ticket's file was not written.
#[derive(Debug, thiserror::Error)]
enum TicketError {
    #[error(transparent)]
    Ask(#[from] ClientError),
    #[error("cannot write {0}")]
    Write(PathBuf, #[source] std::io::Error),
}

async fn write_ticket(wanted: &Wanted) -> Result<(), TicketError> {
    let terms = TicketTerms::new(TICKET_USES, TICKET_TTL_S, &wanted.site);
    let line = wanted.desk.ticket(terms).await?;
    let path = wanted.file.clone();
    let written = tokio::task::spawn_blocking(move || write_secret(&path, &line)).await;
    let written = written.unwrap_or_else(|error| Err(std::io::Error::other(error)));
    written.map_err(|error| TicketError::Write(wanted.file.clone(), error))
}

/// Writes a file that only its owner may read; an older one is replaced, never written into.
fn write_secret(path: &Path, line: &str) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    writeln!(file, "{line}")?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

fn failed(error: &RunError) -> Exit {
    let exit = match error {
        RunError::Gateway(error) => gateway_exit(error),
        RunError::Signals(_) => Exit::Failed,
    };
    super::fail(error, exit)
}

fn gateway_exit(error: &GatewayError) -> Exit {
    if has_cause(error, std::io::ErrorKind::PermissionDenied) {
        return Exit::Permission;
    }
    match error {
        GatewayError::State(_) | GatewayError::Open(_) if error.is_newer_store() => Exit::ForeignState,
        GatewayError::State(_)
        | GatewayError::Open(_)
        | GatewayError::Unserved(_)
        | GatewayError::Control(..) => Exit::CannotWrite,
        GatewayError::Serving(_) => Exit::BadInput,
        GatewayError::Replaced(_)
        | GatewayError::Store(_)
        | GatewayError::Tls(_)
        | GatewayError::Listen(..)
        | GatewayError::Forger(_)
        | GatewayError::Serve(_) => Exit::Failed,
    }
}

pub(super) fn has_cause(error: &(dyn std::error::Error + 'static), kind: std::io::ErrorKind) -> bool {
    let mut next = Some(error);
    while let Some(cause) = next {
        if cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == kind) {
            return true;
        }
        next = cause.source();
    }
    false
}

/// `500ms`, `10s`, `5m`, `24h`.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let bad = || format!("not a time: {text:?} (such as 500ms, 10s, 5m, 24h)");
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(bad)?;
    let number: u32 = text[..at].parse().map_err(|_| bad())?;
    let unit = match &text[at..] {
        "ms" => Duration::from_millis(1),
        "s" => Duration::from_secs(1),
        "m" => Duration::from_secs(60),
        "h" => Duration::from_secs(3600),
        _ => return Err(bad()),
    };
    Ok(unit * number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        for bad in ["", "10", "s", "-1s", "1d", "99999999999s"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_ticket_file_is_closed_to_others_and_replaced_whole() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("ticket");
        write_secret(&path, "first and longer").expect("written");
        write_secret(&path, "second").expect("written");
        assert_eq!(std::fs::read_to_string(&path).expect("read"), "second\n");
        assert_eq!(std::fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o600);
    }
}
