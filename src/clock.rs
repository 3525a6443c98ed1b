//! The clock as an argument: boot time for every duration, wall time for logs and nothing else.
//!
//! Boot time is CLOCK_BOOTTIME: it goes on while the machine sleeps and no operator sets it. Timers are tokio's,
//! which a test can stop.

use std::fmt::Debug;
use std::time::Duration;

use tokio::time::Instant;

/// Where time comes from.
pub trait Clock: Send + Sync + Debug {
    /// Time since the machine's boot, including suspend.
    fn boot(&self) -> Duration;

    /// The local wall clock, ms since the Unix epoch. For logs and first guesses, never for a decision about
    /// somebody else's deadline.
    fn wall_ms(&self) -> i64;
}

/// The machine's clocks.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn boot(&self) -> Duration {
        use nix::time::{ClockId, clock_gettime};
        // CLOCK_BOOTTIME cannot fail on Linux 2.6.39 and later.
        clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads the wall clock")]
    fn wall_ms(&self) -> i64 {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_millis()).unwrap_or(i64::MAX).saturating_add(wrong_by_ms())
    }
}

/// What nobody's clock is wrong by.
#[cfg(not(feature = "fakehw"))]
fn wrong_by_ms() -> i64 {
    0
}

/// What the wall clock of a simulation build is wrong by, since no test may set the machine's: the variable's seconds, or
/// those in the file that it names, which may change while the program runs.
#[cfg(feature = "fakehw")]
fn wrong_by_ms() -> i64 {
    static WRONG_BY: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
    let Some(text) = WRONG_BY.get_or_init(|| std::env::var("BCD_FAKE_CLOCK_OFF_S").ok()) else { return 0 };
    let seconds = |text: &str| text.trim().parse::<i64>().ok();
    let from_file = || seconds(&std::fs::read_to_string(text).ok()?);
    seconds(text).or_else(from_file).unwrap_or(0).saturating_mul(1000)
}

/// A clock that follows tokio's, so that a paused runtime moves it. Its wall clock starts where it is told to and
/// can be set, as an operator's can.
#[derive(Debug)]
pub struct TokioClock {
    start: Instant,
    boot_at_start: Duration,
    wall_at_start_ms: std::sync::atomic::AtomicI64,
}

impl TokioClock {
    /// A clock whose wall time is `wall_ms` now. Must be made within a runtime.
    pub fn starting_at(wall_ms: i64) -> Self {
        Self {
            start: Instant::now(),
            boot_at_start: Duration::from_secs(1000),
            wall_at_start_ms: wall_ms.into(),
        }
    }

    /// Sets the wall clock forward or back; boot time does not notice.
    pub fn step_wall(&self, by_ms: i64) {
        self.wall_at_start_ms.fetch_add(by_ms, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Clock for TokioClock {
    fn boot(&self) -> Duration {
        self.boot_at_start + self.start.elapsed()
    }

    fn wall_ms(&self) -> i64 {
        let elapsed = i64::try_from(self.start.elapsed().as_millis()).unwrap_or(i64::MAX);
        self.wall_at_start_ms.load(std::sync::atomic::Ordering::Relaxed).saturating_add(elapsed)
    }
}

/// The kernel's boot id.
///
/// # Errors
/// The file cannot be read or holds no id.
pub fn boot_id() -> std::io::Result<crate::model::BootId> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    crate::model::BootId::new(text.trim()).map_err(std::io::Error::other)
}
