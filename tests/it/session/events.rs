//! Events over a session: after Welcome and live, acked, never before a result; and a journal that is an old copy.

use bcd::journal::EventLimits;
use bcd::model::{EventType, NewEvent, Reason};
use futures_util::future::join_all;

use super::*;

async fn record(journal: &Journal, kind: EventType, count: u64) {
    for n in 0..count {
        journal.record(NewEvent::new(kind, serde_json::json!({ "n": n }))).await.expect("written");
    }
}

fn event_ack(journal: &str, seq: u64) -> Down {
    Down::Ack(pb::Ack { journal_id: journal.into(), event_seq: seq, ..Default::default() })
}

/// Batches that come until the node is quiet, each acked where that is asked for.
async fn batches(far: &mut FarEnd, acks: bool) -> Vec<pb::EventBatch> {
    let mut batches = Vec::new();
    while let Ok(Some(frame)) = tokio::time::timeout(Duration::from_secs(2), far.next()).await {
        if let Up::EventBatch(batch) = frame {
            if acks {
                far.send(event_ack(&batch.journal_id, batch.events.last().expect("an event").seq));
            }
            batches.push(batch);
        }
    }
    batches
}

fn seqs(batches: &[pb::EventBatch]) -> Vec<u64> {
    batches.iter().flat_map(|batch| &batch.events).map(|event| event.seq).collect()
}

fn pending(node: &Node) -> u64 {
    node.journal.pending_events().borrow().count
}

async fn cut(node: &mut Node, far: FarEnd) -> (pb::Hello, FarEnd) {
    far.end(lost());
    node.live().await
}

