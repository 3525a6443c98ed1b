//! The writer's thread and its queue: takes one job, and whatever else waits, into one commit.
//!
//! It never waits to fill a batch: while a commit syncs, the next batch gathers by itself.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::core::{Core, Job};
use super::error::WriteError;
use super::lazy::Lazy;
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
    ending: Ending,
    ended: bool,
}

/// What stands between the submitters and the thread.
pub(super) struct Queue {
    state: Mutex<State>,
    wake: Condvar,
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

    /// Starts the thread that owns `core`.
    pub(super) fn start(core: Core) -> std::io::Result<Arc<Self>> {
        let room = Arc::new(Semaphore::new(WAITING));
        let queue = Arc::new(Self { state: Mutex::default(), wake: Condvar::new(), room });
        let thread_queue = Arc::clone(&queue);
        std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || Thread { queue: thread_queue, core: Some(core) }.run())?;
        Ok(queue)
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
        // A thread that is woken while this one has the lock wakes only to wait for it.
        drop(state);
        self.wake.notify_one();
    }

    /// Adds something lazy.
    pub(super) fn lazily(&self, add: impl FnOnce(&mut Lazy) -> bool) {
        let anew = add(&mut self.state().lazy);
        if anew {
            self.wake.notify_one();
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
        self.wake.notify_one();
        Some(heard)
    }

    /// Every handle is gone.
    pub(super) fn abandon(&self) {
        let mut state = self.state();
        if matches!(state.ending, Ending::No) {
            state.ending = Ending::Abandoned;
        }
        self.wake.notify_one();
    }

    fn next(&self) -> Batch {
        let mut state = self.state();
        loop {
            if !state.jobs.is_empty() {
                let count = state.jobs.len().min(BATCH);
                // The permits are dropped here: what has been taken waits no longer.
                let jobs = state.jobs.drain(..count).map(|(job, _permit)| job).collect();
                return Batch { jobs, lazy: std::mem::take(&mut state.lazy), last: false };
            }
            match state.ending {
                Ending::No => {}
                Ending::Close(_) => {
                    return Batch { jobs: Vec::new(), lazy: std::mem::take(&mut state.lazy), last: true };
                }
                Ending::Abandoned => {
                    return Batch { jobs: Vec::new(), lazy: Lazy::default(), last: true };
                }
            }
            state = match state.lazy.wait() {
                None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(wait) => {
                    let (mut state, waited) =
                        self.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner);
                    if waited.timed_out() && state.jobs.is_empty() {
                        let lazy = std::mem::take(&mut state.lazy);
                        return Batch { jobs: Vec::new(), lazy, last: false };
                    }
                    state
                }
            };
        }
    }
}

struct Thread {
    queue: Arc<Queue>,
    core: Option<Core>,
}

impl Thread {
    fn run(mut self) {
        while let Some(core) = &mut self.core {
            let batch = self.queue.next();
            let left = core.run_batch(batch.jobs, batch.lazy);
            if batch.last {
                core.end();
                break;
            }
            self.queue.state().lazy.put_back(left);
        }
    }
}

impl Drop for Thread {
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
