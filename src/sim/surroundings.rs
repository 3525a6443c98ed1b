//! What an agent stands in and does not lose when it dies: its clock, its disk, its link, the step at which it dies
//! next. Faults of these last for a while, whoever lives in them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use nix::libc::ENOSPC;
use tokio::time::sleep;

use super::cable::{Cable, Weather};
use super::faults::Blow;
use crate::clock::Clock;
use crate::failpoint::agent::Armed;
use crate::write_fault::{self, Point};

/// A machine's clocks, of which the wall clock can be set.
#[derive(Debug)]
pub struct SetClock {
    inner: Arc<dyn Clock>,
    set_by_ms: AtomicI64,
}

impl Clock for SetClock {
    fn boot(&self) -> Duration {
        self.inner.boot()
    }

    fn wall_ms(&self) -> i64 {
        self.inner.wall_ms().saturating_add(self.set_by_ms.load(Ordering::Relaxed))
    }
}

/// One agent's; its clones are the same.
#[derive(Debug, Clone)]
pub struct Surroundings {
    clock: Arc<SetClock>,
    state: PathBuf,
    cable: Cable,
    armed: Armed,
}

/// What came of a blow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Felt {
    /// It is none of the surroundings.
    Elsewhere,
    /// There was nothing to break, or it breaks later.
    NotNow,
    /// It was carried out.
    Now,
}

impl Surroundings {
    /// Sound ones, on this machine's clock, for the agent of a state directory.
    pub fn new(state: PathBuf, clock: Arc<dyn Clock>, cable: Cable) -> Self {
        let clock = Arc::new(SetClock { inner: clock, set_by_ms: AtomicI64::new(0) });
        Self { clock, state, cable, armed: Armed::default() }
    }

    /// What the agent takes for its machine's clocks.
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as Arc<dyn Clock>
    }

    /// The step at which it dies next.
    pub fn armed(&self) -> Armed {
        self.armed.clone()
    }

    /// Breaks them for a while.
    pub async fn disturb(&self, blow: Blow, lasts: Duration) -> Felt {
        match blow {
            Blow::Kill | Blow::Reboot | Blow::RebootCommand | Blow::JournalLoss | Blow::Clone => {
                return Felt::Elsewhere;
            }
            Blow::KillAt(step) => {
                self.armed.at(step);
                return Felt::NotNow;
            }
            Blow::Cut if self.cable.cut() == 0 => return Felt::NotNow,
            // It ends when one of the sides gives the link up.
            Blow::HalfOpen if self.cable.half_open() == 0 => return Felt::NotNow,
            Blow::Cut | Blow::HalfOpen => {}
            Blow::ClockJump(by_ms) => self.clock.set_by_ms.store(by_ms, Ordering::Relaxed),
            Blow::DiskFull => {
                let _full = write_fault::arm(&self.state, Point::JournalWrite, ENOSPC);
                sleep(lasts).await;
            }
            Blow::Latency(latency) => {
                let jitter = latency / 2;
                self.cable.weather(Weather { latency, jitter, ..Weather::default() });
                sleep(lasts).await;
                self.cable.weather(Weather::default());
            }
            Blow::Loss => self.cable.stall(lasts),
        }
        Felt::Now
    }
}
