//! Upkeep: what a node does for its own state, beside the session and the commands. One task.
//!
//! It looks at the journal's file and at the room on the disk, and brings the conditions up to date: every 55 s while
//! all is well, every second while something is not; then it also tries writes again that were refused, and makes the
//! reserve anew. A write that fails elsewhere wakes it. At each Welcome, each change of the identity and every five
//! minutes it copies the server time mark and the trust bundle's version to floors.json. All of it is off the runtime's
//! thread, and nothing here ends a session.
//!
//! A look while all is well is for people, who are told what stands, and for a journal that was taken away; whatever
//! takes a command on looks by itself. It is one hand-over to the journal's thread, since threads that wake each other
//! are most of what an idle node costs.

pub mod audit;
pub mod conditions;
pub mod failed_sync;
pub mod floors;
pub mod hold;
#[cfg(all(test, feature = "fakehw"))]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

pub use audit::{Audit, AuditLog, FILES, Retention};
pub use conditions::{Condition, Conditions};
pub use floors::{Floors, FloorsError};
pub use hold::{Held, Hold};

use crate::blocking;
use crate::identity::{Identity, rejoins};
use crate::journal::{Journal, Trouble};
use crate::session::working_clock::REWIND_ALLOWANCE;
use crate::session::{SessionStatus, WorkingClock};
use crate::state_dir::{StateDir, StateError};
use crate::status::report;
use crate::wire::link::Validity;

/// Between two looks while all is well. The mark of server time rides on them, which else has a commit of its own after
/// 60 s.
const EVERY: Duration = Duration::from_secs(55);
/// Between two looks while something is not: what waits for a disk goes on soon after it is mended.
const SOON: Duration = Duration::from_secs(1);
/// Between two copies of the mark: as far as a lost journal may set it back.
const FLOORS_EVERY: Duration = REWIND_ALLOWANCE;
/// Between two tries to write them.
const FLOORS_AGAIN: Duration = Duration::from_secs(5);
/// Between two counts of the state directory's files: a walk over as many entries as there are tombstones. None is made
/// while the journal has no new event: a command's files come with its steps, each of which writes one, and so does the
/// load that is measured every five minutes.
const COUNT_EVERY: Duration = Duration::from_secs(60);

/// What upkeep is made of.
pub struct Upkeep {
    /// The state directory.
    pub state: PathBuf,
    /// The journal in it.
    pub journal: Journal,
    /// Server time, the mark.
    pub working: WorkingClock,
    /// The session, for its Welcomes.
    pub session: watch::Receiver<SessionStatus>,
    /// The identity in use, for its certificate.
    pub identity: watch::Receiver<Identity>,
    /// What is told of.
    pub conditions: Conditions,
    /// The operator's hold.
    pub hold: Hold,
    /// As read at the start.
    pub floors: Floors,
}

impl Upkeep {
    /// Runs for ever.
    pub async fn run(mut self) {
        let start = Instant::now();
        let (mut next, mut next_count, mut next_floors) = (start, start, start + FLOORS_EVERY);
        let mut counted_at = None;
        let mut epoch = None;
        loop {
            let changed = tokio::select! {
                biased;
                () = sleep_until(next.min(next_floors)) => false,
                () = self.journal.troubles_changed() => false,
                // A renewal, whose answer may have set the mark back, or a newer bundle.
                changed = self.identity.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    true
                }
                changed = self.session.changed() => {
                    if changed.is_err() {
                        std::future::pending::<()>().await;
                    }
                    let live = self.session.borrow_and_update().live.as_ref().map(|live| live.epoch);
                    if std::mem::replace(&mut epoch, live) == live || live.is_none() {
                        // A heartbeat, or a session's end.
                        continue;
                    }
                    true
                }
            };
            let now = Instant::now();
            if changed || now >= next_floors {
                let again = if self.write_floors().await { FLOORS_EVERY } else { FLOORS_AGAIN };
                next_floors = now + again;
            }
            if now >= next {
                let event = Some(self.journal.pending_events().borrow().last);
                let count = now >= next_count && event != counted_at;
                if count {
                    next_count = now + COUNT_EVERY;
                    counted_at = event;
                }
                self.look(count).await;
            }
            let validity = self.identity.borrow().leaf.validity;
            let rejoins = rejoins(&self.state);
            observe(&self.conditions, &self.journal, &self.working, &self.hold, validity, &rejoins);
            let wait = if self.journal.troubles().is_empty() { EVERY } else { SOON };
            next = if now >= next { now + wait } else { next.min(now + wait) };
        }
    }

    async fn look(&self, count: bool) {
        let troubled = !self.journal.troubles().is_empty();
        if count || troubled {
            self.look_at_files(count, troubled).await;
        }
        // What it finds is told of as trouble.
        let _ = self.journal.look(troubled).await;
    }

    async fn look_at_files(&self, count: bool, troubled: bool) {
        let (journal, state) = (self.journal.clone(), self.state.clone());
        let looked = blocking::run(move || {
            if count {
                journal.count_files();
            }
            // No room for the reserve is among what the journal's look finds.
            let _ = journal.make_room();
            troubled.then(|| try_write(&state))
        });
        match looked.await {
            Ok(Some(tried)) => self.journal.file_written(tried.err()),
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "the look at the state directory failed"),
        }
    }

    /// Whether they are on the disk.
    async fn write_floors(&mut self) -> bool {
        self.floors.set_mark(self.working.now());
        self.floors.raise_trust(self.identity.borrow().trust.bundle.version);
        let (floors, state) = (self.floors.clone(), self.state.clone());
        let written = blocking::run(move || floors.write(&state)).await;
        match written {
            Ok(Ok(())) => return true,
            Ok(Err(FloorsError::State(error))) => self.journal.file_written(Some(trouble(&error))),
            Ok(Err(error)) => tracing::error!(%error, "the floors cannot be written"),
            Err(error) => tracing::error!(%error, "writing the floors failed"),
        }
        false
    }
}

/// Whether the state directory takes a file, in the same steps as for any other.
fn try_write(state: &std::path::Path) -> Result<(), Trouble> {
    const NAME: &str = ".writable";
    let tried = StateDir::ensure(state).and_then(|dir| {
        dir.write(NAME, &[b'\n'; 4096])?;
        dir.remove(NAME)
    });
    tried.map_err(|error| trouble(&error))
}

fn trouble(error: &StateError) -> Trouble {
    match error {
        StateError::System { source, .. } | StateError::NotMade { source, .. } => {
            let io = std::io::Error::from_raw_os_error(source.raw_os_error());
            Trouble::of(&io, &error.to_string())
        }
        other => Trouble { why: crate::model::Reason::IoError, detail: other.to_string() },
    }
}

/// Brings the conditions up to date.
pub fn observe(
    conditions: &Conditions,
    journal: &Journal,
    working: &WorkingClock,
    hold: &Hold,
    validity: Validity,
    rejoins: &str,
) {
    let certificate = report::Certificate::at(validity, working.now());
    let troubles = journal.troubles().into_iter().map(|trouble| (trouble.why, trouble.detail));
    let own = report::conditions(journal.vitals(), certificate, rejoins);
    conditions.observe(troubles.chain(own).chain(hold.condition()));
}
