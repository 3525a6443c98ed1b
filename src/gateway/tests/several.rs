//! Gateways beside each other over one store.

use std::collections::BTreeSet;
use std::time::Duration;

use tonic::Code;

use super::lab::{Gateway, id_of, within};
use crate::gateway::control::{NodeView, Request, Response, Stats};
use crate::model::Reason;
use crate::wire::pb;
use crate::wire::pb::CommandState as Say;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::status;

async fn pair() -> (Gateway, Gateway) {
    let first = Gateway::start().await;
    let second = first.beside("gw-2", |_| {}).await;
    (first, second)
}

async fn node(gateway: &Gateway) -> NodeView {
    match gateway.ask(Request::Nodes).await {
        Response::Nodes(nodes) if nodes.len() == 1 => nodes[0].clone(),
        other => panic!("not one node: {other:?}"),
    }
}

async fn stats(gateway: &Gateway) -> Stats {
    match gateway.ask(Request::Stats).await {
        Response::Stats(stats) => stats,
        other => panic!("no stats: {other:?}"),
    }
}

#[tokio::test]
async fn a_ticket_names_every_gateway_of_the_store_whoever_is_asked() {
    let (first, second) = pair().await;
    let endpoints = |gateway: &Gateway| gateway.ready.address.to_string();
    let (one, two) = (endpoints(&first), endpoints(&second));
    for gateway in [&first, &second] {
        let ticket = gateway.ticket(1, 60).await;
        let named: BTreeSet<&str> =
            ticket["endpoints"].as_array().expect("a list").iter().filter_map(|one| one.as_str()).collect();
        assert_eq!(named, BTreeSet::from([&*one, &*two]));
    }
    let before = second.ticket(1, 60).await;
    let dir = first.stop().await;
    let after = second.ticket(1, 60).await;
    assert_eq!(after["endpoints"], before["endpoints"], "its nodes find it again when it is back");
    second.stop().await;
    drop(dir);
}

#[tokio::test]
async fn a_node_that_joined_at_one_gateway_is_known_at_the_other_and_its_epoch_rises() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let mut session = machine.open(&first, machine.hello()).await.expect("opened");
    let welcome = session.welcome().await;
    let mut again = machine.open(&second, machine.hello()).await.expect("opened");
    let other = again.welcome().await;
    assert_eq!((welcome.epoch, other.epoch), (1, 2));
    assert_ne!(welcome.gateway_id, other.gateway_id);
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_session_that_the_node_has_left_for_another_gateway_is_superseded_without_a_disconnect() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let mut older = machine.live(&first).await;
    let mut newer = machine.live(&second).await;
    let end = older.end().await;
    assert_eq!((end.code(), status::reason(&end)), (Code::Aborted, Some(Reason::Superseded)));
    newer.quiet(Duration::from_millis(100)).await;
    assert!(second.events("node.disconnected").await.is_empty());
    let there = node(&first).await;
    assert_eq!((&*there.state, there.epoch), ("connected", 2));
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_command_and_its_cancellation_reach_a_node_at_another_gateway_and_its_end_comes_back() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let mut session = machine.live(&second).await;
    let id = first.program(&machine).await;
    let command = session.command().await;
    assert_eq!(id_of(&command), id);
    session.say(&command, Say::Accepted).await;
    first.reaches(&id, "accepted").await;
    first.cancel(&id).await.expect("taken");
    within("the cancellation", async {
        while !matches!(session.next().await.expect("a frame"), Out::Cancel(_)) {}
    })
    .await;
    let waiting = first.ask(Request::Wait { id: id.clone(), timeout_ms: 9_000 });
    let (answer, ()) = tokio::join!(waiting, session.say(&command, Say::Cancelled));
    let Response::Command(Some(view)) = answer else { panic!("no command") };
    assert_eq!((&*view.state, view.deliveries), ("cancelled", 1));
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn what_one_gateway_sent_is_delivered_again_by_the_other_and_its_result_counts_once() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let id = first.program(&machine).await;
    let mut session = machine.live(&first).await;
    let command = session.command().await;
    first.vanish();
    let mut session = machine.live(&second).await;
    let again = session.command().await;
    assert_eq!((id_of(&again), again.delivery_attempt), (id.clone(), 2));
    for _ in 0..2 {
        session.say(&command, Say::Succeeded).await;
        assert_eq!(session.acked().await, [id.to_string()]);
    }
    let view = second.show(&id).await;
    assert_eq!((&*view.state, view.terminal_changes, view.late_facts), ("succeeded", 1, 1));
    second.stop().await;
}

