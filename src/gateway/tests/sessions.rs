use std::time::Duration;

use tonic::{Code, Status};

use super::lab::{Gateway, within};
use crate::gateway::Options;
use crate::gateway::control::{Request, Response};
use crate::model::Reason;
use crate::wire::pb;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;
use crate::wire::status;
use crate::wire::version::Range;

fn token(status: &Status) -> (Code, Option<Reason>) {
    (status.code(), status::reason(status))
}

#[tokio::test]
async fn a_welcome_has_what_a_node_needs_and_the_epoch_rises_with_every_hello() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut hello = machine.hello();
    hello.last_epoch = 41;
    let mut session = machine.open(&gateway, hello).await.expect("opened");
    let welcome = session.welcome().await;
    assert_eq!((welcome.epoch, welcome.proto, welcome.heartbeat_interval_ms), (42, 1, 10_000));
    assert_eq!(welcome.lane_credits["work"], 16);
    assert_eq!(welcome.journal_id, "j-1");
    assert!(welcome.server_time_ms >= machine.issued.issued_at.0);
    let mut again = machine.open(&gateway, machine.hello()).await.expect("opened");
    assert_eq!(again.welcome().await.epoch, 43);
    gateway.stop().await;
}

#[tokio::test]
async fn every_heartbeat_is_acked_and_the_first_one_makes_the_node_connected() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.open(&gateway, machine.hello()).await.expect("opened");
    session.welcome().await;
    assert!(gateway.events("node.connected").await.is_empty(), "a node may refuse a Welcome");
    for seq in 1..=2 {
        session.heartbeat().await;
        let Out::Ack(ack) = session.next().await.expect("a frame") else { panic!("no ack") };
        assert_eq!(ack.heartbeat_seq, seq);
    }
    let connected = gateway.events("node.connected").await;
    assert_eq!(connected.len(), 1);
    assert_eq!(connected[0].detail["epoch"], 1);
    assert_eq!(connected[0].detail["journalChanged"], false);
    gateway.stop().await;
}

