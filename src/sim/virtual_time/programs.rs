//! Programs of a virtual machine: virtual seconds instead of a process. They outlive the daemon that started them, die
//! with the boot, and keep begun and outcome records by the code of the real ones.
//!
//! What a program does is read from the arguments of the load's script (load.rs): one line into the witness file, a
//! sleep and another line, an exit status.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};

use crate::exec::programs::{Cancelled, Job, Marked, Program, Programs, Settled, StartError};
use crate::exec::supervise::imitation::{self, End};
use crate::journal::begun::{Record, Supervisor};
use crate::journal::{BegunError, Ended, Locked, OpenError};
use crate::model::{BootId, CommandId, JournalId, Outcome};

/// A process takes so long to start, or to go, ms.
const MOMENT_MS: std::ops::Range<u64> = 1..6;
/// Between two attempts to write or read an outcome.
const AGAIN: Duration = Duration::from_secs(1);

/// All programs of one machine; its clones are the same.
#[derive(Debug, Clone)]
pub struct VirtualPrograms(Arc<Mutex<Machine>>);

#[derive(Debug)]
struct Machine {
    rng: StdRng,
    last_pid: i32,
    live: BTreeMap<i32, Live>,
}

#[derive(Debug)]
struct Live {
    begun: Record,
    boot_id: BootId,
    cancel: watch::Sender<bool>,
    gone: watch::Receiver<()>,
    task: Option<AbortHandle>,
}

/// What the load asks of a program.
struct Script {
    id: String,
    witness: PathBuf,
    sleep: Duration,
    status: i32,
}

impl Script {
    /// None: not a script of the load.
    fn read(argv: &[String]) -> Option<Self> {
        let [_, _, _, _, id, witness, sleep, status] = argv else { return None };
        Some(Self {
            id: id.clone(),
            witness: witness.into(),
            sleep: Duration::try_from_secs_f32(sleep.parse().ok()?).ok()?,
            status: status.parse().ok()?,
        })
    }

    /// One appending write, as the shell's.
    fn witness(&self, attempt: u32, what: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().append(true).create(true).open(&self.witness)?;
        file.write_all(format!("{} {attempt} {what}\n", self.id).as_bytes())
    }
}

impl VirtualPrograms {
    /// A machine without programs.
    pub fn new(rng: StdRng) -> Self {
        Self(Arc::new(Mutex::new(Machine { rng, last_pid: 1, live: BTreeMap::new() })))
    }

    fn machine(&self) -> MutexGuard<'_, Machine> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn moment(&self) -> Duration {
        Duration::from_millis(self.machine().rng.random_range(MOMENT_MS))
    }

    /// Makes the record and starts the program behind it.
    fn begin(&self, job: Job) -> Result<VirtualProgram, StartError> {
        let pid = {
            let mut machine = self.machine();
            machine.last_pid += 1;
            machine.last_pid
        };
        let supervisor = supervisor(pid, job.boot_id.clone());
        let begun = Record { supervisor: Some(supervisor), ..job.begun.clone() };
        match begun.create(&job.state) {
            Ok(_) => {}
            Err(BegunError::AlreadyExists { .. }) => return Err(StartError::Began),
            Err(error @ BegunError::Io { .. }) => {
                return Err(StartError::Failed { detail: error.to_string(), errno: error.errno() });
            }
        }
        let (cancel, cancelled) = watch::channel(false);
        let (going, gone) = watch::channel(());
        let program = VirtualProgram {
            state: job.state.clone(),
            begun: begun.clone(),
            cancel: Some(cancel.clone()),
            gone: Some(gone.clone()),
        };
        let boot_id = job.boot_id.clone();
        self.machine().live.insert(pid, Live { begun: begun.clone(), boot_id, cancel, gone, task: None });
        let programs = self.clone();
        let task = tokio::spawn(async move {
            programs.carry_out(&job, begun, cancelled).await;
            programs.machine().live.remove(&pid);
            drop(going);
        });
        if let Some(live) = self.machine().live.get_mut(&pid) {
            live.task = Some(task.abort_handle());
        }
        Ok(program)
    }

    /// No program outlives its boot.
    fn settle_in(&self, boot_id: &BootId) -> Settled {
        let ended = self.end_all(|live| live.boot_id != *boot_id);
        let machine = self.machine();
        let spared = machine.live.values().map(|live| (live.begun.id.clone(), live.begun.attempt));
        Settled { ended, spared: spared.collect() }
    }

    /// Ends those that are meant, without an outcome; how many.
    fn end_all(&self, meant: impl Fn(&Live) -> bool) -> usize {
        let mut machine = self.machine();
        let before = machine.live.len();
        machine.live.retain(|_, live| {
            let stays = !meant(live);
            if !stays && let Some(task) = &live.task {
                task.abort();
            }
            stays
        });
        before - machine.live.len()
    }

    async fn carry_out(&self, job: &Job, begun: Record, mut cancelled: watch::Receiver<bool>) {
        sleep(self.moment()).await;
        let from = Instant::now();
        let end = match Script::read(&job.args.argv) {
            Some(script) => self.run(&script, job, begun.attempt, &mut cancelled).await,
            None => End::Exited(127),
        };
        sleep(self.moment()).await;
        let outcome = imitation::outcome(job, &begun, end, from.elapsed());
        let ended = Ended { begun, outcome };
        while let Err(error) = ended.write(&job.state) {
            if error.kind() == io::ErrorKind::NotFound && !job.state.exists() {
                return;
            }
            sleep(AGAIN).await;
        }
    }

    async fn run(
        &self,
        script: &Script,
        job: &Job,
        attempt: u32,
        cancelled: &mut watch::Receiver<bool>,
    ) -> End {
        if let Err(error) = script.witness(attempt, "begin") {
            tracing::error!(%error, "a virtual program cannot leave its line");
        }
        if script.sleep.is_zero() {
            return End::Exited(script.status);
        }
        let limit = imitation::limit(job);
        tokio::select! {
            biased;
            Ok(_) = cancelled.wait_for(|cancelled| *cancelled) => End::Cancelled,
            () = sleep(limit), if limit < script.sleep => End::TimeLimit,
            () = sleep(script.sleep) => {
                if let Err(error) = script.witness(attempt, "end") {
                    tracing::error!(%error, "a virtual program cannot leave its line");
                }
                End::Exited(script.status)
            }
        }
    }
}

