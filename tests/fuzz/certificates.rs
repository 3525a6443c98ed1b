//! Certificates: whoever is read from one is whom it names, by another reading and by whoever verified the chain.

use std::sync::OnceLock;

use bcd::gateway::peer::Peer;
use bcd::identity::{Leaf, chains_to};
use bcd::model::{Digest, ServerTime};
use bcd::wire::der::Der;
use bcd::wire::x509;
use bytes::Bytes;
use rcgen::{Issuer, KeyPair, SigningKey as _};
use rustls::pki_types::CertificateDer;

use crate::NOW;
use crate::corpora::authority;
use crate::grammar::{Body, Format, Node, parse, print};
use crate::harness::{Target, corpus, folder};
use crate::memory;

/// 2.5.29.17, subjectAltName.
const ALTERNATIVE_NAMES: &[u8] = &[0x55, 0x1d, 0x11];
/// A URI among the names: context-specific, 6.
const URI: u8 = 0x86;

/// What another reading finds in a certificate.
struct Seen {
    uris: Vec<Vec<u8>>,
    serial: Vec<u8>,
    spki: Vec<u8>,
}

fn bytes_of(node: &Node) -> Vec<u8> {
    print(Format::Der, &node.body)
}

/// By the tests' own reader of DER.
fn look(der: &[u8]) -> Option<Seen> {
    let Body::Nodes(top) = parse(Format::Der, der)? else { return None };
    let [certificate] = &top[..] else { return None };
    let tbs = certificate.body.nodes().first()?.body.nodes();
    // Where the version is left out, the serial comes first.
    let from = usize::from(tbs.first()?.head == [0xa0]);
    let serial = bytes_of(tbs.get(from)?);
    let spki = print(Format::Der, &Body::Nodes(vec![tbs.get(from + 5)?.clone()]));
    let extensions = tbs.iter().find(|node| node.head == [0xa3])?.body.nodes().first()?.body.nodes();
    let mut uris = Vec::new();
    for extension in extensions {
        let parts = extension.body.nodes();
        if parts.first().is_some_and(|oid| bytes_of(oid) == ALTERNATIVE_NAMES) {
            let names = parts.last()?.body.nodes().first()?.body.nodes();
            uris.extend(names.iter().filter(|name| name.head == [URI]).map(bytes_of));
        }
    }
    Some(Seen { uris, serial, spki })
}

/// A certificate under a root of this process: the same words, signed anew, so that changed words come to be verified.
struct Ca {
    issuer: Issuer<'static, KeyPair>,
    root: Bytes,
}

fn ca() -> &'static Ca {
    static CA: OnceLock<Ca> = OnceLock::new();
    CA.get_or_init(|| {
        let (issuer, root) = authority();
        Ca { issuer, root }
    })
}

fn signed_anew(der: &[u8]) -> Option<Vec<u8>> {
    let Body::Nodes(mut top) = parse(Format::Der, der)? else { return None };
    let parts = top.first_mut()?.body.nodes_mut()?;
    let words = print(Format::Der, &Body::Nodes(vec![parts.first()?.clone()]));
    let signature = ca().issuer.key().sign(&words).expect("signed");
    parts.last_mut()?.body = Body::Leaf([&[0], &*signature].concat());
    Some(print(Format::Der, &Body::Nodes(top)))
}

