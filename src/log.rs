//! The log: lines for people or JSON on standard error.
//!
//! Libraries log from `warn` on, whatever the level: at finer levels some of them print what they send.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::writer::BoxMakeWriter;

use crate::config::LogFormat;

/// Sends every later log line of this process to standard error.
///
/// A second call changes nothing: whoever came first has chosen.
pub fn start(level: tracing::Level, format: LogFormat) {
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        .with_writer(BoxMakeWriter::new(std::io::stderr))
        .with_ansi(std::io::stderr().is_terminal());
    let _ = match format {
        LogFormat::Text => builder.with_target(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
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
