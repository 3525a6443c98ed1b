//! Frames of both directions, from the bytes of an HTTP/2 body on: what a stream yields is within the limits, and what it
//! took to read it is bounded by what came.

use std::pin::Pin;
use std::task::{Context, Poll};

use bcd::gateway::hello;
use bcd::gateway::node_events::Batch;
use bcd::gateway::peer::Peer;
use bcd::gateway::update::{Said, Update};
use bcd::identity::{Answer, Asked, Ticket, accept};
use bcd::model::limits::{
    APPROVALS, CAPABILITIES, CHAIN, COMMAND_BODY_BYTES, ENTRIES, EVENT_BYTES, FRAME_BYTES, ID_BYTES,
    RESULT_BYTES, SIGNATURES, TEXT_BYTES,
};
use bcd::model::{Digest, NodeId, Role, ServerTime};
use bcd::wire::codec::FrameCodec;
use bcd::wire::dsse::Envelope;
use bcd::wire::enroll::join_request_digest;
use bcd::wire::frames::{Delivery, Inbound, Notice, read_envelope};
use bcd::wire::pb;
use bcd::wire::pb::node_frame::Frame as In;
use bcd::wire::shape::Shaped;
use bcd::wire::version::Range;
use bytes::Bytes;
use futures_util::FutureExt as _;
use hyper::body::{Body, Frame};
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use tonic::Streaming;
use tonic::codec::Codec as _;

use crate::NOW;
use crate::envelopes::{believes, is_rejoin_proof, is_result};
use crate::grammar::Format;
use crate::harness::{Target, corpus, folder};

/// A gRPC message: not compressed, so long.
pub fn prefixed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("short");
    [&[0], &length.to_be_bytes()[..], message].concat()
}

/// A body that is there at once.
struct Whole(Option<Bytes>);

impl Body for Whole {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        Poll::Ready(self.0.take().map(|bytes| Ok(Frame::data(bytes))))
    }
}

/// The messages of a body up to the first that is none, as a stream of the wire yields them.
fn stream<T: Shaped + Send + 'static>(body: Vec<u8>, mut each: impl FnMut(T)) {
    let decoder = FrameCodec::<T, T>::default().decoder();
    let mut stream = Streaming::new_request(decoder, Whole(Some(body.into())), None, Some(FRAME_BYTES));
    while let Some(Ok(Some(message))) = stream.message().now_or_never() {
        each(message);
    }
}

/// The message of these bytes, where they are one.
fn one<T: Shaped + Clone + PartialEq + std::fmt::Debug + Send + 'static>(bytes: &[u8]) -> Option<T> {
    let mut found = None;
    stream(prefixed(bytes), |message: T| found = Some(message));
    if let Some(message) = &found {
        let again = T::decode(&*message.encode_to_vec()).expect("what was written");
        // A load of NaN is not equal to itself, and a map has no order to compare bytes by.
        assert!(again == *message || *message != message.clone(), "written and read: {again:?}, {message:?}");
    }
    found
}

fn envelope_is_bounded(envelope: &Envelope) {
    assert!(envelope.payload.len() <= COMMAND_BODY_BYTES && envelope.payload_type.len() <= ID_BYTES);
    assert!(envelope.signatures.len() <= SIGNATURES);
    assert!(envelope.signatures.iter().all(|signature| signature.chain.len() <= CHAIN));
}

/// A text for a log: in one line, and not long.
fn text_is_bounded(text: &str) {
    assert!(text.chars().count() <= ID_BYTES && !text.chars().any(char::is_control), "{text:?}");
}

fn inbound_is_bounded(inbound: &Inbound) {
    match inbound {
        Inbound::Welcome(welcome) => {
            assert!(welcome.epoch > 0 && (1000..=60_000).contains(&welcome.heartbeat_interval.as_millis()));
            assert!(welcome.request_sections.len() <= ENTRIES && welcome.lane_credits.len() <= 3);
            text_is_bounded(&welcome.session_id);
            text_is_bounded(&welcome.gateway_id);
            if let Some(bundle) = welcome.bundle() {
                inbound_is_bounded(&bundle);
            }
        }
        Inbound::Delivery(Delivery::Command(command)) => {
            assert!(command.approvals.len() <= APPROVALS);
            command.approvals.iter().chain([&command.envelope]).for_each(envelope_is_bounded);
        }
        Inbound::Delivery(Delivery::Cancel { envelope, .. })
        | Inbound::Notice(Notice::TrustBundle(envelope) | Notice::Revocation(envelope)) => {
            envelope_is_bounded(envelope);
        }
        Inbound::Drain { max_delay, reason } => {
            assert!(max_delay.as_secs() <= 60);
            text_is_bounded(reason);
        }
        Inbound::BadCancel(detail) | Inbound::BadNotice(detail) => assert!(detail.len() <= TEXT_BYTES),
        Inbound::Delivery(Delivery::Malformed { detail, .. }) => assert!(detail.len() <= TEXT_BYTES),
        Inbound::Ack(_) | Inbound::UnsignedRevocation | Inbound::Ignored(_) => {}
    }
}

