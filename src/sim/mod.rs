//! `bcd sim`: real agents against the reference gateway, killed at random, judged from outside.
//!
//! ```text
//! gateway (child process) ◀──mTLS── agents (this process) ──start──▶ programs ──append──▶ witness file
//!        ▲      ▲                        ▲
//!   control     └── SIGKILL, start ── chaos ── drop, start
//!    socket
//!        └── load, history, events ──▶ evidence ──▶ invariants ──▶ report
//! ```
//!
//! A run is: join all, wait until all are connected, load and chaos side by side for the duration, then faults
//! stop and everything must settle, then the evidence is collected and judged.

mod agent;
pub mod cable;
pub mod chaos;
mod descriptors;
mod drive;
mod fleet;
mod gateway_process;
pub mod history;
pub mod invariants;
mod live;
pub mod load;
mod observe;
pub mod pipe;
mod reconnect;
pub mod report;
mod run;
mod seed;

use std::time::Duration;

pub use descriptors::raise as raise_descriptor_limit;
pub use run::{SimError, run};

/// What is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Agents.
    pub nodes: usize,
    /// How long load and chaos last; joining comes before it, settling after it.
    pub duration: Duration,
    /// Fixes the load, the kills and the agents' own chance.
    pub seed: u64,
    /// How much is broken.
    pub chaos: chaos::Level,
    /// Commands handed over a second, all agents together.
    pub commands_per_second: f64,
}

impl Options {
    /// The command line that does it again.
    pub fn command_line(&self) -> String {
        let Self { nodes, duration, seed, chaos, commands_per_second } = self;
        format!(
            "bcd sim --nodes {nodes} --duration {}s --seed {seed} --chaos {} --commands-per-second {commands_per_second}",
            duration.as_secs_f64(),
            chaos.name(),
        )
    }
}
