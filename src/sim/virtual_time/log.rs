//! The log of a run's events: what agents and gateways log of themselves, each line with its virtual time and whose it
//! is. Of one seed it comes out the same, line by line.

use std::fmt::{Debug, Write as _};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::super::report::Report;

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
    /// By span id, from 1: whose it is, and how many handles it has.
    spans: Vec<String>,
    /// Spans that are entered, innermost last.
    entered: Vec<u64>,
}

impl EventLog {
    /// A log into this file. Made within the runtime whose time it tells.
    pub fn new(file: File, work: &Path) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            out: BufWriter::new(file),
            start: Instant::now(),
            work: work.to_string_lossy().into_owned(),
            spans: Vec::new(),
            entered: Vec::new(),
        })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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

/// The text of an event, or of a span's fields.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
    number: Option<String>,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        // Writing into a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }

    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        let mut text = value.to_string();
        let mut source = value.source();
        while let Some(error) = source {
            let _ = write!(text, ": {error}");
            source = error.source();
        }
        let _ = write!(self.fields, " {}={text}", field.name());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "number" {
            self.number = Some(value.to_string());
        }
        self.record_debug(field, &value);
    }
}

impl Subscriber for EventLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let ours = metadata.target().starts_with("bcd");
        *metadata.level() <= if ours { Level::INFO } else { Level::WARN }
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut text = Text::default();
        attributes.record(&mut text);
        let number = text.number.map(|number| format!("-{number}")).unwrap_or_default();
        let mut inner = self.inner();
        inner.spans.push(format!("{}{number}", attributes.metadata().name()));
        Id::from_u64(inner.spans.len() as u64)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = Text::default();
        event.record(&mut text);
        let mut inner = self.inner();
        let metadata = event.metadata();
        let target = metadata.target().trim_start_matches("bcd::");
        let span = inner.entered.last().and_then(|id| inner.spans.get(usize::try_from(id - 1).ok()?));
        let who = span.map_or("-", String::as_str).to_owned();
        let level =
            if *metadata.level() < Level::INFO { format!("{} ", metadata.level()) } else { String::new() };
        inner.line(&who, &format!("{target} {level}{}{}", text.message, text.fields));
    }

    fn enter(&self, span: &Id) {
        self.inner().entered.push(span.into_u64());
    }

    fn exit(&self, span: &Id) {
        let mut inner = self.inner();
        let at = inner.entered.iter().rposition(|id| *id == span.into_u64());
        if let Some(at) = at {
            inner.entered.remove(at);
        }
    }
}
