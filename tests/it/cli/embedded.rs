//! The composition root without the program around it, as the simulator uses it.

use std::sync::Arc;
use std::time::Duration;

use bcd::clock::{Clock, SystemClock};
use bcd::gateway::control::{Operator, Request, Response};
use bcd::gateway::worker::Draft;
use bcd::identity::Ticket;
use bcd::identity::join::{JournalOptions, Options as JoinOptions, join};
use bcd::journal::{EventLimits, Limits, Memory, Mode, OpenError};
use bcd::model::{BootId, Exit, Incarnation, NodeId};
use bcd::node::{BuildError, Node, Options};
use bcd::wire::dsse::Policy;
use bcd::wire::tls::BUILD_TIME;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;

use super::Gateway;

const WAL_BYTES: u64 = 64 << 10;

fn options(state: &std::path::Path, seed: u64) -> Options {
    Options {
        machine: Default::default(),
        state: state.to_owned(),
        endpoints: Vec::new(),
        policy: Policy::None,
        denied: Arc::default(),
        audit: None,
        run_dir: None,
        limits: Limits::NONE,
        clock: Arc::new(SystemClock),
        rng: StdRng::seed_from_u64(seed),
        boot_id: BootId::new("b-1").unwrap(),
        wal_bytes: WAL_BYTES,
        event_limits: EventLimits::default(),
        journal: Mode::Thread,
        memory: Memory::HOST,
        reboot: Arc::new(bcd::host::fake_machine::FakeReboot::none()),
        programs: Arc::new(bcd::exec::Supervisors::new(env!("CARGO_BIN_EXE_bcd").into())),
        protocol: bcd::wire::version::Range::OWN,
        connect: Arc::new(bcd::host::tcp::Tcp),
        dialer: None,
        notifier: Arc::default(),
    }
}

fn join_options(state: &std::path::Path, line: &str) -> JoinOptions {
    JoinOptions {
        machine: Default::default(),
        state: state.to_owned(),
        ticket: Ticket::parse(line, BUILD_TIME).unwrap(),
        patience: Some(Duration::from_secs(10)),
        journal: JournalOptions {
            incarnation: Incarnation::new("i-1").unwrap(),
            boot_id: BootId::new("b-1").unwrap(),
            wal_bytes: WAL_BYTES,
        },
        facts: Default::default(),
        connect: Arc::new(bcd::host::tcp::Tcp),
        rng: StdRng::seed_from_u64(1),
    }
}

/// The journal's thread may still be on its way out.
async fn build(options: &Options) -> Node {
    for _ in 0..100 {
        match Node::build(options.clone()) {
            Err(BuildError::Journal(OpenError::Held { .. })) => {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
            other => return other.unwrap(),
        }
    }
    panic!("the journal is still held after 2 s");
}

/// A gateway, and the state directory of a node that has joined it.
async fn joined(dir: &std::path::Path) -> (Gateway, std::path::PathBuf, NodeId) {
    let gateway = Gateway::start(dir);
    let (gateway, line) = tokio::task::spawn_blocking(move || {
        let line = gateway.ticket(1, 3600);
        (gateway, line)
    })
    .await
    .unwrap();
    let state = dir.join("state");
    let node_id = join(join_options(&state, &line), |_| {}).await.unwrap().node_id;
    (gateway, state, node_id)
}

#[tokio::test]
async fn a_node_whose_future_is_dropped_gives_its_journal_back_and_a_clean_stop_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (gateway, state, node_id) = joined(dir.path()).await;

    for seed in 0..3 {
        let node = build(&options(&state, seed)).await;
        assert_eq!(*node.node_id(), node_id);
        let (_hold, stop) = watch::channel(false);
        let crashed = tokio::time::timeout(Duration::from_millis(300), node.run(stop)).await;
        assert!(crashed.is_err(), "it ran until it was dropped");
    }

    let node = build(&options(&state, 9)).await;
    let (say, stop) = watch::channel(false);
    let run = tokio::spawn(node.run(stop));
    tokio::time::sleep(Duration::from_millis(300)).await;
    say.send(true).unwrap();
    let exit = tokio::time::timeout(Duration::from_secs(10), run).await.unwrap().unwrap();
    assert_eq!(exit, Exit::Done);
    tokio::task::spawn_blocking(move || drop(gateway)).await.unwrap();
}

/// The machine's clocks, with a wall clock that somebody has set.
#[derive(Debug, Default)]
struct SetBack(std::sync::atomic::AtomicI64);

impl Clock for SetBack {
    fn boot(&self) -> Duration {
        SystemClock.boot()
    }

    fn wall_ms(&self) -> i64 {
        SystemClock.wall_ms() - self.0.load(std::sync::atomic::Ordering::Relaxed)
    }
}

async fn probe(gateway: &Gateway, node: &NodeId) -> String {
    let mut operator = Operator::connect(&gateway.state, gateway.desk.clone()).await.unwrap();
    let args = serde_json::value::RawValue::from_string("{}".into()).unwrap();
    let kind = "node.probe".to_owned();
    let id = operator.enqueue(Draft { node: node.clone(), kind, args, ttl_s: 60, id: None }).await.unwrap();
    for _ in 0..1000 {
        match operator.gateway.call(&Request::Show { id: id.clone() }).await.unwrap() {
            Response::Command(Some(view)) if bcd::sim::invariants::is_terminal(&view.state) => {
                return view.state;
            }
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("{id} did not end in 20 s");
}

#[tokio::test]
async fn a_wall_clock_set_back_a_year_changes_nothing_in_a_live_session_nor_at_a_start() {
    const YEAR_MS: i64 = 365 * 24 * 3600 * 1000;
    let dir = tempfile::tempdir().unwrap();
    let (gateway, state, node_id) = joined(dir.path()).await;
    let clock = Arc::new(SetBack::default());
    for (seed, before, after) in [(1, 0, YEAR_MS), (2, YEAR_MS, YEAR_MS), (3, YEAR_MS, -YEAR_MS)] {
        clock.0.store(before, std::sync::atomic::Ordering::Relaxed);
        let options = Options { clock: clock.clone(), ..options(&state, seed) };
        let node = build(&options).await;
        let (say, stop) = watch::channel(false);
        let run = tokio::spawn(node.run(stop));
        assert_eq!(probe(&gateway, &node_id).await, "succeeded");
        clock.0.store(after, std::sync::atomic::Ordering::Relaxed);
        assert_eq!(probe(&gateway, &node_id).await, "succeeded");
        say.send(true).unwrap();
        assert_eq!(run.await.unwrap(), Exit::Done);
    }
    tokio::task::spawn_blocking(move || drop(gateway)).await.unwrap();
}
