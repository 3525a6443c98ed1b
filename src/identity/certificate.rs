//! What a node certificate says of its node, read from its URI SANs.

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::model::{Digest, NodeId, Role, ServerTime};
use crate::wire::der::Der;
use crate::wire::link::Validity;
use crate::wire::tls::unix_time;
use crate::wire::x509;

/// Prefix of the one URI that names the node.
const SPIFFE: &str = "spiffe://";
/// Prefix of the URI that names the role.
const ROLE: &str = "urn:bc:role:";
/// Prefix of the URI that names the attestation key which has certified the node's.
const AK: &str = "urn:bc:tpm-ak:";
/// The URI of a machine under a tenant's control.
const TENANT: &str = "urn:bc:tenant";

/// A node certificate's leaf, read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// The deployment's name.
    pub trust_domain: String,
    /// Where the machine stands.
    pub site: String,
    /// The node.
    pub node_id: NodeId,
    /// host or ramdisk.
    pub role: Role,
    /// SHA-256 of the SubjectPublicKeyInfo.
    pub spki: Digest,
    /// The certificate's serial, hex.
    pub serial: String,
    /// Digest of the name of the attestation key that certified the key, as it was written; absent for a key in a file.
    pub ak_name: Option<String>,
    /// Whether a tenant controls the machine.
    pub tenant: bool,
    /// When it holds.
    pub validity: Validity,
}

/// Why a certificate is not a node certificate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    /// Not X.509.
    #[error("not an X.509 certificate")]
    Malformed,
    /// Not exactly one of a URI that there must be one of.
    #[error("it must name exactly one {what}, and names {found}")]
    Count {
        /// The URI's prefix.
        what: &'static str,
        /// How many there are.
        found: usize,
    },
    /// A URI that is not of the form that it should have.
    #[error("{0:?} is not spiffe://TRUST-DOMAIN/node/SITE/NODE")]
    Name(String),
    /// It does not hold, or no root that is held vouches for it.
    #[error("it does not chain to a root that this node holds, or does not hold at {at}: {why}")]
    Chain {
        /// The time that it was judged at.
        at: ServerTime,
        /// The library's word.
        why: String,
    },
    /// A role that this build does not know.
    #[error("it names the role {0:?}, which is neither host nor ramdisk")]
    Role(String),
}

impl Leaf {
    /// Reads a leaf. Its validity is not judged: that needs server time.
    ///
    /// # Errors
    /// See [`CertificateError`].
    pub fn read(der: &CertificateDer<'_>) -> Result<Self, CertificateError> {
        let (certificate, uris) = x509::read(der).ok_or(CertificateError::Malformed)?;
        let name = only(&uris, SPIFFE)?;
        let role = only(&uris, ROLE)?;
        let (trust_domain, site, node_id) =
            split(name).ok_or_else(|| CertificateError::Name(format!("{SPIFFE}{name}")))?;
        let ak_names: Vec<&str> = uris.iter().filter_map(|uri| uri.strip_prefix(AK)).collect();
        if ak_names.len() > 1 {
            return Err(CertificateError::Count { what: AK, found: ak_names.len() });
        }
        Ok(Self {
            trust_domain,
            site,
            node_id,
            role: Role::from_name(role).ok_or_else(|| CertificateError::Role(role.into()))?,
            spki: Digest::of(certificate.public_key().raw),
            serial: data_encoding::HEXLOWER.encode(certificate.raw_serial()),
            ak_name: ak_names.first().map(|name| (*name).to_owned()),
            tenant: uris.contains(&TENANT),
            validity: validity(&certificate),
        })
    }
}

fn validity(certificate: &X509Certificate<'_>) -> Validity {
    let ms = |at: x509_parser::time::ASN1Time| ServerTime(at.timestamp().saturating_mul(1000));
    let validity = certificate.validity();
    Validity { not_before: ms(validity.not_before), not_after: ms(validity.not_after) }
}

