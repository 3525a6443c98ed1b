//! The agents of a run: in this process, or spread over child processes where there are more than one may have
//! descriptors for.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Mutex, mpsc};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::agent::{Agent, AgentError, Ground, Plan};
use super::faults::{Blow, Tally};
use super::fleet::{Diary, Fleet};
use super::memory;
use super::worker::{Order, Word};
use crate::clock::Clock;
use crate::model::NodeId;

/// A share of a thousand agents joins at 200 a second, and stops within half a minute.
const ANSWER: Duration = Duration::from_secs(180);

/// Why the agents cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum SpreadError {
    /// One of them.
    #[error("an agent could not join")]
    Join(#[source] AgentError),
    /// One of another process.
    #[error("an agent of process {number} could not join: {why}")]
    OtherJoin {
        /// Which process.
        number: usize,
        /// Why.
        why: String,
    },
    /// A process was not started.
    #[error("cannot start process {number} for agents ({exe})")]
    Start {
        /// Which.
        number: usize,
        /// The program.
        exe: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A process ended, hangs, or says something else.
    #[error("process {number} of the agents did not answer; its log is {log}")]
    Lost {
        /// Which.
        number: usize,
        /// What it wrote.
        log: PathBuf,
    },
}

/// All of them, joined; started by [`Agents::start`].
pub struct Agents {
    shares: Vec<Share>,
    /// Agents of one share; the last one may have fewer.
    each: usize,
}

enum Share {
    /// Joined here, not started.
    Joined(Vec<Agent>),
    Here {
        fleet: Fleet,
        before_kib: u64,
    },
    Child(Child),
}

impl Agents {
    /// Joins so many, at most `each` in one process.
    ///
    /// # Errors
    /// See [`SpreadError`].
    pub async fn join(
        plan: &Plan,
        count: usize,
        each: usize,
        start: ChildStart<'_>,
        ticket: &str,
    ) -> Result<(Self, Vec<NodeId>), SpreadError> {
        let each = each.max(1);
        if count <= each {
            let agents: Vec<Agent> = (0..count).map(|index| Agent::new(plan, start.ground, index)).collect();
            let nodes = Fleet::join(&agents, ticket).await.map_err(SpreadError::Join)?;
            return Ok((Self { shares: vec![Share::Joined(agents)], each }, nodes));
        }
        let firsts = (0..count).step_by(each).enumerate();
        let joining = firsts.map(|(number, first)| {
            let share = first..count.min(first + each);
            Child::join(number, plan, share, &start, ticket)
        });
        let (children, nodes): (Vec<Share>, Vec<Vec<NodeId>>) =
            try_join_all(joining).await?.into_iter().unzip();
        Ok((Self { shares: children, each }, nodes.concat()))
    }

    /// Starts them.
    ///
    /// # Errors
    /// A process is gone.
    pub async fn start(&mut self, clock: &Arc<dyn Clock>, tally: &Arc<Tally>) -> Result<(), SpreadError> {
        for share in &mut self.shares {
            match share {
                Share::Joined(agents) => {
                    let before_kib = memory::resident_kib();
                    let fleet = Fleet::start(std::mem::take(agents), clock, tally);
                    *share = Share::Here { fleet, before_kib };
                }
                Share::Here { .. } => {}
                Share::Child(child) => child.order(&Order::Start).await?,
            }
        }
        Ok(())
    }

    /// Strikes one.
    pub async fn strike(&self, agent: usize, blow: Blow, lasts: Duration) {
        let nth = agent % self.each;
        match self.shares.get(agent / self.each) {
            Some(Share::Here { fleet, .. }) => fleet.strike(nth, blow, lasts).await,
            Some(Share::Child(child)) => {
                let lasts_ms = u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX);
                // A process that is gone is told of when it is asked something.
                let _ = child.order(&Order::Strike { nth, blow, lasts_ms }).await;
            }
            Some(Share::Joined(_)) | None => {}
        }
    }

    /// What was done so far, and by how much their processes have grown since their start, KiB.
    ///
    /// # Errors
    /// A process is gone.
    pub async fn told(&self) -> Result<(Diary, u64), SpreadError> {
        let (mut all, mut grown_kib) = (Diary::default(), 0);
        for share in &self.shares {
            match share {
                Share::Joined(_) => {}
                Share::Here { fleet, before_kib } => {
                    all.append(fleet.diary());
                    grown_kib += memory::resident_kib().saturating_sub(*before_kib);
                }
                Share::Child(child) => {
                    let Word::Told(diary, grown) = child.ask(&Order::Tell).await? else {
                        return Err(child.lost());
                    };
                    all.append(diary);
                    grown_kib += grown;
                }
            }
        }
        Ok((all, grown_kib))
    }

    /// Stops all cleanly and gives back what they wrote down.
    ///
    /// # Errors
    /// A process is gone.
    pub async fn stop(self) -> Result<Diary, SpreadError> {
        let mut all = Diary::default();
        for share in self.shares {
            match share {
                Share::Joined(_) => {}
                Share::Here { fleet, .. } => all.append(fleet.stop().await),
                Share::Child(child) => {
                    let Word::Stopped(diary) = child.ask(&Order::Stop).await? else {
                        return Err(child.lost());
                    };
                    all.append(diary);
                }
            }
        }
        Ok(all)
    }
}

