//! What is broken and when: a schedule that is fixed by the seed before the first agent starts.

use std::ops::Range;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;

use super::faults::{Blow, Fault, Outage, What};
use crate::failpoint::{self, Step};
use crate::gateway::Lies;
use crate::gateway::lies::{Lie, Rate};

/// How much is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Nothing.
    None,
    /// An agent dies about once a minute, a gateway about every 12 s.
    Light,
    /// Every fault there is: an agent loses its link or its daemon about every 7 s, a gateway is lost about every 15 s.
    Heavy,
    /// As heavy, and the gateways were taken over: they tell every lie that there is.
    Hostile,
}

impl Level {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Light => "light",
            Self::Heavy => "heavy",
            Self::Hostile => "hostile",
        }
    }

    /// What its gateways do that honest ones do not.
    pub fn lies(self) -> Lies {
        let told: &[Rate] = if self == Self::Hostile { LIES } else { &[] };
        told.iter().fold(Lies::default(), |lies, rate| lies.and(*rate))
    }
}

/// One line of the table: mean seconds between two such faults of one victim, and how long one lasts.
struct Row<T> {
    light: Option<u32>,
    heavy: Option<u32>,
    lasts_ms: Range<u64>,
    draw: fn(&mut StdRng) -> T,
}

impl<T> Row<T> {
    fn mean(&self, level: Level) -> Option<Duration> {
        let seconds = match level {
            Level::None => None,
            Level::Light => self.light,
            Level::Heavy | Level::Hostile => self.heavy,
        };
        seconds.map(|seconds| Duration::from_secs(seconds.into()))
    }
}

/// How long a daemon that died stays away, ms.
const DOWN_MS: Range<u64> = 0..2000;

/// Faults of one agent.
const AGENT: &[Row<Blow>] = &[
    Row { light: Some(60), heavy: Some(30), lasts_ms: DOWN_MS, draw: |_| Blow::Kill },
    Row { light: Some(90), heavy: Some(40), lasts_ms: DOWN_MS, draw: |rng| Blow::KillAt(step(rng)) },
    Row { light: Some(120), heavy: Some(60), lasts_ms: DOWN_MS, draw: |_| Blow::Reboot },
    Row { light: Some(600), heavy: Some(180), lasts_ms: 0..1, draw: |_| Blow::RebootCommand },
    Row { light: None, heavy: Some(240), lasts_ms: 300..2000, draw: |_| Blow::JournalLoss },
    Row { light: Some(300), heavy: Some(90), lasts_ms: 200..4000, draw: |_| Blow::DiskFull },
    Row { light: Some(120), heavy: Some(40), lasts_ms: 0..1, draw: |rng| Blow::ClockJump(jump_ms(rng)) },
    Row { light: None, heavy: Some(1200), lasts_ms: 12_000..15_000, draw: |_| Blow::Clone },
    Row { light: Some(60), heavy: Some(25), lasts_ms: 0..1, draw: |_| Blow::Cut },
    Row { light: Some(240), heavy: Some(60), lasts_ms: 1000..8000, draw: |_| Blow::HalfOpen },
    Row { light: Some(120), heavy: Some(30), lasts_ms: 1000..8000, draw: |rng| Blow::Latency(delay(rng)) },
    Row { light: Some(240), heavy: Some(60), lasts_ms: 300..2500, draw: |_| Blow::Loss },
];

/// Faults of one gateway. The lease is 20 s.
const GATEWAY: &[Row<Outage>] = &[
    Row { light: Some(12), heavy: Some(20), lasts_ms: DOWN_MS, draw: |_| Outage::Kill },
    Row { light: None, heavy: Some(60), lasts_ms: 1000..8000, draw: |_| Outage::Stall },
    Row { light: None, heavy: Some(300), lasts_ms: 21_000..25_000, draw: |_| Outage::Zombie },
];

/// How often a hostile gateway tells each lie where it can be, ‰.
const LIES: &[Rate] = &[
    Rate(Lie::ForgeUnsigned, 300),
    Rate(Lie::ForgeSigned, 300),
    Rate(Lie::AlterBody, 300),
    Rate(Lie::SwapNodes, 300),
    Rate(Lie::ForgeCancel, 100),
    Rate(Lie::ForgeBundle, 300),
    Rate(Lie::ForgeRevocation, 300),
    Rate(Lie::ReplayEnded, 300),
    Rate(Lie::Reorder, 100),
    // Of those that expire within a minute, of which there are few.
    Rate(Lie::Withhold, 500),
    // Of Welcomes there are few, too.
    Rate(Lie::TimeBehind, 120),
    Rate(Lie::TimeAhead, 120),
    Rate(Lie::TimePushed, 120),
    Rate(Lie::AckResult, 50),
    Rate(Lie::AckEvents, 100),
    // Each costs a journal its birth, and with it a renewal: those are what the next three can be told in.
    Rate(Lie::AckAhead, 30),
    Rate(Lie::RenewForged, 200),
    Rate(Lie::RenewStale, 250),
    Rate(Lie::RenewSwapped, 250),
];

/// Faults of the store.
const STORE: Row<What> = Row { light: Some(60), heavy: Some(30), lasts_ms: 300..4000, draw: |_| What::Store };

