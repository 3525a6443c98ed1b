//! What the join service signs, what a node seals for it, and what binds an answer to its request.

use data_encoding::BASE64URL_NOPAD;
use hpke::aead::ChaCha20Poly1305;
use hpke::kdf::HkdfSha256;
use hpke::kem::X25519HkdfSha256;
use hpke::{Deserializable as _, Kem, OpModeS, Serializable as _};
use serde::{Deserialize, Serialize};

use super::der::Der;
use super::dsse::{Audience, Document, DocumentError, Envelope, PublicKey, Verified, verify_document};
use super::pb;
use crate::model::strict::StrictMap;
use crate::model::{Digest, NodeId, Role, ServerTime};

/// What a sealed token is sealed as.
const SEAL_INFO: &[u8] = b"bcd.v1 join token";
/// Before a join service's public key in a ticket.
const KEY_PREFIX: &str = "x25519:";

/// What the join service says of a node and its new certificate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Issued {
    /// The deployment's name.
    pub trust_domain: String,
    /// What was asked, see [`join_request_digest`].
    pub request_sha256: Digest,
    /// The node.
    pub node_id: NodeId,
    /// host or ramdisk.
    pub role: Role,
    /// Where the machine stands.
    pub site: String,
    /// What the operator calls such machines; left out where there is nothing.
    #[serde(default, skip_serializing_if = "StrictMap::is_empty")]
    pub labels: StrictMap<String>,
    /// Rises with each re-join of the node; from 1.
    pub identity_generation: u64,
    /// The certificate chain, leaf first.
    pub chain: Vec<Der>,
    /// SHA-256 of the payload of the trust bundle beside it.
    pub trust_bundle_sha256: Digest,
    /// The control plane's clock.
    pub issued_at: ServerTime,
}

/// The signed answer to a join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JoinAnswer(pub Issued);

/// The signed answer to a renewal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RenewAnswer(pub Issued);

/// What a node signs with the key of its certificate to get another: proof that it holds the key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenewProof {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node.
    pub node_id: NodeId,
    /// SHA-256 of the certificate request, DER.
    pub csr_sha256: Digest,
    /// Random, 128 bits in hex: no two proofs are alike.
    pub nonce: String,
    /// The working clock; beside a challenge the time that came with it.
    pub issued_at: ServerTime,
    /// What the gateway gave to a node whose clock it does not share; absent: it gave nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub challenge: Option<String>,
}

/// The attestor of a join in which the key of an older certificate proves the node.
pub const X509POP: &str = "x509pop";
/// Longest request of such a join, encoded: a new key's, and a chain of certificates.
pub const REJOIN_BYTES: usize = 64 << 10;

/// What a node signs with the key of a certificate that has run out, to be let in again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejoinProof {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node.
    pub node_id: NodeId,
    /// What is asked, see [`join_request_digest`]: the new key and the old certificates are in it.
    pub request_sha256: Digest,
    /// What the join service gave for this request.
    pub challenge: String,
    /// The time that came with it.
    pub issued_at: ServerTime,
}

/// Why a proof lets nobody in.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// It is no proof of that node's.
    #[error("the proof does not hold: {0}")]
    Document(#[from] DocumentError),
    /// It was made for something else that was asked.
    #[error("the proof is over another request")]
    Request,
}

impl RejoinProof {
    /// A proof that the key of the old certificate has made over this request. Whether its challenge is fresh, who gave
    /// it knows.
    ///
    /// # Errors
    /// It does not hold, or is over another request.
    pub fn verify(
        proof: &Envelope,
        key: &PublicKey,
        node: Audience,
        request_sha256: Digest,
    ) -> Result<Verified<Self>, ProofError> {
        let proof: Verified<Self> = verify_document(proof, key, Some(&node))?;
        if proof.get().request_sha256 == request_sha256 { Ok(proof) } else { Err(ProofError::Request) }
    }
}

