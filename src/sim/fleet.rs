//! The agents: each the composition root of `bcd node` in its own state directory, killed by dropping it.
//!
//! One task an agent. It takes blows from a bounded channel, runs the agent in between, and starts it again from the
//! same state directory. A kill drops the agent's future: whatever it was about to do stays undone, and the programs
//! that it had started run on. What befalls the agent's surroundings (surroundings.rs) goes past that task.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{StreamExt as _, TryStreamExt as _};
use rand::Rng as _;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{sleep, timeout};
use tracing::Instrument as _;

use super::agent::{Agent, AgentError};
use super::faults::{Blow, Tally};
use super::history::{Moment, Struck};
use super::surroundings::Felt;
use crate::clock::Clock;
use crate::failpoint::Step;
use crate::failpoint::agent::Killed;
pub use crate::log::chain;
use crate::model::{Exit, NodeId};

/// Blows of one agent that may wait while it is down, 2 s at most; one more is let go, and not counted.
const WAITING: usize = 8;
/// Joins at a time: the gateway admits 200 a second.
const JOINS: usize = 16;
/// A clean stop has 10 s; a little more for a busy machine.
const STOP: Duration = Duration::from_secs(15);
/// An agent that dies at a step, or with its machine by its own command, stays away so long at most, ms.
const AWAY_MS: u64 = 2000;

/// What the agents' tasks write down.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Diary {
    /// What was done to them.
    pub moments: Vec<Moment>,
    /// What should not have happened.
    pub troubles: Vec<String>,
    /// Boots that each machine began, by agent.
    pub boots: Vec<usize>,
    /// Results in each agent's journal that were not acked, after its stop.
    pub owed: Vec<u64>,
}

impl Diary {
    fn trouble(&mut self, agent: usize, trouble: &str) {
        self.troubles.push(format!("agent {agent}: {trouble}"));
    }

    /// Adds what the agents of the next numbers wrote down.
    pub fn append(&mut self, other: Self) {
        self.moments.extend(other.moments);
        self.troubles.extend(other.troubles);
        self.boots.extend(other.boots);
        self.owed.extend(other.owed);
    }
}

/// A daemon that was killed has let go of its files by then.
const COPIED: Duration = Duration::from_millis(300);
/// A copy that ends by itself is started again, as its machine would.
const TWIN_AGAIN: Duration = Duration::from_millis(500);

type Shared = Arc<Mutex<Diary>>;

/// Joined, running agents.
#[derive(Debug)]
pub struct Fleet {
    blows: Vec<mpsc::Sender<(Blow, Duration)>>,
    agents: Vec<Agent>,
    /// One each: whom one channel wakes first is chance.
    stops: Vec<watch::Sender<bool>>,
    lives: JoinSet<()>,
    clock: Arc<dyn Clock>,
    tally: Arc<Tally>,
    diary: Shared,
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
    pub fn start(agents: Vec<Agent>, clock: &Arc<dyn Clock>, tally: &Arc<Tally>) -> Self {
        let mut stops = Vec::with_capacity(agents.len());
        let diary = Shared::default();
        let (mut blows, mut lives) = (Vec::with_capacity(agents.len()), JoinSet::new());
        for agent in &agents {
            let (blow, struck) = mpsc::channel(WAITING);
            let (stop, stopping) = watch::channel(false);
            stops.push(stop);
            blows.push(blow);
            let life = Life {
                rng: agent.stream("life"),
                agent: agent.clone(),
                struck,
                stop: stopping,
                clock: clock.clone(),
                tally: Arc::clone(tally),
                diary: diary.clone(),
                twins: JoinSet::new(),
            };
            lives.spawn(life.run());
        }
        Self { blows, agents, stops, lives, clock: clock.clone(), tally: Arc::clone(tally), diary }
    }

    /// Strikes the nth agent. Resolves when what befell its surroundings is over; a blow to itself is only handed over.
    pub async fn strike(&self, nth: usize, blow: Blow, lasts: Duration) {
        let Some(agent) = self.agents.get(nth) else { return };
        let at_ms = self.clock.wall_ms();
        match agent.surroundings.disturb(blow, lasts).await {
            Felt::NotNow => {}
            Felt::Now => {
                self.tally.add(blow.name());
                note(&self.diary, Moment { at_ms, what: Struck::Agent(agent.index, blow) });
            }
            Felt::Elsewhere => {
                if let Some(blows) = self.blows.get(nth) {
                    // A full channel is an agent that is down all the time, a closed one an agent that ended by
                    // itself, which its diary tells.
                    let _ = blows.try_send((blow, lasts));
                }
            }
        }
    }

    /// What they wrote down so far, but for the boots.
    pub fn diary(&self) -> Diary {
        lock(&self.diary).clone()
    }

    /// Stops all agents cleanly and gives back what they wrote down.
    pub async fn stop(mut self) -> Diary {
        for stop in &self.stops {
            stop.send_replace(true);
        }
        let ended = timeout(STOP, async { while self.lives.join_next().await.is_some() {} }).await;
        let left = self.lives.len();
        self.lives.abort_all();
        let mut diary = std::mem::take(&mut *lock(&self.diary));
        if ended.is_err() {
            diary.troubles.push(format!("{left} agents did not stop within {} s", STOP.as_secs()));
        }
        for agent in &self.agents {
            match (agent.machine.reboots(), agent.owed().await) {
                (Ok(boots), Ok(owed)) => {
                    diary.boots.push(boots);
                    diary.owed.push(owed);
                }
                (Err(error), _) => diary.trouble(agent.index, &format!("its boots cannot be read: {error}")),
                (_, Err(error)) => diary.trouble(agent.index, &format!("its journal: {}", chain(&error))),
            }
        }
        diary
    }
}