/// What a child process is started with.
#[derive(Clone, Copy)]
pub struct ChildStart<'a> {
    /// This program.
    pub exe: &'a Path,
    /// Where logs go.
    pub work: &'a Path,
    /// Of the agents that run here.
    pub ground: &'a Arc<Ground>,
    /// Where faults are counted.
    pub tally: &'a Arc<Tally>,
}

/// A process with a share of the agents.
struct Child {
    number: usize,
    log: PathBuf,
    process: std::process::Child,
    orders: Mutex<OwnedWriteHalf>,
    words: Mutex<mpsc::Receiver<Word>>,
    reader: AbortHandle,
}

impl Child {
    async fn join(
        number: usize,
        plan: &Plan,
        share: std::ops::Range<usize>,
        start: &ChildStart<'_>,
        ticket: &str,
    ) -> Result<(Share, Vec<NodeId>), SpreadError> {
        let failed = |source| SpreadError::Start { number, exe: start.exe.to_owned(), source };
        let child = Self::spawn(number, start).map_err(failed)?;
        let (plan, ticket) = (plan.clone(), ticket.to_owned());
        let order = Order::Join { plan, first: share.start, count: share.len(), ticket };
        match child.ask(&order).await? {
            Word::Joined(nodes) if nodes.len() == share.len() => Ok((Share::Child(child), nodes)),
            Word::Failed(why) => Err(SpreadError::OtherJoin { number, why }),
            _ => Err(child.lost()),
        }
    }

    fn spawn(number: usize, start: &ChildStart<'_>) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let log = start.work.join(format!("agents-{number}.log"));
        let process = Command::new(start.exe)
            .arg("sim-agents")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            // Ctrl-C at the terminal is the simulator's to handle.
            .process_group(0)
            .spawn()?;
        let (words, orders) = UnixStream::from_std(ours)?.into_split();
        let (told, heard) = mpsc::channel(1);
        let reader = tokio::spawn(read(number, words, told, Arc::clone(start.tally))).abort_handle();
        let (orders, words) = (Mutex::new(orders), Mutex::new(heard));
        Ok(Self { number, log, process, orders, words, reader })
    }

    async fn order(&self, order: &Order) -> Result<(), SpreadError> {
        let mut line = serde_json::to_vec(order).map_err(|_| self.lost())?;
        line.push(b'\n');
        self.orders.lock().await.write_all(&line).await.map_err(|_| self.lost())
    }

    async fn ask(&self, order: &Order) -> Result<Word, SpreadError> {
        let mut words = self.words.lock().await;
        self.order(order).await?;
        timeout(ANSWER, words.recv()).await.ok().flatten().ok_or_else(|| self.lost())
    }

    fn lost(&self) -> SpreadError {
        SpreadError::Lost { number: self.number, log: self.log.clone() }
    }
}

/// Counts go to the tally, everything else is an answer.
async fn read(number: usize, words: OwnedReadHalf, told: mpsc::Sender<Word>, tally: Arc<Tally>) {
    let mut lines = BufReader::new(words).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(Word::Counts(counts)) => tally.of_other(number, counts),
            Ok(word) => {
                if told.send(word).await.is_err() {
                    return;
                }
            }
            Err(error) => {
                tracing::error!(number, %error, "a process of the agents says what nobody understands");
                return;
            }
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.reader.abort();
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
