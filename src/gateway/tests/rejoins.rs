//! Joins with the key of a certificate that has run out, as a gateway answers them. The worker's clock is set by the tests.

use rcgen::{CertificateParams, KeyPair};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::lab::{Gateway, Machine, within};
use crate::gateway::control::Request;
use crate::gateway::worker::Order;
use crate::model::{Digest, Reason, ServerTime};
use crate::wire::dsse::{Document as _, sign, signing_key};
use crate::wire::enroll::{JoinAnswer, REJOIN_BYTES, RejoinProof, RenewProof, X509POP, join_request_digest};
use crate::wire::pb::enrollment_client::EnrollmentClient;
use crate::wire::{pb, status};

fn csr(key: &KeyPair) -> Vec<u8> {
    CertificateParams::default().serialize_request(key).expect("a CSR").der().to_vec()
}

fn proof<T: serde::Serialize>(kind: &str, body: &T, machine: &Machine) -> Option<pb::Envelope> {
    let key = signing_key(machine.key.serialize_der()).expect("a key");
    let body = serde_json::to_vec(body).expect("json");
    Some(sign(kind, body, &*key, Vec::new()).expect("signed").into())
}

/// A join that was challenged.
struct Challenged {
    request: pb::JoinRequest,
    challenge: pb::AttestationChallenge,
    say: mpsc::Sender<pb::JoinFrame>,
    answers: Streaming<pb::JoinAnswer>,
}

fn asks(machine: &Machine) -> pb::JoinRequest {
    pb::JoinRequest {
        csr: csr(&KeyPair::generate().expect("a key")).into(),
        attestor: X509POP.into(),
        evidence: machine.issued.chain.iter().flat_map(|der| der.0.to_vec()).collect(),
        proto_min: 1,
        proto_max: 1,
        ..Default::default()
    }
}

async fn challenged(gateway: &Gateway, request: pb::JoinRequest) -> Result<Challenged, Status> {
    let mut client = EnrollmentClient::new(gateway.channel(None).await.expect("connected"));
    let (say, frames) = mpsc::channel(2);
    let frame = pb::JoinFrame { frame: Some(pb::join_frame::Frame::Request(request.clone())) };
    say.send(frame).await.expect("room");
    let mut answers = within("a join", client.join(ReceiverStream::new(frames))).await?.into_inner();
    let answer = within("a challenge", answers.message()).await?.expect("an answer");
    let Some(pb::join_answer::Frame::Challenge(challenge)) = answer.frame else { panic!("no challenge") };
    Ok(Challenged { request, challenge, say, answers })
}

impl Challenged {
    async fn prove(self, machine: &Machine) -> Result<JoinAnswer, Status> {
        let proof = self.proof(machine);
        self.say(proof).await
    }

    fn proof(&self, machine: &Machine) -> Option<pb::Envelope> {
        let body = RejoinProof {
            trust_domain: "lab.example".into(),
            node_id: machine.id(),
            request_sha256: join_request_digest(&self.request),
            challenge: self.challenge.challenge.clone(),
            issued_at: ServerTime(self.challenge.server_time_ms),
        };
        proof(RejoinProof::TYPE, &body, machine)
    }

    async fn say(mut self, proof: Option<pb::Envelope>) -> Result<JoinAnswer, Status> {
        let answer = pb::AttestationAnswer { proof };
        let frame = pb::JoinFrame { frame: Some(pb::join_frame::Frame::Answer(answer)) };
        self.say.send(frame).await.expect("room");
        let answer = within("an answer", self.answers.message()).await?.expect("an answer");
        let Some(pb::join_answer::Frame::Response(response)) = answer.frame else { panic!("no response") };
        let signed = response.signed_response.expect("an envelope").payload;
        Ok(serde_json::from_slice(&signed).expect("what was issued"))
    }
}

async fn rejoin(gateway: &Gateway, machine: &Machine) -> Result<JoinAnswer, Status> {
    challenged(gateway, asks(machine)).await?.prove(machine).await
}

