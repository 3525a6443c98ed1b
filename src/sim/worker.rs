//! A share of the agents in a process of its own, which takes orders over the socket that is its standard input: one
//! JSON order a line, one JSON word a line back. When the socket ends, the process does.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedWriteHalf;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::agent::{Agent, Ground, Plan};
use super::faults::{Blow, Counts, Tally};
use super::fleet::{Diary, Fleet, chain};
use super::memory;
use crate::clock::SystemClock;
use crate::model::NodeId;

/// Counts of faults are told this often.
const TELL: Duration = Duration::from_millis(500);

/// What a share is told to do.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Joins the agents of these numbers, so that they can be started.
    Join {
        /// What all agents have in common.
        plan: Plan,
        /// The first one's number.
        first: usize,
        /// How many.
        count: usize,
        /// The gateway's.
        ticket: String,
    },
    /// Starts them.
    Start,
    /// Strikes the nth agent of this share.
    Strike {
        /// Which.
        nth: usize,
        /// How.
        blow: Blow,
        /// For how long, ms.
        lasts_ms: u64,
    },
    /// Asks what was done so far.
    Tell,
    /// Stops them cleanly.
    Stop,
}

/// What a share says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Word {
    /// Joined; their ids in order.
    Joined(Vec<NodeId>),
    /// Not joined; why.
    Failed(String),
    /// Faults so far.
    Counts(Counts),
    /// To [`Order::Tell`]: what was done, and by how much this process has grown since its agents started, KiB.
    Told(Diary, u64),
    /// Stopped.
    Stopped(Diary),
}

/// Carries orders out until they end.
///
/// # Errors
/// Standard input is no socket, or an order cannot be read.
pub async fn work() -> io::Result<()> {
    let socket = std::os::unix::net::UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    socket.set_nonblocking(true)?;
    let (orders, mut words) = UnixStream::from_std(socket)?.into_split();
    let mut orders = BufReader::new(orders).lines();
    let mut worker = Worker::default();
    let mut tell = interval(TELL);
    tell.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            line = orders.next_line() => match line? {
                None => return Ok(()),
                Some(line) => {
                    if let Some(word) = worker.carry_out(serde_json::from_str(&line)?).await {
                        say(&mut words, &word).await?;
                    }
                }
            },
            _ = tell.tick() => say(&mut words, &Word::Counts(worker.tally.counts())).await?,
            Some(_) = worker.strikes.join_next() => {}
        }
    }
}

async fn say(words: &mut OwnedWriteHalf, word: &Word) -> io::Result<()> {
    let mut line = serde_json::to_vec(word)?;
    line.push(b'\n');
    words.write_all(&line).await
}

#[derive(Default)]
struct Worker {
    joined: Vec<Agent>,
    fleet: Option<Arc<Fleet>>,
    before_kib: u64,
    tally: Arc<Tally>,
    strikes: JoinSet<()>,
}

impl Worker {
    async fn carry_out(&mut self, order: Order) -> Option<Word> {
        match order {
            Order::Join { plan, first, count, ticket } => {
                let ground = Arc::new(Ground::real());
                let agents = first..first + count;
                self.joined = agents.map(|index| Agent::new(&plan, &ground, index)).collect();
                Some(match Fleet::join(&self.joined, &ticket).await {
                    Ok(nodes) => Word::Joined(nodes),
                    Err(error) => Word::Failed(chain(&error)),
                })
            }
            Order::Start => {
                self.before_kib = memory::resident_kib();
                let agents = std::mem::take(&mut self.joined);
                self.fleet = Some(Arc::new(Fleet::start(agents, &(Arc::new(SystemClock) as _), &self.tally)));
                None
            }
            Order::Strike { nth, blow, lasts_ms } => {
                let fleet = Arc::clone(self.fleet.as_ref()?);
                let lasts = Duration::from_millis(lasts_ms);
                self.strikes.spawn(async move { fleet.strike(nth, blow, lasts).await });
                None
            }
            Order::Tell => {
                let grown_kib = memory::resident_kib().saturating_sub(self.before_kib);
                Some(Word::Told(self.fleet.as_ref()?.diary(), grown_kib))
            }
            Order::Stop => {
                self.strikes.shutdown().await;
                let fleet = Arc::into_inner(self.fleet.take()?)?;
                Some(Word::Stopped(fleet.stop().await))
            }
        }
    }
}
