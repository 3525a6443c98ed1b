//! What is broken and when: a schedule that is fixed by the seed before the first agent starts.

use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

/// How much is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Nothing.
    None,
    /// An agent dies about twice a minute, the gateway about every 8 s.
    Light,
    /// An agent dies about every 8 s, the gateway about every 4 s.
    Heavy,
}

/// Mean time between the kills of one agent, and of the gateway.
struct Pace {
    agent: Duration,
    gateway: Duration,
}

impl Level {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Light => "light",
            Self::Heavy => "heavy",
        }
    }

    fn pace(self) -> Option<Pace> {
        let pace = |agent, gateway| {
            Some(Pace { agent: Duration::from_secs(agent), gateway: Duration::from_secs(gateway) })
        };
        match self {
            Self::None => None,
            Self::Light => pace(30, 8),
            Self::Heavy => pace(8, 4),
        }
    }
}

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// The daemon of this agent.
    Agent(usize),
    /// The machine of this agent, which comes back with another boot.
    Machine(usize),
    /// The gateway's process, by SIGKILL.
    Gateway,
}

/// One kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// How long after the start of the load.
    pub at: Duration,
    /// What.
    pub victim: Victim,
    /// How long it stays away before it starts again.
    pub down: Duration,
}

/// A machine restarts this much more rarely than its daemon dies.
const MACHINES_PER_DAEMON: u32 = 3;

/// Longest time that a victim stays away, ms.
const MAX_DOWN_MS: u64 = 2000;

/// The kills of a run, in order of time. The first gateway kill lies within the run whenever it lasts more than
/// 2 s, so that no run with chaos passes without one.
pub fn schedule(level: Level, nodes: usize, duration: Duration, rng: &mut StdRng) -> Vec<Fault> {
    let Some(pace) = level.pace() else { return Vec::new() };
    let mut faults = Vec::new();
    for agent in 0..nodes {
        poisson(Victim::Agent(agent), Duration::ZERO, pace.agent, duration, rng, &mut faults);
        let mean = pace.agent * MACHINES_PER_DAEMON;
        poisson(Victim::Machine(agent), Duration::ZERO, mean, duration, rng, &mut faults);
    }
    if duration > Duration::from_secs(2) {
        let first = duration.mul_f64(rng.random_range(0.2..0.5));
        faults.push(Fault { at: first, victim: Victim::Gateway, down: down(rng) });
        poisson(Victim::Gateway, first, pace.gateway, duration, rng, &mut faults);
    }
    faults.sort_by_key(|fault| fault.at);
    faults
}

fn down(rng: &mut StdRng) -> Duration {
    Duration::from_millis(rng.random_range(0..MAX_DOWN_MS))
}

/// Memoryless kills of one victim: no moment is safer than another.
fn poisson(
    victim: Victim,
    from: Duration,
    mean: Duration,
    end: Duration,
    rng: &mut StdRng,
    faults: &mut Vec<Fault>,
) {
    let mut at = from;
    loop {
        let chance: f64 = rng.random_range(f64::EPSILON..1.0);
        at += mean.mul_f64(-chance.ln());
        if at >= end {
            return;
        }
        let down = down(rng);
        faults.push(Fault { at, victim, down });
        at += down;
    }
}

#[cfg(test)]
mod tests {
    use super::super::seed;
    use super::*;

    fn faults(level: Level, seed: u64) -> Vec<Fault> {
        schedule(level, 50, Duration::from_secs(20), &mut seed::stream(seed, "chaos", 0))
    }

    #[test]
    fn a_seed_fixes_every_fault() {
        assert_eq!(faults(Level::Heavy, 7), faults(Level::Heavy, 7));
        assert_ne!(faults(Level::Heavy, 7), faults(Level::Heavy, 8));
        assert_eq!(faults(Level::None, 7), []);
    }

    #[test]
    fn every_run_with_chaos_kills_the_gateway_and_faults_come_in_order() {
        for seed in 0..50 {
            for level in [Level::Light, Level::Heavy] {
                let faults = faults(level, seed);
                assert!(faults.iter().any(|fault| fault.victim == Victim::Gateway), "seed {seed}");
                assert!(faults.iter().any(|fault| fault.victim != Victim::Gateway), "seed {seed}");
                assert!(faults.is_sorted_by_key(|fault| fault.at), "seed {seed}");
                assert!(faults.iter().all(|fault| fault.at < Duration::from_secs(20)), "seed {seed}");
            }
        }
    }
}
