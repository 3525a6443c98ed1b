//! The writer's thread and its queue: takes one job, and whatever else waits, into one commit.
//!
//! It never waits to fill a batch: while a commit syncs, the next batch gathers by itself. Idle for [`REST`], it gives
//! back the memory that makes it fast: most of a node's life is waiting, and a simulation holds thousands of them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use super::core::{Core, Job};
use super::error::WriteError;
use super::lazy::Lazy;
use super::rescue::Failed;

/// Jobs of one commit.
const BATCH: usize = 256;
/// Jobs that may wait: one batch gathers while another syncs. Who finds it full waits.
const WAITING: usize = 256;
/// Longer than the pauses of a node that has commands, shorter than those between heartbeats.
const REST: Duration = Duration::from_secs(5);

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

/// What the thread does next.
enum Next {
    Write(Batch),
    Rest,
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
        self.wake.notify_one();
    }

    /// Adds something lazy.
    pub(super) fn lazily(&self, add: impl FnOnce(&mut Lazy) -> bool) {
        if add(&mut self.state().lazy) {
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

    /// `rested`: nothing was written since the last rest.
    fn next(&self, rested: bool) -> Next {
        let mut state = self.state();
        loop {
            if !state.jobs.is_empty() {
                let count = state.jobs.len().min(BATCH);
                // The permits are dropped here: what has been taken waits no longer.
                let jobs = state.jobs.drain(..count).map(|(job, _permit)| job).collect();
                return Next::Write(Batch { jobs, lazy: std::mem::take(&mut state.lazy), last: false });
            }
            match state.ending {
                Ending::No => {}
                Ending::Close(_) => {
                    let lazy = std::mem::take(&mut state.lazy);
                    return Next::Write(Batch { jobs: Vec::new(), lazy, last: true });
                }
                Ending::Abandoned => {
                    return Next::Write(Batch { jobs: Vec::new(), lazy: Lazy::default(), last: true });
                }
            }
            let (wait, rest) = match (state.lazy.wait(), rested) {
                (None, true) => {
                    state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                (None, false) => (REST, true),
                (Some(lazy), false) => (lazy.min(REST), lazy > REST),
                // The rest was a part of a long wait; acks that came since wait their second.
                (Some(lazy), true) => (if lazy > REST { lazy - REST } else { lazy }, false),
            };
            let (back, waited) = self.wake.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner);
            state = back;
            if waited.timed_out() && state.jobs.is_empty() {
                if rest {
                    return Next::Rest;
                }
                let lazy = std::mem::take(&mut state.lazy);
                return Next::Write(Batch { jobs: Vec::new(), lazy, last: false });
            }
        }
    }
}

struct Thread {
    queue: Arc<Queue>,
    core: Option<Core>,
}

impl Thread {
    fn run(mut self) {
        let mut rested = true;
        while let Some(core) = &mut self.core {
            let batch = match self.queue.next(rested) {
                Next::Write(batch) => batch,
                Next::Rest => {
                    core.rest();
                    rested = true;
                    continue;
                }
            };
            rested = false;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ServerTime;

    fn queue() -> Queue {
        Queue { state: Mutex::default(), wake: Condvar::new(), room: Arc::new(Semaphore::new(WAITING)) }
    }

    #[test]
    fn an_idle_writer_rests_once_and_what_is_lazy_waits_on() {
        let queue = queue();
        queue.lazily(|lazy| lazy.time(Some(ServerTime(1)), None));
        assert!(matches!(queue.next(false), Next::Rest));
        assert!(queue.state().lazy.wait().is_some(), "the time is still to be written");
        queue.abandon();
        assert!(matches!(queue.next(true), Next::Write(Batch { last: true, .. })));
    }

    #[test]
    fn acks_are_written_before_a_rest() {
        let queue = queue();
        queue.lazily(|lazy| lazy.acked(vec![crate::model::CommandId::new("c-1").expect("an id")]));
        assert!(matches!(queue.next(false), Next::Write(Batch { lazy, .. }) if lazy.has_acks()));
    }
}