fn from_gateway(bytes: &[u8]) -> bool {
    let Some(frame) = one::<pb::GatewayFrame>(bytes) else { return false };
    let Ok(inbound) = Inbound::try_from(frame) else { return false };
    inbound_is_bounded(&inbound);
    !matches!(inbound, Inbound::Ignored(_))
}

fn update_is_bounded(update: &pb::CommandUpdate) -> bool {
    if let Some(signed) = update.signed_result.clone().and_then(|signed| read_envelope(signed).ok()) {
        is_result(&signed);
    }
    let Ok(update) = Update::read(update) else { return false };
    if let Some(claim) = &update.fact {
        assert!(claim.update.len() <= RESULT_BYTES + (65 << 10), "{} bytes", claim.update.len());
    }
    match &update.said {
        Said::Ended(end) => {
            assert!(end.output.len() <= 3 * RESULT_BYTES && end.message.len() <= 2 * TEXT_BYTES);
            assert!(end.reason.len() <= 64);
        }
        Said::Refused { reason, detail, .. } => assert!(reason.len() <= 64 && detail.len() <= TEXT_BYTES),
        Said::Accepted | Said::Running { .. } => {}
    }
    assert!(update.id.is_some() || matches!(update.said, Said::Refused { .. }));
    true
}

fn from_node(bytes: &[u8]) -> bool {
    let Some(frame) = one::<pb::NodeFrame>(bytes) else { return false };
    match frame.frame {
        Some(In::Hello(hello)) => {
            let node = NodeId::new("n-1").unwrap();
            let not_after = ServerTime(NOW.0 + 1000);
            let peer = Peer { node: node.clone(), role: Role::Host, serial: "40".into(), not_after };
            let Ok(checked) = hello::check(&hello, &peer, Range::OWN, NOW) else { return false };
            assert_eq!((&*hello.node_id, &*hello.role), ("n-1", "host"));
            let facts = checked.facts;
            assert_eq!(facts.node, node);
            assert!(facts.capabilities.len() <= CAPABILITIES && facts.capabilities.is_sorted());
            assert!(facts.running.len() <= ENTRIES && facts.version.chars().count() <= 64);
            for result in &hello.done_results {
                update_is_bounded(result);
            }
            true
        }
        Some(In::CommandUpdate(update)) => update_is_bounded(&update),
        Some(In::EventBatch(batch)) => {
            let Ok(batch) = Batch::read(batch) else { return false };
            assert!(batch.events.len() <= ENTRIES);
            for event in &batch.events {
                assert!(event.seq > 0 && event.body.len() <= 3 * EVENT_BYTES && event.kind.len() <= 64);
                assert!(event.dropped.is_none_or(|(from, to)| 0 < from && from <= to && to == event.seq - 1));
            }
            true
        }
        Some(In::Heartbeat(_) | In::Goodbye(_)) => true,
        _ => false,
    }
}

fn answer(signed: Option<pb::Envelope>, bundle: Option<pb::Envelope>) -> Option<Answer> {
    let read = |envelope: Option<pb::Envelope>| read_envelope(envelope?).ok();
    Some(Answer { response: read(signed)?, trust_bundle: read(bundle)? })
}

struct Joining {
    ticket: Ticket,
    request: Digest,
    spki: Digest,
    root: CertificateDer<'static>,
}

fn joining() -> &'static Joining {
    static JOINING: std::sync::OnceLock<Joining> = std::sync::OnceLock::new();
    JOINING.get_or_init(|| {
        let trust = |file: &str| std::fs::read(folder("trust").join(file)).expect("a file");
        let ticket = std::fs::read_to_string(folder("tickets").join("ticket.txt")).expect("a ticket");
        let key: bcd::wire::dsse::PublicKey =
            String::from_utf8(trust("node-key.txt")).unwrap().parse().unwrap();
        Joining {
            ticket: Ticket::parse(&ticket, ServerTime(1)).expect("a ticket"),
            request: join_request_digest(&pb::JoinRequest::decode(&*trust("join-request.pb")).unwrap()),
            spki: key.id(),
            root: trust("node-root.der").into(),
        }
    })
}

fn join_answer(bytes: &[u8]) -> bool {
    let Some(frame) = one::<pb::JoinAnswer>(bytes) else { return false };
    let response = match frame.frame {
        Some(pb::join_answer::Frame::Response(response)) => response,
        // The node signs what came, within its own limits.
        Some(pb::join_answer::Frame::Challenge(challenge)) => return !challenge.challenge.is_empty(),
        None => return false,
    };
    let Some(answer) = answer(response.signed_response, response.trust_bundle) else { return false };
    let Joining { ticket, request, spki, root } = joining();
    let Ok(accepted) = accept(ticket, Asked { spki, request }, root, &answer) else { return false };
    believes().is_genuine(&answer.response);
    believes().is_genuine(&answer.trust_bundle);
    assert_eq!((accepted.leaf.node_id.as_str(), accepted.trust.bundle.version), ("n-1", 3));
    true
}

