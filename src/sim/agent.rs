//! One agent: its files, its chance, its join and its start, through the code of `bcd join` and `bcd node`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinError as TaskError;
use tokio::time::sleep;

use super::cable::{Cable, Cabled, Weather};
use super::surroundings::Surroundings;
use super::{seed, skew};
use crate::blocking;
use crate::clock::{Clock, SystemClock};
use crate::config::Config;
use crate::exec::{Programs, Supervisors};
use crate::host::fake_machine::FakeMachine;
use crate::host::tcp::Tcp;
use crate::identity::join::{self, JoinError, JournalOptions};
use crate::identity::{Ticket, TicketError};
use crate::journal::inspect::{self, InspectError};
use crate::journal::{self, Limits, Memory, OpenError};
use crate::model::{Exit, Incarnation, Machine, NodeId};
use crate::node::{BuildError, Node, Options};
use crate::ports::Connect;
use crate::wire::link::{BadEndpoint, Endpoint};
use crate::wire::tls::BUILD_TIME;
use crate::wire::version::Range;

/// An agent's journal is small: a thousand of them stand in one directory.
const WAL_BYTES: u64 = 256 << 10;
/// Longest trial of a join: the gateway admits 200 a second.
const JOIN: Duration = Duration::from_secs(60);
/// What passes is tried again, as systemd does with a daemon that could not start.
const TRIES: u32 = 600;
const PAUSE: Duration = Duration::from_millis(50);

/// A killed agent's last write may still be under way when it starts again: its journal is then still held, as it
/// would be by a process that the kernel has not buried yet. And a disk may be full.
fn is_passing(error: &BuildError) -> bool {
    matches!(error, BuildError::Journal(OpenError::Held { .. })) || error.exit() == Exit::CannotWrite
}

/// The journal's database and its log.
const JOURNAL: [&str; 2] = ["journal.db", "journal.db-wal"];

/// What the agents of a run have in common.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Plan {
    /// Their state directories stand here, by number.
    pub homes: PathBuf,
    /// Fixes their chance.
    pub seed: u64,
    /// Of a hundred so many are older builds.
    pub skew: u8,
    /// host:port of the gateways, instead of those that the ticket names; each agent begins with another one.
    pub gateways: Vec<String>,
    /// Their status sockets stand here, by number; absent: they have none.
    pub run: Option<PathBuf>,
}

/// An agent that is not running.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its number.
    pub index: usize,
    /// Whose boot it runs in.
    pub machine: FakeMachine,
    /// What its lives have in common.
    pub surroundings: Surroundings,
    plan: Plan,
    means: Means,
    ground: Arc<Ground>,
    state: PathBuf,
}

/// What an agent has of its machine. Its programs outlive it.
#[derive(Debug, Clone)]
pub struct Means {
    /// Its way to the gateways, through its cable.
    pub connect: Arc<dyn Connect>,
    /// Who runs its programs.
    pub programs: Arc<dyn Programs>,
    /// How its journal's writer runs.
    pub journal: journal::Mode,
}

/// What agents stand on.
pub struct Ground {
    /// The machine's clock, or one that stands for it.
    pub clock: Arc<dyn Clock>,
    /// What bytes take to and from each.
    pub climate: Weather,
    /// What the agent of this number has.
    pub means: Box<dyn Fn(usize, &Cable) -> Means + Send + Sync>,
}

impl std::fmt::Debug for Ground {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ground").field("climate", &self.climate).finish_non_exhaustive()
    }
}

impl Ground {
    /// Sockets, processes, threads and real time.
    pub fn real() -> Self {
        let means = |_, cable: &Cable| Means {
            connect: Arc::new(Cabled { connect: Arc::new(Tcp), cable: cable.clone() }),
            programs: Arc::new(Supervisors::of_this_program()),
            journal: journal::Mode::Pool,
        };
        Self { clock: Arc::new(SystemClock), climate: Weather::default(), means: Box::new(means) }
    }
}

