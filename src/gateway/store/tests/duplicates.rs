use std::time::Duration;

use super::Bench;
use crate::gateway::store::{HelloFacts, HelloRefusal, Standing, Stray};
use crate::model::{BootId, JournalId, Reason};

const QUARANTINED: HelloRefusal = HelloRefusal::Revoked(Reason::DuplicateIdentity);

impl Bench {
    fn boot(&self, boot: &str, incarnation: &str) -> HelloFacts {
        HelloFacts { boot_id: BootId::new(boot).expect("an id"), ..self.facts(incarnation) }
    }

    async fn alternations(&self) -> Vec<u64> {
        let told = self.events("security.node.duplicate-session").await;
        told.iter().filter_map(|event| event["alternations"].as_u64()).collect()
    }
}

#[tokio::test]
async fn two_machines_that_take_turns_are_both_out_at_the_fourth_return() {
    let bench = Bench::new().await;
    // A and B once each, which a reboot would do too, then four returns.
    for turn in 0..5 {
        let (boot, incarnation) = [("b-1", "i-1"), ("b-2", "i-2")][turn % 2];
        bench.hello(bench.boot(boot, incarnation)).await.expect("not yet");
    }
    assert_eq!(bench.alternations().await, [1, 2, 3]);
    assert_eq!(bench.hello(bench.boot("b-2", "i-2")).await.err(), Some(QUARANTINED));
    assert_eq!(bench.hello(bench.boot("b-1", "i-1")).await.err(), Some(QUARANTINED), "and the other one");
    let quarantined = bench.events("security.node.quarantined").await;
    assert_eq!(quarantined.len(), 1);
    assert_eq!(quarantined[0]["serials"], serde_json::json!(["40"]));
}

#[tokio::test]
async fn the_live_session_of_a_quarantined_node_neither_routes_nor_stands() {
    let bench = Bench::new().await;
    for turn in 0..4 {
        bench.hello(bench.facts(["i-1", "i-2"][turn % 2])).await.expect("not yet");
    }
    let live = bench.live("i-1").await;
    assert_eq!(bench.hello(bench.facts("i-2")).await.err(), Some(QUARANTINED));
    assert_eq!(bench.try_dispatch(live.clone()).await.err(), Some(Stray::Revoked(Reason::DuplicateIdentity)));
    let standing = bench.store.standing(bench.node.clone(), live.epoch, "40".into()).await.expect("read");
    assert_eq!(standing, Standing::Revoked(Reason::DuplicateIdentity));
}

#[tokio::test]
async fn a_machine_that_reboots_or_restarts_often_is_no_clone() {
    let bench = Bench::new().await;
    for turn in 0..20 {
        let (boot, incarnation) = (format!("b-{}", turn / 2), format!("i-{turn}"));
        bench.hello(bench.boot(&boot, &incarnation)).await.expect("welcomed");
        bench.hello(bench.boot(&boot, &incarnation)).await.expect("a redial of the same process");
    }
    assert_eq!(bench.alternations().await, [0_u64; 0]);
}

#[tokio::test]
async fn returns_that_are_spread_over_more_than_ten_minutes_are_told_but_quarantine_nothing() {
    let bench = Bench::new().await;
    for turn in 0..12 {
        bench.hello(bench.facts(["i-1", "i-2"][turn % 2])).await.expect("welcomed");
        for _ in 0..20 {
            bench.pass(Duration::from_secs(10));
            bench.renew().await;
        }
    }
    let counts = bench.alternations().await;
    assert_eq!((counts.len(), counts.iter().max()), (10, Some(&3)));
}

#[tokio::test]
async fn a_machine_cloned_with_its_memory_is_known_by_an_epoch_that_it_never_saw() {
    let bench = Bench::new().await;
    let first = bench.live("i-1").await;
    let at = |last_epoch| HelloFacts { last_epoch, ..bench.facts("i-1") };
    let second = bench.hello(at(first.epoch)).await.expect("a redial").epoch;
    bench.hello(at(first.epoch)).await.expect("a redial whose Welcome was lost");
    assert_eq!(bench.alternations().await, [0_u64; 0], "no heartbeat of epoch {second} was acked");
    bench.hello(at(first.epoch - 1)).await.expect("one is not enough");
    assert_eq!(bench.alternations().await, [1]);
    // A process that was started again knows what its disk has kept.
    bench.live("i-2").await;
    bench.hello(HelloFacts { last_epoch: 0, ..bench.facts("i-3") }).await.expect("welcomed");
    assert_eq!(bench.alternations().await, [1]);
    // A lost journal remembers nothing and says so by its id.
    let fresh = JournalId::new("j-2").expect("an id");
    bench.live("i-3").await;
    bench
        .hello(HelloFacts { journal_id: fresh, last_epoch: 0, ..bench.facts("i-3") })
        .await
        .expect("welcomed");
    assert_eq!(bench.alternations().await, [1]);
}

#[tokio::test]
async fn a_released_quarantine_lets_the_node_in_and_counts_anew() {
    let bench = Bench::new().await;
    for turn in 0..5 {
        bench.hello(bench.facts(["i-1", "i-2"][turn % 2])).await.expect("not yet");
    }
    assert_eq!(bench.hello(bench.facts("i-2")).await.err(), Some(QUARANTINED));
    assert_eq!(bench.store.unrevoke(bench.node.clone()).await.expect("stored"), Some(1));
    for turn in 0..4 {
        bench.hello(bench.facts(["i-1", "i-2"][turn % 2])).await.expect("in again");
    }
}

#[tokio::test]
async fn a_revoked_certificate_is_told_apart_from_a_quarantined_one() {
    let bench = Bench::new().await;
    let live = bench.live("i-1").await;
    assert_eq!(bench.store.revoke(bench.node.clone(), None).await.expect("stored"), Some(1));
    let refused = bench.hello(bench.facts("i-1")).await.err();
    assert_eq!(refused, Some(HelloRefusal::Revoked(Reason::CertificateRevoked)));
    let written = bench.store.disconnected(live, bench.now(), "certificate-revoked").await.expect("stored");
    assert!(written, "its end is the node's");
    let another = HelloFacts { serial: "41".into(), ..bench.facts("i-1") };
    bench.hello(another).await.expect("a certificate signed later counts");
}
