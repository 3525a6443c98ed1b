//! What a run shows while it goes on: one line that renews itself on a terminal, else a line every 5 s.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::gateway_process::GatewayProcess;
use super::observe::open;
use crate::gateway::control::{Request, Response};

/// Counts that the parts of a run keep for the line.
#[derive(Debug, Default)]
pub struct Counts {
    /// Commands handed over.
    pub commands: AtomicUsize,
    /// Agents killed.
    pub agents_killed: AtomicUsize,
    /// Machines rebooted.
    pub machines_rebooted: AtomicUsize,
    /// Gateway kills.
    pub gateway_killed: AtomicUsize,
}

impl Counts {
    /// One more.
    pub fn add(count: &AtomicUsize) {
        count.fetch_add(1, Ordering::Relaxed);
    }

    /// So far.
    pub fn get(count: &AtomicUsize) -> usize {
        count.load(Ordering::Relaxed)
    }
}

/// Prints until it is dropped.
pub async fn show(nodes: usize, gateway: Arc<GatewayProcess>, counts: Arc<Counts>) {
    let terminal = std::io::stderr().is_terminal();
    let pause = Duration::from_millis(if terminal { 250 } else { 5000 });
    let start = Instant::now();
    loop {
        sleep(pause).await;
        let seen = match gateway.ask(&Request::Stats).await {
            Ok(Response::Stats(stats)) => {
                format!("{}/{nodes} connected   {} commands open", stats.sessions, open(&stats))
            }
            _ => "gateway down".to_owned(),
        };
        let line = format!(
            "{:>4} s   {seen}   {} handed over   killed {} agents, the gateway {} times, rebooted {} machines",
            start.elapsed().as_secs(),
            Counts::get(&counts.commands),
            Counts::get(&counts.agents_killed),
            Counts::get(&counts.gateway_killed),
            Counts::get(&counts.machines_rebooted),
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