fn renew_answer(bytes: &[u8]) -> bool {
    let Some(frame) = one::<pb::RenewResponse>(bytes) else { return false };
    let Some(answer) = answer(frame.signed_response, frame.trust_bundle) else { return false };
    envelope_is_bounded(&answer.response);
    envelope_is_bounded(&answer.trust_bundle);
    true
}

fn join_request(bytes: &[u8]) -> bool {
    let Some(frame) = one::<pb::JoinFrame>(bytes) else { return false };
    let request = match frame.frame {
        Some(pb::join_frame::Frame::Request(request)) => request,
        Some(pb::join_frame::Frame::Answer(answer)) => {
            let proof = answer.proof.and_then(|proof| read_envelope(proof).ok());
            return proof.is_some_and(|proof| {
                envelope_is_bounded(&proof);
                is_rejoin_proof(&proof)
            });
        }
        None => return false,
    };
    let same = join_request_digest(&request) == joining().request;
    let original = pb::JoinRequest::decode(&*std::fs::read(folder("trust").join("join-request.pb")).unwrap());
    assert_eq!(
        same,
        Ok(&request) == original.as_ref(),
        "another request has the digest of the one that was sent"
    );
    true
}

fn renew_request(bytes: &[u8]) -> bool {
    let Some(request) = one::<pb::RenewRequest>(bytes) else { return false };
    request.proof.is_some_and(|proof| read_envelope(proof).is_ok())
}

/// The bytes of a body as they are: lengths that are claimed, and what comes instead.
fn body(bytes: &[u8]) -> bool {
    let mut seen = 0;
    stream(bytes.to_vec(), |frame: pb::GatewayFrame| {
        seen += 1;
        if let Ok(inbound) = Inbound::try_from(frame) {
            inbound_is_bounded(&inbound);
        }
    });
    assert!(seen <= bytes.len() / 5, "more messages than prefixes");
    seen > 0
}

/// A stream's own buffers.
const STREAM: usize = 64 << 10;
/// A submessage of two bytes is a struct of a hundred, in a list that grows; how many there may be is a limit of their own.
const PER_BYTE: usize = 8;
const ELEMENTS: usize = 16 << 20;

fn run(name: &'static str, check: fn(&[u8]) -> bool) {
    Target { name, format: Format::Proto, check, memory: STREAM + ELEMENTS, per_byte: PER_BYTE }.run();
}

#[test]
fn a_frame_of_a_gateway_is_within_the_limits_or_refused() {
    run("gateway-frames", from_gateway);
}

#[test]
fn a_frame_of_a_node_is_within_the_limits_or_refused() {
    run("node-frames", from_node);
}

#[test]
fn an_answer_to_a_join_is_taken_only_as_it_was_signed() {
    run("join-answers", join_answer);
}

#[test]
fn an_answer_to_a_renewal_is_within_the_limits_or_refused() {
    run("renew-answers", renew_answer);
}

#[test]
fn every_change_of_a_join_request_changes_its_digest() {
    run("join-requests", join_request);
}

#[test]
fn a_renewal_request_is_within_the_limits_or_refused() {
    run("renew-requests", renew_request);
}

#[test]
fn a_length_that_is_claimed_takes_at_most_one_frame_of_memory() {
    let memory = FRAME_BYTES + STREAM;
    Target { name: "grpc", format: Format::Bytes, check: body, memory, per_byte: PER_BYTE }.run();
    for (name, bytes) in corpus("grpc") {
        assert!(body(&bytes), "{name}");
    }
}

/// Two bytes on the wire for each of them.
#[test]
fn a_frame_of_empty_elements_takes_no_more_memory_than_a_frame_may() {
    let empty = |tag: u8| [tag, 0].repeat(FRAME_BYTES / 2 - 100);
    let within = |tag: u8, inner: &[u8]| {
        let mut out = vec![tag];
        crate::grammar::put_varint(inner.len() as u64, &mut out);
        [out, inner.to_vec()].concat()
    };
    let command = |inner: &[u8]| within(0x1a, inner);
    for (what, frame) in [
        ("approvals", command(&empty(0x2a))),
        ("signatures", command(&within(0x22, &empty(0x1a)))),
        ("certificates", command(&within(0x22, &within(0x1a, &empty(0x1a))))),
        ("result ids", within(0x12, &empty(0x22))),
        ("sections", within(0x0a, &empty(0x62))),
        (
            "signatures of a bundle within a Welcome",
            within(0x0a, &[&[0x18, 1, 0x38, 1, 0x40, 1][..], &within(0x72, &empty(0x1a))].concat()),
        ),
    ] {
        let (_, most) = crate::memory::most(|| from_gateway(&frame));
        assert!(most < 4 * FRAME_BYTES, "{what}: {most} bytes");
    }
}