/// Why an agent cannot join or start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The kernel does not say which boot this is.
    #[error("cannot read the boot id")]
    BootId(#[source] std::io::Error),
    /// The gateway's ticket cannot be read.
    #[error("the gateway's ticket")]
    Ticket(#[from] TicketError),
    /// The gateway that is to be dialed has another form.
    #[error("the gateway's address")]
    Endpoint(#[source] BadEndpoint),
    /// It was refused, or nobody answered.
    #[error("join")]
    Join(#[from] JoinError),
    /// It cannot start.
    #[error("start")]
    Build(#[from] BuildError),
    /// Its journal cannot be read.
    #[error("read")]
    Read(#[from] InspectError),
    /// Its task died.
    #[error("the task of an agent")]
    Task(#[from] TaskError),
}

impl Agent {
    /// The agent of this number.
    pub fn new(plan: &Plan, ground: &Arc<Ground>, index: usize) -> Self {
        let number = u64::try_from(index).unwrap_or(u64::MAX);
        let chance = |part| seed::stream(plan.seed, part, number).next_u64();
        let state = plan.homes.join(index.to_string());
        let cable = Cable::new(chance("cable"), ground.climate);
        let boots = plan.homes.join(format!("{index}.boots"));
        Self {
            index,
            machine: FakeMachine::new(boots).with_seed(chance("boots")),
            means: (ground.means)(index, &cable),
            surroundings: Surroundings::new(state.clone(), Arc::clone(&ground.clock), cable),
            ground: Arc::clone(ground),
            plan: plan.clone(),
            state,
        }
    }

    fn endpoints(&self) -> Result<Vec<Endpoint>, AgentError> {
        let named: Result<Vec<Endpoint>, _> = self.plan.gateways.iter().map(|name| name.parse()).collect();
        let mut endpoints = named.map_err(AgentError::Endpoint)?;
        let first = self.index % endpoints.len().max(1);
        endpoints.rotate_left(first);
        Ok(endpoints)
    }

    /// The chance of its life, or of its join.
    pub fn stream(&self, part: &str) -> StdRng {
        seed::stream(self.plan.seed, part, u64::try_from(self.index).unwrap_or(u64::MAX))
    }

    /// Joins it.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn join(&self, ticket: &str) -> Result<NodeId, AgentError> {
        let mut rng = self.stream("join");
        let incarnation = Incarnation::random(&mut rng);
        let boot_id = self.machine.boot_id().map_err(AgentError::BootId)?;
        let mut ticket = Ticket::parse(ticket, BUILD_TIME)?;
        if !self.plan.gateways.is_empty() {
            ticket.endpoints = self.endpoints()?;
        }
        let options = join::Options {
            state: self.state.clone(),
            ticket,
            patience: Some(JOIN),
            journal: JournalOptions { incarnation, boot_id, wal_bytes: WAL_BYTES },
            facts: BTreeMap::new(),
            machine: Machine::default(),
            connect: Arc::clone(&self.means.connect),
            rng,
        };
        Ok(join::join(options, |_| ()).await?.node_id)
    }

    /// Starts it, as a new process would: recovered and not dialed yet.
    ///
    /// # Errors
    /// See [`AgentError`].
    pub async fn build(&self, rng: &mut StdRng, stop: watch::Sender<bool>) -> Result<Node, AgentError> {
        let boot_id = self.machine.boot_id().map_err(AgentError::BootId)?;
        let mut config = Config::defaults();
        config.state = self.state.clone();
        config.endpoints = self.endpoints()?;
        let old = skew::is_old(self.index, self.plan.skew);
        if old {
            config.denied = Arc::new(BTreeSet::from([skew::LACKS.name().to_owned()]));
        }
        let options = Options {
            run_dir: self.plan.run.as_ref().map(|run| run.join(self.index.to_string())),
            wal_bytes: WAL_BYTES,
            limits: Limits::NONE,
            audit: None,
            protocol: if old { skew::older() } else { Range::OWN },
            connect: Arc::clone(&self.means.connect),
            programs: Arc::clone(&self.means.programs),
            journal: self.means.journal,
            memory: Memory::ONE_OF_MANY,
            ..Options::new(
                &config,
                self.surroundings.clock(),
                StdRng::from_rng(rng),
                boot_id,
                Arc::new(self.machine.port(stop)),
            )
        };
        for _ in 0..TRIES {
            let once = options.clone();
            match blocking::run(move || Node::build(once)).await? {
                Err(error) if is_passing(&error) => sleep(PAUSE).await,
                built => return Ok(built?),
            }
        }
        let last = blocking::run(move || Node::build(options)).await?;
        Ok(last?)
    }
    /// Takes its journal away while it is down. Programs and their records stay.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub async fn lose_journal(&self) -> io::Result<()> {
        let state = self.state.clone();
        let removed = blocking::run(move || {
            for file in JOURNAL {
                match std::fs::remove_file(state.join(file)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            Ok(())
        });
        removed.await.map_err(io::Error::other)?
    }
    /// Results in its journal that were not acked. It must not run. What an earlier daemon accepted, or began and may
    /// run twice, is owed to nobody: it holds nothing, and waits for a redelivery or for signed time to pass its end.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn owed(&self) -> Result<u64, AgentError> {
        let state = self.state.clone();
        let snapshot = blocking::run(move || inspect::read(&state)).await??;
        Ok(snapshot.counts.done)
    }

    /// A copy of its state directory on another machine, as a restored image is. It must not run meanwhile.
    ///
    /// # Errors
    /// A file cannot be copied.
    pub async fn twin(&self) -> io::Result<Self> {
        let homes = self.plan.homes.clone();
        let number = u64::try_from(self.index).unwrap_or(u64::MAX);
        let mut chance = seed::stream(self.plan.seed, "twin", number);
        let cable = Cable::new(chance.next_u64(), self.ground.climate);
        let machine = FakeMachine::new(homes.join(format!("{}.twin.boots", self.index)));
        let machine = machine.with_seed(chance.next_u64());
        let state = homes.join(format!("{}.twin", self.index));
        let twin = Self {
            index: self.index,
            machine,
            means: (self.ground.means)(self.index, &cable),
            surroundings: Surroundings::new(state.clone(), Arc::clone(&self.ground.clock), cable),
            ground: Arc::clone(&self.ground),
            plan: Plan { run: None, ..self.plan.clone() },
            state: state.clone(),
        };
        let (from, boots) = (self.state.clone(), twin.machine.clone());
        let copied = blocking::run(move || {
            copy_tree(&from, &state)?;
            boots.begin_boot()
        });
        copied.await.map_err(io::Error::other)??;
        Ok(twin)
    }

    /// Takes its files away for good. It must not run.
    pub async fn remove(&self) {
        let state = self.state.clone();
        // What is left lies in the run's directory, which is removed as a whole.
        let _ = blocking::run(move || std::fs::remove_dir_all(state)).await;
    }
}

/// Copies a state directory: directories and files, nothing else is in one.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().mode(0o700).create(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let copy = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &copy)?;
        } else {
            std::fs::copy(entry.path(), &copy)?;
        }
    }
    Ok(())
}
