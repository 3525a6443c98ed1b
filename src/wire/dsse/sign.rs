//! Signing an envelope. The key is a rustls signing key, so that a key in a file and one in a TPM sign alike.

use std::sync::Arc;

use bytes::Bytes;
use rustls::SignatureScheme;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::SigningKey;

use super::{Envelope, Signature, pre_authentication};
use crate::model::Digest;

/// What an envelope may be signed with, in order of preference.
const SCHEMES: &[SignatureScheme] = &[SignatureScheme::ECDSA_NISTP256_SHA256, SignatureScheme::ED25519];

/// Why a body was not signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The key is neither P-256 nor Ed25519, or does not tell its public half.
    #[error("the signing key is neither P-256 nor Ed25519")]
    Key,
    /// The key refused.
    #[error("the signing key failed")]
    Failed(#[source] rustls::Error),
}

/// The signing key of a P-256 key in PKCS#8, DER.
///
/// # Errors
/// It is none.
pub fn signing_key(pkcs8: Vec<u8>) -> Result<Arc<dyn SigningKey>, SignError> {
    rustls::crypto::ring::sign::any_ecdsa_type(&PrivateKeyDer::Pkcs8(pkcs8.into()))
        .map_err(|_| SignError::Key)
}

/// Signs `payload` as a body of `payload_type`; `chain` is the signer's, DER, leaf first, or empty where the key is
/// known by its id. Blocks as long as the key does.
///
/// # Errors
/// See [`SignError`].
pub fn sign(
    payload_type: &str,
    payload: impl Into<Bytes>,
    key: &dyn SigningKey,
    chain: Vec<Bytes>,
) -> Result<Envelope, SignError> {
    let payload = payload.into();
    let spki = key.public_key().ok_or(SignError::Key)?;
    let signer = key.choose_scheme(SCHEMES).ok_or(SignError::Key)?;
    let message = pre_authentication(payload_type, &payload);
    let signature = signer.sign(&message).map_err(SignError::Failed)?;
    let key_id = Bytes::copy_from_slice(&Digest::of(&spki).0);
    Ok(Envelope {
        payload_type: payload_type.to_owned(),
        payload,
        signatures: vec![Signature { key_id, signature: signature.into(), chain }],
    })
}