/// Holds a node's chain, leaf first, against the roots that may vouch for nodes, at `at`.
///
/// # Errors
/// None of them does.
pub fn chains_to(
    chain: &[CertificateDer<'_>],
    roots: &[Der],
    at: ServerTime,
) -> Result<(), CertificateError> {
    let failed = |error: webpki::Error| CertificateError::Chain { at, why: error.to_string() };
    let (leaf, between) = chain.split_first().ok_or(CertificateError::Malformed)?;
    let roots: Vec<_> = roots.iter().map(|root| CertificateDer::from(&*root.0)).collect();
    let anchors = roots.iter().map(webpki::anchor_from_trusted_cert).collect::<Result<Vec<_>, _>>();
    let leaf = webpki::EndEntityCert::try_from(leaf).map_err(failed)?;
    let algorithms = rustls::crypto::ring::default_provider().signature_verification_algorithms.all;
    let usage = webpki::KeyUsage::client_auth();
    leaf.verify_for_usage(algorithms, &anchors.map_err(failed)?, between, unix_time(at), usage, None, None)
        .map(|_| ())
        .map_err(failed)
}

/// Whether any certificate, not only a node's, holds at `time`.
///
/// # Errors
/// It is not X.509.
pub fn holds_at(der: &CertificateDer<'_>, time: ServerTime) -> Result<bool, CertificateError> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| CertificateError::Malformed)?;
    Ok(validity(&certificate).holds_at(time))
}

fn only<'a>(uris: &[&'a str], what: &'static str) -> Result<&'a str, CertificateError> {
    let found: Vec<&str> = uris.iter().filter_map(|uri| uri.strip_prefix(what)).collect();
    match found[..] {
        [one] => Ok(one),
        _ => Err(CertificateError::Count { what, found: found.len() }),
    }
}

fn split(name: &str) -> Option<(String, String, NodeId)> {
    let mut parts = name.split('/');
    let (domain, word, site, node) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() || word != "node" || !plain(domain) || !plain(site) {
        return None;
    }
    Some((domain.to_owned(), site.to_owned(), NodeId::new(node).ok()?))
}

/// A trust domain or site is a plain name: it becomes part of a URI.
fn plain(name: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    (1..=255).contains(&name.len()) && name.bytes().all(allowed)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair, SanType};

    /// A self-signed certificate of `key` with these URIs.
    pub(in crate::identity) fn certificate(key: &KeyPair, uris: &[&str]) -> CertificateDer<'static> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        params.self_signed(key).unwrap().der().clone()
    }

    fn read(uris: &[&str]) -> Result<Leaf, CertificateError> {
        Leaf::read(&certificate(&KeyPair::generate().unwrap(), uris))
    }

    const NAME: &str = "spiffe://lab.example/node/fra1/n-1";
    const HOST: &str = "urn:bc:role:host";

    #[test]
    fn the_names_and_the_role_are_read() {
        let leaf = read(&[NAME, HOST, "urn:bc:tenant"]).unwrap();
        assert_eq!((leaf.trust_domain.as_str(), leaf.site.as_str()), ("lab.example", "fra1"));
        assert_eq!((leaf.node_id.as_str(), leaf.role), ("n-1", Role::Host));
        assert_eq!((leaf.ak_name, leaf.tenant), (None, true));
        let attested = read(&[NAME, HOST, "urn:bc:tpm-ak:00ff"]).unwrap();
        assert_eq!((attested.ak_name.as_deref(), attested.tenant), (Some("00ff"), false));
    }

    #[test]
    fn anything_but_one_well_formed_name_and_one_role_is_refused() {
        for uris in [
            &[HOST][..],
            &[NAME],
            &[NAME, NAME, HOST],
            &[NAME, HOST, "urn:bc:role:ramdisk"],
            &[NAME, "urn:bc:role:root"],
            &[NAME, HOST, "urn:bc:tpm-ak:00", "urn:bc:tpm-ak:01"],
            &["spiffe://lab.example/node/fra1", HOST],
            &["spiffe://lab.example/node/fra1/n-1/x", HOST],
            &["spiffe://lab.example/worker/fra1/n-1", HOST],
            &["spiffe://lab.example/node//n-1", HOST],
            &["spiffe://lab.example/node/fra1/-", HOST],
        ] {
            assert!(read(uris).is_err(), "{uris:?}");
        }
    }
}
