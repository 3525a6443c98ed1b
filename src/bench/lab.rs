//! A reference gateway and joined nodes, each in a directory of the bench's place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::time::{Instant, sleep};

use super::proc::Process;
use super::{Place, PlaceError};
use crate::clock;
use crate::gateway::control::{Client, ClientError, Operator, Request, Response};
use crate::gateway::worker::{Desk, Draft, TicketTerms};
use crate::host::tcp::Tcp;
use crate::identity::join::{self, JoinError, JournalOptions};
use crate::identity::{Ticket, TicketError};
use crate::model::{Incarnation, Machine};
use crate::wire::tls::BUILD_TIME;

/// Longest wait for a gateway's first answer, or for sessions to be there.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(20);
/// Joins at a time: the gateway admits 200 a second.
const JOINS: usize = 16;
const TICKET_TTL_S: u64 = 24 * 3600;

/// Why there is no gateway with nodes.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// Nowhere to write.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// A program was not started, or cannot be looked at.
    #[error("cannot run {program}", program = program.display())]
    Run {
        /// Which.
        program: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A program ended by itself.
    #[error("{0} ended by itself; its log: {1}")]
    Ended(&'static str, String),
    /// It did not come up.
    #[error("{what} was not there after {} s", PATIENCE.as_secs())]
    Slow {
        /// What was waited for.
        what: &'static str,
    },
    /// The gateway did not answer.
    #[error(transparent)]
    Gateway(#[from] ClientError),
    /// The gateway answered something else than what was asked.
    #[error("the gateway's answer was of another kind")]
    Answer,
    /// A node could not join.
    #[error("a node could not join")]
    Join(#[from] JoinError),
    /// The gateway's ticket cannot be read.
    #[error("the gateway's ticket")]
    Ticket(#[from] TicketError),
    /// A file of the lab.
    #[error("cannot use a file of the bench")]
    File(#[from] std::io::Error),
}

/// The directory of the gateway that has store and worker.
const FIRST: &str = "gateway";
/// Ports below the range from which the kernel takes clients' ports: a gateway that starts again must find its own free.
const PORTS: std::ops::Range<u16> = 20_000..32_000;
const PORT_TRIES: u32 = 100;

/// The gateway, and the directory of everything.
pub(super) struct Lab {
    gateway: Process,
    heartbeat: &'static str,
    port: u16,
    exe: PathBuf,
    // Last: the processes in it end first.
    place: Place,
}

impl Lab {
    /// Starts a gateway that asks for heartbeats this often.
    pub(super) async fn start(state: &Path, heartbeat: &'static str) -> Result<Self, LabError> {
        let place = Place::make(state)?;
        let exe = std::env::current_exe()?;
        let port = free_port()?;
        let gateway = gateway(&exe, place.path(), heartbeat, port)?;
        let mut lab = Self { gateway, heartbeat, port, exe, place };
        lab.answers().await?;
        Ok(lab)
    }

    async fn answers(&mut self) -> Result<(), LabError> {
        let until = Instant::now() + PATIENCE;
        while self.ask(&Request::Stats).await.is_err() {
            if self.gateway.has_ended() {
                return Err(LabError::Ended("the gateway", self.log("gateway.log")));
            }
            if Instant::now() > until {
                return Err(LabError::Slow { what: "the gateway" });
            }
            sleep(POLL).await;
        }
        Ok(())
    }

    /// Kills the gateway and starts it again.
    pub(super) async fn restart(&mut self) -> Result<(), LabError> {
        self.gateway.end();
        self.gateway = gateway(&self.exe, self.place.path(), self.heartbeat, self.port)?;
        self.answers().await
    }

    /// Starts one more gateway over the same store and worker; `name` is its directory and its log.
    pub(super) async fn beside(&self, name: &str) -> Result<Process, LabError> {
        let first = self.at(FIRST);
        let mut command = command(&self.exe, &self.at(name), self.heartbeat, free_port()?);
        command.arg("--store").arg(&first).arg("--worker").arg(first.join("worker"));
        let log = format!("{name}.log");
        let mut gateway = start(&mut command, &self.at(&log))?;
        let until = Instant::now() + PATIENCE;
        while Client::connect(&self.at(name)).await.is_err() {
            if gateway.has_ended() {
                return Err(LabError::Ended("a gateway beside it", self.log(&log)));
            }
            if Instant::now() > until {
                return Err(LabError::Slow { what: "a gateway beside it" });
            }
            sleep(POLL).await;
        }
        Ok(gateway)
    }

    /// The gateway's process.
    pub(super) fn gateway(&self) -> u32 {
        self.gateway.id()
    }

    /// This very program.
    pub(super) fn exe(&self) -> &Path {
        &self.exe
    }

    /// A name in its directory.
    pub(super) fn at(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    /// The end of a log.
    pub(super) fn log(&self, name: &str) -> String {
        let text = std::fs::read_to_string(self.at(name)).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" | ")
    }

    /// Starts a program whose log is `name`.
    pub(super) fn run(&self, command: &mut Command, name: &str) -> Result<Process, LabError> {
        start(command, &self.at(name))
    }

    /// Asks the gateway once.
    pub(super) async fn ask(&self, request: &Request) -> Result<Response, ClientError> {
        Client::connect(&self.at(FIRST)).await?.call(request).await
    }

    /// Puts a command into its node's queue.
    pub(super) async fn enqueue(&self, draft: Draft) -> Result<(), ClientError> {
        Operator::connect(&self.at(FIRST), self.desk()).await?.enqueue(draft).await.map(drop)
    }

    fn desk(&self) -> Desk {
        Desk::at(&self.at(FIRST).join("worker"))
    }

    /// Joins so many nodes; their state directories are `folder`/0, `folder`/1, and so on.
    pub(super) async fn join(&self, folder: &str, nodes: usize, wal_bytes: u64) -> Result<(), LabError> {
        let uses = u32::try_from(nodes).unwrap_or(u32::MAX);
        let ticket = self.desk().ticket(TicketTerms::new(uses, TICKET_TTL_S, "bench")).await?;
        let folder = self.at(folder);
        std::fs::create_dir(&folder)?;
        let joins = (0..nodes).map(|index| join_one(folder.join(index.to_string()), &ticket, wal_bytes));
        futures_util::stream::iter(joins).buffer_unordered(JOINS).try_collect::<()>().await
    }

    /// Sessions that the gateway has now.
    pub(super) async fn count_sessions(&self) -> Result<u64, LabError> {
        match self.ask(&Request::Stats).await? {
            Response::Stats(stats) => Ok(stats.sessions),
            _ => Err(LabError::Answer),
        }
    }

    /// Returns once there are so many sessions.
    pub(super) async fn sessions(&self, wanted: usize) -> Result<(), LabError> {
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
        let until = Instant::now() + PATIENCE;
        loop {
            if self.count_sessions().await? == wanted {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(LabError::Slow { what: "a session of every node" });
            }
            sleep(POLL).await;
        }
    }
}

fn gateway(exe: &Path, place: &Path, heartbeat: &str, port: u16) -> Result<Process, LabError> {
    start(&mut command(exe, &place.join(FIRST), heartbeat, port), &place.join("gateway.log"))
}

fn command(exe: &Path, state: &Path, heartbeat: &str, port: u16) -> Command {
    let mut command = Command::new(exe);
    command
        .args(["gateway", "--until-stdin-ends", "--log-level", "warn", "--heartbeat-interval", heartbeat])
        .args(["--listen", &format!("127.0.0.1:{port}")])
        .arg("--state")
        .arg(state);
    command
}

fn free_port() -> std::io::Result<u16> {
    let mut rng = StdRng::from_os_rng();
    let mut last = std::io::Error::from(std::io::ErrorKind::AddrInUse);
    for _ in 0..PORT_TRIES {
        let port = rng.random_range(PORTS);
        match std::net::TcpListener::bind(("127.0.0.1", port)) {
            Ok(_) => return Ok(port),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn start(command: &mut Command, log: &Path) -> Result<Process, LabError> {
    let program = PathBuf::from(command.get_program());
    let log = std::fs::File::options().append(true).create(true).open(log)?;
    command.stdout(Stdio::from(log.try_clone()?)).stderr(Stdio::from(log));
    Process::start(command).map_err(|source| LabError::Run { program, source })
}

async fn join_one(state: PathBuf, ticket: &str, wal_bytes: u64) -> Result<(), LabError> {
    let mut rng = StdRng::from_os_rng();
    let options = join::Options {
        machine: Machine::default(),
        state,
        ticket: Ticket::parse(ticket, BUILD_TIME)?,
        patience: Some(PATIENCE),
        journal: JournalOptions {
            incarnation: Incarnation::random(&mut rng),
            boot_id: clock::boot_id()?,
            wal_bytes,
        },
        facts: BTreeMap::new(),
        connect: std::sync::Arc::new(Tcp),
        rng,
    };
    join::join(options, |_| ()).await?;
    Ok(())
}
