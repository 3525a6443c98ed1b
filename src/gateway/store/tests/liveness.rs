use std::time::Duration;

use super::Bench;

const SECOND: Duration = Duration::from_secs(1);

impl Bench {
    /// Lets time pass as gateways that reach the store see it: judged every 5 s, the lease renewed.
    async fn judged(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let step = left.min(SECOND * 5);
            self.pass(step);
            self.renew().await;
            self.store.judge_silence().await.expect("judged");
            left -= step;
        }
    }

    async fn disconnected(&self) {
        let route = self.live("i-1").await;
        let written = self.store.disconnected(route, self.now(), "closed").await.expect("stored");
        assert!(written);
    }
}

#[tokio::test]
async fn a_disconnected_node_is_unreachable_after_forty_seconds_of_silence_and_back_by_a_heartbeat() {
    let bench = Bench::new().await;
    bench.store.judge_silence().await.expect("judged");
    bench.disconnected().await;
    bench.judged(SECOND * 35).await;
    assert_eq!(bench.node_state().await, "disconnected");
    bench.judged(SECOND * 10).await;
    assert_eq!(bench.node_state().await, "unreachable");
    assert_eq!(bench.events("node.unreachable").await.len(), 1);
    bench.dispatch(bench.live("i-1").await.epoch).await;
    assert_eq!(bench.node_state().await, "connected", "and nothing of it was released");
}

#[tokio::test]
async fn a_node_whose_gateway_was_lost_has_two_minutes_more() {
    let bench = Bench::new().await;
    bench.store.judge_silence().await.expect("judged");
    bench.live("i-1").await;
    let again = bench.store.take_lease(super::LIFE, None, "gateway-restarted").await;
    let bench = Bench { lease: again.expect("stored").expect("granted"), ..bench };
    bench.judged(SECOND * 155).await;
    assert_eq!(bench.node_state().await, "disconnected");
    bench.judged(SECOND * 10).await;
    assert_eq!(bench.node_state().await, "unreachable");
}

#[tokio::test]
async fn after_an_outage_of_the_store_nobody_is_unreachable_for_five_minutes() {
    let bench = Bench::new().await;
    bench.store.judge_silence().await.expect("judged");
    bench.disconnected().await;
    bench.judged(SECOND * 15).await;
    bench.pass(SECOND * 21);
    let again = bench.store.take_lease(super::LIFE, None, "gateway-restarted").await;
    let bench = Bench { lease: again.expect("stored").expect("granted"), ..bench };
    bench.judged(SECOND * 300).await;
    assert_eq!(bench.node_state().await, "disconnected");
    bench.judged(SECOND * 15).await;
    assert_eq!(bench.node_state().await, "unreachable");
}

#[tokio::test]
async fn a_node_that_has_never_said_hello_is_no_silent_one() {
    let bench = Bench::new().await;
    bench.judged(SECOND * 400).await;
    assert_eq!(bench.node_state().await, "disconnected");
}
