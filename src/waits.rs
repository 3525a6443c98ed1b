//! Waits before something is tried again: each twice as long as the one before, up to a longest.

use std::time::Duration;

/// The waits of one thing that is tried.
#[derive(Debug)]
pub struct Waits {
    next: Duration,
    longest: Duration,
}

impl Waits {
    /// The first wait, and the longest.
    pub fn new(first: Duration, longest: Duration) -> Self {
        Self { next: first, longest }
    }

    /// How long the next one is, which is then over.
    pub fn take(&mut self) -> Duration {
        let wait = self.next;
        self.next = (wait * 2).min(self.longest);
        wait
    }

    /// Waits.
    pub async fn next(&mut self) {
        tokio::time::sleep(self.next).await;
        self.take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_wait_is_twice_the_one_before_up_to_the_longest_and_one_that_is_given_up_does_not_count() {
        let mut waits = Waits::new(Duration::from_secs(1), Duration::from_secs(5));
        let given_up = tokio::time::timeout(Duration::from_millis(1), waits.next()).await;
        assert!(given_up.is_err());
        let seconds: Vec<u64> = (0..4).map(|_| waits.take().as_secs()).collect();
        assert_eq!(seconds, [1, 2, 4, 5]);
    }
}
