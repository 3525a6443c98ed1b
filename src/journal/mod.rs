//! The node's only memory of what it owes: one SQLite file, one writer thread, one sync for many commands.
//!
//! Submitters hand operations to the writer and wait for their own commit; whatever waits commits together. A
//! [`Durable`] value is made by the writer alone, once its sync is done: no command's code runs without a
//! `Durable<Running>`, and a result leaves only as `Durable<Done>`.

mod audit;
pub mod begun;
pub mod check;
mod core;
mod disk;
mod durable;
pub mod ended;
mod error;
mod events;
pub mod export;
mod faults;
mod files;
mod handle;
pub mod inspect;
mod lazy;
mod lock;
mod open;
mod ops;
pub mod record;
pub mod recovery;
mod rescue;
mod room;
mod rows;
mod schema;
mod settings;
#[cfg(feature = "fakehw")]
mod sync_count;
mod trouble;
mod unfinished;
mod writer;

#[cfg(all(test, feature = "fakehw"))]
mod power_loss;
#[cfg(all(test, feature = "fakehw"))]
mod tests;

use std::path::PathBuf;

pub use audit::AuditPage;
pub use begun::{Begun, BegunError};
pub use durable::Durable;
pub use ended::{Ended, ReserveError, Room as OutcomeRoom};
pub use error::{Cause, Hindrance, OpenError, WriteError};
pub use events::{EventLimits, PendingEvents};
pub use faults::{At, Faults};
pub use handle::Journal;
pub use inspect::{InspectError, Snapshot};
pub use lock::{Lock, claim};
pub use open::Locked;
pub use record::{Accepted, Reattached, Running, State};
pub use recovery::Left;
pub use rescue::Failed;
pub use room::{LEAST_STATE_BYTES, Limits, RESERVE_BYTES};
#[cfg(feature = "fakehw")]
pub use sync_count::SyncCount;
pub use trouble::{Source, Trouble, hindrance, why};
pub use unfinished::Unfinished;

use crate::model::{Answer, BootId, CommandId, Done, Event, Incarnation, JournalId, NodeId, ServerTime};

/// How the writer runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// On a thread of its own.
    #[default]
    Thread,
    /// On a thread of the runtime's blocking pool, while there is something to write: for the journals of many nodes in
    /// one process, whose threads would be most of its threads and much of its memory.
    Pool,
    /// Within the caller: the same code without its thread, for virtual time.
    Inline,
}

/// What a journal keeps in memory when its start is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// Statements that stay prepared; some KiB each.
    pub statements: usize,
    /// Pages of the database, KiB; absent for as many as SQLite keeps by itself.
    pub page_kib: Option<u32>,
}

impl Memory {
    /// A host's: every statement of a command's life and of the lazy writes.
    pub const HOST: Self = Self { statements: 32, page_kib: None };
    /// One node of many in a process: the statements of a command alone.
    pub const ONE_OF_MANY: Self = Self { statements: 10, page_kib: Some(12) };
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
    /// Size to which the WAL is grown at open, bytes. At 4 MiB it holds what gathers between two
    /// checkpoints; small in the simulator.
    pub wal_bytes: u64,
    /// Thread or inline.
    pub mode: Mode,
}

#[cfg(test)]
impl Options {
    /// A journal of node n-1 in boot b-1, opened by incarnation i-1, with a small log.
    pub(crate) fn of_a_test(state: PathBuf, mode: Mode) -> Self {
        Self {
            state,
            node_id: NodeId::new("n-1").expect("an id"),
            incarnation: Incarnation::new("i-1").expect("an id"),
            boot_id: BootId::new("b-1").expect("an id"),
            wal_bytes: 64 << 10,
            mode,
        }
    }
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
    /// The latest session's epoch; 0 before the first.
    pub last_epoch: u64,
}

/// What recovery did, for the log.
#[derive(Debug, Clone, Default)]
pub struct Recovered {
    /// Commands that became FAILED `interrupted`.
    pub interrupted: Vec<CommandId>,
    /// Commands that wait for a redelivery.
    pub waiting: Vec<CommandId>,
    /// Commands that go on under this incarnation: somebody must wait for their ends.
    pub reattached: Vec<Durable<Reattached>>,
    /// Begun records of another node, which are left alone.
    pub foreign: usize,
    /// Results not yet acked.
    pub unacked: u64,
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

/// Of an open journal, for its conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vitals {
    /// Results that are owed or to come.
    pub owed: u64,
    /// Its birth, when it has one.
    pub birth: Option<ServerTime>,
}

/// A page of unacked results.
#[derive(Debug)]
pub struct Unacked {
    /// The results.
    pub results: Vec<Durable<Done>>,
    /// Pass it as `after` for the next page; absent when this was the last one.
    pub next: Option<u64>,
}

/// A page of events.
#[derive(Debug)]
pub struct EventPage {
    /// The events, in their order.
    pub events: Vec<Durable<Event>>,
    /// Whether more stood behind them.
    pub more: bool,
}

/// What an ack of events means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AckOf {
    /// Of this journal, and sent: it may be forgotten.
    Sent,
    /// Of another journal: it forgets nothing.
    AnotherJournal,
    /// Of this journal and above what it can have sent: it is a copy from before that was sent.
    OldCopy,
}
