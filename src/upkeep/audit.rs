//! audit.log: a line for each command that ended, for the operator of this host. One task.
//!
//! The journal makes the lines within the transactions of the ends (src/journal/audit.rs) and forgets one when it is synced
//! here, so that the file has each once: what a crash left in both places is found again in the file's tail. Nobody waits
//! for the file, but while it takes no lines nothing new is admitted.

mod file;

use std::collections::HashSet;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

pub use file::{AuditLog, FILES, Retention};

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
    /// Runs until `end` is told or given up; what waits then is written before it returns, in one try.
    pub async fn run(self, mut end: oneshot::Receiver<()>) {
        self.prune().await;
        let mut made = self.journal.audit_lines_made();
        let mut progress = Progress::new(*made.borrow());
        loop {
            // A write is never left half-way: it would go on behind the next one.
            tokio::select! {
                biased;
                _ = &mut end => break,
                () = progress.due(&mut made) => {}
            }
            self.write_page(&mut progress).await;
        }
        while self.write_page(&mut progress).await && progress.more {}
    }

    /// Whether it is in the file.
    async fn write_page(&self, progress: &mut Progress) -> bool {
        let Ok(page) = self.journal.audit_lines(progress.written).await else {
            // The journal tells of its own trouble.
            progress.failed();
            return false;
        };
        if page.lines.is_empty() {
            progress.more = false;
            return true;
        }
        let (last, more) = (page.last, page.more);
        let outcome = self.write(page, progress).await;
        let done = outcome.is_ok();
        if done {
            progress.wrote(last, more);
        } else {
            progress.failed();
        }
        self.journal.audited(outcome.map(|()| last));
        done
    }

    async fn prune(&self) {
        let log = self.log.clone();
        match blocking::run(move || log.prune()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "files of audit.log that are more than are kept stay until the next start");
            }
            Err(error) => tracing::error!(%error, "pruning the files of audit.log failed"),
        }
    }

    /// Adds a page's lines but those known to be in the file.
    async fn write(&self, page: AuditPage, progress: &mut Progress) -> Result<(), Trouble> {
        let log = self.log.clone();
        let in_file = progress.known.take();
        let (looks, doubted) = (in_file.is_none(), progress.doubted);
        let waiting = if looks && doubted { self.waiting().await? } else { HashSet::new() };
        let done = blocking::run(move || {
            let in_file = match in_file {
                Some(known) => known,
                None if doubted => {
                    log.tail()?;
                    log.cut(&waiting)?;
                    log.tail()?
                }
                None => log.tail()?,
            };
            let new: Vec<String> = page.lines.into_iter().filter(|line| !in_file.contains(line)).collect();
            log.append(&new)?;
            Ok(in_file)
        });
        progress.doubted = true;
        match done.await {
            Ok(Ok(in_file)) => {
                progress.known = Some(in_file);
                progress.doubted = false;
                Ok(())
            }
            Ok(Err(error)) => Err(trouble(&error)),
            Err(error) => Err(Trouble { why: Reason::IoError, detail: format!("audit.log: {error}") }),
        }
    }

    /// Every line that the journal still has.
    async fn waiting(&self) -> Result<HashSet<String>, Trouble> {
        let (mut waiting, mut after) = (HashSet::new(), 0);
        loop {
            let page = self
                .journal
                .audit_lines(after)
                .await
                .map_err(|error| Trouble { why: Reason::IoError, detail: format!("audit.log: {error}") })?;
            waiting.extend(page.lines);
            if !page.more {
                return Ok(waiting);
            }
            after = page.last;
        }
    }
}

/// How far it has come.
struct Progress {
    /// The last line that an earlier process left. It may be in the file already; what this process makes is not.
    left: u64,
    written: u64,
    /// Lines that are in the file already; absent until somebody has looked.
    known: Option<HashSet<String>>,
    /// A look or a write has failed. After a sync that did, another one passes though nothing of it has reached the disk: the kernel
    /// takes its pages for clean. What the journal still has is therefore written anew.
    doubted: bool,
    /// Lines wait behind the last page.
    more: bool,
    waits: Waits,
    /// Before the next try.
    pause: Duration,
}

impl Progress {
    fn new(left: u64) -> Self {
        let known = (left == 0).then(HashSet::new);
        let waits = Waits::new(FIRST_WAIT, LONGEST_WAIT);
        Self { left, written: 0, known, doubted: false, more: false, waits, pause: Duration::ZERO }
    }

    /// Returns when a page is to be written. Dropping it loses nothing.
    async fn due(&self, made: &mut watch::Receiver<u64>) {
        tokio::time::sleep(self.pause).await;
        if made.wait_for(|last| *last > self.written).await.is_err() {
            std::future::pending::<()>().await;
        }
        if !self.more {
            tokio::time::sleep(GATHER).await;
        }
    }

    fn wrote(&mut self, last: u64, more: bool) {
        self.written = last;
        self.more = more;
        if last >= self.left {
            self.known = Some(HashSet::new());
        }
        self.waits = Waits::new(FIRST_WAIT, LONGEST_WAIT);
        self.pause = Duration::ZERO;
    }

    fn failed(&mut self) {
        self.pause = self.waits.take();
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests;
