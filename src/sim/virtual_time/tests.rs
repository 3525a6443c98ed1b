use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio::time::sleep;

use super::*;
use crate::gateway::control::{Request, Response};
use crate::sim::agent::{Agent, Plan};
use crate::sim::chaos::Level;
use crate::sim::faults::Outage;
use crate::sim::observe;

const HOUR: Duration = Duration::from_secs(3600);
const SEED: u64 = 5;

fn options() -> Options {
    Options {
        nodes: 1,
        gateways: 1,
        duration: Duration::ZERO,
        seed: SEED,
        chaos: Level::None,
        skew: 0,
        commands_per_second: 0.0,
        heartbeat: Duration::from_secs(10),
        per_process: 1,
        foreign: None,
        page: None,
        virtual_time: true,
    }
}

async fn connected(world: &World) -> bool {
    let Ok(Response::Nodes(nodes)) = world.gateways.ask(&Request::Nodes).await else { return false };
    nodes.len() == 1 && nodes[0].state == "connected"
}

/// A gateway, and one agent that has joined and runs; `story` is told its identity.json.
fn with_a_node(story: impl AsyncFnOnce(&World, &dyn Fn() -> serde_json::Value)) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let _inline = Inline::here();
    let work = tempfile::tempdir().unwrap();
    runtime.unwrap().block_on(async {
        let clock = Arc::new(TokioClock::starting_at(BUILD_TIME.0 + BEGIN_MS));
        let world = world(&options(), work.path(), clock).await.unwrap();
        let ticket = observe::ticket(&world.gateways, 1).await.unwrap();
        let homes = work.path().join("homes");
        std::fs::create_dir(&homes).unwrap();
        let gateways = world.addresses.clone();
        let plan = Plan { homes: homes.clone(), seed: SEED, skew: 0, gateways, run: None };
        let agent = Agent::new(&plan, &world.ground, 0);
        agent.join(&ticket).await.unwrap();
        let (say_stop, stop) = watch::channel(false);
        let node = agent.build(&mut StdRng::seed_from_u64(SEED), say_stop.clone()).await.unwrap();
        let running = tokio::spawn(node.run(stop));
        sleep(Duration::from_secs(60)).await;
        assert!(connected(&world).await);
        let identity =
            || serde_json::from_slice(&std::fs::read(homes.join("0/identity.json")).unwrap()).unwrap();
        story(&world, &identity).await;
        say_stop.send_replace(true);
        running.await.unwrap();
    });
}

#[test]
fn a_node_that_reaches_no_gateway_for_25_hours_joins_again_by_itself_as_the_same_node() {
    with_a_node(async |world, identity| {
        let before = identity();
        world.gateways.strike(0, Outage::Kill, 25 * HOUR).await.unwrap();
        sleep(HOUR / 4).await;
        assert!(connected(world).await);
        let after = identity();
        assert_eq!((&after["node_id"], &after["generation"]), (&before["node_id"], &2.into()));
        // From here on it renews as ever.
        sleep(20 * HOUR).await;
        assert!(connected(world).await);
        let renewed = identity();
        assert_ne!(renewed["key"], after["key"]);
        assert_eq!(renewed["generation"], 2);
    });
}

#[test]
fn a_node_that_reaches_no_gateway_for_longer_than_it_may_stays_out_whoever_answers() {
    with_a_node(async |world, identity| {
        world.gateways.strike(0, Outage::Kill, 24 * HOUR + 8 * 24 * HOUR).await.unwrap();
        sleep(HOUR).await;
        assert!(!connected(world).await);
        assert_eq!(identity()["generation"], 1);
    });
}
