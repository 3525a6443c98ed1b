use std::time::Duration;

use super::{Bench, LIFE};
use crate::gateway::store::{HelloRefusal, Notice, StoreError, Stray, begin, schema};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test]
async fn a_lease_that_ran_out_routes_nothing_and_is_not_renewed() {
    let bench = Bench::new().await;
    let route = bench.live("i-1").await;
    bench.pass(LIFE - SECOND);
    bench.renew().await;
    bench.pass(LIFE - SECOND);
    bench.try_dispatch(route.clone()).await.expect("it routes until then");
    bench.pass(SECOND * 2);
    assert_eq!(bench.try_dispatch(route.clone()).await.err(), Some(Stray::Fenced));
    assert_eq!(bench.hello(bench.facts("i-1")).await.err(), Some(HelloRefusal::Fenced));
    let written = bench.store.disconnected(route.clone(), bench.now(), "closed").await.expect("stored");
    assert!(!written, "nor does it disconnect");
    let seen = vec![(bench.node.clone(), route.epoch, bench.now(), "{}".into())];
    let seen = bench.store.seen(bench.lease.clone(), seen).await.expect("stored");
    assert_eq!(seen, Err(Stray::Fenced), "nor tell of liveness");
    assert!(!bench.store.renew_lease(bench.lease.clone(), LIFE, 0).await.expect("stored"));
    assert_eq!(bench.node_state().await, "connected", "nobody has found the loss yet");
}

#[tokio::test]
async fn the_first_gateway_to_look_finds_a_lost_one_and_its_nodes_are_disconnected_once() {
    let bench = Bench::new().await;
    bench.live("i-1").await;
    let (neighbour, lease) = bench.neighbour().await;
    bench.pass(LIFE - SECOND);
    assert!(!neighbour.end_leases().await.expect("stored"), "both hold");
    assert!(neighbour.renew_lease(lease, LIFE, 0).await.expect("stored"));
    bench.pass(SECOND * 2);
    assert!(neighbour.end_leases().await.expect("stored"));
    assert!(!bench.store.end_leases().await.expect("stored"), "once");
    assert_eq!(bench.node_state().await, "disconnected");
    let events = bench.events("node.disconnected").await;
    assert_eq!(events.len(), 1);
    assert_eq!((&events[0]["reason"], &events[0]["gateway"]), (&"gateway-lost".into(), &"g-1".into()));
}

#[tokio::test]
async fn what_a_lease_was_taken_for_ends_with_the_next_grant() {
    let bench = Bench::new().await;
    let older = bench.live("i-1").await;
    let again = bench.store.take_lease(LIFE, Some(bench.lease.clone()), "gateway-fenced").await;
    let again = again.expect("stored").expect("granted");
    assert!(again.number > bench.lease.number);
    assert_eq!(bench.try_dispatch(older).await.err(), Some(Stray::Fenced));
    assert_eq!(bench.events("node.disconnected").await[0]["reason"], "gateway-fenced");
    // A second process with this gateway's id has been granted it since.
    let stolen = bench.store.take_lease(LIFE, Some(bench.lease.clone()), "gateway-fenced").await;
    assert_eq!(stolen.expect("stored"), None);
}

#[tokio::test]
async fn a_node_that_moves_is_told_to_the_gateway_that_had_it() {
    let bench = Bench::new().await;
    let older = bench.live("i-1").await;
    let (neighbour, lease) = bench.neighbour().await;
    let before = bench.store.last_notice().await.expect("a number");
    let caller = std::sync::Arc::new(());
    let there = neighbour.hello(bench.facts("i-1"), lease, std::sync::Arc::downgrade(&caller));
    there.await.expect("stored").expect("welcomed");
    assert_eq!(bench.try_dispatch(older).await.err(), Some(Stray::Superseded));
    let heard = bench.store.notices(before).await.expect("read");
    assert_eq!(heard.notices, [Notice::Session(bench.node.clone())]);
    assert!(bench.store.is_shared() && neighbour.is_shared());
    assert_eq!(bench.store.notices(heard.last).await.expect("read").notices, [], "each is heard once");
}

#[tokio::test]
async fn a_job_waits_while_another_process_holds_the_store_and_is_done_afterwards() {
    let bench = Bench::new().await;
    let path = bench.dir.path().join("gateway.db");
    let other = rusqlite::Connection::open(path).expect("a second connection");
    other.execute_batch("BEGIN IMMEDIATE").expect("the file's lock");
    let renewal = bench.store.renew_lease(bench.lease.clone(), LIFE, 0);
    let held = tokio::time::timeout(Duration::from_millis(300), renewal).await;
    assert!(held.is_err(), "the job waits: {held:?}");
    other.execute_batch("COMMIT").expect("the lock is free");
    bench.renew().await;
}

#[tokio::test]
async fn a_store_that_stays_held_is_given_up_after_the_time_that_was_meant() {
    let bench = Bench::new().await;
    let path = bench.dir.path().join("gateway.db");
    let other = rusqlite::Connection::open(&path).expect("a second connection");
    other.execute_batch("BEGIN IMMEDIATE").expect("the file's lock");
    let ours = schema::open(&path).expect("it is opened while another writes");
    let began = tokio::time::Instant::now();
    let given_up = begin(&ours, Duration::from_millis(50));
    assert!(matches!(given_up, Err(StoreError::Busy)), "{given_up:?}");
    assert!(began.elapsed() < SECOND * 5, "SQLite's own wait does not come on top");
    other.execute_batch("COMMIT").expect("the lock is free");
    begin(&ours, Duration::ZERO).expect("and its turn comes");
}
