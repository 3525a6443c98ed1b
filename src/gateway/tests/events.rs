//! The nodes' events: stored once each, in order, acked when stored.

use std::time::Duration;

use super::lab::{Gateway, Session};
use crate::gateway::control::{NodeEventView, Request, Response};
use crate::wire::pb;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;

fn event(seq: u64) -> pb::Event {
    pb::Event {
        seq,
        class: pb::EventClass::Transition.into(),
        r#type: "command.done".into(),
        body: format!(r#"{{"n":{seq}}}"#).into(),
        age_ms: Some(5),
        ..Default::default()
    }
}

fn batch(journal: &str, events: impl IntoIterator<Item = pb::Event>) -> In {
    In::EventBatch(pb::EventBatch { journal_id: journal.into(), events: events.into_iter().collect() })
}

/// The next ack of events.
async fn acked(session: &mut Session) -> (String, u64) {
    loop {
        match session.next().await.expect("a frame") {
            Out::Ack(ack) if ack.event_seq != 0 => return (ack.journal_id, ack.event_seq),
            Out::Ack(_) => {}
            other => panic!("not an ack: {other:?}"),
        }
    }
}

async fn stored(gateway: &Gateway) -> Vec<NodeEventView> {
    match gateway.ask(Request::NodeEvents { node: None, after: 0 }).await {
        Response::NodeEvents(events) => events,
        other => panic!("not events: {other:?}"),
    }
}

#[tokio::test]
async fn events_are_stored_once_each_by_journal_and_number_and_acked_up_to_the_highest() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.send(batch("j-1", [event(1), event(2)])).await;
    assert_eq!(acked(&mut session).await, ("j-1".into(), 2));
    session.send(batch("j-1", [event(2), event(3)])).await;
    assert_eq!(acked(&mut session).await, ("j-1".into(), 3));
    // Facts are never fenced: a batch of an older journal counts for that journal.
    session.send(batch("j-0", [event(1)])).await;
    assert_eq!(acked(&mut session).await, ("j-0".into(), 1));
    let stored = stored(&gateway).await;
    let rows: Vec<_> = stored.iter().map(|event| (event.journal.as_str(), event.seq)).collect();
    assert_eq!(rows, [("j-1", 1), ("j-1", 2), ("j-1", 3), ("j-0", 1)]);
    assert_eq!((stored[2].body["n"].as_u64(), stored[2].age_ms), (Some(3), Some(5)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_gap_is_not_waited_for_and_what_the_node_says_of_it_is_kept() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    let behind = pb::Event { dropped_from: 2, dropped_to: 8, ..event(9) };
    session.send(batch("j-1", [event(1), behind])).await;
    assert_eq!(acked(&mut session).await.1, 9);
    let dropped: Vec<_> = stored(&gateway).await.iter().map(|event| event.dropped).collect();
    assert_eq!(dropped, [None, Some((2, 8))]);
    gateway.stop().await;
}

#[tokio::test]
async fn welcome_acks_what_is_stored_of_the_journal_that_hello_names_even_when_it_comes_back() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.send(batch("j-1", [event(1), event(2)])).await;
    acked(&mut session).await;
    for (journal, expected) in [("j-1", 2), ("j-2", 0), ("j-1", 2)] {
        drop(session);
        let hello = pb::Hello { journal_id: journal.into(), ..machine.hello() };
        session = machine.open(&gateway, hello).await.expect("opened");
        let welcome = session.welcome().await;
        assert_eq!((welcome.journal_id.as_str(), welcome.acked_event_seq), (journal, expected));
    }
    gateway.stop().await;
}

#[tokio::test]
async fn a_batch_that_names_no_journal_is_ignored_and_the_session_goes_on() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.send(batch("", [event(1)])).await;
    session.quiet(Duration::from_millis(200)).await;
    session.send(batch("j-1", [event(1)])).await;
    assert_eq!(acked(&mut session).await.1, 1);
    assert_eq!(stored(&gateway).await.len(), 1);
    gateway.stop().await;
}
