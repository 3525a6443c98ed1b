//! Admission of streams and joins: a token bucket, and the pushback that spreads refused nodes. Pure.

use std::time::Duration;

use rand::Rng;

/// What a gateway takes at once.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Session opens and joins a second; also the bucket's depth.
    pub rate: u32,
    /// Sessions held.
    pub streams: usize,
    /// Hello transactions under way. Without the bound a storm is admitted faster than the store commits it.
    pub pending_hellos: usize,
    /// Joins that were challenged and wait for their proofs: each keeps its request.
    pub pending_proofs: usize,
    /// Hello, or a frame of a join, must come within this.
    pub first_frame: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            rate: 200,
            streams: 5_000,
            pending_hellos: 64,
            pending_proofs: 64,
            first_frame: Duration::from_secs(10),
        }
    }
}

/// The bucket that opens and joins share.
#[derive(Debug)]
pub struct Bucket {
    rate: f64,
    tokens: f64,
    /// Refused callers whose promised time has not passed: the queue that the next one stands behind.
    ahead: f64,
    at: Duration,
}

impl Bucket {
    /// A full bucket. `now` is on any clock that only rises.
    pub fn new(rate: u32, now: Duration) -> Self {
        let rate = f64::from(rate.max(1));
        Self { rate, tokens: rate, ahead: 0.0, at: now }
    }

    /// Takes a token.
    ///
    /// # Errors
    /// The bucket is empty: when to come back.
    pub fn take(&mut self, now: Duration, rng: &mut impl Rng) -> Result<(), Duration> {
        let gained = now.saturating_sub(self.at).as_secs_f64() * self.rate;
        self.at = now.max(self.at);
        self.tokens = (self.tokens + gained).min(self.rate);
        self.ahead = (self.ahead - gained).max(0.0);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        self.ahead += 1.0;
        let turn = self.ahead / self.rate * rng.random_range(1.0..=1.1);
        Err(Duration::from_secs_f64(turn.clamp(1.0, 60.0)))
    }
}

/// When to come back while too many Hellos are pending.
pub fn pending_full(rng: &mut impl Rng) -> Duration {
    Duration::from_millis(rng.random_range(1_000..=5_000))
}

/// When to come back to a gateway that holds as many sessions as it may.
pub fn streams_full(rng: &mut impl Rng) -> Duration {
    Duration::from_millis(rng.random_range(30_000..=60_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    fn rng() -> rand::rngs::StdRng {
        rand::rngs::StdRng::seed_from_u64(7)
    }

    #[test]
    fn a_full_bucket_admits_its_depth_and_refills_with_time() {
        let mut rng = rng();
        let mut bucket = Bucket::new(200, Duration::ZERO);
        let admitted = (0..300).filter(|_| bucket.take(Duration::ZERO, &mut rng).is_ok()).count();
        assert_eq!(admitted, 200);
        let later = Duration::from_millis(500);
        let admitted = (0..300).filter(|_| bucket.take(later, &mut rng).is_ok()).count();
        assert_eq!(admitted, 100);
    }

    #[test]
    fn a_pushback_grows_with_the_queue_ahead_and_stays_within_its_bounds() {
        let mut rng = rng();
        let mut bucket = Bucket::new(200, Duration::ZERO);
        while bucket.take(Duration::ZERO, &mut rng).is_ok() {}
        let waits: Vec<_> = (0..20_000).filter_map(|_| bucket.take(Duration::ZERO, &mut rng).err()).collect();
        let (least, most) = (Duration::from_secs(1), Duration::from_secs(60));
        assert!(waits.iter().all(|wait| (least..=most).contains(wait)));
        // The 1,001st stands behind 1,000 others at 200 a second, up to a tenth more.
        assert!((Duration::from_secs(5)..=Duration::from_millis(5_520)).contains(&waits[1_000]), "{waits:?}");
        assert_eq!(waits[19_999], most);
        assert!(waits[800..900].windows(2).any(|two| two[0] > two[1]), "the jitter is there");
    }

    #[test]
    fn the_queue_ahead_passes_with_time() {
        let mut rng = rng();
        let mut bucket = Bucket::new(10, Duration::ZERO);
        while bucket.take(Duration::ZERO, &mut rng).is_ok() {}
        for _ in 0..100 {
            let _ = bucket.take(Duration::ZERO, &mut rng);
        }
        let much_later = Duration::from_secs(60);
        while bucket.take(much_later, &mut rng).is_ok() {}
        let wait = bucket.take(much_later, &mut rng).expect_err("empty");
        assert!(wait < Duration::from_millis(1_200), "{wait:?}");
    }

    #[test]
    fn the_other_pushbacks_lie_within_their_bounds() {
        let mut rng = rng();
        for _ in 0..1000 {
            assert!((1_000..=5_000).contains(&pending_full(&mut rng).as_millis()));
            assert!((30_000..=60_000).contains(&streams_full(&mut rng).as_millis()));
        }
    }
}
