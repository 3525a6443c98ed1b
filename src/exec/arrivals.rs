//! Which commands have come and have no answer of admission yet.
//!
//! Deliveries are handled side by side, so that a barrier may be admitted before a command that came ahead of it. It
//! would call a host empty that is about to be busy; therefore it waits for what has come before.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Shared by the executor's tasks; cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct Arrivals(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    answered: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Commands that have come to this process.
    count: u64,
    /// Highest number that a frame bore; outside of any signature, so it is told on and never judged by.
    highest_seq: u64,
    waiting: BTreeSet<u64>,
}

/// A command between its arrival and the answer of admission; dropped with the answer.
#[derive(Debug)]
pub(super) struct Arrival {
    arrivals: Arrivals,
    number: u64,
}

impl Arrivals {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command has come, `seq` in the node's queue.
    pub(super) fn arrive(&self, seq: u64) -> Arrival {
        let mut state = self.state();
        state.count += 1;
        state.highest_seq = state.highest_seq.max(seq);
        let number = state.count;
        state.waiting.insert(number);
        Arrival { arrivals: self.clone(), number }
    }

    /// Waits until every command that has come by now is answered; the highest number among those.
    pub(super) async fn settled(&self) -> u64 {
        let (count, highest_seq) = {
            let state = self.state();
            (state.count, state.highest_seq)
        };
        loop {
            let mut answered = std::pin::pin!(self.0.answered.notified());
            // Before the look, so that no answer falls between the two.
            answered.as_mut().enable();
            if self.state().waiting.first().is_none_or(|first| *first > count) {
                return highest_seq;
            }
            answered.await;
        }
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        self.arrivals.state().waiting.remove(&self.number);
        self.arrivals.0.answered.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn what_came_before_is_waited_for_and_what_comes_later_is_not() {
        let arrivals = Arrivals::default();
        let (first, second) = (arrivals.arrive(4), arrivals.arrive(3));
        let mut settled = Box::pin(arrivals.settled());
        assert_eq!(settled.as_mut().now_or_never(), None);
        let later = arrivals.arrive(9);
        drop(second);
        assert_eq!(settled.as_mut().now_or_never(), None);
        drop(first);
        assert_eq!(settled.await, 4);
        drop(later);
        assert_eq!(arrivals.settled().await, 9);
    }
}
