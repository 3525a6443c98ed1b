//! The working clock: server time as this process knows it, and signed time beside it.
//!
//! Every source but one can only advance it: the mark found in the journal, a Welcome, the date of a verified document.
//! The signed answer to a question of this process sets it. Between two of them CLOCK_BOOTTIME moves it. Signed time is a second, slower clock that listens to verified
//! documents alone; what guards against replays is kept by that one, since no gateway can hurry it.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::UnixTime;

use crate::clock::Clock;
use crate::model::ServerTime;
use crate::wire::tls::{BUILD_TIME, JudgeTime, unix_time};

/// A Welcome may lie this far before the mark.
pub const REWIND_ALLOWANCE: Duration = Duration::from_secs(300);

/// Shared by the session (which sets it) and by whoever judges a deadline.
#[derive(Debug, Clone)]
pub struct WorkingClock {
    clock: Arc<dyn Clock>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Server time at a boot time.
    working: Option<(ServerTime, Duration)>,
    /// Signed time at a boot time.
    signed: Option<(ServerTime, Duration)>,
    /// Server time was learned from a peer in this process.
    heard: bool,
}

fn carried(at: Option<(ServerTime, Duration)>, boot: Duration) -> Option<ServerTime> {
    at.map(|(time, then)| time.plus(boot.saturating_sub(then)))
}

impl WorkingClock {
    /// Starts from what is stored: the server time mark and the signed time of the journal.
    pub fn new(clock: Arc<dyn Clock>, mark: Option<ServerTime>, signed: Option<ServerTime>) -> Self {
        let boot = clock.boot();
        let state = State {
            working: mark.max(signed).map(|time| (time, boot)),
            signed: signed.map(|time| (time, boot)),
            heard: false,
        };
        Self { clock, state: Arc::new(Mutex::new(state)) }
    }

    fn with<T>(&self, f: impl FnOnce(&mut State, Duration) -> T) -> T {
        let boot = self.clock.boot();
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner), boot)
    }

    /// Server time now; absent until the first one ever known to this node. Also the server time mark.
    pub fn now(&self) -> Option<ServerTime> {
        self.with(|state, boot| carried(state.working, boot))
    }

    /// Signed time now; absent until the first signed document.
    pub fn signed(&self) -> Option<ServerTime> {
        self.with(|state, boot| carried(state.signed, boot))
    }

    /// Whether this process has heard server time from a peer (else `now` is a floor).
    pub fn heard(&self) -> bool {
        self.with(|state, _| state.heard)
    }

    /// Takes the time of a Welcome that the session did not refuse. Never sets the clock back.
    pub fn welcome(&self, time: ServerTime) {
        self.with(|state, boot| {
            state.working = carried(state.working, boot).max(Some(time)).map(|time| (time, boot));
            state.heard = true;
        });
    }

    /// Takes the time of a verified signed document. Never sets either clock back.
    pub fn document(&self, issued_at: ServerTime) {
        self.with(|state, boot| {
            state.signed = carried(state.signed, boot).max(Some(issued_at)).map(|time| (time, boot));
            state.working =
                carried(state.working, boot).max(state.signed.map(|(time, _)| time)).map(|t| (t, boot));
        });
    }

    /// Takes the time of a signed answer to a question of this process: the one thing that may set the working clock
    /// back. Signed time never goes back.
    pub fn answered(&self, time: ServerTime) {
        self.with(|state, boot| {
            state.working = Some((time, boot));
            state.signed = carried(state.signed, boot).max(Some(time)).map(|time| (time, boot));
            state.heard = true;
        });
    }

    /// The clock below.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }
}

impl JudgeTime for WorkingClock {
    fn now(&self) -> (UnixTime, bool) {
        let floor = self.now().unwrap_or(BUILD_TIME).max(BUILD_TIME);
        if self.heard() { (unix_time(self.now().unwrap_or(floor)), true) } else { (unix_time(floor), false) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::TokioClock;

    fn clock(mark: Option<i64>, signed: Option<i64>) -> WorkingClock {
        let clock = Arc::new(TokioClock::starting_at(0));
        WorkingClock::new(clock, mark.map(ServerTime), signed.map(ServerTime))
    }

    #[tokio::test(start_paused = true)]
    async fn the_mark_is_the_floor_before_the_first_welcome_and_boot_time_carries_it() {
        let working = clock(Some(1_000), None);
        assert_eq!(working.now(), Some(ServerTime(1_000)));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(working.now(), Some(ServerTime(3_000)));
        assert!(!working.heard());
    }

    #[tokio::test(start_paused = true)]
    async fn a_welcome_never_sets_it_back() {
        let working = clock(Some(10_000), None);
        working.welcome(ServerTime(4_000));
        assert_eq!(working.now(), Some(ServerTime(10_000)));
        working.welcome(ServerTime(50_000));
        assert_eq!(working.now(), Some(ServerTime(50_000)));
        assert!(working.heard());
    }

    #[tokio::test(start_paused = true)]
    async fn no_welcome_moves_signed_time_and_a_document_moves_both() {
        let working = clock(None, Some(5_000));
        working.welcome(ServerTime(90_000));
        assert_eq!(working.signed(), Some(ServerTime(5_000)));
        working.document(ServerTime(95_000));
        assert_eq!(working.signed(), Some(ServerTime(95_000)));
        assert_eq!(working.now(), Some(ServerTime(95_000)));
        working.document(ServerTime(1));
        assert_eq!(working.signed(), Some(ServerTime(95_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_signed_answer_alone_sets_it_back_and_never_signed_time() {
        let working = clock(Some(90_000), Some(5_000));
        working.answered(ServerTime(7_000));
        assert_eq!((working.now(), working.signed()), (Some(ServerTime(7_000)), Some(ServerTime(7_000))));
        assert!(working.heard());
        working.answered(ServerTime(6_000));
        assert_eq!((working.now(), working.signed()), (Some(ServerTime(6_000)), Some(ServerTime(7_000))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_step_of_the_wall_clock_changes_nothing() {
        let tokio_clock = Arc::new(TokioClock::starting_at(0));
        let working = WorkingClock::new(tokio_clock.clone(), Some(ServerTime(7)), None);
        tokio_clock.step_wall(-365 * 24 * 3600 * 1000);
        assert_eq!(working.now(), Some(ServerTime(7)));
    }
}
