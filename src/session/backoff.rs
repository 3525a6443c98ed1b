//! When to dial again. Pure: the chance is an argument.

use std::ops::Range;
use std::time::Duration;

use rand::Rng;

use crate::model::Reason;
use crate::wire::link::{EndKind, LinkEnd};

/// The wait doubles from this.
const FIRST: Duration = Duration::from_secs(1);
/// And no longer than to this.
const LONGEST: Duration = Duration::from_secs(60);
/// Where an operator must act, or a refusal has no known reason: rare enough to be no load, soon enough to notice
/// the mend.
const OPERATOR: Range<Duration> = Duration::from_secs(30)..Duration::from_secs(60);
/// An identity that every endpoint calls ended is offered again this often: the word of a gateway that lies
/// ends no node for good.
const CONDEMNED: Duration = Duration::from_secs(15 * 60);

/// The schedule of one node's dials.
#[derive(Debug, Clone)]
pub struct Backoff {
    /// Dials since the last session that held.
    attempt: u32,
    /// Exponent of the next wait; the same count, but a pushback starts it over.
    doublings: u32,
    /// Endpoints in a row that called the identity ended.
    condemned: usize,
    endpoints: usize,
}

impl Backoff {
    /// The schedule for this many endpoints.
    pub fn new(endpoints: usize) -> Self {
        Self { attempt: 0, doublings: 0, condemned: 0, endpoints }
    }

    /// Dials since the last session that held.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// A dial is made.
    pub fn dialed(&mut self) {
        self.attempt = self.attempt.saturating_add(1);
    }

    /// A session has had its second heartbeat acked: the gateway does not just accept and drop.
    pub fn session_held(&mut self) {
        self.attempt = 0;
        self.doublings = 0;
        self.condemned = 0;
    }

    /// Full jitter: uniform between nothing and the doubled bound, which grows with each call.
    pub fn jitter(&mut self, rng: &mut impl Rng) -> Duration {
        let bound = 2_u32.checked_pow(self.doublings).map_or(LONGEST, |factor| FIRST.saturating_mul(factor));
        self.doublings = self.doublings.saturating_add(1);
        up_to(bound.min(LONGEST), rng)
    }

    /// How long to wait after `end`.
    pub fn after(&mut self, end: &LinkEnd, rng: &mut impl Rng) -> Duration {
        let reaction = Reaction::to(end);
        if reaction != Reaction::Condemned {
            self.condemned = 0;
        }
        if let Some(pushback) = end.pushback {
            self.doublings = 0;
            return pushback;
        }
        match reaction {
            Reaction::Retry => self.jitter(rng),
            Reaction::Operator => OPERATOR.start + up_to(OPERATOR.end.saturating_sub(OPERATOR.start), rng),
            Reaction::Condemned => {
                self.condemned += 1;
                if self.condemned < self.endpoints {
                    return up_to(FIRST, rng);
                }
                self.condemned = 0;
                CONDEMNED
            }
        }
    }
}

/// Uniform in [0, bound], in ms.
pub fn up_to(bound: Duration, rng: &mut impl Rng) -> Duration {
    let ms = u64::try_from(bound.as_millis()).unwrap_or(u64::MAX);
    Duration::from_millis(rng.random_range(0..=ms))
}

/// What an end asks of the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reaction {
    /// Dial again with back-off.
    Retry,
    /// Somebody must act, or nobody knows why: log at error, dial again in 30 to 60 s.
    Operator,
    /// The identity is called ended, without proof: other endpoints, then again every 15 minutes.
    Condemned,
}

