//! The writer's core: the only connection, and the one place where a transaction begins and ends.
//!
//! Jobs run one after the other within one transaction, each in a savepoint of its own, and are answered after its
//! commit: two deliveries of one id see each other, and a job that fails takes no neighbour with it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use tokio::sync::{oneshot, watch};

use super::Memory;
use super::error::{WriteError, failed_sync, full_disk, is_failed_sync, system_errno};
use super::events::{EventCounts, PendingEvents};
use super::faults::{At, Faults};
use super::lazy::Lazy;
use super::lock::Lock;
use super::rescue::{self, Failed, Identity};
use super::room::Room;
use super::trouble::{Source, Trouble, Troubles};
use super::{rows, settings};
use crate::clock::{Clock, SystemClock};
use crate::failpoint;
use crate::model::{BootId, CommandId, Incarnation, JournalId, Reason, ServerTime};
use crate::write_fault::{self, Point};

/// What the handles read without asking the writer.
#[derive(Debug)]
pub(super) struct Shared {
    /// As of the last commit.
    pub(super) named: Mutex<Arc<Named>>,
    /// Events as of the last commit.
    pub(super) pending: watch::Sender<PendingEvents>,
    /// Commands whose result is owed or to come, as of the last commit.
    pub(super) owed: AtomicU64,
    /// The number of the last line for audit.log, as of the last commit.
    pub(super) audited: watch::Sender<u64>,
    pub(super) last_epoch: AtomicU64,
    /// Commits that wrote something: what group commit saves is seen here.
    pub(super) commits: AtomicU64,
    /// Why nothing more is written; absent while all is well.
    pub(super) failed: watch::Sender<Option<Failed>>,
    pub(super) troubles: Troubles,
    pub(super) room: Room,
}

impl Shared {
    pub(super) fn named(&self) -> Arc<Named> {
        Arc::clone(&self.named.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What a commit has made true.
    fn publish(&self, counters: &Counters) {
        *self.named.lock().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&counters.named);
        self.owed.store(counters.owed, Ordering::Relaxed);
        let now = counters.events.pending();
        self.pending.send_if_modified(|pending| std::mem::replace(pending, now) != now);
        let last = counters.audited;
        self.audited.send_if_modified(|known| std::mem::replace(known, last) != last);
    }
}

/// What a journal is called, and since when it knows of everything; an old copy is called anew.
#[derive(Debug)]
pub(super) struct Named {
    pub(super) id: JournalId,
    pub(super) birth: Option<ServerTime>,
    /// The highest event number that can have been sent under this id.
    pub(super) sent: Arc<AtomicU64>,
}

impl Named {
    pub(super) fn new(id: JournalId, birth: Option<ServerTime>, sent: u64) -> Arc<Self> {
        Arc::new(Self { id, birth, sent: Arc::new(sent.into()) })
    }

    /// The same journal, with a birth.
    pub(super) fn born(&self, birth: ServerTime) -> Arc<Self> {
        Arc::new(Self { id: self.id.clone(), birth: Some(birth), sent: Arc::clone(&self.sent) })
    }
}

/// What is kept in memory of the tables, and must be put back when the tables are rolled back.
#[derive(Debug, Clone)]
pub(super) struct Counters {
    pub(super) named: Arc<Named>,
    pub(super) events: EventCounts,
    /// Commands whose result is owed or to come.
    pub(super) owed: u64,
    /// The number of the last line for audit.log. It rises while the process lives, though the table may be empty.
    pub(super) audited: u64,
}

/// The connection and what belongs to it.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) conn: Connection,
    pub(super) state: PathBuf,
    pub(super) db: PathBuf,
    pub(super) incarnation: Incarnation,
    pub(super) boot_id: BootId,
    pub(super) shared: Arc<Shared>,
    pub(super) counters: Counters,
    /// The number of the last result; a number that is rolled back leaves a gap, which harms nobody.
    pub(super) last_seq: u64,
    /// Whether there is an audit.log to write lines for.
    pub(super) audits: bool,
    /// Commands that an older incarnation left and no delivery has taken up.
    pub(super) left: Vec<CommandId>,
    pub(super) faults: Faults,
    /// What this batch's look for a hindrance has found; absent before it.
    pub(super) looked: Option<Option<Reason>>,
    /// A batch was not written: what is lazy waits for a commit of its own, or for one that shows that the disk takes
    /// writes again. Else it would make a batch that only reads into one that fails.
    pub(super) lazy_alone: bool,
    /// Stamps events.
    pub(super) clock: Arc<dyn Clock>,
    /// The file that is open; absent where it is not the kernel's.
    pub(super) open: Option<Identity>,
    // Last: the lock goes when the connection is closed.
    pub(super) _lock: Lock,
}

