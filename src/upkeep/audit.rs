//! audit.log: a line for each command that ended, for the operator of this host. One task.
//!
//! The journal makes the lines within the transactions of the ends (src/journal/audit.rs) and forgets one when it is synced
//! here, so that the file has each once: what a crash left in both places is found again in the file's tail. Nobody waits
//! for the file, but while it takes no lines nothing new is admitted.

mod file;

use std::collections::HashSet;
use std::time::Duration;

pub use file::{AuditLog, Retention};

use super::trouble;
use crate::blocking;
use crate::journal::{AuditPage, Journal, Trouble};
use crate::model::Reason;
use crate::waits::Waits;

/// Lines gather this long for one sync.
const GATHER: Duration = Duration::from_millis(200);
/// Between two tries on a file that takes no lines.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// What writes audit.log.
pub struct Audit {
    /// Where the lines come from.
    pub journal: Journal,
    /// Where they go.
    pub log: AuditLog,
}

impl Audit {
    /// Runs for ever.
    pub async fn run(self) {
        let mut made = self.journal.audit_lines_made();
        // What an earlier process left may be in the file already; what this one makes is not.
        let left = *made.borrow();
        let mut known = (left == 0).then(HashSet::new);
        let (mut written, mut more) = (0, false);
        let mut waits = Waits::new(FIRST_WAIT, LONGEST_WAIT);
        loop {
            if made.wait_for(|last| *last > written).await.is_err() {
                return std::future::pending().await;
            }
            if !more {
                tokio::time::sleep(GATHER).await;
            }
            let Ok(page) = self.journal.audit_lines(written).await else {
                // The journal tells of its own trouble.
                waits.next().await;
                continue;
            };
            let last = page.last;
            more = page.more;
            let outcome = self.write(page, &mut known).await;
            if outcome.is_ok() {
                written = last;
                if written >= left {
                    known = Some(HashSet::new());
                }
                waits = Waits::new(FIRST_WAIT, LONGEST_WAIT);
            }
            let failed = outcome.is_err();
            self.journal.audited(outcome.map(|()| last));
            if failed {
                waits.next().await;
            }
        }
    }

    /// Adds a page's lines but those `known` to be in the file: absent before the look at it.
    async fn write(&self, page: AuditPage, known: &mut Option<HashSet<String>>) -> Result<(), Trouble> {
        let log = self.log.clone();
        let in_file = known.take();
        let done = blocking::run(move || {
            let in_file = match in_file {
                Some(known) => known,
                None => log.tail()?,
            };
            let new: Vec<String> = page.lines.into_iter().filter(|line| !in_file.contains(line)).collect();
            log.append(&new)?;
            Ok(in_file)
        });
        match done.await {
            Ok(Ok(in_file)) => {
                *known = Some(in_file);
                Ok(())
            }
            Ok(Err(error)) => Err(trouble(&error)),
            Err(error) => Err(Trouble { why: Reason::IoError, detail: format!("audit.log: {error}") }),
        }
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests;