#[tokio::test]
async fn a_newer_session_supersedes_the_older_without_a_disconnect() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut older = machine.live(&gateway).await;
    let mut hello = machine.hello();
    hello.boot_id = "b-2".into();
    let mut newer = machine.live_with(&gateway, hello).await;
    assert_eq!(token(&older.end().await), (Code::Aborted, Some(Reason::Superseded)));
    newer.quiet(Duration::from_millis(100)).await;
    assert!(gateway.events("node.disconnected").await.is_empty());
    assert_eq!(gateway.events("security.node.duplicate-session").await.len(), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn a_silent_node_is_told_heartbeat_timeout_and_disconnected() {
    let gateway = Gateway::with(|options| options.heartbeat_interval = Duration::from_secs(1)).await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    assert_eq!(token(&session.end().await), (Code::Unavailable, Some(Reason::HeartbeatTimeout)));
    let events = gateway.events("node.disconnected").await;
    assert_eq!(events[0].detail["reason"], "heartbeat-timeout");
    gateway.stop().await;
}

#[tokio::test]
async fn a_live_session_ends_with_its_certificate() {
    let beat = |options: &mut Options| options.heartbeat_interval = Duration::from_secs(1);
    let gateway = Gateway::certifying_for(Duration::from_secs(2), beat);
    let gateway = gateway.await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    assert_eq!(token(&session.end().await), (Code::Unauthenticated, Some(Reason::CertificateExpired)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_drain_is_told_to_live_sessions_and_refuses_new_ones_until_it_ends() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.next().await.expect("the heartbeat's ack");
    gateway.ask(Request::Drain { max_delay_ms: 99_999 }).await;
    let Out::Drain(drain) = session.next().await.expect("a frame") else { panic!("no Drain") };
    assert_eq!(drain.max_delay_ms, 60_000);
    let refused = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(token(&refused), (Code::Unavailable, Some(Reason::Draining)));
    assert_eq!(status::pushback(&refused), None);
    gateway.ask(Request::Undrain).await;
    machine.open(&gateway, machine.hello()).await.expect("opened");
    gateway.stop().await;
}

#[tokio::test]
async fn the_first_frame_must_be_a_hello_of_the_certificates_node() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let beat = pb::NodeFrame { frame: Some(In::Heartbeat(pb::Heartbeat::default())) };
    let status = machine.call(&gateway, beat).await.err().expect("refused");
    assert_eq!(token(&status), (Code::InvalidArgument, Some(Reason::HelloMissing)));
    let mut hello = machine.hello();
    hello.node_id = "n-2".into();
    let status = machine.open(&gateway, hello).await.err().expect("refused");
    assert_eq!(token(&status), (Code::PermissionDenied, Some(Reason::WrongIdentity)));
    let Response::Stats(stats) = gateway.ask(Request::Stats).await else { panic!("no stats") };
    assert_eq!((stats.refused["hello-missing"], stats.refused["wrong-identity"]), (1, 1));
    gateway.stop().await;
}

#[tokio::test]
async fn a_node_that_the_store_does_not_know_is_told_to_join_again() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let dir = gateway.stop().await;
    for name in ["gateway.db", "gateway.db-wal"] {
        let _ = std::fs::remove_file(dir.path().join("gw").join(name));
    }
    let gateway = Gateway::on(dir, |_| {}).await;
    let status = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(token(&status), (Code::PermissionDenied, Some(Reason::UnknownNode)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_full_gateway_refuses_with_a_pushback_of_half_a_minute_or_more() {
    let gateway = Gateway::with(|options| options.limits.streams = 1).await;
    let (first, second) = (gateway.machine().await, gateway.machine().await);
    let held = first.live(&gateway).await;
    let status = second.open(&gateway, second.hello()).await.err().expect("refused");
    assert_eq!(token(&status), (Code::ResourceExhausted, Some(Reason::Full)));
    assert!(status::pushback(&status).expect("a pushback") >= Duration::from_secs(30));
    drop(held);
    within("a free place", async {
        while second.open(&gateway, second.hello()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    gateway.stop().await;
}

#[tokio::test]
async fn after_a_goodbye_nothing_more_is_dispatched_and_the_end_is_no_loss() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    session.next().await.expect("the heartbeat's ack");
    let goodbye = pb::Goodbye { intent: "stopping".into(), reason: "stop".into() };
    session.send(In::Goodbye(goodbye)).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    let id = gateway.program(&machine).await;
    session.quiet(Duration::from_millis(100)).await;
    drop(session);
    within("the disconnect", async {
        while gateway.events("node.disconnected").await.is_empty() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    assert_eq!(gateway.show(&id).await.state, "pending");
    gateway.stop().await;
}

#[tokio::test]
async fn a_stopping_gateway_tells_its_sessions_so() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut session = machine.live(&gateway).await;
    let (status, dir) = tokio::join!(session.end(), gateway.stop());
    assert_eq!(token(&status), (Code::Unavailable, Some(Reason::Draining)));
    drop(dir);
}

#[tokio::test]
async fn each_hello_that_is_refused_is_told_its_status_and_its_token() {
    type Spoil = fn(&mut pb::Hello);
    let rows: [(Spoil, Code, Reason); 9] = [
        (|hello| hello.node_id = "n-2".into(), Code::PermissionDenied, Reason::WrongIdentity),
        (|hello| hello.role = "ramdisk".into(), Code::PermissionDenied, Reason::RoleMismatch),
        (|hello| hello.role.clear(), Code::PermissionDenied, Reason::RoleMismatch),
        (|hello| hello.boot_id.clear(), Code::InvalidArgument, Reason::HelloInvalid),
        (|hello| hello.journal_id = "../j".into(), Code::InvalidArgument, Reason::HelloInvalid),
        (|hello| hello.incarnation.clear(), Code::InvalidArgument, Reason::HelloInvalid),
        (|hello| hello.proto_max = 0, Code::InvalidArgument, Reason::ProtocolRange),
        (|hello| hello.proto_min = 2, Code::InvalidArgument, Reason::ProtocolRange),
        (
            |hello| (hello.proto_min, hello.proto_max) = (90, 91),
            Code::FailedPrecondition,
            Reason::ProtocolTooNew,
        ),
    ];
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    for (spoil, code, reason) in rows {
        let mut hello = machine.hello();
        spoil(&mut hello);
        let status = machine.open(&gateway, hello).await.err().expect("refused");
        assert_eq!(token(&status), (code, Some(reason)), "{status:?}");
        assert_eq!(status::pushback(&status), None);
    }
    assert!(gateway.events("node.connected").await.is_empty(), "none had another effect");
    machine.live(&gateway).await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_node_that_is_too_old_for_the_gateway_is_told_so() {
    let gateway = Gateway::with(|options| {
        options.protocol = Range::from_wire(2, 2).expect("a range");
    });
    let gateway = gateway.await;
    let token_line = gateway.token(1, 60).await;
    let key = rcgen::KeyPair::generate().expect("a key");
    let machine = super::lab::Machine::join_with(&gateway, &token_line, key, |request| request.proto_max = 2);
    let machine = machine.await.expect("joined");
    let status = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(token(&status), (Code::FailedPrecondition, Some(Reason::ProtocolTooOld)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_storm_is_refused_with_a_pushback_of_a_second_to_a_minute() {
    let gateway = Gateway::with(|options| options.limits.rate = 1).await;
    let machine = gateway.machine().await;
    let mut refused = None;
    for _ in 0..10 {
        match machine.open(&gateway, machine.hello()).await {
            Ok(_) => {}
            Err(status) => refused = Some(status),
        }
    }
    let status = refused.expect("ten at once are too many for one a second");
    assert_eq!(token(&status), (Code::ResourceExhausted, Some(Reason::Storm)));
    let pushback = status::pushback(&status).expect("a pushback");
    assert!((Duration::from_secs(1)..=Duration::from_secs(66)).contains(&pushback), "{pushback:?}");
    gateway.stop().await;
}

#[tokio::test]
async fn an_upgrade_only_session_says_so_in_its_welcome() {
    let gateway = Gateway::with(|options| options.upgrade_only = true).await;
    let machine = gateway.machine().await;
    let mut session = machine.open(&gateway, machine.hello()).await.expect("opened");
    assert!(session.welcome().await.upgrade_required);
    gateway.stop().await;
}