/// The machine with its next certificate, which it has perhaps never seen.
async fn renewed(gateway: &Gateway, machine: &Machine) -> Machine {
    let key = KeyPair::generate().expect("a key");
    let csr = csr(&key);
    let body = RenewProof {
        trust_domain: "lab.example".into(),
        node_id: machine.id(),
        csr_sha256: Digest::of(&csr),
        nonce: "00".repeat(16),
        issued_at: ServerTime(crate::clock::Clock::wall_ms(&*gateway.works_at)),
        challenge: None,
    };
    let renewal = pb::RenewRequest { csr: csr.into(), proof: proof(RenewProof::TYPE, &body, machine) };
    let mut renewal = tonic::Request::new(renewal);
    renewal.metadata_mut().insert(status::INCARNATION, tonic::metadata::MetadataValue::from_static("i-1"));
    let channel = gateway.channel(Some(machine.identity())).await.expect("connected");
    let answer = within("a renewal", EnrollmentClient::new(channel).renew(renewal)).await.expect("renewed");
    let signed = answer.into_inner().signed_response.expect("an envelope").payload;
    let JoinAnswer(issued) = serde_json::from_slice(&signed).expect("what was issued");
    Machine { node: machine.node.clone(), issued, bundle: machine.bundle.clone(), key }
}

fn token(refused: &Status) -> (Code, Option<Reason>) {
    (refused.code(), status::reason(refused))
}

fn has_revocation(refused: &Status) -> bool {
    refused.metadata().get_bin(status::REVOCATION).is_some()
}

/// A node that joined an hour ago and has renewed its certificate since.
async fn node_that_has_renewed(gateway: &Gateway) -> (Machine, Machine) {
    gateway.works_at.hours(-1);
    let old = gateway.machine().await;
    gateway.works_at.hours(0);
    let new = renewed(gateway, &old).await;
    (old, new)
}

