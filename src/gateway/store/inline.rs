//! The store's writer without a thread, and what a simulation does to it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::{Job, StoreError, transact};

/// Its clones are the same.
#[derive(Debug, Clone)]
pub struct Inline(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Absent once it is closed.
    db: Mutex<Option<Connection>>,
    held_until: Mutex<Option<Instant>>,
    closed: watch::Sender<bool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inline {
    pub(super) fn over(db: Connection) -> Self {
        Self(Arc::new(Shared {
            db: Mutex::new(Some(db)),
            held_until: Mutex::default(),
            closed: watch::Sender::new(false),
        }))
    }

    /// Does a job in a transaction of its own. On a closed store it is dropped, which its caller hears as such.
    pub(super) async fn run(&self, job: Job) {
        loop {
            let held = lock(&self.0.held_until).filter(|until| *until > Instant::now());
            let Some(until) = held else { break };
            sleep_until(until).await;
        }
        let result = lock(&self.0.db).as_ref().map_or(Ok(()), |db| transact(db, job, || None));
        if !matches!(result, Ok(()) | Err(StoreError::Busy)) {
            self.close();
        }
    }

    pub(super) async fn closed(&self) {
        let mut closed = self.0.closed.subscribe();
        // The sender lives as long as this handle.
        let _ = closed.wait_for(|closed| *closed).await;
    }

    /// Nothing is written from now on, as by a process that was killed.
    pub fn close(&self) {
        *lock(&self.0.db) = None;
        self.0.closed.send_replace(true);
    }

    /// Every job waits for so long, as for another process that holds the file.
    pub fn hold(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut held = lock(&self.0.held_until);
        *held = (*held).max(Some(until));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Mode, Store, StoreError};
    use super::*;
    use crate::clock::TokioClock;

    async fn count(store: &Store) -> Result<i64, StoreError> {
        store.run(|db| db.query_row("SELECT count(*) FROM nodes", [], |row| row.get(0))).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_is_held_answers_later_and_one_that_is_closed_never_writes_again() {
        let dir = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(TokioClock::starting_at(0));
        let store = Store::open(&dir.path().join("gateway.db"), Mode::Inline, "g-1".into(), clock);
        let store = store.expect("a store");
        let start = Instant::now();
        assert_eq!(count(&store).await.expect("an answer"), 0);
        assert_eq!(start.elapsed(), Duration::ZERO, "no time passes in it");
        let inline = store.inline().expect("an inline writer");
        inline.hold(Duration::from_secs(3));
        assert_eq!(count(&store).await.expect("an answer"), 0);
        assert_eq!(start.elapsed(), Duration::from_secs(3));
        inline.close();
        assert!(matches!(count(&store).await, Err(StoreError::Closed)));
        store.failed().await;
    }
}
