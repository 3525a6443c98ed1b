//! How a gateway refuses or ends a call: the code, the token, and when to come back.

use std::time::Duration;

use tonic::{Code, Status};

use super::lab::Gateway;
use crate::gateway::store::{Mode, Store};
use crate::model::Reason;
use crate::model::limits::{FRAME_BYTES, FRAME_ELEMENTS};
use crate::wire::pb;
use crate::wire::pb::node_frame::Frame as In;
use crate::wire::status;

fn token(status: &Status) -> (Code, Option<Reason>) {
    (status.code(), status::reason(status))
}

#[tokio::test]
async fn a_second_hello_is_a_protocol_error() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.send(In::Hello(machine.hello())).await;
    assert_eq!(token(&session.end().await), (Code::InvalidArgument, Some(Reason::ProtocolError)));
    assert_eq!(gateway.events("node.disconnected").await[0].detail["reason"], "protocol-error");
    gateway.stop().await;
}

#[tokio::test]
async fn a_frame_over_the_limit_is_told_frame_too_large() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    let update = pb::CommandUpdate { output: vec![0; FRAME_BYTES + 1].into(), ..Default::default() };
    session.send(In::CommandUpdate(update)).await;
    assert_eq!(token(&session.end().await), (Code::OutOfRange, Some(Reason::FrameTooLarge)));
    // Few bytes, and much more in memory.
    let events = vec![pb::Event::default(); FRAME_ELEMENTS];
    let mut session = machine.live(&gateway).await;
    session.send(In::EventBatch(pb::EventBatch { journal_id: "j-1".into(), events })).await;
    assert_eq!(token(&session.end().await), (Code::OutOfRange, Some(Reason::FrameTooLarge)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_call_without_a_first_frame_is_told_hello_missing() {
    let gateway = Gateway::with(|options| options.limits.first_frame = Duration::from_millis(200)).await;
    let machine = gateway.machine().await;
    let silent = machine.call(&gateway, None).await.err().expect("refused");
    assert_eq!(token(&silent), (Code::InvalidArgument, Some(Reason::HelloMissing)));
    gateway.stop().await;
}

#[tokio::test]
async fn too_many_pending_hellos_are_a_storm_with_a_pushback_of_one_to_five_seconds() {
    let gateway = Gateway::with(|options| options.limits.pending_hellos = 0).await;
    let machine = gateway.machine().await;
    let refused = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(token(&refused), (Code::ResourceExhausted, Some(Reason::Storm)));
    let wait = status::pushback(&refused).expect("a pushback");
    assert!((Duration::from_secs(1)..=Duration::from_secs(5)).contains(&wait), "{wait:?}");
    gateway.stop().await;
}

#[tokio::test]
async fn the_older_identity_of_a_node_that_joined_again_is_told_identity_superseded() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let dir = gateway.stop().await;
    // A store as a later join of the same node leaves it; a gateway that re-joins nodes is not built yet.
    let path = dir.path().join("gw/gateway.db");
    let clock = std::sync::Arc::new(crate::clock::SystemClock);
    let store = Store::open(&path, Mode::Thread, "g-0".into(), clock).expect("a store");
    let raised = store.run(|db| db.execute("UPDATE nodes SET generation = generation + 1", [])).await;
    assert_eq!(raised.expect("stored"), 1);
    drop(store);
    let gateway = Gateway::on(dir, |_| {}).await;
    let refused = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::IdentitySuperseded)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_session_without_a_certificate_is_told_certificate_missing() {
    let gateway = Gateway::start().await;
    let channel = gateway.channel(None).await.expect("connected");
    let hello = pb::NodeFrame { frame: Some(In::Hello(pb::Hello::default())) };
    let mut client = pb::node_client::NodeClient::new(channel);
    let refused = client.session(tokio_stream::once(hello)).await.expect_err("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::CertificateMissing)));
    gateway.stop().await;
}

#[tokio::test]
async fn an_epoch_far_ahead_is_not_believed_and_told_as_an_event() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut hello = machine.hello();
    hello.last_epoch = 1 << 40;
    let mut session = machine.open(&gateway, hello).await.expect("opened");
    assert_eq!(session.welcome().await.epoch, 1);
    let events = gateway.events("security.node.epoch-ahead").await;
    assert_eq!(events.len(), 1);
    assert_eq!(
        (events[0].detail["claimed"].as_u64(), events[0].detail["stored"].as_u64()),
        (Some(1 << 40), Some(0))
    );
    gateway.stop().await;
}

#[tokio::test]
async fn a_renewal_that_is_refused_is_a_security_event_once_a_minute() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let channel = gateway.channel(Some(machine.identity())).await.expect("connected");
    let mut client = pb::enrollment_client::EnrollmentClient::new(channel);
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let refused = client.renew(pb::RenewRequest::default()).await.expect_err("no proof");
        tokens.extend(token(&refused).1);
    }
    assert_eq!(tokens.len(), 2, "both are refused with a token");
    let events = gateway.events("security.renew.refused").await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].detail["reason"], tokens[0].token());
    assert!(events[0].detail["serial"].is_string(), "{events:?}");
    gateway.stop().await;
}

#[tokio::test]
async fn a_call_that_is_not_built_is_told_so_by_its_code_and_no_token() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut client = machine.client(&gateway).await;
    let tunnel = client.tunnel(tokio_stream::pending()).await.expect_err("refused");
    assert_eq!(token(&tunnel), (Code::Unimplemented, None));
    let channel = gateway.channel(None).await.expect("connected");
    let mut client = pb::enrollment_client::EnrollmentClient::new(channel);
    let renewal = client.renew(pb::RenewRequest::default()).await.expect_err("refused");
    assert_eq!(token(&renewal), (Code::Unauthenticated, Some(Reason::CertificateMissing)));
    gateway.stop().await;
}
