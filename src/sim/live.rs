//! What a run shows while it goes on: one line that renews itself on a terminal, else a line every 5 s.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::faults::Tally;
use super::gateways::Gateways;
use super::observe;

/// Counts that the parts of a run keep for the line.
#[derive(Debug, Default)]
pub struct Counts {
    commands: AtomicUsize,
}

impl Counts {
    /// One more command was handed over.
    pub fn command(&self) {
        self.commands.fetch_add(1, Ordering::Relaxed);
    }
}

/// Between two lines in real time.
pub fn pause() -> Duration {
    Duration::from_millis(if std::io::stderr().is_terminal() { 500 } else { 5000 })
}

/// Prints until it is dropped.
pub async fn show(
    nodes: usize,
    pause: Duration,
    gateways: Arc<Gateways>,
    counts: Arc<Counts>,
    tally: Arc<Tally>,
) {
    let terminal = std::io::stderr().is_terminal();
    let start = Instant::now();
    loop {
        sleep(pause).await;
        let seen = match observe::state(&gateways).await {
            Ok(state) => format!(
                "{}/{nodes} connected   {} in flight   {} reconnects",
                state.connected, state.open, state.reconnects
            ),
            Err(_) => "no gateway answers".to_owned(),
        };
        let line = format!(
            "{:>4} s   {seen}   {} handed over   {} faults",
            start.elapsed().as_secs(),
            counts.commands.load(Ordering::Relaxed),
            tally.total(),
        );
        // A closed standard error is no reason to end a run.
        let mut out = std::io::stderr().lock();
        let _ = if terminal { write!(out, "\r\x1b[2K{line}") } else { writeln!(out, "{line}") };
        let _ = out.flush();
    }
}

/// Takes the renewing line away.
pub fn clear() {
    if std::io::stderr().is_terminal() {
        eprint!("\r\x1b[2K");
    }
}
