//! A reference gateway and joined nodes, each in a directory of the bench's place.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::time::{Instant, sleep};

use super::proc::Process;
use super::{Place, PlaceError};
use crate::clock;
use crate::gateway::control::{Client, ClientError, Request, Response};
use crate::host::tcp::Tcp;
use crate::identity::join::{self, JoinError, JournalOptions};
use crate::identity::{Ticket, TicketError};
use crate::model::Incarnation;
use crate::wire::tls::BUILD_TIME;

/// Longest wait for a gateway's first answer, or for sessions to be there.
const PATIENCE: Duration = Duration::from_secs(120);
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

/// The gateway, and the directory of everything.
pub(super) struct Lab {
    gateway: Process,
    exe: PathBuf,
    // Last: the processes in it end first.
    place: Place,
}

impl Lab {
    /// Starts a gateway that asks for heartbeats this often.
    pub(super) async fn start(state: &Path, heartbeat: &str) -> Result<Self, LabError> {
        let place = Place::make(state)?;
        let exe = std::env::current_exe()?;
        let mut command = Command::new(&exe);
        command
            .args([
                "gateway",
                "--listen",
                "127.0.0.1:0",
                "--until-stdin-ends",
                "--heartbeat-interval",
                heartbeat,
            ])
            .arg("--state")
            .arg(place.path().join("gateway"));
        let gateway = start(&mut command, &place.path().join("gateway.log"))?;
        let mut lab = Self { gateway, exe, place };
        let until = Instant::now() + PATIENCE;
        while lab.ask(&Request::Stats).await.is_err() {
            if lab.gateway.has_ended() {
                return Err(LabError::Ended("the gateway", lab.log("gateway.log")));
            }
            if Instant::now() > until {
                return Err(LabError::Slow { what: "the gateway" });
            }
            sleep(POLL).await;
        }
        Ok(lab)
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

    async fn ask(&self, request: &Request) -> Result<Response, ClientError> {
        Client::connect(&self.at("gateway")).await?.call(request).await
    }

    /// Joins so many nodes; their state directories are `folder`/0, `folder`/1, and so on.
    pub(super) async fn join(&self, folder: &str, nodes: usize, wal_bytes: u64) -> Result<(), LabError> {
        let uses = u32::try_from(nodes).unwrap_or(u32::MAX);
        let request = Request::Ticket { uses, ttl_s: TICKET_TTL_S, site: "bench".into() };
        let Response::Ticket(ticket) = self.ask(&request).await? else { return Err(LabError::Answer) };
        let folder = self.at(folder);
        std::fs::create_dir(&folder)?;
        let joins = (0..nodes).map(|index| join_one(folder.join(index.to_string()), &ticket, wal_bytes));
        futures_util::stream::iter(joins).buffer_unordered(JOINS).try_collect::<()>().await
    }

    /// Returns once there are so many sessions.
    pub(super) async fn sessions(&self, wanted: usize) -> Result<(), LabError> {
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
        let until = Instant::now() + PATIENCE;
        loop {
            let Response::Stats(stats) = self.ask(&Request::Stats).await? else {
                return Err(LabError::Answer);
            };
            if stats.sessions == wanted {
                return Ok(());
            }
            if Instant::now() > until {
                return Err(LabError::Slow { what: "a session of every node" });
            }
            sleep(POLL).await;
        }
    }
}

fn start(command: &mut Command, log: &Path) -> Result<Process, LabError> {
    let program = PathBuf::from(command.get_program());
    let log = std::fs::File::create(log)?;
    command.stdout(Stdio::from(log.try_clone()?)).stderr(Stdio::from(log));
    Process::start(command).map_err(|source| LabError::Run { program, source })
}

async fn join_one(state: PathBuf, ticket: &str, wal_bytes: u64) -> Result<(), LabError> {
    let mut rng = StdRng::from_os_rng();
    let options = join::Options {
        state,
        ticket: Ticket::parse(ticket, BUILD_TIME)?,
        patience: Some(PATIENCE),
        journal: JournalOptions {
            incarnation: Incarnation::random(&mut rng),
            boot_id: clock::boot_id()?,
            wal_bytes,
        },
        facts: std::collections::BTreeMap::new(),
        connect: std::sync::Arc::new(Tcp),
        rng,
    };
    join::join(options, |_| ()).await?;
    Ok(())
}