fn lock(diary: &Shared) -> std::sync::MutexGuard<'_, Diary> {
    diary.lock().unwrap_or_else(PoisonError::into_inner)
}

fn note_now(diary: &Shared, clock: &dyn Clock, what: Struck) {
    note(diary, Moment { at_ms: clock.wall_ms(), what });
}

/// A copy lives for so long beside the agent that it was made of. Its end is a moment as its making is.
async fn live_beside(twin: Agent, lasts: Duration, diary: Shared, clock: Arc<dyn Clock>) {
    let life = async {
        let mut rng = twin.stream("twin");
        loop {
            let (say_stop, stop) = watch::channel(false);
            match twin.build(&mut rng, say_stop).await {
                Ok(node) => {
                    let span = tracing::info_span!("twin", number = twin.index);
                    let _ = node.run(stop).instrument(span).await;
                }
                Err(error) => tracing::warn!(error = chain(&error), "a twin did not start"),
            }
            sleep(TWIN_AGAIN).await;
        }
    };
    let _: Result<(), _> = timeout(lasts, Box::pin(life)).await;
    twin.remove().await;
    note_now(&diary, &*clock, Struck::Agent(twin.index, Blow::Clone));
}

fn note(diary: &Shared, moment: Moment) {
    tracing::info!(what = ?moment.what, "struck");
    lock(diary).moments.push(moment);
}

struct Life {
    agent: Agent,
    rng: StdRng,
    struck: mpsc::Receiver<(Blow, Duration)>,
    stop: watch::Receiver<bool>,
    clock: Arc<dyn Clock>,
    tally: Arc<Tally>,
    diary: Shared,
    /// Copies of the agent that run beside it.
    twins: JoinSet<()>,
}

enum End {
    Struck(Blow, Duration),
    Stopped,
}

impl Life {
    async fn run(mut self) {
        loop {
            let boots = self.agent.machine.reboots().unwrap_or_default();
            match self.once().await {
                Ok(End::Stopped) => return,
                Ok(End::Struck(blow, lasts)) => {
                    // A copy is made at once, and the agent goes on beside it.
                    sleep(if blow == Blow::Clone { COPIED } else { lasts }).await;
                    // What struck it while it went down to reboot has not undone the reboot.
                    let rebooted = self.agent.machine.reboots().is_ok_and(|now| now > boots);
                    if rebooted && blow != Blow::RebootCommand {
                        self.note(Blow::RebootCommand);
                    }
                    match self.suffer(blow, lasts).await {
                        Ok(false) => {}
                        Ok(true) => self.note(blow),
                        Err(error) => return self.trouble(&format!("{}: {error}", blow.name())),
                    }
                }
                Err(trouble) => return self.trouble(&trouble),
            }
        }
    }

    fn note(&self, blow: Blow) {
        self.tally.add(blow.name());
        note_now(&self.diary, &*self.clock, Struck::Agent(self.agent.index, blow));
    }

    /// What a blow does to the files of an agent that is down. False: it could not be carried out now.
    async fn suffer(&mut self, blow: Blow, lasts: Duration) -> std::io::Result<bool> {
        match blow {
            Blow::Reboot => self.agent.machine.begin_boot()?,
            Blow::JournalLoss => self.agent.lose_journal().await?,
            Blow::Clone => {
                while self.twins.try_join_next().is_some() {}
                if !self.twins.is_empty() {
                    // A second copy would have the first one's name.
                    return Ok(false);
                }
                let twin = self.agent.twin().await?;
                let (diary, clock) = (Arc::clone(&self.diary), Arc::clone(&self.clock));
                self.twins.spawn(live_beside(twin, lasts, diary, clock));
            }
            _ => {}
        }
        Ok(true)
    }

    fn trouble(&self, trouble: &str) {
        lock(&self.diary).trouble(self.agent.index, trouble);
    }

    /// One process's life.
    async fn once(&mut self) -> Result<End, String> {
        let (say_stop, stop) = watch::channel(false);
        let node = self.agent.build(&mut self.rng, say_stop.clone()).await;
        let node = node.map_err(|error| chain(&error))?;
        let away = Duration::from_millis(self.rng.random_range(0..AWAY_MS));
        // A task of its own: aborting it drops the agent wherever it stands.
        let mut running = JoinSet::new();
        let span = tracing::info_span!("agent", number = self.agent.index);
        let armed = self.agent.surroundings.armed();
        let step = armed.clone();
        running.spawn(armed.over(node.run(stop).instrument(span)));
        let asked = async {
            // A sender that is gone asks for the same.
            let _ = self.stop.wait_for(|stop| *stop).await;
            step.disarm();
            say_stop.send_replace(true);
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            biased;
            Some((blow, down)) = self.struck.recv() => {
                running.shutdown().await;
                return Ok(End::Struck(blow, down));
            }
            ended = running.join_next() => ended,
            () = asked => None,
        };
        match ended {
            Some(Ok(Exit::Done)) if *self.stop.borrow() => Ok(End::Stopped),
            Some(Ok(Exit::Done)) if *say_stop.borrow() => Ok(End::Struck(Blow::RebootCommand, away)),
            Some(Ok(exit)) => Err(format!("ended by itself: {}", exit.meaning())),
            Some(Err(error)) => died(error).map(|step| End::Struck(Blow::KillAt(step), away)),
            None => Err("was never started".into()),
        }
    }
}

/// The step at which an agent was to die and did; anything else is a panic of its own.
fn died(error: JoinError) -> Result<Step, String> {
    let text = error.to_string();
    let panic = error.try_into_panic().map_err(|_| text.clone())?;
    match panic.downcast::<Killed>() {
        Ok(killed) => Ok(killed.0),
        Err(_) => Err(format!("panicked: {text}")),
    }
}
