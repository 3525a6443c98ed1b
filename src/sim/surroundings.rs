//! What an agent stands in and does not lose when it dies: its clock, its disk, its link, the step at which it dies
//! next. Faults of these last for a while, whoever lives in them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use nix::libc::ENOSPC;
use tokio::time::sleep;

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
    armed: Armed,
}

impl Surroundings {
    /// Sound ones, on this machine's clock, for the agent of a state directory.
    pub fn new(state: PathBuf, clock: Arc<dyn Clock>) -> Self {
        let clock = Arc::new(SetClock { inner: clock, set_by_ms: AtomicI64::new(0) });
        Self { clock, state, armed: Armed::default() }
    }

    /// What the agent takes for its machine's clocks.
    pub fn clock(&self) -> Arc<dyn Clock> {
        Arc::clone(&self.clock) as Arc<dyn Clock>
    }

    /// The step at which it dies next.
    pub fn armed(&self) -> Armed {
        self.armed.clone()
    }

    /// Breaks them for a while. False: the blow is not one of the surroundings.
    pub async fn disturb(&self, blow: Blow, lasts: Duration) -> bool {
        match blow {
            Blow::KillAt(step) => self.armed.at(step),
            Blow::ClockJump(by_ms) => {
                self.clock.set_by_ms.store(by_ms, Ordering::Relaxed);
            }
            Blow::DiskFull => {
                let _full = write_fault::arm(&self.state, Point::JournalWrite, ENOSPC);
                sleep(lasts).await;
            }
            _ => return false,
        }
        true
    }
}
