//! The program as an operator meets it: every bad input has its sentence and its exit code.

mod bad_input;
mod daemon;
mod embedded;
mod joining;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bcd::clock::{Clock as _, SystemClock};
use bcd::gateway::worker::{self, Desk, Link, TicketTerms, Worker};
use bcd::gateway::{self, Options, Ready};
use bcd::model::ServerTime;
use tokio::sync::oneshot;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A gateway on a thread of its own; ends when it is dropped.
struct Gateway {
    ready: Ready,
    state: PathBuf,
    desk: Desk,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Gateway {
    fn start(dir: &Path) -> Self {
        Self::start_with(dir, |_| ())
    }

    fn start_with(dir: &Path, change: impl FnOnce(&mut Options)) -> Self {
        Self::certifying_for(dir, DAY, change)
    }

    /// One whose nodes' certificates hold so long.
    fn certifying_for(dir: &Path, life: Duration, change: impl FnOnce(&mut Options)) -> Self {
        let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let state = dir.join("gateway");
        gateway::make_closed(&state).unwrap();
        let works = worker::Options { certificate_life: life, ..worker::Options::new(state.join("worker")) };
        let clock = Arc::new(SystemClock);
        let worker = Arc::new(Worker::open(&works, ServerTime(clock.wall_ms())).unwrap());
        let desk = Desk::here(worker.clone(), clock.clone());
        let mut options = Options::new(state.clone(), listen, Link::here(worker, clock));
        options.heartbeat_interval = Duration::from_secs(1);
        change(&mut options);
        let (say, ready) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let run =
                gateway::run(options, Arc::new(SystemClock), move |ready| say.send(ready).unwrap(), async {
                    let _ = stopped.await;
                });
            runtime().block_on(run).unwrap();
        });
        let ready = ready.recv_timeout(Duration::from_secs(20)).unwrap();
        Self { ready, state, desk, stop: Some(stop), thread: Some(thread) }
    }

    /// A ticket for so many machines, which holds so long.
    fn ticket(&self, uses: u32, ttl_s: u64) -> String {
        runtime().block_on(self.desk.ticket(TicketTerms::new(uses, ttl_s, "fra1"))).unwrap()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// One machine: a directory with a state directory, a run directory and a ticket file in it.
struct Machine {
    dir: tempfile::TempDir,
}

impl Machine {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// The program on this machine, away from the configuration of the one that tests.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_bcd"));
        std::fs::write(self.path("bcd.toml"), "").unwrap();
        command
            .args(args)
            .env_clear()
            .env("BCD_CONFIG", self.path("bcd.toml"))
            .env("BCD_STATE", self.state())
            .env("BCD_RUN", self.path("run"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Ended {
        Ended(self.command(args).output().unwrap())
    }

    fn write_ticket(&self, ticket: &str) -> String {
        let path = self.path("ticket");
        std::fs::write(&path, format!("{ticket}\n")).unwrap();
        path.display().to_string()
    }

    /// `bcd join` with this ticket, trying for a second.
    fn join(&self, ticket: &str) -> Ended {
        let ticket = self.write_ticket(ticket);
        self.run(&["join", "--ticket", &ticket, "--try-for", "1"])
    }

    fn joined(gateway: &Gateway) -> Self {
        let machine = Self::new();
        machine.join(&gateway.ticket(1, 3600)).expect(0);
        machine
    }
}

/// A program that has ended.
struct Ended(Output);

impl Ended {
    /// Checks the exit code; its standard output.
    #[track_caller]
    fn expect(&self, code: i32) -> String {
        assert_eq!(self.0.status.code(), Some(code), "{}", self.stderr());
        String::from_utf8(self.0.stdout.clone()).unwrap()
    }

    /// Checks the exit code, and that standard error holds every one of `words`, each error in one line.
    #[track_caller]
    fn refused(&self, code: i32, words: &[&str]) {
        self.expect(code);
        let text = self.stderr();
        for word in words {
            assert!(text.contains(word), "{word:?} is missing in: {text}");
        }
        assert_eq!(
            text.lines().filter(|line| line.starts_with("bcd: ")).count(),
            text.lines().count(),
            "{text}"
        );
    }

    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.0.stderr).into_owned()
    }
}
