//! What a node is built from: on a host from bcd.toml, in the simulator from what an agent is to be.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::StdRng;

use crate::clock::Clock;
use crate::config::Config;
use crate::exec::{Programs, Supervisors};
use crate::host::tcp::Tcp;
use crate::journal::{self, EventLimits};
use crate::model::{BootId, Machine};
use crate::ports::{Connect, Reboot};
use crate::systemd::Notifier;
use crate::upkeep::Retention;
use crate::wire::dsse::Policy;
use crate::wire::link::{Dialer, Endpoint};
use crate::wire::version::Range;

/// The journal's log on a host: above SQLite's checkpoint at 1,000 pages of 4 KiB, so that commits overwrite it and
/// never make it grow.
pub const WAL_BYTES: u64 = 4 << 20;

/// What a node is built from.
#[derive(Clone)]
pub struct Options {
    /// The state directory.
    pub state: PathBuf,
    /// Where to dial; empty: where the join said.
    pub endpoints: Vec<Endpoint>,
    /// Which commands need a signature.
    pub policy: Policy,
    /// `[kinds] deny` of bcd.toml.
    pub denied: Arc<BTreeSet<String>>,
    /// Versions that it says it speaks.
    pub protocol: Range,
    /// Directory of the status socket; absent: there is none.
    pub run_dir: Option<PathBuf>,
    /// Boot time and wall time.
    pub clock: Arc<dyn Clock>,
    /// This machine, as its identity must know it.
    pub machine: Machine,
    /// Everything random but keys comes from it.
    pub rng: StdRng,
    /// This boot.
    pub boot_id: BootId,
    /// Size to which the journal's log is grown at open, bytes.
    pub wal_bytes: u64,
    /// How many events may wait for their ack.
    pub event_limits: EventLimits,
    /// How much of audit.log is kept; absent: there is none, as in a process of many nodes, which have no operator.
    pub audit: Option<Retention>,
    /// How the journal's writer runs.
    pub journal: journal::Mode,
    /// What the journal keeps in memory.
    pub memory: journal::Memory,
    /// Restarts the machine.
    pub reboot: Arc<dyn Reboot>,
    /// Who runs programs.
    pub programs: Arc<dyn Programs>,
    /// What it may take of the disk.
    pub limits: journal::Limits,
    /// The way to the gateways.
    pub connect: Arc<dyn Connect>,
    /// Instead of gRPC with the node's identity.
    pub dialer: Option<Arc<dyn Dialer>>,
    /// Who is told that the node is ready, lives and stops.
    pub notifier: Arc<Notifier>,
}

impl Options {
    /// A daemon on this machine, as configured.
    pub fn new(
        config: &Config,
        clock: Arc<dyn Clock>,
        rng: StdRng,
        boot_id: BootId,
        reboot: Arc<dyn Reboot>,
    ) -> Self {
        Self {
            state: config.state.clone(),
            endpoints: config.endpoints.clone(),
            policy: config.signatures,
            denied: Arc::clone(&config.denied),
            protocol: Range::OWN,
            run_dir: Some(config.run.clone()),
            clock,
            machine: Machine::default(),
            rng,
            boot_id,
            wal_bytes: WAL_BYTES,
            event_limits: config.event_limits,
            audit: Some(config.audit),
            journal: journal::Mode::Thread,
            memory: journal::Memory::HOST,
            reboot,
            programs: Arc::new(Supervisors::of_this_program()),
            limits: config.limits,
            connect: Arc::new(Tcp),
            dialer: None,
            notifier: Arc::default(),
        }
    }
}
