//! kill -9 at steps drawn by chance, with programs in flight, judged at the end. `make crash N=1000` makes it long.
//!
//! The seed fixes who is killed, at which step, and what the node has to do meanwhile; how the processes interleave
//! is the machine's. So a replay meets the same kills, and not always the same failure.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{GATEWAY_STEPS, NODE_STEPS, SUPERVISOR_STEPS, for_each_of};

mod campaign;
mod checks;
mod programs;

/// Kills of a node at a named step when nobody asks for more. With the others that fall meanwhile about 30.
const KILLS: usize = 20;
/// Each lab has a gateway and a node of its own.
const LABS: usize = 4;
/// More kills than this do not fall on one lab: a failure is replayed in a minute.
const KILLS_A_LAB: usize = 50;
/// Labs at work at once: half of the time a node waits for its dial.
const AT_ONCE: usize = 6;

fn asked(variable: &str) -> Option<usize> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

/// What died, by name: steps, and the random moments of each kind of process.
type Deaths = BTreeMap<String, usize>;

/// How far all labs together are.
struct Progress {
    wanted: usize,
    done: AtomicUsize,
    deaths: Mutex<Deaths>,
}

impl Progress {
    /// One more node has died at a named step.
    fn one(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(50) {
            eprintln!("{done} of {} kills at named steps of a node", self.wanted);
        }
    }

    fn add(&self, deaths: &Deaths) {
        let mut all = self.deaths.lock().expect("no lab panics with the lock");
        for (name, count) in deaths {
            *all.entry(name.clone()).or_default() += count;
        }
    }
}

#[test]
fn kills_at_random_steps_double_no_effect_and_lose_no_command_no_result_and_no_program() {
    let kills = asked("BCD_CRASH_KILLS").unwrap_or(KILLS);
    let seed = asked("BCD_CRASH_SEED").unwrap_or(1);
    let labs = asked("BCD_CRASH_LABS").unwrap_or_else(|| LABS.max(kills.div_ceil(KILLS_A_LAB)));
    let each = kills.div_ceil(labs);
    let progress = Progress { wanted: each * labs, done: 0.into(), deaths: Mutex::default() };
    let seeds: Vec<usize> = (seed..seed + labs).collect();
    eprintln!("{labs} labs of {each} kills, seeds {seed} to {}", seed + labs - 1);
    for_each_of(AT_ONCE, &seeds, |&seed| {
        let replay = format!("again: BCD_CRASH_SEED={seed} BCD_CRASH_LABS=1 make crash N={each}");
        campaign::run(seed as u64, each, &replay, &progress);
    });
    report(&progress);
}

fn report(progress: &Progress) {
    let deaths = progress.deaths.lock().expect("no lab panics with the lock");
    let of =
        |who: &str| deaths.iter().filter(|(name, _)| name.starts_with(who)).map(|(_, count)| count).sum();
    let node: usize = of("node.");
    for (name, count) in deaths.iter() {
        eprintln!("{count:6}  {name}");
    }
    let (supervisor, gateway): (usize, usize) = (of("supervisor."), of("gateway."));
    eprintln!("kills: {node} of a node, {supervisor} of a supervisor, {gateway} of a gateway");
    assert!(node >= progress.wanted, "{node} kills of a node, and {} were wanted", progress.wanted);
    // Each is drawn 20 times on the average: one that never comes is a step that is not reached any more.
    let steps = NODE_STEPS.iter().map(|(step, _)| step);
    if progress.wanted >= 20 * steps.len() {
        let supervisor = SUPERVISOR_STEPS.iter().map(|(step, ..)| step);
        let missing: Vec<&str> = (steps.chain(supervisor).chain(GATEWAY_STEPS))
            .map(|step| step.name())
            .filter(|name| !deaths.contains_key(*name))
            .collect();
        assert_eq!(missing, [""; 0], "no process died at these steps");
    }
}