#[tokio::test]
async fn a_node_that_goes_on_with_a_renewed_certificate_is_not_taken_over_by_its_old_key() {
    let gateway = Gateway::start().await;
    let (old, new) = node_that_has_renewed(&gateway).await;
    let _session = new.live(&gateway).await;
    // The old certificate has run out, and the new one holds.
    gateway.works_at.hours(23);
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    let refused = rejoin(&gateway, &old).await.expect_err("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::IdentitySuperseded)));
    assert!(refused.message().contains("used a newer certificate"), "{refused:?}");
    assert_eq!(gateway.events("security.renew.refused").await.len(), 1);
    // Nothing has become of the node that it is.
    gateway.works_at.hours(0);
    new.live(&gateway).await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_node_that_never_had_the_answer_to_its_renewal_joins_again_with_the_key_that_it_has() {
    let gateway = Gateway::start().await;
    gateway.works_at.hours(-1);
    let old = gateway.machine().await;
    let _session = old.live(&gateway).await;
    gateway.works_at.hours(0);
    let _lost = renewed(&gateway, &old).await;
    gateway.works_at.hours(23);
    tokio::time::sleep(std::time::Duration::from_millis(1_100)).await;
    let JoinAnswer(issued) = rejoin(&gateway, &old).await.expect("joined again");
    assert_eq!((issued.node_id, issued.identity_generation), (old.id(), 2));
    gateway.stop().await;
}

#[tokio::test]
async fn a_revoked_node_is_not_let_in_again_and_is_told_so_by_what_was_signed_and_by_an_event() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    gateway.operator().await.revoke(machine.id(), true).await.expect("revoked");
    gateway.works_at.hours(25);
    let refused = rejoin(&gateway, &machine).await.expect_err("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::CertificateRevoked)));
    assert!(has_revocation(&refused));
    let events = gateway.events("security.renew.refused").await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!(events[0].detail["reason"], "certificate-revoked");
    assert!(events[0].detail["serial"].is_string(), "{events:?}");
    gateway.stop().await;
}

#[tokio::test]
async fn who_has_only_the_certificate_learns_not_that_its_node_is_revoked_and_makes_no_event() {
    let gateway = Gateway::start().await;
    let (machine, other) = (gateway.machine().await, gateway.machine().await);
    gateway.operator().await.revoke(machine.id(), true).await.expect("revoked");
    gateway.works_at.hours(25);
    // With what it has heard once, too: a request and its proof.
    let request = asks(&machine);
    let heard = challenged(&gateway, request.clone()).await.expect("challenged").proof(&machine);
    let again = challenged(&gateway, request.clone()).await.expect("challenged").say(heard);
    let asked = challenged(&gateway, request).await.expect("challenged");
    let thief = Machine { key: other.key, ..machine };
    let strange = asked.prove(&thief);
    for (refused, why) in [(again.await, "another challenge"), (strange.await, "the proof does not hold")] {
        let refused = refused.expect_err("refused");
        assert_eq!(token(&refused), (Code::InvalidArgument, Some(Reason::JoinInvalid)));
        assert!(refused.message().contains(why), "{refused:?}");
        assert!(!has_revocation(&refused));
    }
    assert_eq!(gateway.events("security.renew.refused").await.len(), 0);
    gateway.stop().await;
}

#[tokio::test]
async fn a_revocation_that_only_the_worker_has_refuses_a_rejoin_with_an_event_too() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    gateway.obey(Order::Revoke(machine.id()));
    gateway.works_at.hours(25);
    let refused = rejoin(&gateway, &machine).await.expect_err("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::CertificateRevoked)));
    assert_eq!(gateway.events("security.renew.refused").await.len(), 1);
    gateway.stop().await;
}

#[tokio::test]
async fn a_quarantined_node_is_not_let_in_again_until_that_is_lifted_though_the_worker_knows_nothing_of_it() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut last = None;
    for turn in 0..6 {
        let boot = if turn % 2 == 0 { "b-1" } else { "b-2" };
        let hello = pb::Hello { boot_id: boot.into(), last_epoch: turn, ..machine.hello() };
        let Ok(mut session) = machine.open(&gateway, hello).await else { break };
        session.welcome().await;
        session.heartbeat().await;
        last = Some(session);
    }
    drop(last);
    assert_eq!(gateway.events("security.node.quarantined").await.len(), 1);
    gateway.works_at.hours(25);
    let refused = rejoin(&gateway, &machine).await.expect_err("refused");
    assert_eq!(token(&refused), (Code::Unauthenticated, Some(Reason::DuplicateIdentity)));
    assert!(!has_revocation(&refused), "nobody has signed one");
    let events = gateway.events("security.renew.refused").await;
    assert_eq!(events[0].detail["reason"], "duplicate-identity");
    gateway.ask(Request::Unrevoke { node: machine.id() }).await;
    rejoin(&gateway, &machine).await.expect("joined again");
    gateway.stop().await;
}

#[tokio::test]
async fn a_rejoin_that_is_too_long_or_has_a_token_is_asked_for_no_proof() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    gateway.works_at.hours(25);
    let long = pb::JoinRequest { evidence: vec![0x30; REJOIN_BYTES].into(), ..asks(&machine) };
    let sealed = pb::JoinRequest { sealed_token: vec![0; 48].into(), ..asks(&machine) };
    for request in [long, sealed] {
        let refused = challenged(&gateway, request).await.err().expect("refused");
        assert_eq!(token(&refused), (Code::InvalidArgument, Some(Reason::JoinInvalid)));
    }
    gateway.stop().await;
}

#[tokio::test]
async fn no_more_joins_wait_for_their_proofs_than_there_are_places_and_a_place_is_free_again() {
    let gateway = Gateway::with(|options| options.limits.pending_proofs = 1).await;
    let machine = gateway.machine().await;
    gateway.works_at.hours(25);
    let first = challenged(&gateway, asks(&machine)).await.expect("challenged");
    let refused = challenged(&gateway, asks(&machine)).await.err().expect("refused");
    assert_eq!(token(&refused), (Code::ResourceExhausted, Some(Reason::Storm)));
    assert!(status::pushback(&refused).is_some());
    first.prove(&machine).await.expect("joined again");
    let refused = rejoin(&gateway, &machine).await.expect_err("another new key");
    assert_eq!(token(&refused).1, Some(Reason::IdentitySuperseded), "it was heard");
    gateway.stop().await;
}
