//! Workers: who may sign commands, by a short-lived certificate under a command root of the trust bundle.

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::ring::{ECDSA_P256_SHA256, ED25519};
use webpki::{EndEntityCert, KeyUsage};

use super::{Envelope, Signature, pre_authentication};
use crate::model::limits::CHAIN;
use crate::model::{Digest, ServerTime};
use crate::wire::tls::unix_time;
use crate::wire::x509;

/// What a worker's certificate names it by.
const WORKER: &str = "urn:bc:worker:";
/// 1.3.6.1.5.5.7.3.3, code signing: held against a certificate that restricts its use.
const CODE_SIGNING: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x03];
/// Certificates of a worker are P-256 all the way up; a root may be Ed25519.
const ALGORITHMS: &[&dyn rustls::pki_types::SignatureVerificationAlgorithm] = &[ECDSA_P256_SHA256, ED25519];

/// The command roots that a node holds; empty until a trust bundle came.
#[derive(Clone, Default)]
pub struct CommandRoots(Arc<[TrustAnchor<'static>]>);

impl std::fmt::Debug for CommandRoots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CommandRoots({})", self.0.len())
    }
}

/// Who signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Worker {
    /// Its name.
    pub name: String,
    /// SHA-256 of its SubjectPublicKeyInfo.
    pub key: Digest,
}

/// A certificate that is no root.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a root is no CA certificate: {0}")]
pub struct BadRoot(String);

/// Why no worker vouches for an envelope.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WorkerError {
    /// There is nothing to hold a signature against.
    #[error("this node holds no command roots")]
    NoRoots,
    /// No signature carries a certificate chain.
    #[error("no signature carries the certificate of a worker")]
    NoChain,
    /// The chain is longer than any.
    #[error("a signature carries {0} certificates, at most {CHAIN}")]
    ChainTooLong(usize),
    /// The leaf cannot be read.
    #[error("the signer's certificate cannot be read")]
    Malformed,
    /// The key named is not the certificate's.
    #[error("the key that the signature names is not its certificate's")]
    OtherKey,
    /// It does not chain to a command root, or does not hold now.
    #[error("the signer's certificate does not hold at {at}: {why}")]
    Chain {
        /// The time that it was judged at.
        at: ServerTime,
        /// The library's word.
        why: String,
    },
    /// Not exactly one worker's name.
    #[error("the signer's certificate does not name exactly one {WORKER}NAME")]
    Name,
    /// The signature itself.
    #[error("the signature does not hold over these bytes")]
    Signature,
}

impl CommandRoots {
    /// These CA certificates, DER.
    ///
    /// # Errors
    /// One of them is no CA certificate.
    pub fn new<'a>(certificates: impl IntoIterator<Item = &'a [u8]>) -> Result<Self, BadRoot> {
        let anchor = |der: &[u8]| {
            let der = CertificateDer::from(der);
            let anchor = webpki::anchor_from_trusted_cert(&der);
            anchor.map(|anchor| anchor.to_owned()).map_err(|error| BadRoot(error.to_string()))
        };
        Ok(Self(certificates.into_iter().map(anchor).collect::<Result<_, _>>()?))
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The worker whose signature over `envelope` holds at server time `at`; the first one of several.
    ///
    /// # Errors
    /// None holds; what is wrong with the last one that was looked at.
    pub fn signer(&self, envelope: &Envelope, at: ServerTime) -> Result<Worker, WorkerError> {
        if self.is_empty() {
            return Err(WorkerError::NoRoots);
        }
        let message = pre_authentication(&envelope.payload_type, &envelope.payload);
        let mut why = WorkerError::NoChain;
        for signature in envelope.signatures.iter().filter(|signature| !signature.chain.is_empty()) {
            match self.judge(signature, &message, at) {
                Ok(worker) => return Ok(worker),
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    fn judge(&self, signature: &Signature, message: &[u8], at: ServerTime) -> Result<Worker, WorkerError> {
        if signature.chain.len() > CHAIN {
            return Err(WorkerError::ChainTooLong(signature.chain.len()));
        }
        let chain: Vec<CertificateDer<'_>> =
            signature.chain.iter().map(|der| CertificateDer::from(der.as_ref())).collect();
        let (leaf, between) = chain.split_first().ok_or(WorkerError::NoChain)?;
        let (name, key) = read(leaf)?;
        if signature.key_id != key.0.as_slice() {
            return Err(WorkerError::OtherKey);
        }
        let certificate = EndEntityCert::try_from(leaf).map_err(|_| WorkerError::Malformed)?;
        let usage = KeyUsage::required_if_present(CODE_SIGNING);
        let time: UnixTime = unix_time(at);
        certificate
            .verify_for_usage(ALGORITHMS, &self.0, between, time, usage, None, None)
            .map_err(|error| WorkerError::Chain { at, why: error.to_string() })?;
        // Only now is it worth the cost: whoever has no certificate under a root is out already.
        let held = [ECDSA_P256_SHA256, ED25519]
            .iter()
            .any(|algorithm| certificate.verify_signature(*algorithm, message, &signature.signature).is_ok());
        if held { Ok(Worker { name, key }) } else { Err(WorkerError::Signature) }
    }
}

/// The one worker's name of a leaf, and its key.
fn read(leaf: &CertificateDer<'_>) -> Result<(String, Digest), WorkerError> {
    let (certificate, uris) = x509::read(leaf).ok_or(WorkerError::Malformed)?;
    let mut workers = uris.iter().filter_map(|uri| uri.strip_prefix(WORKER));
    let (Some(name), None) = (workers.next(), workers.next()) else { return Err(WorkerError::Name) };
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_');
    if !(1..=128).contains(&name.len()) || !name.bytes().all(plain) {
        return Err(WorkerError::Name);
    }
    Ok((name.to_owned(), Digest::of(certificate.public_key().raw)))
}

#[cfg(test)]
mod tests;
