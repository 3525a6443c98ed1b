//! kill -9 at random moments, judged by the simulator's invariants. `make crash N=1000` makes it long.

use std::thread::sleep;
use std::time::Duration;

use bcd::gateway::control::{Request, Response};
use bcd::sim::history::{Evidence, Handed, read_witness};
use bcd::sim::invariants::judge;
use bcd::sim::load::{Load, Planned};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::for_each;
use crate::lab::{Lab, until};

/// Kills when nobody asks for more: seconds, not minutes.
const KILLS: u64 = 40;
/// Each lab has a gateway and a node of its own.
const LABS: u64 = 4;

fn kills() -> u64 {
    let asked = std::env::var("BCD_CRASH_KILLS").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or(KILLS)
}

fn seed() -> u64 {
    std::env::var("BCD_CRASH_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[test]
fn kills_at_random_moments_double_no_effect_and_lose_no_result() {
    let seeds: Vec<u64> = (0..LABS).map(|lab| seed() * 1000 + lab).collect();
    for_each(&seeds, |seed| one_lab(*seed, kills().div_ceil(LABS)));
}

fn one_lab(seed: u64, kills: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut load = Load::new(1, StdRng::seed_from_u64(seed ^ 0x6c6f_6164));
    let mut lab = Lab::joined();
    let mut evidence = Evidence::default();
    lab.start_node(None);
    for _ in 0..kills {
        for _ in 0..rng.random_range(2..10) {
            let planned = load.draw();
            hand_over(&lab, &planned);
            evidence.handed.insert(planned.id.clone(), Handed { planned, acknowledged: true });
        }
        // A started node dials within a second; the range reaches from before its dial to idle again.
        sleep(Duration::from_millis(rng.random_range(0..1800)));
        if rng.random_ratio(1, 4) {
            lab.kill_gateway();
            lab.start_gateway(None);
        } else {
            lab.kill_node();
            lab.start_node(None);
        }
    }
    for id in evidence.handed.keys() {
        lab.ended(id);
    }
    lab.probe();
    until("the last node.connected event", || {
        lab.events().iter().any(|event| event.kind == "node.connected").then_some(())
    });
    let Response::Commands(commands) = lab.ask(&Request::History) else { panic!("no history") };
    // The probe is the lab's own.
    evidence.commands = commands.into_iter().filter(|row| evidence.handed.contains_key(&row.id)).collect();
    evidence.witness = read_witness(&lab.path("witness")).expect("a witness file");
    evidence.events = lab.events();
    // The last results may be acked before the events that tell of them.
    until("the nodes' own word of every end", || {
        evidence.told = lab.told();
        let ends = evidence.told_ends();
        evidence.ended_by_nodes().all(|row| ends.contains_key(row.id.as_str())).then_some(())
    });
    for verdict in judge(&evidence) {
        assert!(
            verdict.held(),
            "{} broken: {:#?}; again: BCD_CRASH_SEED={} make crash N={}\n{}",
            verdict.id,
            verdict.broken,
            seed / 1000,
            kills * LABS,
            lab.logs()
        );
        eprintln!("seed {seed}: {} held ({} {})", verdict.id, verdict.checks, verdict.unit);
    }
}

fn hand_over(lab: &Lab, planned: &Planned) {
    let request = Request::Enqueue {
        node: lab.node_id(),
        kind: planned.kind().into(),
        args: planned.args(&lab.path("witness")).expect("arguments"),
        ttl_s: planned.ttl_s(),
        id: Some(planned.id.clone()),
    };
    let answer = lab.ask(&request);
    assert!(matches!(answer, Response::Enqueued(_)), "{answer:?}");
}
