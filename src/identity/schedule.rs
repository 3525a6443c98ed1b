//! When a certificate is renewed, and when a renewal that failed is tried again. Pure.

use std::time::Duration;

use rand::Rng;

use crate::model::ServerTime;
use crate::wire::link::Validity;

/// So much of a certificate's life passes before it is renewed, ‰.
const AT: u32 = 600;
/// Moved by chance by so much either way, so that machines that joined together do not renew together.
const JITTER: u32 = 50;
/// The wait after the first failure.
const FIRST: Duration = Duration::from_secs(30);
/// And the longest one: a certificate of a day still has fifty tries from its 60 % on.
const LONGEST: Duration = Duration::from_secs(600);
/// Between a renewal and the next stands this share of what is left of the certificate, whatever its dates say: one
/// that was dated back far would be renewed without end.
const BETWEEN: u32 = 10;

/// The moment of one certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(u32);

impl Moment {
    /// Draws it.
    pub fn draw(rng: &mut impl Rng) -> Self {
        Self(rng.random_range(AT - JITTER..=AT + JITTER))
    }

    /// When it comes for a certificate that holds so long; `got` is when this process got it, absent for one that it
    /// found at its start.
    pub fn of(self, validity: Validity, got: Option<ServerTime>) -> ServerTime {
        let at = validity.passed(self.0);
        got.map_or(at, |got| at.max(got.plus(validity.not_after.since(got) / BETWEEN)))
    }
}

/// The waits after failures in a row.
#[derive(Debug, Clone, Copy, Default)]
pub struct Retries {
    failures: u32,
}

impl Retries {
    /// Failures in a row.
    pub fn failures(self) -> u32 {
        self.failures
    }

    /// One more failure: how long to wait. A pushback is followed exactly, and the doubling starts over behind it.
    pub fn failed(&mut self, pushback: Option<Duration>, rng: &mut impl Rng) -> Duration {
        let doublings = self.failures.min(5);
        self.failures = self.failures.saturating_add(1);
        if let Some(pushback) = pushback {
            self.failures = 1;
            return pushback;
        }
        let wait = LONGEST.min(FIRST * (1 << doublings));
        wait.mul_f64(rng.random_range(0.75..=1.25))
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    const DAY: Validity = Validity { not_before: ServerTime(1_000), not_after: ServerTime(86_401_000) };

    #[test]
    fn a_certificate_is_renewed_between_55_and_65_percent_of_its_life_and_not_always_at_once() {
        let mut rng = StdRng::seed_from_u64(5);
        let percent = |at: ServerTime| at.since(DAY.not_before).as_secs() * 100 / 86_400;
        let drawn: Vec<u64> = (0..200).map(|_| percent(Moment::draw(&mut rng).of(DAY, None))).collect();
        assert!(drawn.iter().all(|percent| (55..=65).contains(percent)), "{drawn:?}");
        assert!(drawn.iter().any(|percent| *percent < 57) && drawn.iter().any(|percent| *percent > 62));
    }

    #[test]
    fn a_certificate_that_is_past_its_moment_when_it_comes_is_not_renewed_without_end() {
        let got = ServerTime(80_001_000);
        assert_eq!(Moment(600).of(DAY, Some(got)), got.plus(Duration::from_secs(640)));
        assert_eq!(Moment(600).of(DAY, Some(DAY.not_before)), DAY.passed(600));
    }

    #[test]
    fn the_waits_double_from_half_a_minute_to_ten_minutes_with_jitter() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut retries = Retries::default();
        for wait in [30, 60, 120, 240, 480, 600, 600, 600] {
            let waited = retries.failed(None, &mut rng).as_secs_f64();
            assert!(
                (0.75 * f64::from(wait)..=1.25 * f64::from(wait)).contains(&waited),
                "{waited} of {wait}"
            );
        }
        assert_eq!(retries.failures(), 8);
        let first = |seed| Retries::default().failed(None, &mut StdRng::seed_from_u64(seed));
        assert_ne!(first(1), first(2));
    }

    #[test]
    fn a_pushback_is_waited_exactly_and_starts_the_doubling_over() {
        let mut rng = StdRng::seed_from_u64(3);
        let mut retries = Retries::default();
        for _ in 0..9 {
            retries.failed(None, &mut rng);
        }
        assert_eq!(retries.failed(Some(Duration::from_millis(1500)), &mut rng), Duration::from_millis(1500));
        assert!(retries.failed(None, &mut rng) <= Duration::from_secs(75));
    }
}
