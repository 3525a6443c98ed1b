//! The words for what a run breaks, and how often it did. Shared by the world of real sockets and the virtual one.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failpoint::Step;

/// One fault of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// How long after the start of the load.
    pub at: Duration,
    /// What is broken.
    pub what: What,
    /// How long it stays broken; of a daemon or a gateway that dies: until it starts again.
    pub lasts: Duration,
}

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The agent of this number.
    Agent(usize, Blow),
    /// The gateway of this number.
    Gateway(usize, Outage),
    /// The store of all gateways: nobody can write.
    Store,
}

/// How an agent, its machine or its link fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Blow {
    /// The daemon dies, wherever it stands.
    Kill,
    /// The daemon dies the next time that it comes to this step.
    KillAt(#[serde(with = "step")] Step),
    /// The machine restarts: the daemon dies with all programs, and the next one finds another boot.
    Reboot,
    /// The control plane asks for a reboot.
    RebootCommand,
    /// The daemon dies and its journal is gone when it starts again.
    JournalLoss,
    /// The journal can write nothing.
    DiskFull,
    /// The machine's wall clock is set by so many ms.
    ClockJump(i64),
    /// Its state directory runs a second time, on another machine.
    Clone,
    /// Every connection breaks, and both sides are told.
    Cut,
    /// Every connection goes silent, and nobody is told.
    HalfOpen,
    /// What it sends and what it is sent takes this much longer.
    Latency(Duration),
    /// Nothing passes for a while, then all of it does, as after lost packets.
    Loss,
}

/// How a gateway fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outage {
    /// SIGKILL.
    Kill,
    /// It stands still for less than its lease.
    Stall,
    /// It stands still for longer than its lease, and goes on as if it had not.
    Zombie,
}

impl What {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Store => "store-outage",
            Self::Gateway(_, Outage::Kill) => "gateway-kill",
            Self::Gateway(_, Outage::Stall) => "gateway-stall",
            Self::Gateway(_, Outage::Zombie) => "gateway-zombie",
            Self::Agent(_, blow) => blow.name(),
        }
    }
}

impl Blow {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "daemon-kill",
            Self::KillAt(_) => "daemon-kill-at-step",
            Self::Reboot => "reboot",
            Self::RebootCommand => "reboot-command",
            Self::JournalLoss => "journal-loss",
            Self::DiskFull => "disk-full",
            Self::ClockJump(_) => "clock-jump",
            Self::Clone => "cloned-identity",
            Self::Cut => "link-cut",
            Self::HalfOpen => "link-half-open",
            Self::Latency(_) => "link-latency",
            Self::Loss => "link-loss",
        }
    }
}

/// A step as its name.
mod step {
    use serde::de::Error;
    use serde::{Deserialize as _, Deserializer, Serializer};

    use crate::failpoint::{ALL, Step};

    pub fn serialize<S: Serializer>(step: &Step, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(step.name())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Step, D::Error> {
        let name = String::deserialize(deserializer)?;
        let step = ALL.iter().find(|step| step.name() == name);
        step.copied().ok_or_else(|| Error::custom(format!("there is no step {name:?}")))
    }
}

/// Counts of faults, by name.
pub type Counts = BTreeMap<String, usize>;

/// How often each fault was carried out: what was only planned is not counted.
#[derive(Debug, Default)]
pub struct Tally {
    own: Mutex<Counts>,
    /// What other processes of the run have counted so far, by their number.
    others: Mutex<BTreeMap<usize, Counts>>,
}

impl Tally {
    /// One more.
    pub fn add(&self, name: &str) {
        let mut own = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        *own.entry(name.to_owned()).or_default() += 1;
    }

    /// Another process has counted so many, all together.
    pub fn of_other(&self, process: usize, counts: Counts) {
        self.others.lock().unwrap_or_else(PoisonError::into_inner).insert(process, counts);
    }

    /// So far, by name.
    pub fn counts(&self) -> Counts {
        let mut all = self.own.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for counts in self.others.lock().unwrap_or_else(PoisonError::into_inner).values() {
            for (name, count) in counts {
                *all.entry(name.clone()).or_default() += count;
            }
        }
        all
    }

    /// So far, all together.
    pub fn total(&self) -> usize {
        self.counts().values().sum()
    }
}
