//! The writer's handle: what the session, the executor and the status socket call.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};

use super::check::{self, Check};
use super::core::{Call, Core, Shared};
use super::durable::Durable;
use super::error::WriteError;
use super::events::{self, PendingEvents};
use super::export::{self, Cursor, Page};
use super::inspect::{self, Snapshot};
use super::lazy::Lazy;
use super::record::{Accepted, Reattached, Running};
use super::rescue::Failed;
use super::trouble::{Source, Trouble};
use super::writer::Queue;
use super::{AckOf, Admission, AuditPage, EventPage, Mode, Unacked, Vitals, audit, ops};
use crate::admission::Context;
use crate::failpoint;
use crate::model::{Command, CommandId, Digest, Done, EventType, JournalId, NewEvent, Outcome, ServerTime};
use crate::mutant::{self, Mutant};
use crate::wire::dsse::Verified;

/// The writer's handle. When the last clone is dropped without [`Journal::close`], the writer ends as in a crash: what
/// was answered stands, what was to ride on a later commit is lost.
#[derive(Debug, Clone)]
pub struct Journal {
    shared: Arc<Shared>,
    writer: Arc<Writer>,
}

#[derive(Debug)]
enum Writer {
    Queued(Arc<Queue>),
    /// Absent once closed.
    Inline(Mutex<Option<(Box<Core>, Lazy)>>),
}

impl Drop for Writer {
    fn drop(&mut self) {
        if let Self::Queued(queue) = self {
            queue.abandon();
        }
    }
}

impl Journal {
    pub(super) fn over(core: Core, mode: Mode) -> Result<Self, WriteError> {
        let shared = Arc::clone(&core.shared);
        let writer = match mode {
            Mode::Inline => Writer::Inline(Mutex::new(Some((Box::new(core), Lazy::default())))),
            Mode::Thread => {
                Writer::Queued(Queue::start(core).map_err(|error| WriteError::no_thread(&error))?)
            }
            Mode::Pool => {
                let runtime = Handle::try_current().map_err(|error| WriteError::no_thread(&error))?;
                Writer::Queued(Queue::rest(core, runtime))
            }
        };
        Ok(Self { shared, writer: Arc::new(writer) })
    }

