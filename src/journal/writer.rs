//! The writer and its queue: takes one job, and whatever else waits, into one commit.
//!
//! It never waits to fill a batch: while a commit syncs, the next batch gathers by itself. While nothing waits, its
//! thread sleeps here; or, where many journals live in one process, it rests in its queue without a thread and takes one
//! of the runtime's blocking pool for as long as there is something to write.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep_until};

use super::core::{Core, Job};
use super::error::WriteError;
use super::lazy::{Lazy, TIME_WAITS};
use super::rescue::Failed;

/// Jobs of one commit.
const BATCH: usize = 256;
/// Jobs that may wait: one batch gathers while another syncs. Who finds it full waits.
const WAITING: usize = 256;

/// How the writer is asked to end.
#[derive(Debug, Default)]
enum Ending {
    #[default]
    No,
    /// After what waits, lazy writes included.
    Close(Vec<oneshot::Sender<()>>),
    /// Every handle is gone, as in a crash: what waits is answered, nothing lazy is written.
    Abandoned,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<(Box<dyn Job>, OwnedSemaphorePermit)>,
    lazy: Lazy,
    /// What is lazy has waited long enough.
    due: bool,
    ending: Ending,
    ended: bool,
    /// The writer, while it has no thread. It and its queue hold each other; the end of the last handle wakes it, and
    /// with that it leaves.
    resting: Option<Owner>,
    /// When it is woken for what is lazy, while it has no thread.
    timer: Option<Instant>,
}

impl State {
    /// What is to be written now, or the end.
    fn take(&mut self) -> Option<Batch> {
        let due = std::mem::take(&mut self.due);
        if !self.jobs.is_empty() {
            let count = self.jobs.len().min(BATCH);
            // The permits are dropped here: what has been taken waits no longer.
            let jobs = self.jobs.drain(..count).map(|(job, _permit)| job).collect();
            return Some(Batch { jobs, lazy: std::mem::take(&mut self.lazy), last: false });
        }
        let alone = |lazy, last| Some(Batch { jobs: Vec::new(), lazy, last });
        match self.ending {
            Ending::No if due && self.lazy.wait().is_some() => alone(std::mem::take(&mut self.lazy), false),
            Ending::No => None,
            Ending::Close(_) => alone(std::mem::take(&mut self.lazy), true),
            Ending::Abandoned => alone(Lazy::default(), true),
        }
    }
}

/// Where the writer runs.
enum Place {
    /// On a thread of its own, which sleeps here.
    Thread(Condvar),
    /// On this runtime's blocking pool.
    Pool(Handle),
}

