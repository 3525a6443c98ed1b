//! `bcd sim`: real agents against the reference gateway, broken at random, judged from outside.
//!
//! ```text
//! gateways (child processes) ◀──mTLS── agents (this process) ──start──▶ programs ──append──▶ witness file
//!        ▲      ▲                           ▲
//!   control     └── SIGKILL, SIGSTOP ── chaos ── drop, reboot, cut, fill the disk …
//!    sockets
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
pub mod explain;
pub mod faults;
mod fleet;
pub mod foreign;
mod gateway_process;
mod gateways;
pub mod history;
pub mod invariants;
pub mod lies;
mod live;
pub mod load;
mod memory;
mod observe;
mod page;
pub mod pipe;
mod reconnect;
pub mod report;
mod run;
mod seed;
mod settle;
mod skew;
mod spread;
mod strikes;
mod surroundings;
pub mod virtual_time;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

use crate::mutant;
pub use descriptors::{TooFew, agents_per_process};
pub use run::{SimError, run};
pub use worker::work;

/// What is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Agents.
    pub nodes: usize,
    /// Gateways over one store.
    pub gateways: usize,
    /// How long load and chaos last; joining comes before it, settling after it.
    pub duration: Duration,
    /// Fixes the load, the kills and the agents' own chance.
    pub seed: u64,
    /// How much is broken.
    pub chaos: chaos::Level,
    /// Of a hundred agents so many are older builds, which speak fewer versions and lack a kind.
    pub skew: u8,
    /// Commands handed over a second, all agents together.
    pub commands_per_second: f64,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
    /// Agents in one process at most; the rest runs in others.
    pub per_process: usize,
    /// Somebody else's gateway instead of our own.
    pub foreign: Option<foreign::Foreign>,
    /// Where the report is written as a page.
    pub page: Option<PathBuf>,
    /// In virtual time.
    pub virtual_time: bool,
}

/// The longest virtual run whose faults come as often as in real time, seconds, and the most that longer ones are
/// slowed down: a fault costs as much real time as minutes of heartbeats do.
const PACE: (u64, u64) = (600, 60);

impl Options {
    /// How much more rarely faults come than in a run of seconds.
    pub fn pace(&self) -> u32 {
        let slower = self.duration.as_secs().div_ceil(PACE.0).clamp(1, PACE.1);
        if self.virtual_time { u32::try_from(slower).unwrap_or(1) } else { 1 }
    }

    /// The command line that does it again.
    pub fn command_line(&self) -> String {
        let Self { nodes, gateways, duration, seed, chaos, skew, commands_per_second, heartbeat, .. } = self;
        let world = if self.virtual_time { " --virtual" } else { "" };
        let foreign = self.foreign.as_ref().map_or(String::new(), |foreign| {
            format!(" --gateway {} --ticket {}", foreign.gateway, foreign.ticket.display())
        });
        // A mistake that was asked for is part of what happened.
        let mutant = mutant::chosen().as_ref().ok().and_then(|mutant| *mutant);
        let mutant = mutant.map_or(String::new(), |mutant| format!("BCD_MUTANT={} ", mutant.name()));
        format!(
            "{mutant}bcd sim{world} --nodes {nodes} --gateways {gateways} --duration {}s --seed {seed} --chaos {} --skew {skew} --commands-per-second {commands_per_second} --heartbeat-interval {}s",
            duration.as_secs_f64(),
            chaos.name(),
            heartbeat.as_secs_f64(),
        ) + &foreign
    }
}
