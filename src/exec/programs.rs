//! The socket for programs: who starts one so that it outlives this daemon, and who finds it again.
//!
//! What every hand promises: nothing starts before its begun record is durable, a record that exists starts nothing,
//! and how a program ended stands in its outcome record before anybody is told of the end.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};

use futures_util::future::BoxFuture;

pub use super::cancel::Cancelled;
pub use super::mark::Marked;
pub use super::supervise::job::Job;
pub use super::supervised::{StartError, Supervisors};
use crate::journal::begun::{Record, Supervisor};
use crate::journal::{Locked, OpenError};
use crate::model::{BootId, CommandId, JournalId, Outcome};

/// Whoever runs programs for daemons that come and go.
pub trait Programs: Send + Sync + Debug {
    /// Ends every program that was started in this state directory and has no supervisor any more. Called while the journal is locked, so that no living daemon owns them, and before recovery. Blocks.
    ///
    /// # Errors
    /// The begun records cannot be read.
    fn settle(&self, locked: &Locked, state: &Path, boot_id: &BootId) -> Result<Settled, OpenError>;

    /// Ends what the program of one record started, its supervisor being gone. Blocks.
    fn end(&self, begun: &Record);

    /// Whether a supervisor is there, in this boot.
    fn lives(&self, supervisor: &Supervisor, boot_id: &BootId) -> bool;

    /// Starts a program; there when its begun record is durable. Dropping the future leaves it open whether it starts.
    fn start(&self, job: Job) -> BoxFuture<'static, Result<Box<dyn Program>, StartError>>;

    /// The program of a record that somebody started before.
    fn find(&self, state: PathBuf, begun: Record, boot_id: &BootId) -> Box<dyn Program>;

    /// Processes that were started under these journals, however they got away from their parents. Blocks.
    ///
    /// # Errors
    /// Nobody knows whether there are any.
    fn running(&self, journals: &BTreeSet<JournalId>) -> io::Result<Vec<Marked>>;
}

/// What a look at the programs of earlier daemons did.
#[derive(Debug, Default)]
pub struct Settled {
    /// Processes that were ended.
    pub ended: usize,
    /// Executions whose supervisor lived: what they started was spared.
    pub spared: BTreeSet<(CommandId, u32)>,
}

/// A program that was started. Dropping it ends nothing.
pub trait Program: Send {
    /// Waits for its end and says how it ended. A cancellation is passed on; the outcome says what came of it.
    fn ended<'a>(self: Box<Self>, cancelled: &'a mut Cancelled) -> BoxFuture<'a, Outcome>;
}
