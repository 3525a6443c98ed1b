//! Cancellations: before their command, while it runs, when it is over, and when the journal cannot decide.

use super::*;

#[tokio::test]
async fn a_cancellation_while_the_start_cannot_be_written_ends_the_command_unstarted() {
    let mut bench = Bench::new();
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 1, u32::MAX);
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    bench.cancel("c-1").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    bench.faults.clear();
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::None));
    assert_eq!(bench.effects(), 0);
}

#[tokio::test]
async fn a_cancellation_that_comes_first_is_applied_when_its_command_arrives() {
    let mut bench = Bench::new();
    bench.cancel("c-1").await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::None));
    assert_eq!(bench.effects(), 0);
}

#[tokio::test]
async fn a_running_command_is_ended_by_its_cancellation() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "sleep 60")).await;
    bench.effect_has_started().await;
    bench.cancel("c-1").await;
    let outcome = bench.result().await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Cancelled, Some(Reason::Cancelled)));
}

#[tokio::test]
async fn a_cancellation_of_a_done_command_gets_its_result_again() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "")).await;
    let outcome = bench.result().await;
    bench.credits_are_back().await;
    bench.cancel("c-1").await;
    assert_eq!(bench.result().await, outcome);
}

#[tokio::test]
async fn a_cancellation_ends_what_a_dead_daemon_left_accepted_though_nobody_delivers_it_again() {
    let mut bench = Bench::new();
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 1, u32::MAX);
    let command = bench.exec("c-1", "");
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    let mut bench = Bench::over(bench.crash().await, "i-2");
    // The disk fails once more: a cancellation is a promise that is kept.
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 0, 1);
    bench.cancel("c-1").await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::None));
    let mut bench = Bench::over(bench.crash().await, "i-3");
    bench.deliver(&command).await;
    assert_eq!(bench.result().await, outcome, "it is durable");
    assert_eq!(bench.effects(), 0);
}

#[tokio::test]
async fn cancellations_that_the_journal_cannot_decide_keep_no_delivery_waiting_and_are_kept_past_their_minute()
 {
    let mut bench = Bench::new();
    bench.faults.fail(At::Commit, SQLITE_FULL);
    for n in 0..=ADMITTING {
        bench.cancel(&format!("c-{n}")).await;
    }
    bench.deliver(&probe("c-probe")).await;
    assert_eq!(bench.answer().await, Said::Refused(Reason::Busy, "disk".into()));
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(61)).await;
    tokio::time::resume();
    bench.faults.clear();
    bench.deliver(&bench.exec("c-0", "")).await;
    assert_eq!(ending(&bench.result().await), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::None));
    assert_eq!(bench.effects(), 0);
}

#[tokio::test]
async fn a_cancellation_for_another_node_cancels_nothing() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "sleep 0.5")).await;
    bench.effect_has_started().await;
    let body =
        json!({"trust_domain": "lab.example", "node_id": "n-2", "command_id": "c-1", "issued_at": ISSUED});
    let delivery = Delivery::Cancel { command_id: id("c-1"), envelope: envelope(CANCEL_TYPE, &body) };
    bench.deliveries.send(delivery).await.expect("a running executor");
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
}
