use bytes::Bytes;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use rustls::sign::SigningKey;
use time::OffsetDateTime;

use super::*;
use crate::wire::dsse::{sign, signing_key};

const NOW: ServerTime = ServerTime(1_800_000_000_000);

struct Root {
    issuer: Issuer<'static, KeyPair>,
    der: Vec<u8>,
}

impl Root {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(1));
        let key = KeyPair::generate().unwrap();
        let der = params.self_signed(&key).unwrap().der().to_vec();
        Self { issuer: Issuer::new(params, key), der }
    }

    fn worker(&self, uris: &[&str], from_s: i64, until_s: i64) -> (std::sync::Arc<dyn SigningKey>, Bytes) {
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        let at = |offset| OffsetDateTime::from_unix_timestamp(NOW.0 / 1000 + offset).unwrap();
        (params.not_before, params.not_after) = (at(from_s), at(until_s));
        let key = KeyPair::generate().unwrap();
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        (signing_key(key.serialize_der()).unwrap(), Bytes::copy_from_slice(leaf.der()))
    }

    fn roots(&self) -> CommandRoots {
        CommandRoots::new([&*self.der]).unwrap()
    }
}

const NAME: &str = "urn:bc:worker:w-1";

fn signed(worker: &(std::sync::Arc<dyn SigningKey>, Bytes)) -> Envelope {
    sign("application/vnd.bcd.v1.command", "{}", &*worker.0, vec![worker.1.clone()]).unwrap()
}

#[test]
fn a_workers_signature_under_a_command_root_holds_and_names_it() {
    let root = Root::new();
    let worker = root.roots().signer(&signed(&root.worker(&[NAME], -60, 60)), NOW).unwrap();
    assert_eq!(worker.name, "w-1");
}

#[test]
fn a_node_without_command_roots_takes_no_signature() {
    let root = Root::new();
    let envelope = signed(&root.worker(&[NAME], -60, 60));
    assert_eq!(CommandRoots::default().signer(&envelope, NOW), Err(WorkerError::NoRoots));
}

#[test]
fn a_worker_of_another_root_is_refused() {
    let (root, other) = (Root::new(), Root::new());
    let refused = root.roots().signer(&signed(&other.worker(&[NAME], -60, 60)), NOW);
    assert!(matches!(refused, Err(WorkerError::Chain { .. })), "{refused:?}");
}

#[test]
fn a_worker_whose_certificate_ran_out_or_is_yet_to_hold_is_refused() {
    let root = Root::new();
    for (from, until) in [(-120, -60), (60, 120)] {
        let refused = root.roots().signer(&signed(&root.worker(&[NAME], from, until)), NOW);
        assert!(matches!(refused, Err(WorkerError::Chain { .. })), "{refused:?}");
    }
}

#[test]
fn a_certificate_that_names_no_worker_or_two_is_refused() {
    let root = Root::new();
    let node = "spiffe://lab.example/node/fra1/n-1";
    for uris in [&[node][..], &[NAME, "urn:bc:worker:w-2"], &["urn:bc:worker:"], &["urn:bc:worker:a/b"]] {
        let refused = root.roots().signer(&signed(&root.worker(uris, -60, 60)), NOW);
        assert_eq!(refused, Err(WorkerError::Name), "{uris:?}");
    }
}

#[test]
fn bytes_that_were_changed_after_signing_are_refused() {
    let root = Root::new();
    let good = signed(&root.worker(&[NAME], -60, 60));
    let other_bytes = Envelope { payload: Bytes::from_static(b"{ }"), ..good.clone() };
    let other_type = Envelope { payload_type: "application/vnd.bcd.v1.cancel".into(), ..good.clone() };
    for changed in [other_bytes, other_type] {
        assert_eq!(root.roots().signer(&changed, NOW), Err(WorkerError::Signature));
    }
    let mut borrowed = good;
    borrowed.signatures[0].chain = vec![root.worker(&[NAME], -60, 60).1];
    assert_eq!(root.roots().signer(&borrowed, NOW), Err(WorkerError::OtherKey));
}

#[test]
fn a_signature_without_a_chain_or_with_too_long_a_one_is_refused() {
    let root = Root::new();
    let worker = root.worker(&[NAME], -60, 60);
    let mut envelope = signed(&worker);
    envelope.signatures[0].chain = vec![worker.1; CHAIN + 1];
    assert_eq!(root.roots().signer(&envelope, NOW), Err(WorkerError::ChainTooLong(CHAIN + 1)));
    envelope.signatures[0].chain.clear();
    assert_eq!(root.roots().signer(&envelope, NOW), Err(WorkerError::NoChain));
}

#[test]
fn one_signature_that_holds_is_enough_beside_others_that_do_not() {
    let (root, other) = (Root::new(), Root::new());
    let mut envelope = signed(&other.worker(&[NAME], -60, 60));
    envelope.signatures.extend(signed(&root.worker(&[NAME], -60, 60)).signatures);
    assert!(root.roots().signer(&envelope, NOW).is_ok());
}

#[test]
fn an_intermediate_certificate_leads_to_the_root_only_when_it_is_a_ca() {
    let root = Root::new();
    for is_ca in [IsCa::Ca(BasicConstraints::Constrained(0)), IsCa::NoCa] {
        let holds = is_ca != IsCa::NoCa;
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = is_ca;
        params.distinguished_name.push(rcgen::DnType::CommonName, "between");
        let between = params.signed_by(&key, &root.issuer).unwrap().der().to_vec();
        let middle = Root { issuer: Issuer::new(params, key), der: between.clone() };
        let mut envelope = signed(&middle.worker(&[NAME], -60, 60));
        envelope.signatures[0].chain.push(between.into());
        assert_eq!(root.roots().signer(&envelope, NOW).is_ok(), holds);
    }
}
