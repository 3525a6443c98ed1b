//! The agents: each the composition root of `bcd node` in its own state directory, killed by dropping it.
//!
//! One task an agent. It takes kills from a bounded channel, runs the agent in between, and starts it again from
//! the same state directory. A kill drops the agent's future: whatever it was about to do stays undone, and the
//! programs that it had started run on until its next start.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use rand::rngs::StdRng;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::Instrument as _;

use super::agent::{Agent, AgentError};
use crate::clock::Clock;
use crate::model::{Exit, NodeId};

/// How an agent's machine fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blow {
    /// The daemon dies.
    Kill,
    /// The machine restarts: the daemon dies, and the next one finds another boot.
    Reboot,
}

/// Kills of one agent that may wait while it is down: the schedule has it down for 2 s at most.
const WAITING_KILLS: usize = 8;
/// Joins at a time: the gateway admits 200 a second.
const JOINS: usize = 16;
/// A clean stop has 10 s; a little more for a busy machine.
const STOP: Duration = Duration::from_secs(15);

/// What the agents' tasks write down.
#[derive(Debug, Default)]
pub struct Diary {
    /// (agent, wall ms) of each start after a kill.
    pub restarts: Vec<(usize, i64)>,
    /// What should not have happened.
    pub troubles: Vec<String>,
}

/// Joined, running agents.
#[derive(Debug)]
pub struct Fleet {
    kills: Vec<mpsc::Sender<(Blow, Duration)>>,
    stop: watch::Sender<bool>,
    lives: JoinSet<()>,
    diary: Arc<Mutex<Diary>>,
}

impl Fleet {
    /// Joins agents with one ticket; their node ids in the agents' order.
    ///
    /// # Errors
    /// The first join that failed.
    pub async fn join(agents: &[Agent], ticket: &str) -> Result<Vec<NodeId>, AgentError> {
        let joins = agents.iter().map(|agent| agent.join(ticket));
        futures_util::stream::iter(joins).buffered(JOINS).try_collect().await
    }

    /// Starts joined agents.
    pub fn start(agents: Vec<Agent>, clock: &Arc<dyn Clock>) -> Self {
        let (stop, stopping) = watch::channel(false);
        let diary = Arc::new(Mutex::new(Diary::default()));
        let (mut kills, mut lives) = (Vec::with_capacity(agents.len()), JoinSet::new());
        for agent in agents {
            let (kill, killed) = mpsc::channel(WAITING_KILLS);
            kills.push(kill);
            let life = Life {
                rng: agent.stream("life"),
                agent,
                killed,
                stop: stopping.clone(),
                diary: diary.clone(),
                clock: clock.clone(),
            };
            lives.spawn(life.run());
        }
        Self { kills, stop, lives, diary }
    }

    /// Strikes an agent; it stays away for `down`.
    pub async fn strike(&self, agent: usize, blow: Blow, down: Duration) {
        if let Some(kill) = self.kills.get(agent) {
            // A closed channel is an agent that ended by itself, which its diary tells.
            let _ = kill.send((blow, down)).await;
        }
    }

    /// Stops all agents cleanly and gives back what they wrote down.
    pub async fn stop(mut self) -> Diary {
        self.stop.send_replace(true);
        let ended = timeout(STOP, async { while self.lives.join_next().await.is_some() {} }).await;
        let left = self.lives.len();
        self.lives.abort_all();
        let mut diary =
            std::mem::take(&mut *self.diary.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        if ended.is_err() {
            diary.troubles.push(format!("{left} agents did not stop within {} s", STOP.as_secs()));
        }
        diary
    }
}

struct Life {
    agent: Agent,
    rng: StdRng,
    killed: mpsc::Receiver<(Blow, Duration)>,
    stop: watch::Receiver<bool>,
    diary: Arc<Mutex<Diary>>,
    clock: Arc<dyn Clock>,
}

enum End {
    Killed(Blow, Duration),
    /// It rebooted its machine itself, as a command asked.
    Rebooted,
    Stopped,
}

impl Life {
    async fn run(mut self) {
        loop {
            match self.once().await {
                Ok(End::Stopped) => return,
                Ok(End::Killed(blow, down)) => {
                    sleep(down).await;
                    if blow == Blow::Reboot
                        && let Err(error) = self.agent.machine.begin_boot()
                    {
                        return self.trouble(&format!("cannot begin a boot: {error}"));
                    }
                    let at = self.clock.wall_ms();
                    self.write(|diary, agent| diary.restarts.push((agent, at)));
                }
                Ok(End::Rebooted) => {}
                Err(trouble) => return self.trouble(&trouble),
            }
        }
    }

    fn trouble(&self, trouble: &str) {
        self.write(|diary, agent| diary.troubles.push(format!("agent {agent}: {trouble}")));
    }

    /// One process's life.
    async fn once(&mut self) -> Result<End, String> {
        let (say_stop, stop) = watch::channel(false);
        let node = self.agent.build(&mut self.rng, &self.clock, say_stop.clone()).await;
        let node = node.map_err(|error| chain(&error))?;
        // A task of its own: aborting it drops the agent wherever it stands.
        let mut running = JoinSet::new();
        let span = tracing::info_span!("agent", number = self.agent.index);
        running.spawn(node.run(stop).instrument(span));
        let asked = async {
            // A sender that is gone asks for the same.
            let _ = self.stop.wait_for(|stop| *stop).await;
            say_stop.send_replace(true);
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            biased;
            Some((blow, down)) = self.killed.recv() => {
                running.shutdown().await;
                return Ok(End::Killed(blow, down));
            }
            ended = running.join_next() => ended,
            () = asked => None,
        };
        match ended {
            Some(Ok(Exit::Done)) if *self.stop.borrow() => Ok(End::Stopped),
            Some(Ok(Exit::Done)) if *say_stop.borrow() => Ok(End::Rebooted),
            Some(Ok(exit)) => Err(format!("ended by itself: {}", exit.meaning())),
            Some(Err(error)) => Err(format!("panicked: {error}")),
            None => Err("was never started".into()),
        }
    }

    fn write(&self, entry: impl FnOnce(&mut Diary, usize)) {
        let mut diary = self.diary.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        entry(&mut diary, self.agent.index);
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