/// What stands between the submitters and the writer.
pub(super) struct Queue {
    state: Mutex<State>,
    place: Place,
    room: Arc<Semaphore>,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

struct Batch {
    jobs: Vec<Box<dyn Job>>,
    lazy: Lazy,
    last: bool,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(place: Place) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), place, room: Arc::new(Semaphore::new(WAITING)) })
    }

    /// Starts the thread that owns `core`.
    pub(super) fn start(core: Core) -> std::io::Result<Arc<Self>> {
        let queue = Self::at(Place::Thread(Condvar::new()));
        let owner = Owner { queue: Arc::clone(&queue), core: Some(Box::new(core)) };
        std::thread::Builder::new().name("journal".into()).spawn(move || owner.run())?;
        Ok(queue)
    }

    /// The same without a thread while there is nothing to do.
    pub(super) fn rest(core: Core, runtime: Handle) -> Arc<Self> {
        let queue = Self::at(Place::Pool(runtime));
        queue.state().resting = Some(Owner { queue: Arc::clone(&queue), core: Some(Box::new(core)) });
        queue
    }

    /// Has the writer look at its state anew.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let resting = state.resting.take();
        // A thread that is woken while this one has the lock wakes only to wait for it.
        drop(state);
        match &self.place {
            Place::Thread(sleeper) => sleeper.notify_one(),
            Place::Pool(runtime) => {
                if let Some(owner) = resting {
                    runtime.spawn_blocking(move || owner.run());
                }
            }
        }
    }

    /// Hands over a job; waits for room.
    pub(super) async fn push(&self, job: Box<dyn Job>) {
        let Ok(permit) = Arc::clone(&self.room).acquire_owned().await else {
            return job.answer(Err(WriteError::stopping()));
        };
        let mut state = self.state();
        if state.ended || !matches!(state.ending, Ending::No) {
            drop(state);
            return job.answer(Err(WriteError::stopping()));
        }
        state.jobs.push_back((job, permit));
        self.wake(state);
    }

    /// Adds something lazy; what is not to be written `soon` needs nobody who looks at the timer, where a thread does by
    /// itself.
    pub(super) fn lazily(&self, add: impl FnOnce(&mut Lazy) -> bool, soon: bool) {
        let mut state = self.state();
        let looks_by_itself = !soon && matches!(self.place, Place::Thread(_));
        if add(&mut state.lazy) && !looks_by_itself {
            self.wake(state);
        }
    }

    /// Asks for the end; the receiver hears of it.
    pub(super) fn close(&self) -> Option<oneshot::Receiver<()>> {
        let mut state = self.state();
        if state.ended {
            return None;
        }
        let (done, heard) = oneshot::channel();
        match &mut state.ending {
            Ending::Close(waiting) => waiting.push(done),
            other => *other = Ending::Close(vec![done]),
        }
        self.wake(state);
        Some(heard)
    }

    /// Every handle is gone.
    pub(super) fn abandon(&self) {
        let mut state = self.state();
        if matches!(state.ending, Ending::No) {
            state.ending = Ending::Abandoned;
        }
        self.wake(state);
    }

    /// The next batch, and who is to write it. Waits for one; absent where the writer rests until there is one.
    fn next(self: &Arc<Self>, owner: Owner) -> Option<(Owner, Batch)> {
        let mut state = self.state();
        loop {
            if let Some(batch) = state.take() {
                return Some((owner, batch));
            }
            state = match (&self.place, state.lazy.wait()) {
                (Place::Thread(sleeper), wait) => {
                    let (mut state, waited) = sleeper
                        .wait_timeout(state, wait.unwrap_or(TIME_WAITS))
                        .unwrap_or_else(PoisonError::into_inner);
                    state.due = waited.timed_out();
                    state
                }
                (Place::Pool(runtime), wait) => {
                    if let Some(wait) = wait {
                        self.wake_after(wait, &mut state, runtime);
                    }
                    state.resting = Some(owner);
                    return None;
                }
            };
        }
    }

    /// Wakes the writer for what is lazy, unless it is woken for that before.
    fn wake_after(self: &Arc<Self>, wait: Duration, state: &mut State, runtime: &Handle) {
        let at = Instant::now() + wait;
        if state.timer.is_some_and(|timer| timer <= at) {
            return;
        }
        state.timer = Some(at);
        let queue = Arc::downgrade(self);
        runtime.spawn(async move {
            sleep_until(at).await;
            let Some(queue) = queue.upgrade() else { return };
            let mut state = queue.state();
            // Another time has been set since, which is an earlier one.
            if state.timer == Some(at) {
                state.timer = None;
                state.due = true;
                queue.wake(state);
            }
        });
    }
}

/// Who owns the connection, and writes.
struct Owner {
    queue: Arc<Queue>,
    core: Option<Box<Core>>,
}

impl Owner {
    fn run(self) {
        let queue = Arc::clone(&self.queue);
        let mut turn = queue.next(self);
        while let Some((mut owner, batch)) = turn {
            let Some(core) = &mut owner.core else { return };
            let left = core.run_batch(batch.jobs, batch.lazy);
            if batch.last {
                return core.end();
            }
            queue.state().lazy.put_back(left);
            turn = queue.next(owner);
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Some(core) = &self.core
        {
            core.shared.failed.send_replace(Some(Failed::Writer));
        }
        // The connection and the lock go before anybody hears of the end.
        self.core = None;
        self.queue.room.close();
        let (jobs, ending) = {
            let mut state = self.queue.state();
            state.ended = true;
            (std::mem::take(&mut state.jobs), std::mem::take(&mut state.ending))
        };
        jobs.into_iter().for_each(|(job, _)| job.answer(Err(WriteError::stopping())));
        if let Ending::Close(waiting) = ending {
            for done in waiting {
                let _ = done.send(());
            }
        }
    }
}
