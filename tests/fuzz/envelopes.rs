//! Signed envelopes: what no key has signed is never taken, whatever is around it.

use std::collections::BTreeSet;
use std::sync::OnceLock;

use bcd::model::{CommandId, NodeId};
use bcd::wire::bundle::{Trust, TrustBundle};
use bcd::wire::dsse::{
    Audience, Authority, CANCEL_TYPE, COMMAND_TYPE, CommandRoots, Document, Envelope, Policy, PublicKey,
    Verified, verify_cancel, verify_command, verify_document,
};
use bcd::wire::enroll::{JoinAnswer, RejoinProof, RenewAnswer, RenewProof};
use bcd::wire::frames::read_envelope;
use bcd::wire::pb;
use bcd::wire::report::{Leave, SignedResult};
use bcd::wire::revocation::Revocation;
use prost::Message as _;

use crate::NOW;
use crate::grammar::Format;
use crate::harness::{Target, corpus, folder};

/// What a node of the corpora believes.
pub struct Believes {
    pub audience: Audience,
    pub authority: Authority,
    pub join_key: PublicKey,
    node_key: PublicKey,
    /// Type and payload of everything that was signed.
    signed: BTreeSet<(String, Vec<u8>)>,
}

pub fn believes() -> &'static Believes {
    static BELIEVES: OnceLock<Believes> = OnceLock::new();
    BELIEVES.get_or_init(|| {
        let trust = |file: &str| std::fs::read(folder("trust").join(file)).expect("a file");
        let key = |file: &str| String::from_utf8(trust(file)).unwrap().parse().expect("a key");
        let roots = CommandRoots::new([&*trust("command-root.der")]).expect("a root");
        let genuine = |(name, bytes): (String, Vec<u8>)| {
            let envelope = pb::Envelope::decode(&*bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
            (envelope.payload_type, envelope.payload.to_vec())
        };
        // What was found once was made from them.
        let genuine = corpus("envelopes").into_iter().filter(|(name, _)| name.ends_with(".pb")).map(genuine);
        Believes {
            audience: Audience { trust_domain: "lab.example".into(), node_id: NodeId::new("n-1").unwrap() },
            authority: Authority { policy: Policy::All, roots, now: Some(NOW) },
            join_key: key("join-key.txt"),
            node_key: key("node-key.txt"),
            signed: genuine.collect(),
        }
    })
}

impl Believes {
    /// Panics unless somebody has signed exactly this.
    pub fn is_genuine(&self, envelope: &Envelope) {
        let signed = (envelope.payload_type.clone(), envelope.payload.to_vec());
        assert!(self.signed.contains(&signed), "nobody has signed this: {envelope:?}");
    }
}

/// Whether this is a proof of the node's, as the worker reads it.
pub fn is_rejoin_proof(envelope: &Envelope) -> bool {
    document::<RejoinProof>(envelope, &believes().node_key)
}

/// Whether this is a result that the node has signed.
pub fn is_result(envelope: &Envelope) -> bool {
    document::<SignedResult>(envelope, &believes().node_key)
}

fn document<T: Document>(envelope: &Envelope, key: &PublicKey) -> bool {
    let verified = verify_document::<T>(envelope, key, Some(&believes().audience)).map(Verified::into_inner);
    if verified.is_ok() {
        assert_eq!(envelope.payload_type, T::TYPE);
        believes().is_genuine(envelope);
        let kept = envelope.clone().as_signed_by(key);
        assert!(kept.signatures.len() == 1 && kept.signatures[0].chain.is_empty(), "{kept:?}");
        assert!(verify_document::<T>(&kept, key, None).is_ok(), "what is kept holds no more");
    }
    verified.is_ok()
}

fn check(bytes: &[u8]) -> bool {
    let Ok(decoded) = bcd::wire::shape::decode::<pb::Envelope>(bytes) else { return false };
    let Ok(envelope) = read_envelope(decoded) else { return false };
    let again = pb::Envelope::from(envelope.clone()).encode_to_vec();
    let again = read_envelope(pb::Envelope::decode(&*again).expect("our own")).expect("within the limits");
    assert_eq!(again, envelope);
    let text = serde_json::to_vec(&envelope).expect("JSON");
    assert_eq!(serde_json::from_slice::<Envelope>(&text).expect("our own"), envelope);

    let Believes { audience, authority, join_key, node_key, .. } = believes();
    let mut taken = false;
    if let Ok(command) = verify_command(&envelope, audience, authority) {
        assert_eq!(envelope.payload_type, COMMAND_TYPE);
        believes().is_genuine(&envelope);
        assert_eq!(command.get().payload, envelope.payload, "what was verified is what is parsed");
        assert_eq!(command.signer().map(|worker| worker.name.as_str()), Some("w-1"));
        taken = true;
    }
    let id = CommandId::new("c-1").unwrap();
    if verify_cancel(&envelope, &id, audience, authority).is_ok() {
        assert_eq!(envelope.payload_type, CANCEL_TYPE);
        believes().is_genuine(&envelope);
        taken = true;
    }
    taken |= document::<TrustBundle>(&envelope, join_key)
        | document::<Revocation>(&envelope, join_key)
        | document::<JoinAnswer>(&envelope, join_key)
        | document::<RenewAnswer>(&envelope, join_key)
        | document::<RenewProof>(&envelope, node_key)
        | document::<RejoinProof>(&envelope, node_key)
        | document::<Leave>(&envelope, node_key)
        | document::<SignedResult>(&envelope, node_key);
    if let Ok(trust) = Trust::verify(envelope.clone(), join_key, "lab.example") {
        assert_eq!(trust.envelope.payload, envelope.payload);
        let again = Trust::verify(trust.envelope, join_key, "lab.example").expect("kept, and holds no more");
        assert_eq!((again.sha256, again.bundle), (trust.sha256, trust.bundle));
    }
    taken
}

#[test]
fn an_envelope_is_taken_only_for_a_body_that_its_key_has_signed() {
    Target { name: "envelopes", format: Format::Proto, check, memory: 64 << 10, per_byte: 160 }.run();
}

#[test]
fn every_genuine_envelope_is_taken() {
    for (name, bytes) in corpus("envelopes") {
        assert!(check(&bytes) || !name.ends_with(".pb"), "{name}");
    }
}
