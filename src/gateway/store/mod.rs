//! The gateway's store: one SQLite file, one thread that owns its connection, group commit.
//!
//! A job is a function of the connection; jobs run in the order in which they were handed in, up to
//! [`BATCH`] of them in one transaction, each within a savepoint of its own, so that one that fails takes no other
//! with it. A caller hears of its job after the commit: what it then sends is durable. Readers are jobs too.

mod commands;
mod enrol;
mod events;
mod hello;
mod inline;
mod node_events;
mod schema;
mod updates;
mod views;

use std::path::Path;
use std::sync::Arc;

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

pub use commands::{Cancelled, Deliver, NewCommand};
pub use enrol::{JoinRefusal, JoinTry, Joined};
pub use hello::{HelloFacts, HelloRefusal};
pub use inline::Inline;
pub use updates::{Applied, Effects};

/// Jobs in one transaction at most.
const BATCH: usize = 500;
/// Jobs that may wait; a caller that finds the queue full waits.
const QUEUE: usize = 4_096;

/// Why a job was not done.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The job's own statements failed; nothing of it is stored.
    #[error("the gateway's store refused a statement")]
    Statement(#[source] Arc<rusqlite::Error>),
    /// The transaction could not be committed; the gateway must stop, since nothing says what the disk kept.
    #[error("the gateway's store could not commit")]
    Commit(#[source] Arc<rusqlite::Error>),
    /// The writer has ended.
    #[error("the gateway's store is closed")]
    Closed,
}

/// Why a store cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// SQLite says so.
    #[error("cannot open the gateway's store {path}")]
    Sqlite {
        /// The file.
        path: std::path::PathBuf,
        /// SQLite's words.
        source: rusqlite::Error,
    },
    /// The file is of a newer release.
    #[error("the gateway's store {path} has schema {found}, this build knows {known}; use the newer bcd")]
    Newer {
        /// The file.
        path: std::path::PathBuf,
        /// Its schema.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// A durability setting did not hold.
    #[error("the gateway's store {path} did not take {setting}")]
    Setting {
        /// The file.
        path: std::path::PathBuf,
        /// Which.
        setting: &'static str,
    },
    /// The file or its thread could not be made.
    #[error("cannot make the gateway's store {path}")]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

type Report = Box<dyn FnOnce(Result<(), StoreError>) + Send>;
type Job = Box<dyn FnOnce(&Connection) -> Report + Send>;

/// How the writer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// On a thread of its own, which ends when the last handle is dropped.
    Thread,
    /// Within each call, a transaction a job: for virtual time, where a wait for a thread would pass for idleness.
    Inline,
}

/// A handle to the writer.
#[derive(Debug, Clone)]
pub struct Store(Writer);

#[derive(Debug, Clone)]
enum Writer {
    Thread(mpsc::Sender<Job>),
    Inline(Inline),
}

impl Store {
    /// Opens or makes the store. Blocks.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path, mode: Mode) -> Result<Self, OpenError> {
        let connection = schema::open(path)?;
        if mode == Mode::Inline {
            return Ok(Self(Writer::Inline(Inline::over(connection))));
        }
        let (jobs, queue) = mpsc::channel(QUEUE);
        std::thread::Builder::new()
            .name("gateway-store".into())
            .spawn(move || write_jobs(&connection, queue))
            .map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        Ok(Self(Writer::Thread(jobs)))
    }

    /// Runs a job and waits for its commit. Dropping the future does not undo the job.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce(&Connection) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let boxed: Job = Box::new(move |db| {
            let result = within_savepoint(db, job);
            Box::new(move |commit| {
                let result = match (result, commit) {
                    (_, Err(error)) => Err(error),
                    (Err(error), Ok(())) => Err(StoreError::Statement(Arc::new(error))),
                    (Ok(value), Ok(())) => Ok(value),
                };
                let _ = reply.send(result);
            })
        });
        match &self.0 {
            Writer::Thread(jobs) => jobs.send(boxed).await.map_err(|_| StoreError::Closed)?,
            Writer::Inline(writer) => writer.run(boxed).await,
        }
        answer.await.map_err(|_| StoreError::Closed)?
    }

    /// Holds the store's write lock for a while, as a process would that hangs in its transaction.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn stop(&self, time: std::time::Duration) -> Result<(), StoreError> {
        if let Writer::Inline(writer) = &self.0 {
            writer.hold(time);
            return self.run(|_| Ok(())).await;
        }
        self.run(move |_| {
            std::thread::sleep(time);
            Ok(())
        })
        .await
    }

    /// Resolves when the writer has ended by itself: a commit failed.
    pub async fn failed(&self) {
        match &self.0 {
            Writer::Thread(jobs) => jobs.closed().await,
            Writer::Inline(writer) => writer.closed().await,
        }
    }

    /// What breaks it in a simulation; absent where a thread writes.
    pub fn inline(&self) -> Option<Inline> {
        match &self.0 {
            Writer::Thread(_) => None,
            Writer::Inline(writer) => Some(writer.clone()),
        }
    }
}

fn within_savepoint<T>(
    db: &Connection,
    job: impl FnOnce(&Connection) -> rusqlite::Result<T>,
) -> rusqlite::Result<T> {
    db.prepare_cached("SAVEPOINT job")?.execute([])?;
    let result = job(db);
    if result.is_err() {
        db.prepare_cached("ROLLBACK TO job")?.execute([])?;
    }
    db.prepare_cached("RELEASE job")?.execute([])?;
    result
}

fn write_jobs(db: &Connection, mut queue: mpsc::Receiver<Job>) {
    while let Some(first) = queue.blocking_recv() {
        if !transact(db, first, || queue.try_recv().ok()) {
            return;
        }
    }
}

/// One transaction of this job and of those that wait behind it. False: it could not be committed, and nothing may be
/// written any more.
fn transact(db: &Connection, first: Job, mut waiting: impl FnMut() -> Option<Job>) -> bool {
    let mut reports = Vec::new();
    let mut next = Some(first);
    let begun = db.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([]));
    while let Some(job) = next.take() {
        reports.push(job(db));
        if reports.len() < BATCH {
            next = waiting();
        }
    }
    let committed = begun.and_then(|_| db.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([])));
    let result = committed.map(|_| ()).map_err(|error| StoreError::Commit(Arc::new(error)));
    for report in reports {
        report(result.clone());
    }
    // A failed sync may have dropped pages that a second try would report as written.
    if let Err(error) = &result {
        tracing::error!(?error, "the gateway's store cannot commit; the gateway stops");
    }
    result.is_ok()
}

/// For SQLite, which has no unsigned 64-bit integer.
pub(in crate::gateway) fn int(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Back from [`int`].
pub(in crate::gateway) fn uint(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// A column that only this program writes and that does not read back.
pub(in crate::gateway) fn corrupt(
    column: usize,
    error: impl std::error::Error + Send + Sync + 'static,
) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
}
