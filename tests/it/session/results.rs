//! Results over a session: in Hello, behind it, again until they are acked, and past a slow wire.

use super::*;

#[tokio::test(start_paused = true)]
async fn a_result_in_hello_is_not_said_again_in_that_session_but_in_the_next() {
    let mut node = node_with(async |journal| drop(result(journal, "c-1", 10).await)).await;
    let attempt = node.dials.next().await;
    assert_eq!(ids(&hello(&attempt).done_results), ["c-1"]);
    // The executor hands over the same result while the node dials.
    let again =
        node.journal.result(CommandId::new("c-1").expect("an id")).await.expect("read").expect("done");
    node.outbox.send(Outgoing::Result(again));
    let mut far = attempt.open();
    far.send(Down::Welcome(welcome()));
    let (updates, beats) = until_quiet(&mut far).await;
    assert_eq!((ids(&updates).len(), beats.first()), (0, Some(&1)));
    far.end(lost());
    let (hello, _far) = node.live().await;
    assert_eq!(ids(&hello.done_results), ["c-1"]);
}

#[tokio::test(start_paused = true)]
async fn a_result_is_said_again_when_its_command_is_delivered_again() {
    let mut node = node_with(async |journal| drop(result(journal, "c-1", 10).await)).await;
    let (_, mut far) = node.live().await;
    let again =
        node.journal.result(CommandId::new("c-1").expect("an id")).await.expect("read").expect("done");
    node.outbox.send(Outgoing::Result(again));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-1"]);
}

#[tokio::test(start_paused = true)]
async fn results_that_do_not_fit_in_hello_follow_once_each_in_order() {
    let names: Vec<String> = (10..50).map(|n| format!("c-{n}")).collect();
    let mut node = node_with(async |journal| {
        for name in &names {
            result(journal, name, 20 << 10).await;
        }
    })
    .await;
    let (hello, before, first, mut far) = node.live_after_results().await;
    let in_hello = hello.done_results.len();
    assert!(in_hello > 0 && in_hello < names.len(), "{in_hello} in Hello");
    assert_eq!(
        in_hello + before.len(),
        names.len(),
        "all that the node holds comes before the first heartbeat"
    );
    assert_eq!(first, 1);
    let late = result(&node.journal, "c-99", 10).await;
    node.outbox.send(Outgoing::Result(late));
    let (updates, _) = until_quiet(&mut far).await;
    let mut said = ids(&hello.done_results);
    said.extend(ids(&before));
    said.extend(ids(&updates));
    let expected: Vec<&str> = names.iter().map(String::as_str).chain(["c-99"]).collect();
    assert_eq!(said, expected);
}

#[tokio::test(start_paused = true)]
async fn an_acked_result_is_not_in_the_next_hello() {
    let mut node = node_with(async |journal| {
        result(journal, "c-1", 10).await;
        result(journal, "c-2", 10).await;
    })
    .await;
    let (_, far) = node.live().await;
    let unknown = ["c-1".to_owned(), "c-unknown".to_owned()];
    far.send(Down::Ack(pb::Ack { result_ids: unknown.to_vec(), ..Default::default() }));
    tokio::time::sleep(Duration::from_secs(2)).await;
    far.end(lost());
    let (hello, _far) = node.live().await;
    assert_eq!(ids(&hello.done_results), ["c-2"]);
}

#[tokio::test(start_paused = true)]
async fn results_wait_for_a_slow_wire_and_are_said_once_each() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    let names: Vec<String> = (10..10 + 3 * QUEUE).map(|n| format!("c-{n}")).collect();
    for name in &names {
        let done = result(&node.journal, name, 10).await;
        node.outbox.send(Outgoing::Result(done));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), names.iter().map(String::as_str).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn a_result_that_found_the_outbox_full_is_read_from_the_journal() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    // The session task does not run between these, so the outbox fills up.
    for _ in 0..2000 {
        node.outbox.send(accepted("c-0"));
    }
    let done = result(&node.journal, "c-1", 10).await;
    node.outbox.send(Outgoing::Result(done));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates).iter().filter(|id| **id == "c-1").count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_passing_answer_is_for_the_session_that_asked() {
    let mut node = node().await;
    let attempt = node.dials.next().await;
    attempt.fail(lost());
    node.outbox.send(accepted("c-1"));
    let (_, mut far) = node.live().await;
    node.outbox.send(accepted("c-2"));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-2"]);
}
