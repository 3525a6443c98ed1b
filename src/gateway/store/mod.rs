//! The gateway's store: one SQLite file, one thread that owns its connection, group commit. Other gateways may have
//! the same file open: a transaction takes the file's write lock at its start, so that what it reads is what it
//! writes over.
//!
//! A job is a function of the connection; jobs run in the order in which they were handed in, up to
//! [`BATCH`] of them in one transaction, each within a savepoint of its own, so that one that fails takes no other
//! with it. A caller hears of its job after the commit: what it then sends is durable. Readers are jobs too.

mod commands;
mod duplicates;
mod enrol;
mod events;
mod facts;
mod hello;
mod inline;
mod lease;
mod lies;
mod liveness;
mod node_events;
mod notices;
mod revocations;
mod schema;
mod updates;
mod views;

#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{mpsc, oneshot};

use crate::clock::Clock;

pub use commands::{Cancelled, Deliver, NewCommand};
pub use facts::{VERIFIED, Waiting};
pub use hello::{HelloFacts, HelloRefusal};
pub use inline::Inline;
pub use lease::{Lease, Route, Stray};
pub use notices::{Heard, Notice};
pub use revocations::{Renewing, Standing};
pub use updates::{Applied, Effects};

/// Jobs in one transaction at most.
const BATCH: usize = 500;
/// Jobs that may wait; a caller that finds the queue full waits.
const QUEUE: usize = 4_096;
/// Another process's transaction is waited for so long, which is longer than a gateway keeps its lease without the
/// store: whoever waits for a job then learns that it was not done.
const OTHERS_TURN: Duration = Duration::from_secs(15);
/// Between two tries to begin. SQLite's own waits grow to 100 ms.
const TRY_AGAIN: Duration = Duration::from_micros(500);
/// After a commit, where other processes share the file: its lock has no queue, and whoever commits and begins at
/// once would keep the others out.
const YIELD: Duration = Duration::from_millis(2);

/// Why a job was not done.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The job's own statements failed; nothing of it is stored.
    #[error("the gateway's store refused a statement")]
    Statement(#[source] Arc<rusqlite::Error>),
    /// The transaction could not be committed; the gateway must stop, since nothing says what the disk kept.
    #[error("the gateway's store could not commit")]
    Commit(#[source] Arc<rusqlite::Error>),
    /// Another process held the file; nothing is stored.
    #[error("another process has held the gateway's store for {} s", OTHERS_TURN.as_secs())]
    Busy,
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
/// Given an error instead of a connection, a job is not done and reports that.
type Job = Box<dyn FnOnce(Result<&Connection, StoreError>) -> Report + Send>;

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
pub struct Store {
    writer: Writer,
    /// Whose handle it is.
    gateway: Arc<str>,
    /// The control plane's clock, for what a job may judge only at the moment it is done.
    clock: Arc<dyn Clock>,
    /// Whether other gateways write to the file, as far as this one knows.
    shared: Arc<AtomicBool>,
}

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
    pub fn open(
        path: &Path,
        mode: Mode,
        gateway: Arc<str>,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, OpenError> {
        let connection = schema::open(path)?;
        let shared = Arc::new(AtomicBool::new(false));
        if mode == Mode::Inline {
            let writer = Writer::Inline(Inline::over(connection));
            return Ok(Self { writer, gateway, clock, shared });
        }
        let (jobs, queue) = mpsc::channel(QUEUE);
        let others = shared.clone();
        std::thread::Builder::new()
            .name("gateway-store".into())
            .spawn(move || write_jobs(&connection, queue, &others))
            .map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        Ok(Self { writer: Writer::Thread(jobs), gateway, clock, shared })
    }

    /// The id of the gateway that this handle is of.
    pub fn gateway(&self) -> &Arc<str> {
        &self.gateway
    }

    /// Whether other gateways write to the file, as far as this one knows.
    pub fn is_shared(&self) -> bool {
        self.shared.load(Ordering::Relaxed)
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
            let done = db.and_then(|db| {
                within_savepoint(db, job).map_err(|error| StoreError::Statement(Arc::new(error)))
            });
            Box::new(move |commit: Result<(), StoreError>| {
                let _ = reply.send(commit.and(done));
            })
        });
        match &self.writer {
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
        if let Writer::Inline(writer) = &self.writer {
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
        match &self.writer {
            Writer::Thread(jobs) => jobs.closed().await,
            Writer::Inline(writer) => writer.closed().await,
        }
    }

    /// What breaks it in a simulation; absent where a thread writes.
    pub fn inline(&self) -> Option<Inline> {
        match &self.writer {
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

fn write_jobs(db: &Connection, mut queue: mpsc::Receiver<Job>, shared: &AtomicBool) {
    while let Some(first) = queue.blocking_recv() {
        match transact(db, first, || queue.try_recv().ok()) {
            Ok(()) if shared.load(Ordering::Relaxed) => std::thread::sleep(YIELD),
            Ok(()) | Err(StoreError::Busy) => {}
            Err(_) => return,
        }
    }
}

/// Begins a transaction once no other process is in the middle of one.
fn begin(db: &Connection, patience: Duration) -> Result<(), StoreError> {
    let mut waited = Duration::ZERO;
    loop {
        match db.prepare_cached("BEGIN IMMEDIATE").and_then(|mut begin| begin.execute([])) {
            Ok(_) => return Ok(()),
            Err(error) if error.sqlite_error_code() != Some(ErrorCode::DatabaseBusy) => {
                return Err(StoreError::Commit(Arc::new(error)));
            }
            Err(_) if waited >= patience => return Err(StoreError::Busy),
            Err(_) => {
                std::thread::sleep(TRY_AGAIN);
                waited += TRY_AGAIN;
            }
        }
    }
}

/// One transaction of this job and of those that wait behind it.
///
/// # Errors
/// [`StoreError::Busy`]: another process was in the middle of one for too long, and these jobs were given up. Any other
/// one: nothing may be written any more.
fn transact(db: &Connection, first: Job, mut waiting: impl FnMut() -> Option<Job>) -> Result<(), StoreError> {
    let mut next = Some(first);
    let mut taken = std::iter::from_fn(|| next.take().or_else(&mut waiting)).take(BATCH);
    if let Err(error) = begin(db, OTHERS_TURN) {
        tracing::error!(?error, "the gateway's store cannot begin a transaction; jobs are given up");
        taken.for_each(|job| job(Err(error.clone()))(Ok(())));
        return Err(error);
    }
    let reports: Vec<Report> = taken.by_ref().map(|job| job(Ok(db))).collect();
    let committed = db.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
    let result = committed.map(|_| ()).map_err(|error| StoreError::Commit(Arc::new(error)));
    reports.into_iter().for_each(|report| report(result.clone()));
    // A failed sync may have dropped pages that a second try would report as written.
    if let Err(error) = &result {
        tracing::error!(?error, "the gateway's store cannot commit; the gateway stops");
    }
    result
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
