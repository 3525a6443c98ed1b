//! The node's only memory of what it owes: one SQLite file, one writer thread, one sync for many commands.
//!
//! Submitters hand operations to the writer and wait for their own commit; whatever waits commits together. A
//! [`Durable`] value has one maker, the writer, after its sync: a command's code can only be reached with a
//! `Durable<Running>`, and a result leaves only as `Durable<Done>`.

mod durable;
pub mod record;

use std::path::PathBuf;

pub use durable::Durable;
pub use record::{Accepted, Running};

use crate::admission::Context;
use crate::model::{
    Answer, BootId, Command, CommandId, Done, Incarnation, JournalId, NodeId, Outcome, Reason, ServerTime,
};
use crate::wire::dsse::Verified;

/// How the writer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// On a thread of its own.
    #[default]
    Thread,
    /// Within the caller: the same code without its thread, for virtual time.
    Inline,
}

/// What opening needs.
#[derive(Debug, Clone)]
pub struct Options {
    /// The state directory; the file is `journal.db` in it, begun records are in `begun/`.
    pub state: PathBuf,
    /// Whose journal it must be.
    pub node_id: NodeId,
    /// This process.
    pub incarnation: Incarnation,
    /// This boot.
    pub boot_id: BootId,
    /// Size to which the WAL is grown at open, bytes.
    pub wal_bytes: u64,
    /// Thread or inline.
    pub mode: Mode,
}

/// An open, locked journal in which nothing has been recovered yet: the moment to end leftover programs.
#[derive(Debug)]
pub struct Locked {}

/// Why a journal cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another daemon holds it.
    #[error("another bcd (pid {pid}) holds {path}; stop it first (systemctl stop bcd, or kill {pid})")]
    Held {
        /// The journal.
        path: PathBuf,
        /// The holder.
        pid: u32,
    },
}

/// What stands in a journal beside its commands.
#[derive(Debug, Clone)]
pub struct Facts {
    /// Id of the file.
    pub journal_id: JournalId,
    /// Its birth, when it has one.
    pub birth: Option<ServerTime>,
    /// The server time mark.
    pub mark: Option<ServerTime>,
    /// Signed time.
    pub signed: Option<ServerTime>,
    /// Epoch of the last Welcome applied; 0 for none.
    pub last_epoch: u64,
}

impl Locked {
    /// Makes a new, rowless journal for a join; replaces one that has no rows.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create(_options: &Options, _birth: Option<ServerTime>, _id: JournalId) -> Result<(), OpenError> {
        todo!()
    }

    /// Opens and locks the journal; a missing one is made anew, without a birth. Blocks.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(_options: Options, _new_id: JournalId) -> Result<Self, OpenError> {
        todo!()
    }

    /// What stands in it beside its commands.
    pub fn facts(&self) -> Facts {
        todo!()
    }

    /// Settles every command that an older incarnation left, durably, and starts the writer. Blocks.
    ///
    /// # Errors
    /// A write failed.
    pub fn recover(self, _signed: Option<ServerTime>) -> Result<(Journal, Recovered), WriteError> {
        todo!()
    }
}

/// What recovery did, for the log.
#[derive(Debug, Clone, Default)]
pub struct Recovered {
    /// Commands that became FAILED `interrupted`.
    pub interrupted: Vec<CommandId>,
    /// Commands that wait for a redelivery.
    pub waiting: Vec<CommandId>,
    /// Results not yet acked.
    pub unacked: u64,
}

/// A write that did not happen: nothing was started, nothing was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the journal cannot be written ({why}): {detail}")]
pub struct WriteError {
    /// `disk`, `read-only`, `io-error` or `stopping`.
    pub why: Reason,
    /// SQLite's or the kernel's words.
    pub detail: String,
}

/// What became of a delivery.
#[derive(Debug)]
pub enum Admission {
    /// Answered, nothing written: refused, or known as accepted or running in this process.
    Answered(Answer),
    /// Ended, now or before: its result.
    Ended(Durable<Done>),
    /// Accepted.
    Accepted(Durable<Accepted>),
    /// Left RUNNING by an older incarnation, retry-safe: running again, attempt raised.
    Restarted(Durable<Running>),
}

/// The writer's handle.
#[derive(Debug, Clone)]
pub struct Journal {}

impl Journal {
    /// Id of the file.
    pub fn id(&self) -> JournalId {
        todo!()
    }

    /// Its birth.
    pub fn birth(&self) -> Option<ServerTime> {
        todo!()
    }

    /// Looks up, decides (admission) and writes, as one job of the writer.
    ///
    /// # Errors
    /// Nothing was written; the command is to be refused `busy` with the why.
    pub async fn admit(
        &self,
        _command: Verified<Command>,
        _context: Context,
    ) -> Result<Admission, WriteError> {
        todo!()
    }

    /// Writes RUNNING.
    ///
    /// # Errors
    /// Nothing was written; the command is given back.
    pub async fn start(
        &self,
        _command: Durable<Accepted>,
        _started: Option<ServerTime>,
    ) -> Result<Durable<Running>, (Durable<Accepted>, WriteError)> {
        todo!()
    }

    /// Writes DONE with the outcome.
    ///
    /// # Errors
    /// Nothing was written; the command and its outcome are given back.
    pub async fn finish(
        &self,
        _command: Durable<Running>,
        _outcome: Outcome,
    ) -> Result<Durable<Done>, (Durable<Running>, Outcome, WriteError)> {
        todo!()
    }

    /// Writes DONE for a command that was never started (cancelled).
    ///
    /// # Errors
    /// Nothing was written; the command and its outcome are given back.
    pub async fn finish_accepted(
        &self,
        _command: Durable<Accepted>,
        _outcome: Outcome,
    ) -> Result<Durable<Done>, (Durable<Accepted>, Outcome, WriteError)> {
        todo!()
    }

    /// The result of a done command or tombstone, if there is one of that id.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn result(&self, _id: CommandId) -> Result<Option<Durable<Done>>, WriteError> {
        todo!()
    }

    /// Results were acked: tombstones ride on the next commit, within a second.
    pub fn acked(&self, _ids: Vec<CommandId>) {
        todo!()
    }

    /// The working clock and signed time: they ride on the next commit, at most 60 s late.
    pub fn note_time(&self, _mark: ServerTime, _signed: Option<ServerTime>) {
        todo!()
    }

    /// A Welcome was applied: the epoch and the mark, durable when this returns.
    ///
    /// # Errors
    /// Nothing was written; the session goes on all the same.
    pub async fn welcomed(&self, _epoch: u64, _mark: ServerTime) -> Result<(), WriteError> {
        todo!()
    }

    /// The epoch of the last Welcome.
    pub fn last_epoch(&self) -> u64 {
        todo!()
    }

    /// Unacked results, oldest first, behind `after`, up to `max_bytes` of encoded output (at least one).
    ///
    /// # Errors
    /// The journal cannot be read.
    pub async fn unacked(&self, _after: Option<u64>, _max_bytes: usize) -> Result<Unacked, WriteError> {
        todo!()
    }

    /// Writes what rides lazily, checkpoints and closes. Later calls fail with `stopping`.
    pub async fn close(&self) {
        todo!()
    }
}

/// A page of unacked results.
#[derive(Debug)]
pub struct Unacked {
    /// The results.
    pub results: Vec<Durable<Done>>,
    /// Pass it as `after` for the next page; absent when this was the last one.
    pub next: Option<u64>,
}