impl Reaction {
    /// To an end.
    pub fn to(end: &LinkEnd) -> Self {
        match (end.kind, end.reason) {
            (
                EndKind::Unauthenticated,
                Some(Reason::CertificateRevoked | Reason::DuplicateIdentity | Reason::IdentitySuperseded),
            ) => Self::Condemned,
            (EndKind::Unauthenticated | EndKind::Refused, _) => Self::Operator,
            _ => Self::Retry,
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    fn end(kind: EndKind, reason: Option<Reason>) -> LinkEnd {
        LinkEnd { kind, reason, pushback: None, revocation: None, detail: String::new() }
    }

    fn secs(range: Range<u64>) -> Range<Duration> {
        Duration::from_secs(range.start)..Duration::from_secs(range.end)
    }

    #[test]
    fn waits_are_uniform_below_a_bound_that_doubles_to_a_minute() {
        let mut highest = [Duration::ZERO; 10];
        for seed in 0..400 {
            let mut rng = StdRng::seed_from_u64(seed);
            let mut backoff = Backoff::new(1);
            for (n, highest) in highest.iter_mut().enumerate() {
                let wait = backoff.jitter(&mut rng);
                assert!(wait <= Duration::from_secs(1 << n.min(6)).min(LONGEST), "attempt {n}: {wait:?}");
                *highest = (*highest).max(wait);
            }
        }
        for (n, highest) in highest.iter().enumerate() {
            let bound = Duration::from_secs(1 << n.min(6)).min(LONGEST);
            assert!(*highest > bound.mul_f64(0.9), "attempt {n} never comes near {bound:?}: {highest:?}");
        }
    }

    #[test]
    fn a_very_long_outage_stays_at_a_minute() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut backoff = Backoff { doublings: u32::MAX - 1, ..Backoff::new(1) };
        for _ in 0..4 {
            assert!(backoff.jitter(&mut rng) <= LONGEST);
        }
    }

    #[test]
    fn a_pushback_is_waited_exactly_and_starts_the_doubling_over() {
        let mut rng = StdRng::seed_from_u64(2);
        let mut backoff = Backoff::new(1);
        for _ in 0..8 {
            backoff.jitter(&mut rng);
        }
        let pushed =
            LinkEnd { pushback: Some(Duration::from_millis(1234)), ..end(EndKind::Unavailable, None) };
        assert_eq!(backoff.after(&pushed, &mut rng), Duration::from_millis(1234));
        assert!(backoff.jitter(&mut rng) <= FIRST);
    }

    #[test]
    fn each_row_of_the_table_of_statuses_has_its_wait() {
        use EndKind::{Aborted, Closed, Lost, Refused, Unauthenticated, Unavailable};
        let retry = [
            (Unavailable, Some(Reason::NotStarted)),
            (Unavailable, Some(Reason::Draining)),
            (Unavailable, None),
            (Aborted, Some(Reason::Superseded)),
            (Aborted, Some(Reason::GatewayFenced)),
            (Closed, None),
            (Lost, None),
        ];
        let operator = [
            (Unauthenticated, None),
            (Unauthenticated, Some(Reason::CertificateExpired)),
            (Refused, Some(Reason::UnknownNode)),
            (Refused, Some(Reason::RoleMismatch)),
            (Refused, Some(Reason::ProtocolTooOld)),
        ];
        for seed in 0..50 {
            let mut rng = StdRng::seed_from_u64(seed);
            for (kind, reason) in retry {
                let wait = Backoff::new(1).after(&end(kind, reason), &mut rng);
                assert!(secs(0..1).contains(&wait) || wait == FIRST, "{kind:?} {reason:?}: {wait:?}");
            }
            for (kind, reason) in operator {
                let wait = Backoff::new(1).after(&end(kind, reason), &mut rng);
                assert!(OPERATOR.contains(&wait) || wait == OPERATOR.end, "{kind:?} {reason:?}: {wait:?}");
            }
        }
    }

    #[test]
    fn one_endpoint_that_condemns_while_another_is_down_does_not_silence_the_node() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut backoff = Backoff::new(2);
        let condemned = end(EndKind::Unauthenticated, Some(Reason::CertificateRevoked));
        for _ in 0..10 {
            assert!(backoff.after(&condemned, &mut rng) <= FIRST, "the other endpoint is to be tried");
            backoff.after(&end(EndKind::Lost, None), &mut rng);
        }
    }

    #[test]
    fn a_condemned_identity_tries_every_endpoint_and_then_waits_a_quarter_of_an_hour() {
        let mut rng = StdRng::seed_from_u64(3);
        for reason in [Reason::CertificateRevoked, Reason::DuplicateIdentity, Reason::IdentitySuperseded] {
            let condemned = end(EndKind::Unauthenticated, Some(reason));
            let mut backoff = Backoff::new(3);
            for _round in 0..2 {
                assert!(backoff.after(&condemned, &mut rng) <= FIRST);
                assert!(backoff.after(&condemned, &mut rng) <= FIRST);
                assert_eq!(backoff.after(&condemned, &mut rng), CONDEMNED);
            }
        }
    }
}