/// Steps of an agent's own tasks; those of its supervisors are other processes'.
pub const STEPS: &[Step] = &[
    failpoint::RECEIVED,
    failpoint::ACCEPTED,
    failpoint::ACCEPTED_SENT,
    failpoint::RUNNING,
    failpoint::SUPERVISED,
    failpoint::RUNNING_SENT,
    failpoint::EFFECT_STARTED,
    failpoint::EFFECT_ENDED,
    failpoint::DONE,
    failpoint::RESULT_SENT,
    failpoint::ACK_RECEIVED,
];

fn step(rng: &mut StdRng) -> Step {
    STEPS.choose(rng).copied().unwrap_or(failpoint::DONE)
}

/// An operator's slip (seconds), a wrong time zone (hours) or an empty battery (years), either way.
fn jump_ms(rng: &mut StdRng) -> i64 {
    const SECOND: i64 = 1000;
    const HOUR: i64 = 3600 * SECOND;
    let size = match rng.random_range(0..3) {
        0 => rng.random_range(SECOND..600 * SECOND),
        1 => rng.random_range(HOUR..24 * HOUR),
        _ => rng.random_range(365 * 24 * HOUR..3 * 365 * 24 * HOUR),
    };
    if rng.random() { size } else { -size }
}

fn delay(rng: &mut StdRng) -> Duration {
    Duration::from_millis(rng.random_range(20..400))
}

/// The faults of a run, in order of time; at a pace of 2 each comes half as often. Each kind of the level strikes at least once in a run that is long enough
/// for it to end (twice its longest duration), so that no run passes without one.
pub fn schedule(
    level: Level,
    nodes: usize,
    gateways: usize,
    (duration, pace): (Duration, u32),
    rng: &mut StdRng,
) -> Vec<Fault> {
    let mut faults = Vec::new();
    for row in AGENT {
        strike((level, pace), row, nodes, duration, rng, &mut faults, What::Agent);
    }
    for row in GATEWAY {
        strike((level, pace), row, gateways, duration, rng, &mut faults, What::Gateway);
    }
    strike((level, pace), &STORE, 1, duration, rng, &mut faults, |_, what| what);
    faults.sort_by_key(|fault| fault.at);
    faults
}

/// Memoryless strikes at every victim of one row: no moment is safer than another.
fn strike<T>(
    (level, pace): (Level, u32),
    row: &Row<T>,
    victims: usize,
    end: Duration,
    rng: &mut StdRng,
    faults: &mut Vec<Fault>,
    of: fn(usize, T) -> What,
) {
    let Some(mean) = row.mean(level).map(|mean| mean * pace) else { return };
    let before = faults.len();
    for victim in 0..victims {
        let mut at = Duration::ZERO;
        loop {
            let chance: f64 = rng.random_range(f64::EPSILON..1.0);
            at += mean.mul_f64(-chance.ln());
            if at >= end {
                break;
            }
            let lasts = Duration::from_millis(rng.random_range(row.lasts_ms.clone()));
            faults.push(Fault { at, what: of(victim, (row.draw)(rng)), lasts });
            at += lasts;
        }
    }
    let longest = Duration::from_millis(row.lasts_ms.end);
    if faults.len() == before && victims > 0 && end >= 2 * longest {
        let at = (end - longest).mul_f64(rng.random_range(0.1..0.8));
        let lasts = Duration::from_millis(rng.random_range(row.lasts_ms.clone()));
        let victim = rng.random_range(0..victims);
        faults.push(Fault { at, what: of(victim, (row.draw)(rng)), lasts });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::seed;
    use super::*;

    fn faults(level: Level, seed: u64) -> Vec<Fault> {
        schedule(level, 5, 3, (Duration::from_secs(60), 1), &mut seed::stream(seed, "chaos", 0))
    }

    #[test]
    fn a_seed_fixes_every_fault() {
        assert_eq!(faults(Level::Heavy, 7), faults(Level::Heavy, 7));
        assert_ne!(faults(Level::Heavy, 7), faults(Level::Heavy, 8));
        assert_eq!(faults(Level::None, 7), []);
    }

    #[test]
    fn a_minute_has_every_fault_of_its_level_and_they_come_in_order() {
        for seed in 0..50 {
            for (level, kinds) in [(Level::Light, 12), (Level::Heavy, 16)] {
                let faults = faults(level, seed);
                let names: BTreeSet<_> = faults.iter().map(|fault| fault.what.name()).collect();
                assert_eq!(names.len(), kinds, "seed {seed}: {names:?}");
                assert!(faults.is_sorted_by_key(|fault| fault.at), "seed {seed}");
                assert!(faults.iter().all(|fault| fault.at < Duration::from_secs(60)), "seed {seed}");
            }
        }
    }

    #[test]
    fn a_short_run_has_no_fault_that_could_not_end_within_it() {
        let short = |seed| {
            let rng = &mut seed::stream(seed, "chaos", 0);
            schedule(Level::Heavy, 1, 1, (Duration::from_secs(5), 1), rng)
        };
        let zombies = (0..50).flat_map(short).filter(|fault| fault.what.name() == "gateway-zombie").count();
        // Chance may still begin one; it is not put there.
        assert!(zombies < 10, "{zombies}");
    }
}