    /// Runs `work` in the writer; its value comes after the commit. Who drops the future does not take the work back.
    pub(super) async fn submit<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Core) -> rusqlite::Result<T> + Send + 'static,
    ) -> Result<T, WriteError> {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Call::new(work, reply));
        match &*self.writer {
            Writer::Queued(queue) => queue.push(job).await,
            Writer::Inline(slot) => {
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                match slot.as_mut() {
                    Some((core, lazy)) => *lazy = core.run_batch(vec![job], std::mem::take(lazy)),
                    None => return Err(WriteError::stopping()),
                }
            }
        }
        answer.await.unwrap_or_else(|_| Err(WriteError::writer_gone()))
    }

    /// Runs `jobs` in one batch, as the thread does with what waits together; on an inline journal.
    #[cfg(test)]
    pub(super) fn run_together(&self, jobs: Vec<Box<dyn super::core::Job>>) {
        if let Writer::Inline(slot) = &*self.writer
            && let Some((core, lazy)) = slot.lock().unwrap_or_else(PoisonError::into_inner).as_mut()
        {
            *lazy = core.run_batch(jobs, std::mem::take(lazy));
        }
    }

    /// Its id. An old copy is given a new one.
    pub fn id(&self) -> JournalId {
        self.shared.named().id.clone()
    }

    /// Its birth; an old copy has none.
    pub fn birth(&self) -> Option<ServerTime> {
        self.shared.named().birth
    }

    /// Looks up, decides (admission) and writes, as one job of the writer. This future, and those that take a command
    /// on, are to be awaited to their end: a command that nobody took up stays as it is until the next start.
    ///
    /// # Errors
    /// Nothing was written; the command is to be refused `busy` with the why.
    pub async fn admit(&self, command: Verified<Command>, context: Context) -> Result<Admission, WriteError> {
        let admitting = self.submit(move |core| ops::admit(core, command, &context)).await?;
        let admission = admitting.after_sync();
        match &admission {
            Admission::Accepted(_) => failpoint::hit(failpoint::ACCEPTED),
            Admission::Restarted(_) => failpoint::hit(failpoint::RUNNING),
            Admission::Ended(_) | Admission::Answered(_) => {}
        }
        Ok(admission)
    }

    /// Writes RUNNING.
    ///
    /// # Errors
    /// Nothing was written; the command is given back.
    pub async fn start(
        &self,
        command: Durable<Accepted>,
        started: Option<ServerTime>,
    ) -> Result<Durable<Running>, (Durable<Accepted>, WriteError)> {
        let id = command.command.command().header.id.clone();
        let attempt = command.attempt.saturating_add(1);
        if mutant::is(Mutant::EffectBeforeSync) {
            let Accepted { command, .. } = command.into_inner();
            return Ok(Durable::after_sync(Running { command, attempt, started }));
        }
        match self.submit(move |core| ops::start(core, &id, attempt, started)).await {
            Ok(()) => {
                failpoint::hit(failpoint::RUNNING);
                let Accepted { command, .. } = command.into_inner();
                Ok(Durable::after_sync(Running { command, attempt, started }))
            }
            Err(error) => Err((command, error)),
        }
    }

    /// Writes DONE with the outcome.
    ///
    /// # Errors
    /// Nothing was written; the command and its outcome are given back.
    pub async fn finish(
        &self,
        command: Durable<Running>,
        outcome: Outcome,
    ) -> Result<Durable<Done>, (Durable<Running>, Outcome, WriteError)> {
        match self.write_done(whose(command.command.command()), outcome).await {
            Ok(done) => Ok(done),
            Err((outcome, error)) => Err((command, outcome, error)),
        }
    }

    /// Writes DONE for a command whose process outlived an older daemon.
    ///
    /// # Errors
    /// Nothing was written; the outcome is given back.
    pub async fn finish_reattached(
        &self,
        command: &Durable<Reattached>,
        outcome: Outcome,
    ) -> Result<Durable<Done>, (Outcome, WriteError)> {
        self.write_done((command.begun.id.clone(), command.begun.body_sha256), outcome).await
    }

    /// Writes DONE for a command that was never started (cancelled).
    ///
    /// # Errors
    /// Nothing was written; the command and its outcome are given back.
    pub async fn finish_accepted(
        &self,
        command: Durable<Accepted>,
        outcome: Outcome,
    ) -> Result<Durable<Done>, (Durable<Accepted>, Outcome, WriteError)> {
        match self.write_done(whose(command.command.command()), outcome).await {
            Ok(done) => Ok(done),
            Err((outcome, error)) => Err((command, outcome, error)),
        }
    }

    async fn write_done(
        &self,
        (id, body_sha256): (CommandId, Digest),
        outcome: Outcome,
    ) -> Result<Durable<Done>, (Outcome, WriteError)> {
        let done = Arc::new(Done { id, body_sha256, outcome });
        let job = Arc::clone(&done);
        let written = self.submit(move |core| ops::finish(core, &job.id, &job.outcome)).await;
        let done = Arc::unwrap_or_clone(done);
        match written {
            Ok(()) => {
                failpoint::hit(failpoint::DONE);
                Ok(Durable::after_sync(done))
            }
            Err(error) => Err((done.outcome, error)),
        }
    }

    /// The result of a done command or tombstone, if there is one of that id.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn result(&self, id: CommandId) -> Result<Option<Durable<Done>>, WriteError> {
        let done = self.submit(move |core| ops::result(core, &id)).await?;
        Ok(done.map(Durable::after_sync))
    }

    /// Ends what an older incarnation left, no redelivery took up, and signed time has passed by now; for the
    /// outbox. To be called now and then, a minute apart.
    ///
    /// # Errors
    /// Nothing was written; the next call finds the same commands.
    pub async fn expire_left(&self, signed: ServerTime) -> Result<Vec<Durable<Done>>, WriteError> {
        // Asked once a minute: an idle journal is left alone.
        if self.vitals().owed == 0 {
            return Ok(Vec::new());
        }
        let ended = self.submit(move |core| ops::expire_left(core, signed)).await?;
        Ok(ended.into_iter().map(Durable::after_sync).collect())
    }

    /// Ends a command that an older incarnation left and no delivery took up, CANCELLED; for the outbox. Of one that has
    /// ended its result, of one that is in flight or not known nothing.
    ///
    /// # Errors
    /// Nothing was written.
    pub async fn cancel_left(
        &self,
        id: CommandId,
        now: Option<ServerTime>,
    ) -> Result<Option<Durable<Done>>, WriteError> {
        let done = self.submit(move |core| ops::cancel_left(core, &id, now)).await?;
        Ok(done.map(Durable::after_sync))
    }

    /// Results were acked: tombstones ride on the next commit, within a second.
    pub fn acked(&self, ids: Vec<CommandId>) {
        self.lazily(|lazy| lazy.acked(ids), true);
    }

    /// The working clock and signed time: they ride on the next commit, at most 60 s late.
    pub fn note_time(&self, mark: ServerTime, signed: Option<ServerTime>) {
        self.lazily(|lazy| lazy.time(Some(mark), signed), false);
    }

    fn lazily(&self, add: impl FnOnce(&mut Lazy) -> bool, soon: bool) {
        match &*self.writer {
            Writer::Queued(queue) => queue.lazily(add, soon),
            Writer::Inline(slot) => {
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some((core, lazy)) = slot.as_mut() {
                    add(lazy);
                    // There is no timer here, so what may not wait a minute is written at once.
                    if soon {
                        *lazy = core.run_batch(Vec::new(), std::mem::take(lazy));
                    }
                }
            }
        }
    }

    /// A Welcome was applied: the epoch and the mark, durable when this returns.
    ///
    /// # Errors
    /// Nothing was written; the session goes on all the same.
    pub async fn welcomed(&self, epoch: u64, mark: ServerTime) -> Result<(), WriteError> {
        self.submit(move |core| ops::welcomed(core, epoch, mark)).await?;
        self.shared.last_epoch.store(epoch, Ordering::Relaxed);
        Ok(())
    }

    /// A signed answer has told the time: the mark is set anew, back too, and is the birth of a journal that has none.
    /// Durable when this returns. What has been noted of the time before is written first, so that it is outdone.
    ///
    /// # Errors
    /// Nothing was written.
    pub async fn answered(&self, time: ServerTime) -> Result<(), WriteError> {
        self.submit(move |core| ops::answered(core, time)).await
    }

    /// The epoch of the last Welcome.
    pub fn last_epoch(&self) -> u64 {
        self.shared.last_epoch.load(Ordering::Relaxed)
    }

    /// Unacked results, oldest first, behind `after`, up to `max_bytes` of encoded output (at least one).
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn unacked(&self, after: Option<u64>, max_bytes: usize) -> Result<Unacked, WriteError> {
        let (page, next) = self.submit(move |core| ops::unacked(core, after, max_bytes)).await?;
        Ok(Unacked { results: page.into_iter().map(Durable::after_sync).collect(), next })
    }

    /// Writes an event that tells of nothing else that is written.
    ///
    /// # Errors
    /// It is not written.
    pub async fn record(&self, event: NewEvent) -> Result<(), WriteError> {
        self.submit(move |core| events::add(core, event)).await
    }

    /// Events that wait for an ack, as of the last commit; marked when that changes.
    pub fn pending_events(&self) -> watch::Receiver<PendingEvents> {
        self.shared.pending.subscribe()
    }

    /// Events behind `after`, oldest first, at most `max` with bodies of `max_bytes` (at least one).
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn events(&self, after: u64, max: usize, max_bytes: usize) -> Result<EventPage, WriteError> {
        let (page, more) = self.submit(move |core| events::read(core, after, max, max_bytes)).await?;
        Ok(EventPage { events: page.into_iter().map(Durable::after_sync).collect(), more })
    }

    /// Events up to this number are on their way: an ack may name it from now on.
    pub fn events_sent(&self, seq: u64) {
        self.shared.named().sent.fetch_max(seq, Ordering::Relaxed);
    }

    /// What an ack of events means here. 0 acks nothing.
    pub fn ack_of(&self, journal: &JournalId, seq: u64) -> AckOf {
        let named = self.shared.named();
        if named.id != *journal {
            AckOf::AnotherJournal
        } else if seq > named.sent.load(Ordering::Relaxed) {
            AckOf::OldCopy
        } else {
            AckOf::Sent
        }
    }

    /// Events of this journal were acked: forgotten with the next commit, within a second.
    pub fn events_acked(&self, journal: JournalId, seq: u64) {
        self.lazily(|lazy| lazy.events_acked(journal, seq), true);
    }

    /// It is an old copy of itself, as an ack of `gave_away` has shown: it takes the id `id`, loses its birth and
    /// numbers its events anew; commands, results and tombstones stay. Durable when this returns.
    ///
    /// # Errors
    /// Nothing was written, and the next Welcome shows it again.
    pub async fn rename(&self, id: JournalId, gave_away: u64) -> Result<(), WriteError> {
        self.submit(move |core| events::rename(core, id, gave_away)).await
    }

    /// What stands in the journal, for people.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn snapshot(&self) -> Result<Snapshot, WriteError> {
        self.submit(|core| inspect::snapshot(&core.conn, &core.db)).await
    }

    /// A page of everything, for people.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn export(&self, cursor: Cursor) -> Result<Page, WriteError> {
        self.submit(move |core| export::page(&core.conn, &core.db, &core.state, &cursor)).await
    }

    /// Whether it is sound.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn check(&self) -> Result<Check, WriteError> {
        self.submit(|core| check::check(&core.conn, &core.db, &core.state)).await
    }

    /// What the conditions are made from, as of the last commit.
    pub fn vitals(&self) -> Vitals {
        Vitals { owed: self.shared.owed.load(Ordering::Relaxed), birth: self.birth() }
    }

    /// Commits so far that wrote something.
    pub fn commits(&self) -> u64 {
        self.shared.commits.load(Ordering::Relaxed)
    }

    /// Returns once the journal takes no more writes, with the why: the process is to exit, and a new one to read what
    /// the disk holds. Until then every call is answered `io-error`. Never returns otherwise.
    pub async fn failed(&self) -> Failed {
        let mut failed: watch::Receiver<Option<Failed>> = self.shared.failed.subscribe();
        match failed.wait_for(Option::is_some).await.map(|failed| *failed) {
            Ok(Some(failed)) => failed,
            _ => std::future::pending().await,
        }
    }

    /// What hinders writes now, one of each why.
    pub fn troubles(&self) -> Vec<Trouble> {
        self.shared.troubles.all()
    }

    /// Returns when trouble has come or gone since the last call. For one caller.
    pub async fn troubles_changed(&self) {
        self.shared.troubles.changed().await;
    }

    /// A file beside the journal could not be written (or, with nothing, was): until one is, what needs one is refused.
    pub fn file_written(&self, trouble: Option<Trouble>) {
        match trouble {
            Some(trouble) => self.shared.troubles.set(Source::Files, trouble),
            None => self.shared.troubles.clear(Source::Files),
        }
    }

    /// The number of the last line for audit.log, as of the last commit; marked when that changes.
    pub fn audit_lines_made(&self) -> watch::Receiver<u64> {
        self.shared.audited.subscribe()
    }

    /// Lines for audit.log behind `after`, as many as one page has.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn audit_lines(&self, after: u64) -> Result<AuditPage, WriteError> {
        self.submit(move |core| audit::page(core, after)).await
    }

    /// Lines up to this number are in audit.log (or, with trouble, cannot be written there: until they are, nothing is
    /// admitted). Forgotten with the next commit, within a second.
    pub fn audited(&self, written: Result<u64, Trouble>) {
        match written {
            Ok(up_to) => {
                self.shared.troubles.clear(Source::Audit);
                self.lazily(|lazy| lazy.audited(up_to), true);
            }
            Err(trouble) => self.shared.troubles.set(Source::Audit, trouble),
        }
    }

    /// Counts the state directory anew. Blocks.
    pub fn count_files(&self) {
        self.shared.room.count();
    }

    /// Looks whether there is room again, and makes the reserve where it is missing. Blocks.
    pub fn make_room(&self) -> Option<Trouble> {
        self.shared.room.reserve().err()
    }

    /// Looks whether the journal's file and its room are there; with `writes`, also whether a write is taken, which
    /// ends what stood against it.
    ///
    /// # Errors
    /// A write was asked for and did not happen.
    pub async fn look(&self, writes: bool) -> Result<(), WriteError> {
        self.submit(move |core| {
            if core.hindrance()?.is_none() {
                core.shared.troubles.clear(Source::Room);
            }
            if writes { ops::rewrite_head(core) } else { Ok(()) }
        })
        .await
    }

    /// Writes what rides lazily, checkpoints and closes; the lock is free when it returns. Later calls fail with
    /// `stopping`.
    pub async fn close(&self) {
        let stopped = self.submit(|core| {
            let body = json!({ "incarnation": core.incarnation.as_str() });
            events::add(core, NewEvent::new(EventType::DaemonStopped, body))
        });
        if let Err(error) = stopped.await {
            tracing::debug!(%error, "the stop is not in the journal");
        }
        match &*self.writer {
            Writer::Queued(queue) => {
                if let Some(closed) = queue.close() {
                    // An error is the thread's end as well.
                    let _ = closed.await;
                }
            }
            Writer::Inline(slot) => {
                let taken = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some((mut core, lazy)) = taken {
                    core.run_batch(Vec::new(), lazy);
                    core.end();
                }
            }
        }
    }
}

fn whose(command: &Command) -> (CommandId, Digest) {
    (command.header.id.clone(), command.body_sha256)
}