/// A pid is never given away twice here, so it stands for its own start time.
fn supervisor(pid: i32, boot_id: BootId) -> Supervisor {
    Supervisor { pid, start: u64::from(pid.unsigned_abs()), boot_id, groups: Vec::new() }
}

impl Programs for VirtualPrograms {
    fn settle(&self, _locked: &Locked, _state: &Path, boot_id: &BootId) -> Result<Settled, OpenError> {
        Ok(self.settle_in(boot_id))
    }

    fn end(&self, begun: &Record) {
        self.end_all(|live| live.begun.id == begun.id && live.begun.attempt == begun.attempt);
    }

    fn lives(&self, supervisor: &Supervisor, boot_id: &BootId) -> bool {
        supervisor.boot_id == *boot_id && self.machine().live.contains_key(&supervisor.pid)
    }

    fn start(&self, job: Job) -> BoxFuture<'static, Result<Box<dyn Program>, StartError>> {
        let programs = self.clone();
        async move {
            let program = programs.begin(job)?;
            // The answer takes a moment: a daemon that dies in it has started a program and does not know.
            sleep(programs.moment()).await;
            Ok(Box::new(program) as Box<dyn Program>)
        }
        .boxed()
    }

    fn find(&self, state: PathBuf, begun: Record, boot_id: &BootId) -> Box<dyn Program> {
        let machine = self.machine();
        let pid = begun.supervisor.as_ref().filter(|supervisor| supervisor.boot_id == *boot_id);
        let live = pid.and_then(|supervisor| machine.live.get(&supervisor.pid));
        let (cancel, gone) = live.map(|live| (live.cancel.clone(), live.gone.clone())).unzip();
        Box::new(VirtualProgram { state, begun, cancel, gone })
    }

    fn running(&self, journals: &BTreeSet<JournalId>) -> io::Result<Vec<Marked>> {
        let machine = self.machine();
        let ours = machine.live.iter().filter(|(_, live)| journals.contains(&live.begun.journal_id));
        let marked = |(pid, live): (&i32, &Live)| {
            let Record { id, attempt, .. } = &live.begun;
            Marked { pid: *pid, command: CommandId::to_string(id), attempt: *attempt }
        };
        Ok(ours.map(marked).collect())
    }
}

/// A program, by its record. Cancel and end are absent when it was gone before it could be watched.
#[derive(Debug)]
struct VirtualProgram {
    state: PathBuf,
    begun: Record,
    cancel: Option<watch::Sender<bool>>,
    gone: Option<watch::Receiver<()>>,
}

impl VirtualProgram {
    async fn outcome(&self) -> Outcome {
        loop {
            match Ended::read(&self.state, &self.begun) {
                Ok(Some(outcome)) => return outcome,
                Ok(None) => return Outcome::interrupted(self.begun.attempt, self.begun.started),
                Err(_) => sleep(AGAIN).await,
            }
        }
    }
}

impl Program for VirtualProgram {
    fn ended<'a>(mut self: Box<Self>, cancelled: &'a mut Cancelled) -> BoxFuture<'a, Outcome> {
        async move {
            if let Some(mut gone) = self.gone.take() {
                // Nothing is ever sent: an error is the end.
                tokio::select! {
                    biased;
                    _ = gone.changed() => {}
                    () = cancelled.requested() => {
                        if let Some(cancel) = &self.cancel {
                            cancel.send_replace(true);
                        }
                        let _ = gone.changed().await;
                    }
                }
            }
            self.outcome().await
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests;
