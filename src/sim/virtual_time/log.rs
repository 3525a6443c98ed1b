//! The log of a run's events: what agents and gateways log of themselves, each line with its virtual time and whose it
//! is. Of one seed it comes out the same, line by line.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;
use tracing::Subscriber;

use super::super::report::Report;
use crate::log::lines;

/// Before the sentence of an invariant that did not hold.
pub const BROKEN: &str = "BROKEN";

/// Receives the events of one thread. Its clones are the same.
#[derive(Clone)]
pub struct EventLog(Arc<Mutex<Inner>>);

struct Inner {
    out: BufWriter<File>,
    start: Instant,
    /// Replaced by `~`: another run has another directory.
    work: String,
}

impl EventLog {
    /// A log into this file. Made within the runtime whose time it tells.
    pub fn new(file: File, work: &Path) -> Self {
        let work = work.to_string_lossy().into_owned();
        Self(Arc::new(Mutex::new(Inner { out: BufWriter::new(file), start: Instant::now(), work })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What gives it its lines.
    pub fn subscriber(&self) -> impl Subscriber + Send + Sync + use<> {
        let log = self.clone();
        lines(move |who, what| log.inner().line(who, what))
    }

    /// The invariants that did not hold, at the end.
    pub fn close(&self, report: &Report) {
        let mut inner = self.inner();
        for verdict in &report.verdicts {
            for what in &verdict.broken {
                inner.line("sim", &format!("{BROKEN} {} {what}", verdict.id));
            }
        }
        for trouble in &report.troubles {
            inner.line("sim", &format!("{BROKEN} trouble {trouble}"));
        }
        // A log that cannot be written is no reason to end a run.
        let _ = inner.out.flush();
    }
}

impl Inner {
    fn line(&mut self, who: &str, what: &str) {
        let ms = self.start.elapsed().as_millis();
        let what = what.replace(&self.work, "~").replace('\n', " ");
        let _ = writeln!(self.out, "{ms:>10} {who} {what}");
    }
}
