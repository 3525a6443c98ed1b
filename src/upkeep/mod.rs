//! Upkeep: what a node does for its own state, beside the session and the commands. One task.
//!
//! Every few seconds it looks at the journal's file and at the room on the disk, tries writes again that were refused,
//! makes the reserve anew, and brings the conditions up to date; at each Welcome, each change of the identity and every
//! five minutes it copies the server time mark and the trust bundle's version to floors.json. All of it is off the runtime's thread, and nothing here ends a session.

pub mod conditions;
pub mod failed_sync;
pub mod floors;

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

pub use conditions::{Condition, Conditions};
pub use floors::{Floors, FloorsError};

use crate::blocking;
use crate::identity::{Identity, join_again};
use crate::journal::{Journal, Trouble};
use crate::session::working_clock::REWIND_ALLOWANCE;
use crate::session::{SessionStatus, WorkingClock};
use crate::state_dir::{StateDir, StateError};
use crate::status::report;
use crate::wire::link::Validity;

/// Between two looks while all is well.
const EVERY: Duration = Duration::from_secs(5);
/// Between two looks while something is not: what waits for a disk goes on soon after it is mended.
const SOON: Duration = Duration::from_secs(1);
/// Between two copies of the mark: as far as a lost journal may set it back.
const FLOORS_EVERY: Duration = REWIND_ALLOWANCE;
/// Between two counts of the state directory's files: a walk over as many entries as there are tombstones.
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
    /// As read at the start.
    pub floors: Floors,
}

impl Upkeep {
    /// Runs for ever.
    pub async fn run(mut self) {
        let start = Instant::now();
        let (mut next, mut next_count, mut next_floors) = (start, start, start + FLOORS_EVERY);
        let mut epoch = None;
        loop {
            let changed = tokio::select! {
                biased;
                () = sleep_until(next) => false,
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
                    std::mem::replace(&mut epoch, live) != live && live.is_some()
                }
            };
            let now = Instant::now();
            if changed || now >= next_floors {
                let again = if self.write_floors().await { FLOORS_EVERY } else { EVERY };
                next_floors = now + again;
            }
            if now >= next {
                let count = now >= next_count;
                if count {
                    next_count = now + COUNT_EVERY;
                }
                self.look(count).await;
            }
            let validity = self.identity.borrow().leaf.validity;
            let mend = join_again(&self.state);
            observe(&self.conditions, &self.journal, &self.working, validity, &mend).await;
            let wait = if self.journal.troubles().is_empty() { EVERY } else { SOON };
            next = if now >= next { now + wait } else { next.min(now + wait) };
        }
    }

    async fn look(&self, count: bool) {
        let (journal, state) = (self.journal.clone(), self.state.clone());
        let troubled = !self.journal.troubles().is_empty();
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
        // What it finds is told of as trouble.
        let _ = self.journal.look(troubled).await;
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
pub async fn observe(
    conditions: &Conditions,
    journal: &Journal,
    working: &WorkingClock,
    validity: Validity,
    join_again: &str,
) {
    let vitals = journal.vitals().await;
    let certificate = report::Certificate::at(validity, working.now());
    let troubles = journal.troubles().into_iter().map(|trouble| (trouble.why, trouble.detail));
    conditions.observe(troubles.chain(report::conditions(&vitals, certificate, join_again)));
}