#[tokio::test(start_paused = true)]
async fn unacked_events_follow_welcome_in_order_and_live_ones_come_behind_them() {
    let mut node = node_with(async |journal| record(journal, EventType::SessionOpened, 5).await).await;
    let (hello, mut far) = node.live().await;
    assert_eq!(hello.pending_events, 6);
    // The start, five, and the opening of this session.
    let first = batches(&mut far, true).await;
    assert_eq!(seqs(&first), [1, 2, 3, 4, 5, 6, 7]);
    let event = &first[0].events[0];
    assert_eq!((event.r#type.as_str(), event.class), ("daemon.started", pb::EventClass::Transition.into()));
    assert!(event.age_ms.is_some(), "written in this boot");
    result(&node.journal, "c-1", 10).await;
    let live = batches(&mut far, true).await;
    let types: Vec<_> = live.iter().flat_map(|batch| &batch.events).map(|event| &*event.r#type).collect();
    assert_eq!(types, ["command.accepted", "command.running", "command.done"]);
    assert_eq!(pending(&node), 0, "all of them are acked and forgotten");
}

#[tokio::test(start_paused = true)]
async fn what_was_not_acked_comes_again_in_the_next_session_and_what_welcome_acks_does_not() {
    let mut node = node_with(async |journal| record(journal, EventType::SessionOpened, 5).await).await;
    let (hello, mut far) = node.live().await;
    assert_eq!(seqs(&batches(&mut far, false).await), [1, 2, 3, 4, 5, 6, 7]);
    let (_, mut far) = cut(&mut node, far).await;
    assert_eq!(seqs(&batches(&mut far, false).await), [1, 2, 3, 4, 5, 6, 7, 8]);
    far.end(lost());
    let mut far = node.dials.next().await.open();
    let acked = pb::Welcome { journal_id: hello.journal_id.clone(), acked_event_seq: 6, ..welcome() };
    far.send(Down::Welcome(acked));
    assert_eq!(seqs(&batches(&mut far, false).await), [7, 8, 9]);
    far.send(event_ack("j-of-another", 9));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(pending(&node), 3, "another journal's ack forgets nothing");
    let (hello, _far) = cut(&mut node, far).await;
    assert_eq!(hello.pending_events, 3);
}

#[tokio::test(start_paused = true)]
async fn few_batches_are_under_way_unacked_and_a_result_overtakes_the_rest() {
    let large = async |journal: &Journal| {
        for _ in 0..12 {
            let body = serde_json::json!({ "padding": "x".repeat(60_000) });
            journal.record(NewEvent::new(EventType::SessionOpened, body)).await.expect("written");
        }
    };
    let mut node = node_with(large).await;
    let (_, mut far) = node.live().await;
    let unacked = batches(&mut far, false).await;
    assert_eq!(unacked.len(), 2, "{:?}", unacked.iter().map(|batch| batch.events.len()).collect::<Vec<_>>());
    let done = result(&node.journal, "c-1", 10).await;
    node.outbox.send(Outgoing::Result(done));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-1"], "though events wait");
    let last = unacked[1].events.last().expect("an event").seq;
    far.send(event_ack(&unacked[1].journal_id, last));
    let rest = batches(&mut far, true).await;
    assert_eq!(seqs(&rest).first(), Some(&(last + 1)));
    assert_eq!(pending(&node), 0);
}

#[tokio::test(start_paused = true)]
async fn a_metric_waits_until_everything_before_it_is_acked() {
    let mut node = node_with(async |journal| record(journal, EventType::SessionOpened, 3).await).await;
    let (_, mut far) = node.live().await;
    let first = batches(&mut far, false).await;
    record(&node.journal, EventType::NodeLoad, 1).await;
    record(&node.journal, EventType::SessionOpened, 1).await;
    assert_eq!(seqs(&batches(&mut far, false).await), [0; 0], "nor is it passed over");
    let last = *seqs(&first).last().expect("an event");
    far.send(event_ack(&first[0].journal_id, last));
    assert_eq!(seqs(&batches(&mut far, true).await), [last + 1, last + 2]);
}

#[tokio::test(start_paused = true)]
async fn a_gap_is_told_by_the_event_behind_it() {
    let limits = EventLimits { count: 10, bytes: 1 << 20 };
    let mut node =
        node_with_limits(limits, async |journal| record(journal, EventType::NodeLoad, 15).await).await;
    let (_, mut far) = node.live().await;
    let events: Vec<_> = batches(&mut far, true).await.into_iter().flat_map(|batch| batch.events).collect();
    let told: Vec<_> = events
        .iter()
        .filter(|event| event.dropped_to != 0)
        .map(|event| (event.seq, event.dropped_from, event.dropped_to))
        .collect();
    let mut expected = 1;
    for event in &events {
        if event.seq != expected {
            assert!(told.contains(&(event.seq, expected, event.seq - 1)), "{told:?} at {}", event.seq);
        }
        expected = event.seq + 1;
    }
    assert!(!told.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_welcome_beyond_what_was_sent_gives_the_journal_a_new_id_and_ends_the_session() {
    let mut node = node_with(async |journal| {
        result(journal, "c-1", 10).await;
    })
    .await;
    let mut attempt = node.dials.next().await;
    let old = hello(&attempt);
    let mut far = attempt.open();
    let beyond = pb::Welcome { journal_id: old.journal_id.clone(), acked_event_seq: 900, ..welcome() };
    far.send(Down::Welcome(beyond));
    let Some(Up::Goodbye(goodbye)) = next(&mut far).await else { panic!("no Goodbye") };
    assert_eq!((goodbye.intent.as_str(), goodbye.reason.as_str()), ("closing", "old-copy"));
    attempt = node.dials.next().await;
    let new = hello(&attempt);
    assert_ne!(new.journal_id, old.journal_id);
    assert_eq!((new.journal_birth_ms, new.last_epoch), (0, 7), "the gateway has counted the epoch");
    assert_eq!(ids(&new.done_results), ["c-1"]);
    let mut far = attempt.open();
    far.send(Down::Welcome(pb::Welcome { journal_id: new.journal_id.clone(), ..welcome() }));
    let events = batches(&mut far, true).await;
    let count = seqs(&events).len() as u64;
    assert_eq!(seqs(&events), (1..=count).collect::<Vec<_>>());
    assert!(events.iter().all(|batch| batch.journal_id == new.journal_id));
    let types: Vec<_> = events.iter().flat_map(|batch| &batch.events).map(|event| &*event.r#type).collect();
    assert!(types.contains(&"command.done") && types.contains(&"journal.old-copy"), "{types:?}");
}

#[tokio::test(start_paused = true)]
async fn an_ack_beyond_what_was_sent_does_so_in_a_live_session_too() {
    let mut node = node().await;
    let (hello, mut far) = node.live().await;
    let sent = *seqs(&batches(&mut far, false).await).last().expect("an event");
    far.send(event_ack(&hello.journal_id, sent));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(node.status.borrow().state, SessionState::Live, "that one was sent");
    far.send(event_ack(&hello.journal_id, sent + 1));
    let status = node.state(SessionState::Waiting).await;
    assert_eq!(status.last_end.expect("an end").reason, Some(Reason::OldCopy));
    let (again, _far) = node.live().await;
    assert_ne!(again.journal_id, hello.journal_id);
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_events_and_a_thousand_results_make_a_small_hello_and_all_arrive() {
    // Written by an earlier process, many to a commit.
    let state = tempfile::tempdir().expect("a directory");
    let before = open_journal(state.path(), Mode::Thread, EventLimits::default());
    let names: Vec<String> = (0..1000).map(|n| format!("c-{n}")).collect();
    join_all(names.iter().map(|name| result(&before, name, 1000))).await;
    join_all((0..6996).map(|_| record(&before, EventType::SessionOpened, 1))).await;
    before.close().await;
    let journal = open_journal(state.path(), Mode::Inline, EventLimits::default());
    let mut node = node_over(&["gw1.lab.example"], state, journal);
    assert_eq!(pending(&node), 9999);
    let (hello, before, first, mut far) = node.live_after_results().await;
    assert!(first <= 2, "held for one interval at most");
    far.send(ack(first));
    assert!(prost::Message::encoded_len(&hello) < 300 << 10, "Hello");
    assert_eq!(hello.pending_events, 9999);
    let mut results: BTreeSet<String> =
        hello.done_results.iter().chain(&before).map(|update| update.command_id.clone()).collect();
    let (mut events, mut largest) = (Vec::new(), 0);
    while let Ok(Some(frame)) = tokio::time::timeout(Duration::from_secs(2), far.next()).await {
        match frame {
            Up::EventBatch(batch) => {
                largest = largest.max(prost::Message::encoded_len(&batch));
                events.extend(batch.events.iter().map(|event| event.seq));
                far.send(event_ack(&batch.journal_id, *events.last().expect("an event")));
            }
            Up::CommandUpdate(update) => {
                assert_eq!(events, [0; 0], "results go first");
                results.insert(update.command_id);
            }
            _ => {}
        }
    }
    assert_eq!(results.len(), 1000);
    assert_eq!(events, (1..=10_000).collect::<Vec<u64>>());
    assert!(largest < 512 << 10, "a batch of {largest} bytes");
    assert_eq!(pending(&node), 0);
}