/// A piece of work for the writer.
pub(super) trait Job: Send {
    /// Does it, within the batch's transaction.
    fn run(&mut self, core: &mut Core) -> rusqlite::Result<()>;
    /// Answers, after the commit or after the failure.
    fn answer(self: Box<Self>, written: Result<(), WriteError>);
}

/// A job of a batch, and what became of it so far.
type Tried = (Box<dyn Job>, Result<(), WriteError>);

/// A job made of a closure and the one who waits for its value.
pub(super) struct Call<T, F> {
    work: Option<F>,
    value: Option<T>,
    reply: oneshot::Sender<Result<T, WriteError>>,
}

impl<T, F: FnOnce(&mut Core) -> rusqlite::Result<T>> Call<T, F> {
    pub(super) fn new(work: F, reply: oneshot::Sender<Result<T, WriteError>>) -> Self {
        Self { work: Some(work), value: None, reply }
    }
}

impl<T: Send, F: FnOnce(&mut Core) -> rusqlite::Result<T> + Send> Job for Call<T, F> {
    fn run(&mut self, core: &mut Core) -> rusqlite::Result<()> {
        if let Some(work) = self.work.take() {
            self.value = Some(work(core)?);
        }
        Ok(())
    }

    fn answer(self: Box<Self>, written: Result<(), WriteError>) {
        let answer = match (written, self.value) {
            (Ok(()), Some(value)) => Ok(value),
            (Err(error), _) => Err(error),
            (Ok(()), None) => Err(WriteError::writer_gone()),
        };
        // Who does not wait any longer has what was written all the same.
        let _ = self.reply.send(answer);
    }
}

impl Core {
    fn poisoned(&self) -> Option<Failed> {
        *self.shared.failed.borrow()
    }

