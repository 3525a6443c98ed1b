//! A store with one node and one command, by a clock that the test sets.

mod duplicates;
mod leases;
mod liveness;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use super::commands::Dispatched;
use super::hello::Opened;
use super::{HelloFacts, HelloRefusal, Lease, Mode, NewCommand, Route, Store, Stray};
use crate::clock::Clock;
use crate::model::{BootId, CommandId, Incarnation, JournalId, Lane, NodeId, ServerTime};

pub(super) const BODY: &[u8] = b"a body";
const LIFE: Duration = Duration::from_secs(20);

/// A clock that stands until it is set: a slow machine is no part of what is tested.
#[derive(Debug)]
struct SetClock(AtomicI64);

impl Clock for SetClock {
    fn boot(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed).unsigned_abs())
    }

    fn wall_ms(&self) -> i64 {
        self.0.load(Ordering::Relaxed)
    }
}

pub(super) struct Bench {
    pub store: Store,
    pub lease: Lease,
    pub node: NodeId,
    pub id: CommandId,
    clock: Arc<SetClock>,
    /// Of the last Welcome.
    epoch: AtomicU64,
    dir: tempfile::TempDir,
}

impl Bench {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let clock = Arc::new(SetClock(AtomicI64::new(1_000_000_000)));
        let path = dir.path().join("gateway.db");
        let store = Store::open(&path, Mode::Thread, "g-1".into(), clock.clone()).expect("a store");
        let lease = store.take_lease(LIFE, None, "").await.expect("stored").expect("a lease");
        let node = NodeId::new("n-1").expect("an id");
        let id = CommandId::new("c-1").expect("an id");
        let insert = "INSERT INTO nodes (node_id, generation, role, site) VALUES ('n-1', 1, 'host', 'lab')";
        store.run(move |db| db.execute(insert, [])).await.expect("a node");
        let bench = Self { store, lease, node, id, clock, epoch: AtomicU64::new(0), dir };
        let command = NewCommand {
            id: bench.id.clone(),
            node: bench.node.clone(),
            kind: "node.exec".into(),
            lane: Lane::Work,
            retry_safe: false,
            envelope: crate::wire::pb::Envelope { payload: BODY.into(), ..Default::default() },
            not_after: bench.now().plus(Duration::from_secs(9_000_000)),
            now: bench.now(),
        };
        bench.store.enqueue(command).await.expect("stored").expect("queued");
        bench
    }

    /// Another gateway's handle to the same file, and its lease.
    pub async fn neighbour(&self) -> (Store, Lease) {
        let path = self.dir.path().join("gateway.db");
        let store = Store::open(&path, Mode::Thread, "g-2".into(), self.clock.clone()).expect("a store");
        let lease = store.take_lease(LIFE, None, "").await.expect("stored").expect("a lease");
        (store, lease)
    }

    pub fn now(&self) -> ServerTime {
        ServerTime(self.clock.wall_ms())
    }

    pub fn pass(&self, time: Duration) {
        self.clock.0.fetch_add(i64::try_from(time.as_millis()).expect("a time"), Ordering::Relaxed);
    }

    pub async fn renew(&self) {
        assert!(
            self.store.renew_lease(self.lease.clone(), LIFE, 0).await.expect("stored"),
            "the lease holds"
        );
    }

    pub fn facts(&self, incarnation: &str) -> HelloFacts {
        HelloFacts {
            node: self.node.clone(),
            serial: "40".into(),
            boot_id: BootId::new("b-1").expect("an id"),
            journal_id: JournalId::new("j-1").expect("an id"),
            incarnation: Incarnation::new(incarnation).expect("an id"),
            version: String::new(),
            capabilities: Vec::new(),
            last_epoch: self.epoch.load(Ordering::Relaxed),
            results: Vec::new(),
            running: Vec::new(),
        }
    }

    pub async fn hello(&self, facts: HelloFacts) -> Result<Opened, HelloRefusal> {
        let caller = Arc::new(());
        let opened =
            self.store.hello(facts, self.lease.clone(), Arc::downgrade(&caller)).await.expect("stored");
        opened.inspect(|opened| self.epoch.store(opened.epoch, Ordering::Relaxed))
    }

    /// A new session; its epoch.
    pub async fn welcomed(&self, incarnation: &str) -> u64 {
        self.hello(self.facts(incarnation)).await.expect("welcomed").epoch
    }

    pub fn route(&self, epoch: u64) -> Route {
        Route { node: self.node.clone(), epoch, lease: self.lease.clone() }
    }

    /// A session that has had its first heartbeat.
    pub async fn live(&self, incarnation: &str) -> Route {
        let route = self.route(self.welcomed(incarnation).await);
        let first = self.store.first_heartbeat(route.clone(), Vec::new(), serde_json::json!({})).await;
        first.expect("stored").expect("it routes");
        route
    }

    pub async fn try_dispatch(&self, route: Route) -> Result<Dispatched, Stray> {
        self.store.dispatch(route, vec![(Lane::Work, 1)]).await.expect("stored")
    }

    pub async fn dispatch(&self, epoch: u64) {
        let dispatched = self.try_dispatch(self.route(epoch)).await;
        assert_eq!(dispatched.expect("the session is the node's").out.len(), 1);
    }

    pub async fn events(&self, kind: &str) -> Vec<serde_json::Value> {
        let events = self.store.events(0).await.expect("events");
        events.into_iter().filter(|event| event.kind == kind).map(|event| event.detail).collect()
    }

    pub async fn node_state(&self) -> String {
        self.store.nodes(self.now()).await.expect("nodes")[0].state.clone()
    }
}

#[tokio::test]
async fn no_statement_is_compiled_again_for_the_values_that_are_bound_to_it() {
    let bench = Bench::new().await;
    let again = bench.store.run(|db| {
        let mut statement = db.prepare("SELECT id FROM commands WHERE state = ? LIMIT ?")?;
        for (state, limit) in [("pending", 1), ("dispatched", 2), ("running", 3)] {
            statement.exists(rusqlite::params![state, limit])?;
        }
        Ok(statement.get_status(rusqlite::StatementStatus::RePrepare))
    });
    assert_eq!(again.await.expect("read"), 0);
}
