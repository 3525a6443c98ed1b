//! The log: to the journal with a field for each value, or lines for people or JSON on standard error.
//!
//! Libraries log from `warn` on, whatever the level: at finer levels some of them print what they send.

use std::io::IsTerminal as _;
use std::os::fd::AsFd;

use tracing_journald::{Priority, PriorityMappings};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::config::LogFormat;

/// An error with its sources, in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let errors = std::iter::successors(Some(error), |error| error.source());
    errors.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

/// Sends every later log line of this process to the journal or to standard error.
///
/// A second call changes nothing: whoever came first has chosen.
pub fn start(level: tracing::Level, format: LogFormat) {
    let to_journal = match format {
        LogFormat::Auto => {
            leads_to_the_journal(std::env::var("JOURNAL_STREAM").ok().as_deref(), std::io::stderr())
        }
        LogFormat::Journald => true,
        LogFormat::Text | LogFormat::Json => false,
    };
    let unreached = match to_journal.then(tracing_journald::layer) {
        Some(Ok(journal)) => {
            // A value of ours is BCD_NAME there, so that none can pass for one of the journal's own.
            let journal = journal
                .with_field_prefix(Some("BCD".to_owned()))
                .with_syslog_identifier("bcd".to_owned())
                .with_priority_mappings(priorities());
            let _ = tracing_subscriber::registry().with(filter(level)).with(journal).try_init();
            return;
        }
        Some(Err(error)) => Some(error),
        None => None,
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(BoxMakeWriter::new(std::io::stderr))
        .with_ansi(std::io::stderr().is_terminal());
    let _ = match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Auto | LogFormat::Journald | LogFormat::Text => builder.with_target(false).try_init(),
    };
    if let Some(error) = unreached {
        let error: &dyn std::error::Error = &error;
        tracing::warn!(error, "the journal cannot be reached; the log goes to standard error");
    }
}

/// Whether a descriptor is the stream to the journal that `JOURNAL_STREAM` (device:inode) names. The variable alone
/// proves nothing: a child of a unit inherits it, whatever its own standard error is.
fn leads_to_the_journal(stream: Option<&str>, descriptor: impl AsFd) -> bool {
    let named = || {
        let (device, inode) = stream?.split_once(':')?;
        Some((device.parse::<u64>().ok()?, inode.parse::<u64>().ok()?))
    };
    let Some(named) = named() else { return false };
    rustix::fs::fstat(descriptor).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == named)
}

/// syslog's words for our levels: without them an `info` line would be a notice.
fn priorities() -> PriorityMappings {
    PriorityMappings {
        error: Priority::Error,
        warn: Priority::Warning,
        info: Priority::Informational,
        debug: Priority::Debug,
        trace: Priority::Debug,
    }
}

/// Sends every later log line of this process to a file, as lines for people: standard error shows a run's progress.
#[cfg(feature = "fakehw")]
pub fn start_in_file(level: tracing::Level, file: std::fs::File) {
    let builder = tracing_subscriber::fmt().with_env_filter(filter(level)).with_target(false);
    let _ = builder.with_ansi(false).with_writer(std::sync::Mutex::new(file)).try_init();
}

fn filter(level: tracing::Level) -> EnvFilter {
    EnvFilter::new(format!("warn,bcd={level}"))
}

/// Hands every line to `write`, with the innermost span that it stands in, such as `agent-7`; `-` where there is none.
#[cfg(feature = "fakehw")]
pub fn lines(write: impl Fn(&str, &str) + Send + Sync + 'static) -> impl tracing::Subscriber + Send + Sync {
    tracing_subscriber::registry().with(filter(tracing::Level::INFO)).with(lines::Lines(write))
}

#[cfg(feature = "fakehw")]
mod lines {
    use std::fmt::{Debug, Write as _};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id};
    use tracing::{Event, Level, Subscriber};
    use tracing_subscriber::layer::{Context, Layer};
    use tracing_subscriber::registry::LookupSpan;

    pub(super) struct Lines<F>(pub(super) F);

    /// A span's name and number.
    struct Who(String);

    #[derive(Default)]
    struct Text {
        message: String,
        fields: String,
        number: Option<u64>,
    }

    impl Visit for Text {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            // Writing into a string cannot fail.
            let _ = match field.name() {
                "message" => write!(self.message, "{value:?}"),
                name => write!(self.fields, " {name}={value:?}"),
            };
        }

        fn record_u64(&mut self, field: &Field, value: u64) {
            self.number = Some(value);
            self.record_debug(field, &value);
        }

        fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
            let _ = write!(self.fields, " {}={}", field.name(), super::chain(value));
        }
    }

    impl<F, S> Layer<S> for Lines<F>
    where
        F: Fn(&str, &str) + 'static,
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
            let mut text = Text::default();
            attributes.record(&mut text);
            let number = text.number.map(|number| format!("-{number}")).unwrap_or_default();
            if let Some(span) = context.span(id) {
                span.extensions_mut().insert(Who(format!("{}{number}", attributes.metadata().name())));
            }
        }

        fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
            let mut text = Text::default();
            event.record(&mut text);
            let metadata = event.metadata();
            let target = metadata.target().trim_start_matches("bcd::");
            let level = match *metadata.level() {
                Level::INFO => String::new(),
                level => format!("{level} "),
            };
            let line = format!("{target} {level}{}{}", text.message, text.fields);
            match context.event_span(event) {
                Some(span) => (self.0)(span.extensions().get::<Who>().map_or("-", |who| &who.0), &line),
                None => (self.0)("-", &line),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn only_the_very_stream_that_the_variable_names_leads_to_the_journal() {
        let file = tempfile::tempfile().unwrap();
        let stat = file.metadata().unwrap();
        let own = format!("{}:{}", stat.dev(), stat.ino());
        assert!(leads_to_the_journal(Some(&own), &file));
        assert!(!leads_to_the_journal(Some(&own), tempfile::tempfile().unwrap()), "inherited by a child");
        for nonsense in [None, Some(""), Some("1"), Some("a:b")] {
            assert!(!leads_to_the_journal(nonsense, &file), "{nonsense:?}");
        }
    }
}
