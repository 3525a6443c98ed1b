//! Public keys that verify envelopes by themselves: the join-signing key, a broker's, release and approver keys.

use std::fmt;
use std::str::FromStr;

use data_encoding::BASE64URL_NOPAD;
use ring::signature::{ECDSA_P256_SHA256_ASN1, ED25519, UnparsedPublicKey, VerificationAlgorithm};
use serde::{Deserialize, Serialize};
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_SIG_ED25519};
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;

use crate::model::Digest;

/// A SubjectPublicKeyInfo of either algorithm has under 100 bytes.
const SPKI_BYTES: usize = 256;

/// The two algorithms that sign envelopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    /// ECDSA over P-256 with SHA-256; signatures in ASN.1 DER.
    P256,
    /// Ed25519, for release and approver keys.
    Ed25519,
}

/// A public key. As text, in tickets and bundles: `p256:` or `ed25519:` and the base64url of its
/// SubjectPublicKeyInfo.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey {
    algorithm: Algorithm,
    spki: Box<[u8]>,
    /// The key itself, as the algorithm writes it.
    raw: Box<[u8]>,
    id: Digest,
}

/// Why something is no public key of ours.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// Not `<algorithm>:<base64url>`.
    #[error("a public key is p256: or ed25519: and the base64url of its SubjectPublicKeyInfo")]
    Text,
    /// The bytes are no SubjectPublicKeyInfo.
    #[error("the key is no SubjectPublicKeyInfo")]
    Malformed,
    /// Another algorithm, or another one than the text says.
    #[error("the key is of another algorithm than its text says, or than P-256 and Ed25519")]
    Algorithm,
}

impl PublicKey {
    /// Reads a SubjectPublicKeyInfo, DER.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn from_spki(der: &[u8]) -> Result<Self, KeyError> {
        if der.len() > SPKI_BYTES {
            return Err(KeyError::Malformed);
        }
        let (rest, spki) = SubjectPublicKeyInfo::from_der(der).map_err(|_| KeyError::Malformed)?;
        if !rest.is_empty() {
            return Err(KeyError::Malformed);
        }
        let curve = || spki.algorithm.parameters.as_ref().and_then(|any| any.as_oid().ok());
        let algorithm = if spki.algorithm.algorithm == OID_SIG_ED25519 {
            Algorithm::Ed25519
        } else if spki.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY && curve() == Some(OID_EC_P256) {
            Algorithm::P256
        } else {
            return Err(KeyError::Algorithm);
        };
        let raw = spki.subject_public_key.data.as_ref();
        let whole = match algorithm {
            Algorithm::P256 => raw.len() == 65 && raw[0] == 4,
            Algorithm::Ed25519 => raw.len() == 32,
        };
        if !whole {
            return Err(KeyError::Malformed);
        }
        Ok(Self { algorithm, spki: der.into(), raw: raw.into(), id: Digest::of(der) })
    }

    /// Its SubjectPublicKeyInfo, DER.
    #[must_use]
    pub fn spki(&self) -> &[u8] {
        &self.spki
    }

    /// SHA-256 of the SubjectPublicKeyInfo: what a signature names its key by.
    pub fn id(&self) -> Digest {
        self.id
    }

    /// Whether `signature` is this key's over `message`.
    pub fn verifies(&self, message: &[u8], signature: &[u8]) -> bool {
        let algorithm: &dyn VerificationAlgorithm = match self.algorithm {
            Algorithm::P256 => &ECDSA_P256_SHA256_ASN1,
            Algorithm::Ed25519 => &ED25519,
        };
        UnparsedPublicKey::new(algorithm, &*self.raw).verify(message, signature).is_ok()
    }

    fn prefix(&self) -> &'static str {
        match self.algorithm {
            Algorithm::P256 => "p256:",
            Algorithm::Ed25519 => "ed25519:",
        }
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.prefix(), BASE64URL_NOPAD.encode(&self.spki))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PublicKey({})", self.id)
    }
}

impl FromStr for PublicKey {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<Self, KeyError> {
        let (_, encoded) = text.split_once(':').ok_or(KeyError::Text)?;
        let der = BASE64URL_NOPAD.decode(encoded.as_bytes()).map_err(|_| KeyError::Text)?;
        let key = Self::from_spki(&der)?;
        if text.starts_with(key.prefix()) { Ok(key) } else { Err(KeyError::Algorithm) }
    }
}

impl TryFrom<String> for PublicKey {
    type Error = KeyError;

    fn try_from(text: String) -> Result<Self, KeyError> {
        text.parse()
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> Self {
        key.to_string()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, PublicKeyData as _};

    use super::*;

    #[test]
    fn both_algorithms_read_back_from_their_text() {
        for (algorithm, prefix) in [(&PKCS_ECDSA_P256_SHA256, "p256:"), (&PKCS_ED25519, "ed25519:")] {
            let pair = KeyPair::generate_for(algorithm).unwrap();
            let key = PublicKey::from_spki(&pair.subject_public_key_info()).unwrap();
            assert!(key.to_string().starts_with(prefix));
            assert_eq!(key.to_string().parse(), Ok(key));
        }
    }

    #[test]
    fn what_is_no_key_of_ours_is_refused() {
        let p384 = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        assert_eq!(PublicKey::from_spki(&p384.subject_public_key_info()), Err(KeyError::Algorithm));
        let spki = KeyPair::generate().unwrap().subject_public_key_info();
        for length in 0..spki.len() {
            assert!(PublicKey::from_spki(&spki[..length]).is_err(), "cut at {length}");
        }
        let longer = [&spki[..], b"x"].concat();
        assert_eq!(PublicKey::from_spki(&longer), Err(KeyError::Malformed));
        assert_eq!(PublicKey::from_spki(&vec![0x30; 1 << 20]), Err(KeyError::Malformed));
        let text = PublicKey::from_spki(&spki).unwrap().to_string();
        assert_eq!(text.replace("p256:", "ed25519:").parse::<PublicKey>(), Err(KeyError::Algorithm));
        assert_eq!(text.replace("p256:", "").parse::<PublicKey>(), Err(KeyError::Text));
    }
}