    /// Nothing more is written by this process, its last checkpoint included.
    fn poison(&self, failed: Failed) {
        tracing::error!("{}", failed.detail());
        if let Err(error) = self.conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true) {
            tracing::warn!(%error, "the last checkpoint cannot be prevented");
        }
        self.shared
            .troubles
            .set(Source::Journal, Trouble { why: Reason::IoError, detail: failed.detail().into() });
        self.shared.failed.send_replace(Some(failed));
    }

    /// Ends the journal when its file was taken away, and puts it back for the next process.
    fn look_for_file(&self) {
        if self.open.is_none_or(|open| !rescue::displaced(&self.db, open)) {
            return;
        }
        let rescued = rescue::put_back(&self.conn, &self.db, SystemClock.wall_ms() / 1000);
        if let Err(error) = &rescued {
            tracing::error!(error = format!("{error:#}"), "journal.db is gone and cannot be put back");
        }
        self.poison(Failed::Displaced { rescued: rescued.is_ok() });
    }

    /// What the journal has in use, bytes: pages that are free again are used before the file grows.
    pub(super) fn bytes(&self) -> rusqlite::Result<u64> {
        let number = |sql| self.conn.prepare_cached(sql)?.query_row([], |row| rows::unsigned(row, 0));
        let pages = number("PRAGMA page_count")?.saturating_sub(number("PRAGMA freelist_count")?);
        let log = super::files::wal_of(&self.db).metadata().map_or(0, |meta| meta.len());
        Ok(pages.saturating_mul(settings::PAGE_BYTES).saturating_add(log))
    }

    /// Why no command is to be taken on, if there is a why. Looked at once a batch: what a batch may write is far below
    /// the room that must be left, and the look is two statements and two calls of the kernel.
    pub(super) fn hindrance(&mut self) -> rusqlite::Result<Option<Reason>> {
        if let Some(found) = self.looked {
            return Ok(found);
        }
        let found = self.look_for_hindrance()?;
        self.looked = Some(found);
        Ok(found)
    }

    fn look_for_hindrance(&self) -> rusqlite::Result<Option<Reason>> {
        let room = self.shared.room.look(self.bytes()?);
        if let Some(trouble) = &room {
            self.shared.troubles.set(Source::Room, trouble.clone());
        }
        let files = || self.shared.troubles.of(Source::Files);
        // What cannot be written down for the operator is not begun.
        let audit = || self.shared.troubles.of(Source::Audit);
        Ok(room.or_else(files).or_else(audit).map(|trouble| trouble.why))
    }

    /// Runs `jobs` and writes `lazy` in one transaction, and answers. Gives back what of `lazy` is still to be
    /// written.
    pub(super) fn run_batch(&mut self, jobs: Vec<Box<dyn Job>>, lazy: Lazy) -> Lazy {
        self.look_for_file();
        if let Some(failed) = self.poisoned() {
            jobs.into_iter().for_each(|job| job.answer(Err(WriteError::ended(failed))));
            return Lazy::default();
        }
        let before = self.counters.clone();
        let mut jobs: Vec<Tried> = jobs.into_iter().map(|job| (job, Ok(()))).collect();
        let rides = jobs.is_empty() || !self.lazy_alone;
        let left = match self.transaction(&mut jobs, rides.then_some(&lazy)) {
            Ok(lazy_written) => {
                self.shared.publish(&self.counters);
                if lazy_written && lazy.buries() {
                    failpoint::hit(failpoint::TOMBSTONE);
                }
                if lazy_written { Lazy::default() } else { lazy }
            }
            Err(error) => {
                self.lazy_alone = true;
                self.counters = before;
                self.roll_back();
                let error = self.judge(&error);
                tracing::warn!(why = %error.why, detail = error.detail, "a batch was not written");
                for (_, written) in &mut jobs {
                    *written = Err(error.clone());
                }
                lazy
            }
        };
        jobs.into_iter().for_each(|(job, written)| job.answer(written));
        left
    }

    /// Whether the lazy writes are in the transaction that was committed.
    fn transaction(&mut self, jobs: &mut [Tried], lazy: Option<&Lazy>) -> rusqlite::Result<bool> {
        let changes = self.conn.total_changes();
        self.looked = None;
        self.execute("BEGIN IMMEDIATE")?;
        let lazy_written = match lazy {
            Some(lazy) => self.in_savepoint(|core| lazy.write(core))?.is_ok(),
            None => false,
        };
        for (job, written) in jobs {
            *written = self.in_savepoint(|core| job.run(core))?;
        }
        self.commit()?;
        if self.conn.total_changes() > changes {
            self.shared.commits.fetch_add(1, Ordering::Relaxed);
            self.shared.troubles.clear(Source::Journal);
            self.lazy_alone = false;
        }
        Ok(lazy_written)
    }

    /// One job's share: written whole or not at all. The outer error means that the transaction itself is gone.
    fn in_savepoint(
        &mut self,
        work: impl FnOnce(&mut Self) -> rusqlite::Result<()>,
    ) -> rusqlite::Result<Result<(), WriteError>> {
        let before = self.counters.clone();
        self.execute("SAVEPOINT job")?;
        match self.faults.check(At::Statement).and_then(|()| work(self)) {
            Ok(()) => {
                self.execute("RELEASE job")?;
                Ok(Ok(()))
            }
            // SQLite ends the whole transaction itself for some errors of the disk, a full one among them. Then the
            // neighbours are not written either, and are told so: the disk has as little room for them.
            Err(error) if self.conn.is_autocommit() || is_failed_sync(&error) => Err(error),
            Err(error) => {
                self.counters = before;
                // What failed may have been for want of room.
                self.looked = None;
                self.execute("ROLLBACK TO job")?;
                self.execute("RELEASE job")?;
                let error = self.judge(&error);
                tracing::warn!(why = %error.why, detail = error.detail, "an operation was not written");
                Ok(Err(error))
            }
        }
    }

    fn commit(&mut self) -> rusqlite::Result<()> {
        self.faults.check(At::Commit)?;
        write_fault::check(Point::JournalWrite, &self.db).map_err(|error| full_disk(&error))?;
        write_fault::check(Point::JournalSync, &self.db).map_err(|error| failed_sync(&error))?;
        self.execute("COMMIT")
    }

    fn execute(&self, sql: &str) -> rusqlite::Result<()> {
        self.conn.prepare_cached(sql)?.execute([]).map(|_| ())
    }

    fn roll_back(&self) {
        if !self.conn.is_autocommit()
            && let Err(error) = self.execute("ROLLBACK")
        {
            tracing::warn!(%error, "rolling back failed");
        }
    }

    /// The words for those who wait; a failed sync is the last thing that this process writes.
    fn judge(&self, error: &rusqlite::Error) -> WriteError {
        let judged = WriteError::of(error, system_errno(&self.conn, error));
        // Another error is one of the operation, not of the disk.
        if error.sqlite_error().is_some() {
            let trouble = Trouble { why: judged.why, detail: judged.to_string() };
            self.shared.troubles.set(Source::Journal, trouble);
        }
        if is_failed_sync(error) {
            tracing::error!(%error, "a sync of the journal failed");
            self.poison(Failed::Sync);
        } else if judged.why == Reason::Disk && self.shared.room.release() {
            tracing::warn!("the disk is full: the reserve was given back, for the results that are owed");
        }
        judged
    }

    /// Runs `work` in a transaction of its own.
    pub(super) fn run_one<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> rusqlite::Result<T>,
    ) -> Result<T, WriteError> {
        let before = self.counters.clone();
        let written = self.execute("BEGIN IMMEDIATE").and_then(|()| {
            let value = work(self)?;
            self.commit()?;
            self.shared.publish(&self.counters);
            Ok(value)
        });
        written.map_err(|error| {
            self.counters = before;
            self.roll_back();
            self.judge(&error)
        })
    }

    /// Gives back what only the start needed: the pages of the whole file, which its check has read, and the statements
    /// of recovery. What a session needs of them is made again, within `memory`.
    pub(super) fn forget_the_start(&self, memory: Memory) {
        self.conn.flush_prepared_statement_cache();
        self.conn.set_prepared_statement_cache_capacity(memory.statements);
        // Without spilling, what a transaction has changed is written once, by its commit, as on a host.
        let pages = memory
            .page_kib
            .map_or_else(String::new, |kib| format!("PRAGMA cache_spill = OFF; PRAGMA cache_size = -{kib};"));
        if let Err(error) = self.conn.execute_batch(&format!("{pages} PRAGMA shrink_memory")) {
            tracing::debug!(%error, "the journal's memory is not given back");
        }
    }

    /// The number of the next result.
    pub(super) fn next_seq(&mut self) -> u64 {
        self.last_seq += 1;
        self.last_seq
    }

    /// Before the connection is closed: carries the log into the file, so that a clean stop leaves one file. After a
    /// failed sync nothing is carried anywhere; the next process reads what really reached the disk.
    pub(super) fn end(&self) {
        if self.poisoned().is_some() {
            return;
        }
        if let Err(error) = self.conn.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())) {
            tracing::warn!(%error, "the last checkpoint failed; the log is read at the next start");
        }
    }

    /// Removes tombstones, and their begun records, that signed time has passed.
    pub(super) fn prune(&mut self, signed: ServerTime) -> rusqlite::Result<()> {
        use crate::model::limits::TOMBSTONE_GRACE;
        // Bounded, so that no batch waits behind a mass of them; the rest goes with the next.
        const AT_ONCE: u32 = 256;
        for (id, attempt) in rows::stale_tombstones(&self.conn, signed.minus(TOMBSTONE_GRACE), AT_ONCE)? {
            // The record first: without its row it would be taken for a command of a lost journal.
            match super::begun::remove(&self.state, &id, attempt) {
                Ok(()) => rows::forget(&self.conn, &id)?,
                Err(error) => {
                    tracing::warn!(%id, %error, "a begun record cannot be removed; its tombstone stays")
                }
            }
        }
        Ok(())
    }
}
