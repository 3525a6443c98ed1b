use std::time::Duration;

use rcgen::KeyPair;
use tonic::{Code, Status};

use super::lab::{Gateway, Machine, Token};
use crate::gateway::peer::Peer;
use crate::model::{Reason, Role};
use crate::wire::status;
use crate::wire::version::Range;

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}

fn same(key: &KeyPair) -> KeyPair {
    KeyPair::from_pem(&key.serialize_pem()).expect("a key")
}

async fn refused(gateway: &Gateway, token: &Token) -> (Code, Option<Reason>) {
    told(Machine::join(gateway, token, key()).await)
}

fn told(joined: Result<Machine, Status>) -> (Code, Option<Reason>) {
    let status = joined.err().expect("refused");
    (status.code(), status::reason(&status))
}

#[tokio::test]
async fn a_join_gives_a_certificate_with_exactly_the_names_of_the_node() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let leaf = rustls::pki_types::CertificateDer::from(machine.issued.chain[0].0.to_vec());
    let peer = Peer::read(&leaf, "lab.example").expect("a node's certificate");
    assert_eq!((peer.node.as_str(), peer.role), (machine.node.as_str(), Role::Host));
    let life = peer.not_after.0 - machine.issued.issued_at.0;
    assert!((86_398_000..=86_400_000).contains(&life), "{life}");
    assert_eq!(machine.issued.identity_generation, 1);
    assert_eq!((&*machine.issued.site, &*machine.issued.trust_domain), ("lab", "lab.example"));
    assert_eq!(machine.bundle.gateway_roots[0], machine.issued.chain[1]);
    gateway.stop().await;
}

#[tokio::test]
async fn a_repeated_join_with_the_same_key_gives_the_same_node_and_uses_nothing() {
    let gateway = Gateway::start().await;
    let token = gateway.token(1, 60).await;
    let key = key();
    let first = Machine::join(&gateway, &token, same(&key)).await.expect("joined");
    let second = Machine::join(&gateway, &token, same(&key)).await.expect("joined again");
    assert_eq!(first.node, second.node);
    assert_ne!(first.issued.chain[0], second.issued.chain[0], "it is freshly signed");
    assert_eq!(refused(&gateway, &token).await, (Code::PermissionDenied, Some(Reason::TicketUsed)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_token_that_is_unknown_or_has_run_out_is_told_apart() {
    let gateway = Gateway::start().await;
    let expired = gateway.token(9, 0).await;
    let unknown = Token { text: "bt_x".into(), seal: expired.seal };
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(refused(&gateway, &unknown).await, (Code::PermissionDenied, Some(Reason::TicketInvalid)));
    assert_eq!(refused(&gateway, &expired).await, (Code::PermissionDenied, Some(Reason::TicketExpired)));
    gateway.stop().await;
}

#[tokio::test]
async fn a_join_that_is_malformed_or_speaks_another_version_is_refused_and_costs_no_use() {
    let gateway = Gateway::with(|options| options.protocol = Range::from_wire(2, 2).expect("a range")).await;
    let token = gateway.token(1, 60).await;
    let old = told(Machine::join(&gateway, &token, key()).await);
    assert_eq!(old, (Code::FailedPrecondition, Some(Reason::ProtocolTooOld)));
    let speak = |request: &mut crate::wire::pb::JoinRequest| request.proto_max = 2;
    let forged = Machine::join_with(&gateway, &token, key(), |request| {
        speak(request);
        let mut csr = request.csr.to_vec();
        *csr.last_mut().expect("bytes") ^= 1;
        request.csr = csr.into();
    });
    assert_eq!(told(forged.await), (Code::InvalidArgument, Some(Reason::JoinInvalid)));
    Machine::join_with(&gateway, &token, key(), speak).await.expect("the use is still there");
    gateway.stop().await;
}

#[tokio::test]
async fn joins_and_sessions_share_the_bucket_and_a_refusal_says_when_to_come_back() {
    let gateway = Gateway::with(|options| options.limits.rate = 1).await;
    let token = gateway.token(9, 60).await;
    let machine = Machine::join(&gateway, &token, key()).await.expect("the first");
    let status = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!((status.code(), status::reason(&status)), (Code::ResourceExhausted, Some(Reason::Storm)));
    let wait = status::pushback(&status).expect("a pushback");
    assert!((Duration::from_secs(1)..Duration::from_secs(3)).contains(&wait), "{wait:?}");
    gateway.stop().await;
}

#[tokio::test]
async fn a_session_needs_a_certificate_of_this_ca_and_an_expired_one_is_told_so() {
    let gateway = Gateway::certifying_for(Duration::from_secs(1), |_| {}).await;
    let machine = gateway.machine().await;
    tokio::time::sleep(Duration::from_millis(1_100)).await;
    let status = machine.open(&gateway, machine.hello()).await.err().expect("refused");
    assert_eq!(
        (status.code(), status::reason(&status)),
        (Code::Unauthenticated, Some(Reason::CertificateExpired))
    );
    let channel = gateway.channel(None).await.expect("connected");
    let mut client = crate::wire::pb::node_client::NodeClient::new(channel);
    let status = client.session(tokio_stream::empty()).await.expect_err("refused");
    assert_eq!(status::reason(&status), Some(Reason::CertificateMissing));
    gateway.stop().await;
}