#[tokio::test]
async fn each_gateway_tells_of_the_nodes_and_events_of_all() {
    let (first, second) = pair().await;
    let (one, two) = (first.machine().await, second.machine().await);
    let (_here, _there) = (one.live(&first).await, two.live(&second).await);
    within("both connected", async {
        while stats(&first).await.sessions != 2 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    for gateway in [&first, &second] {
        let stats = stats(gateway).await;
        assert_eq!((stats.sessions, stats.nodes, stats.gateways.len()), (2, 2, 2));
        assert_eq!(gateway.events("node.connected").await.len(), 2);
    }
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn an_event_of_another_gateway_ends_the_wait_for_events() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let waiting = first.ask(Request::Events { after: 0, wait_ms: 9_000 });
    let (answer, _session) = tokio::join!(waiting, machine.live(&second));
    let Response::Events(events) = answer else { panic!("no events") };
    assert_eq!(events[0].kind, "node.connected");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn the_nodes_of_a_gateway_that_vanished_are_disconnected_once_its_lease_is_over() {
    let short = |options: &mut crate::gateway::Options| options.lease_life = Duration::from_secs(2);
    let first = Gateway::with(short).await;
    let second = first.beside("gw-2", short).await;
    let machine = first.machine().await;
    let session = machine.live(&first).await;
    within("the node", async {
        while node(&second).await.state != "connected" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    first.vanish();
    within("the loss", async {
        while node(&second).await.state != "disconnected" {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    let events = second.events("node.disconnected").await;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].detail["reason"], "gateway-lost");
    drop(session);
    second.stop().await;
}

#[tokio::test]
async fn a_revocation_ends_the_session_at_another_gateway_within_a_second_and_can_be_taken_back() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let mut session = machine.live(&second).await;
    first.ask(Request::Revoke { node: machine.id(), revocation: None }).await;
    let ended = tokio::time::timeout(Duration::from_secs(1), session.end()).await.expect("within a second");
    let revoked = (Code::Unauthenticated, Some(Reason::CertificateRevoked));
    assert_eq!((ended.code(), status::reason(&ended)), revoked);
    let refused = machine.open(&first, machine.hello()).await.err().expect("refused");
    assert_eq!((refused.code(), status::reason(&refused)), revoked);
    second.ask(Request::Unrevoke { node: machine.id() }).await;
    machine.live(&first).await;
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn clones_at_two_gateways_are_both_put_out() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let hello = |boot: &str, last_epoch| pb::Hello { boot_id: boot.into(), last_epoch, ..machine.hello() };
    let mut other = None;
    for round in 0..2 {
        machine.live_with(&first, hello("b-1", 2 * round)).await;
        other = Some(machine.live_with(&second, hello("b-2", 2 * round + 1)).await);
    }
    let mut last = machine.live_with(&first, hello("b-1", 4)).await;
    let refused = machine.open(&second, hello("b-2", 5)).await.err().expect("refused");
    let out = (Code::Unauthenticated, Some(Reason::DuplicateIdentity));
    assert_eq!((refused.code(), status::reason(&refused)), out);
    let end = last.end().await;
    assert_eq!((end.code(), status::reason(&end)), out);
    drop(other);
    assert_eq!(first.events("security.node.quarantined").await.len(), 1);
    let told = second.events("node.connected").await;
    assert!(told.iter().any(|event| event.detail["duplicateIdentity"] == true), "{told:?}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_deleted_nodes_commands_end_and_it_is_told_to_join_again() {
    let (first, second) = pair().await;
    let machine = first.machine().await;
    let mut session = machine.live(&second).await;
    let (sent, id) = (first.program(&machine).await, session.command().await);
    assert_eq!(id_of(&id), sent);
    first.ask(Request::Delete { node: machine.id() }).await;
    let end = session.end().await;
    assert_eq!((end.code(), status::reason(&end)), (Code::PermissionDenied, Some(Reason::UnknownNode)));
    let view = first.show(&sent).await;
    assert_eq!((&*view.state, &*view.reason, &*view.effect), ("failed", "node-deleted", "unknown"));
    let refused = machine.open(&first, machine.hello()).await.err().expect("refused");
    assert_eq!(status::reason(&refused), Some(Reason::UnknownNode));
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_gateway_that_cannot_reach_its_store_fences_itself_and_comes_back() {
    let gateway = Gateway::with(|options| options.lease_life = Duration::from_secs(2)).await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.next().await.expect("the heartbeat's ack");
    let other = rusqlite::Connection::open(gateway.dir.path().join("gw/gateway.db")).expect("the store");
    other.busy_timeout(Duration::from_secs(5)).expect("a time");
    other.execute_batch("BEGIN IMMEDIATE").expect("the store's lock");
    let end = session.end().await;
    assert_eq!((end.code(), status::reason(&end)), (Code::Aborted, Some(Reason::GatewayFenced)));
    let refused = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!((refused.code(), status::reason(&refused)), (Code::Unavailable, Some(Reason::NotStarted)));
    assert_eq!(status::pushback(&refused), None);
    other.execute_batch("ROLLBACK").expect("the lock is free");
    within("another session", async {
        while machine.open(&gateway, machine.hello()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    assert_eq!(gateway.events("node.disconnected").await[0].detail["reason"], "gateway-fenced");
    gateway.stop().await;
}

#[tokio::test]
async fn a_hello_whose_caller_hung_up_while_the_store_was_held_opens_no_session() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let other = rusqlite::Connection::open(gateway.dir.path().join("gw/gateway.db")).expect("the store");
    other.busy_timeout(Duration::from_secs(5)).expect("a time");
    other.execute_batch("BEGIN IMMEDIATE").expect("the store's lock");
    let opening = machine.open(&gateway, machine.hello());
    assert!(tokio::time::timeout(Duration::from_millis(500), opening).await.is_err(), "the store is held");
    // The end of its connection is a matter of milliseconds on the loopback.
    tokio::time::sleep(Duration::from_millis(500)).await;
    other.execute_batch("ROLLBACK").expect("the lock is free");
    let mut session = machine.open(&gateway, machine.hello()).await.expect("opened");
    assert_eq!(session.welcome().await.epoch, 1, "the first one counted for nothing");
    gateway.stop().await;
}