/// The two readings of the program agree with the third; None where it is no node's certificate.
fn read(der: &[u8]) -> Option<Leaf> {
    let certificate = CertificateDer::from(der);
    let both = || (Peer::read(&certificate, "lab.example").ok(), Leaf::read(&certificate));
    let ((peer, leaf), most) = memory::most(both);
    assert!(most <= (32 << 10) + 64 * der.len(), "{} bytes held {most}", der.len());
    let Ok(leaf) = leaf else {
        assert!(peer.is_none(), "a gateway takes a certificate that a node does not: {peer:?}");
        return None;
    };
    let seen = look(der).expect("it was read");
    let name = format!("spiffe://{}/node/{}/{}", leaf.trust_domain, leaf.site, leaf.node_id).into_bytes();
    let role = format!("urn:bc:role:{}", leaf.role.name()).into_bytes();
    let begins =
        |start: &'static [u8]| seen.uris.iter().filter(move |uri| uri.starts_with(start)).collect::<Vec<_>>();
    assert_eq!(begins(b"spiffe://"), [&name]);
    assert_eq!(begins(b"urn:bc:role:"), [&role]);
    assert_eq!(
        leaf.tenant,
        !begins(b"urn:bc:tenant").is_empty() && seen.uris.iter().any(|uri| uri == b"urn:bc:tenant")
    );
    assert_eq!(leaf.ak_name.is_some(), !begins(b"urn:bc:tpm-ak:").is_empty());
    assert_eq!(leaf.serial, data_encoding::HEXLOWER.encode(&seen.serial));
    assert_eq!(leaf.spki, Digest::of(&seen.spki));
    if let Some(peer) = peer {
        assert_eq!((&peer.node, peer.role, &peer.serial), (&leaf.node_id, leaf.role, &leaf.serial));
        assert_eq!((leaf.trust_domain.as_str(), peer.not_after), ("lab.example", leaf.validity.not_after));
    }
    Some(leaf)
}

fn holds(der: &[u8], root: &[u8], at: ServerTime) -> bool {
    chains_to(&[CertificateDer::from(der)], &[Der::from(root)], at).is_ok()
}

fn genuine() -> &'static [(Vec<u8>, Option<Leaf>)] {
    static GENUINE: OnceLock<Vec<(Vec<u8>, Option<Leaf>)>> = OnceLock::new();
    GENUINE.get_or_init(|| {
        let originals = corpus("certificates").into_iter().filter(|(name, _)| name.ends_with(".der"));
        originals.map(|(_, der)| (x509_words(&der).expect("a certificate"), read(&der))).collect()
    })
}

/// What a certificate's signature is over.
fn x509_words(der: &[u8]) -> Option<Vec<u8>> {
    Some(x509::read(der)?.0.tbs_certificate.as_ref().to_vec())
}

fn node_root() -> &'static [u8] {
    static ROOT: OnceLock<Vec<u8>> = OnceLock::new();
    ROOT.get_or_init(|| std::fs::read(folder("trust").join("node-root.der")).expect("a root"))
}

fn check(der: &[u8]) -> bool {
    let leaf = read(der);
    if holds(der, node_root(), NOW) {
        // Its signature may be written otherwise; what it is over may not.
        let words = x509_words(der);
        let original = genuine().iter().find(|(genuine, _)| Some(genuine) == words.as_ref());
        let (_, original) = original.expect("a chain holds over words that nobody has signed");
        assert_eq!(leaf.as_ref(), original.as_ref());
    }
    let Some(anew) = signed_anew(der) else { return leaf.is_some() };
    let again = read(&anew);
    if holds(&anew, &ca().root, NOW)
        && let Some(leaf) = &again
    {
        let verified = CertificateDer::from(&*anew);
        let verified = webpki::EndEntityCert::try_from(&verified).expect("it was verified");
        let uris: Vec<&str> = verified.valid_uri_names().collect();
        let name = format!("spiffe://{}/node/{}/{}", leaf.trust_domain, leaf.site, leaf.node_id);
        assert!(uris.contains(&&*name), "{name} is no name that was verified: {uris:?}");
        assert_eq!(Digest::of(&verified.subject_public_key_info()), leaf.spki);
        assert_eq!(data_encoding::HEXLOWER.encode(verified.serial()), leaf.serial);
    }
    leaf.is_some() | again.is_some()
}

#[test]
fn an_identity_is_read_only_as_its_certificate_names_it_and_its_chain_holds() {
    // The tests' own trees are part of it; what the program takes is measured by itself.
    Target { name: "certificates", format: Format::Der, check, memory: 256 << 10, per_byte: 512 }.run();
}

#[test]
fn a_certificate_signed_anew_holds_and_names_its_node() {
    let (_, der) = corpus("certificates").into_iter().find(|(name, _)| name == "node.der").unwrap();
    let anew = signed_anew(&der).unwrap();
    assert!(
        holds(&anew, &ca().root, NOW) && !holds(&anew, node_root(), NOW) && holds(&der, node_root(), NOW)
    );
    assert_eq!(read(&anew).unwrap().node_id.as_str(), "n-1");
}