macro_rules! documents {
    ($($name:ty, $suffix:literal, $this:ident => $issued:expr;)+) => {$(
        impl Document for $name {
            const TYPE: &'static str = concat!("application/vnd.bcd.v1.", $suffix);

            fn trust_domain(&self) -> &str {
                let $this = self;
                &$issued.trust_domain
            }

            fn node_id(&self) -> Option<&NodeId> {
                let $this = self;
                Some(&$issued.node_id)
            }
        }
    )+};
}

documents! {
    JoinAnswer, "join-response", this => this.0;
    RenewAnswer, "renew-response", this => this.0;
    RenewProof, "renew-request", this => this;
    RejoinProof, "rejoin-proof", this => this;
}

/// What a join asked, as one digest: every field of the request, each with its length before it, facts in their order.
pub fn join_request_digest(request: &pb::JoinRequest) -> Digest {
    let pb::JoinRequest { csr, sealed_token, attestor, evidence, facts, proto_min, proto_max, role } =
        request;
    let mut bytes = Vec::new();
    let mut field = |value: &[u8]| {
        bytes.extend((value.len() as u64).to_be_bytes());
        bytes.extend(value);
    };
    for value in [&csr[..], sealed_token, attestor.as_bytes(), evidence, role.as_bytes()] {
        field(value);
    }
    field(&proto_min.to_be_bytes());
    field(&proto_max.to_be_bytes());
    let sorted: std::collections::BTreeMap<_, _> = facts.iter().collect();
    for (name, value) in sorted {
        field(name.as_bytes());
        field(value.as_bytes());
    }
    Digest::of(&bytes)
}

/// What a renewal asked.
pub fn renew_request_digest(request: &pb::RenewRequest) -> Digest {
    both(&Digest::of(&request.csr), request.proof.as_ref())
}

/// What a join asked whose request has this digest, and whose challenge was answered with `proof`.
pub fn rejoin_digest(request: &Digest, proof: &pb::Envelope) -> Digest {
    both(request, Some(proof))
}

fn both(first: &Digest, proof: Option<&pb::Envelope>) -> Digest {
    let proof = proof.map(|proof| &proof.payload[..]).unwrap_or_default();
    Digest::of(&[&first.0[..], &Digest::of(proof).0].concat())
}

/// The join service's key that tokens are sealed to: X25519. As text `x25519:` and base64url.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SealingKey([u8; 32]);

/// A text that is no sealing key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the join encryption key is not x25519: and the base64url of 32 bytes")]
pub struct BadSealingKey;

/// A token cannot be sealed or opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SealError {
    /// The key.
    #[error("the join encryption key is no point of the curve")]
    Key,
    /// Not sealed to this key, for this request.
    #[error("the token was not sealed for this join service and this certificate request")]
    NotOurs,
}

impl TryFrom<String> for SealingKey {
    type Error = BadSealingKey;

    fn try_from(text: String) -> Result<Self, BadSealingKey> {
        let encoded = text.strip_prefix(KEY_PREFIX).ok_or(BadSealingKey)?;
        let bytes = BASE64URL_NOPAD.decode(encoded.as_bytes()).map_err(|_| BadSealingKey)?;
        bytes.try_into().map(Self).map_err(|_| BadSealingKey)
    }
}

impl From<SealingKey> for String {
    fn from(key: SealingKey) -> Self {
        format!("{KEY_PREFIX}{}", BASE64URL_NOPAD.encode(&key.0))
    }
}

impl SealingKey {
    /// Seals a token for one certificate request: whoever relays it can neither read it nor put another request beside
    /// it. Encapsulated key, then ciphertext.
    ///
    /// # Errors
    /// The key is none.
    pub fn seal(&self, token: &str, csr: &[u8]) -> Result<Vec<u8>, SealError> {
        let key = <X25519HkdfSha256 as Kem>::PublicKey::from_bytes(&self.0).map_err(|_| SealError::Key)?;
        let (encapsulated, ciphertext) =
            hpke::single_shot_seal::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
                &OpModeS::Base,
                &key,
                SEAL_INFO,
                token.as_bytes(),
                &Digest::of(csr).0,
            )
            .map_err(|_| SealError::Key)?;
        Ok([&encapsulated.to_bytes()[..], &ciphertext].concat())
    }
}

