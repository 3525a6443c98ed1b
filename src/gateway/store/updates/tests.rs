use super::*;
use crate::clock::TokioClock;
use crate::gateway::store::{HelloFacts, Lease, NewCommand, Route};
use crate::model::{BootId, Digest, Incarnation, JournalId};

const NOW: ServerTime = ServerTime(1_000_000);
const BODY: &[u8] = b"a body";

/// A store with one node and one command, which waits.
struct Bench {
    store: Store,
    lease: Lease,
    node: NodeId,
    id: CommandId,
    _dir: tempfile::TempDir,
}

impl Bench {
    async fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let clock = std::sync::Arc::new(TokioClock::starting_at(NOW.0));
        let store =
            Store::open(&dir.path().join("gateway.db"), super::super::Mode::Thread, "g-1".into(), clock)
                .expect("a store");
        let life = std::time::Duration::from_secs(20);
        let lease = store.take_lease(&[], life, None, "").await.expect("stored").expect("a lease");
        let node = NodeId::new("n-1").expect("an id");
        let id = CommandId::new("c-1").expect("an id");
        let insert = "INSERT INTO nodes (node_id, generation, role, site) VALUES ('n-1', 1, 'host', 'lab')";
        store.run(move |db| db.execute(insert, [])).await.expect("a node");
        let command = NewCommand {
            id: id.clone(),
            node: node.clone(),
            kind: "node.exec".into(),
            lane: Lane::Work,
            retry_safe: false,
            payload: BODY.to_vec(),
            not_after: ServerTime(9_000_000),
            now: NOW,
        };
        store.enqueue(command).await.expect("stored").expect("queued");
        Self { store, lease, node, id, _dir: dir }
    }

    /// A new session; its epoch.
    async fn hello(&self) -> u64 {
        let facts = HelloFacts {
            node: self.node.clone(),
            serial: "40".into(),
            boot_id: BootId::new("b-1").expect("an id"),
            journal_id: JournalId::new("j-1").expect("an id"),
            incarnation: Incarnation::new("i-1").expect("an id"),
            version: String::new(),
            capabilities: Vec::new(),
            last_epoch: 0,
            results: Vec::new(),
        };
        self.store.hello(facts, self.lease.clone()).await.expect("stored").expect("welcomed").epoch
    }

    async fn dispatch(&self, epoch: u64) {
        let free = vec![(Lane::Work, 1)];
        let route = Route { node: self.node.clone(), epoch, lease: self.lease.clone() };
        let dispatched = self.store.dispatch(route, free).await.expect("stored");
        assert_eq!(dispatched.expect("the session is the node's").out.len(), 1);
    }

    async fn say(&self, epoch: u64, said: Said) -> Effects {
        let update = Update { id: Some(self.id.clone()), body_sha256: Digest::of(BODY), said };
        self.store.updates(self.node.clone(), epoch, vec![update], NOW).await.expect("stored")
    }

    async fn state(&self) -> String {
        let read = |db: &Connection| db.query_row("SELECT state FROM commands", [], |row| row.get(0));
        self.store.run(read).await.expect("a command")
    }
}

fn busy(why: Reason) -> Said {
    Said::Refused { reason: "busy".into(), detail: why.token().into(), busy: Some(why) }
}

fn succeeded() -> Said {
    Said::Ended(End {
        state: State::Succeeded,
        reason: String::new(),
        message: String::new(),
        effect: "complete",
        attempt: 1,
        output: "{}".into(),
    })
}

#[tokio::test]
async fn passing_answers_of_an_older_epoch_are_ignored() {
    let bench = Bench::new().await;
    let older = bench.hello().await;
    bench.dispatch(older).await;
    let newer = bench.hello().await;
    for said in [busy(Reason::Disk), Said::Accepted, Said::Running { attempt: 1 }] {
        assert_eq!(bench.say(older, said.clone()).await.applied, [Applied::Nothing], "{said:?}");
        assert_eq!(bench.state().await, "dispatched", "{said:?}");
    }
    assert_eq!(bench.say(newer, Said::Accepted).await.applied, [Applied::Progress]);
    assert_eq!(bench.state().await, "accepted");
}

#[tokio::test]
async fn a_result_of_an_older_epoch_is_stored_and_acked() {
    let bench = Bench::new().await;
    let older = bench.hello().await;
    bench.dispatch(older).await;
    bench.hello().await;
    let effects = bench.say(older, succeeded()).await;
    assert_eq!((effects.acks(), effects.ended()), (vec![bench.id.clone()], vec![bench.id.clone()]));
    assert_eq!(bench.state().await, "succeeded");
}

#[tokio::test]
async fn only_a_node_without_credit_is_told_apart_from_other_refusals() {
    for (why, exhausted) in [(Reason::Credits, true), (Reason::JournalFull, false)] {
        let bench = Bench::new().await;
        let epoch = bench.hello().await;
        bench.dispatch(epoch).await;
        assert_eq!(bench.say(epoch, busy(why)).await.applied, [Applied::BackOff(Lane::Work, exhausted)]);
        assert_eq!(bench.state().await, "pending");
    }
}

#[test]
fn a_refused_commands_wait_doubles_from_one_second_to_thirty() {
    let waits = std::iter::successors(Some(next_backoff(0)), |wait| Some(next_backoff(*wait)));
    let waits: Vec<i64> = waits.take(8).collect();
    assert_eq!(waits, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
    assert_eq!(next_backoff(i64::MAX), LONGEST_BACKOFF_MS);
}