/// The private half, in the join service alone.
#[cfg(feature = "fakehw")]
pub struct OpeningKey(<X25519HkdfSha256 as Kem>::PrivateKey, SealingKey);

#[cfg(feature = "fakehw")]
impl std::fmt::Debug for OpeningKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OpeningKey(secret)")
    }
}

#[cfg(feature = "fakehw")]
impl OpeningKey {
    /// The key of these 32 random bytes.
    ///
    /// # Errors
    /// They are no key.
    pub fn new(secret: &[u8]) -> Result<Self, SealError> {
        let private =
            <X25519HkdfSha256 as Kem>::PrivateKey::from_bytes(secret).map_err(|_| SealError::Key)?;
        let public = X25519HkdfSha256::sk_to_pk(&private).to_bytes();
        let public = SealingKey(public.into());
        Ok(Self(private, public))
    }

    /// The public half.
    pub fn public(&self) -> SealingKey {
        self.1
    }

    /// Opens what was sealed for this certificate request.
    ///
    /// # Errors
    /// It was not.
    pub fn open(&self, sealed: &[u8], csr: &[u8]) -> Result<Vec<u8>, SealError> {
        let (encapsulated, ciphertext) = sealed.split_at_checked(32).ok_or(SealError::NotOurs)?;
        let encapsulated = <X25519HkdfSha256 as Kem>::EncappedKey::from_bytes(encapsulated)
            .map_err(|_| SealError::NotOurs)?;
        hpke::single_shot_open::<ChaCha20Poly1305, HkdfSha256, X25519HkdfSha256>(
            &hpke::OpModeR::Base,
            &self.0,
            &encapsulated,
            SEAL_INFO,
            ciphertext,
            &Digest::of(csr).0,
        )
        .map_err(|_| SealError::NotOurs)
    }
}

#[cfg(all(test, feature = "fakehw"))]
mod tests {
    use super::*;

    #[test]
    fn a_sealed_token_opens_for_its_request_alone_and_no_byte_may_change() {
        let key = OpeningKey::new(&[7; 32]).unwrap();
        let sealed = key.public().seal("bt_secret", b"a csr").unwrap();
        assert_eq!(key.open(&sealed, b"a csr").unwrap(), b"bt_secret");
        assert!(!sealed.windows(9).any(|window| window == b"bt_secret"));
        assert_eq!(key.open(&sealed, b"another csr"), Err(SealError::NotOurs));
        assert_eq!(OpeningKey::new(&[8; 32]).unwrap().open(&sealed, b"a csr"), Err(SealError::NotOurs));
        for at in 0..sealed.len() {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(key.open(&changed, b"a csr").is_err(), "byte {at}");
            assert!(key.open(&sealed[..at], b"a csr").is_err(), "cut at {at}");
        }
    }

    #[test]
    fn a_sealing_key_reads_back_from_its_text() {
        let key = OpeningKey::new(&[7; 32]).unwrap().public();
        assert_eq!(SealingKey::try_from(String::from(key)), Ok(key));
        for bad in ["", "x25519:", "x25519:AAAA", "p256:AAAA"] {
            assert!(SealingKey::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_field_of_a_join_request_is_in_its_digest() {
        let digest = |change: fn(&mut pb::JoinRequest)| {
            let mut request = pb::JoinRequest { proto_max: 1, ..Default::default() };
            change(&mut request);
            join_request_digest(&request)
        };
        let all = [
            digest(|_| {}),
            digest(|request| request.csr = b"x"[..].into()),
            digest(|request| request.sealed_token = b"x"[..].into()),
            digest(|request| request.attestor = "x".into()),
            digest(|request| request.evidence = b"x"[..].into()),
            digest(|request| request.role = "x".into()),
            digest(|request| request.proto_min = 1),
            digest(|request| request.proto_max = 2),
            digest(|request| drop(request.facts.insert("x".into(), String::new()))),
            digest(|request| drop(request.facts.insert(String::new(), "x".into()))),
        ];
        assert_eq!(std::collections::BTreeSet::from(all).len(), all.len());
    }
}
