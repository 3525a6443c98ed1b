//! Documents signed by a key that is known by itself: pinned at join, or named by the trust bundle.

use serde::de::DeserializeOwned;

use super::{Audience, Envelope, PublicKey, Signature, Verified, check_audience, pre_authentication, shown};
use crate::model::NodeId;
use crate::model::strict::{self, StrictError};

/// A signed body other than a command's.
pub trait Document: DeserializeOwned {
    /// Payload type.
    const TYPE: &'static str;

    /// The deployment that it names.
    fn trust_domain(&self) -> &str;

    /// The node that it is for; absent where it is for all of the deployment.
    fn node_id(&self) -> Option<&NodeId>;
}

/// Why a document is not taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DocumentError {
    /// Another type of body.
    #[error("its type is {0:?}, not {1}")]
    Type(String, &'static str),
    /// No signature of the key holds.
    #[error("no signature of the key {0} holds over it")]
    Signature(String),
    /// A field that this build does not know.
    #[error("it has the field {0:?}, which this bcd does not know; install a newer bcd")]
    UnknownField(String),
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Body(String),
    /// For somebody else.
    #[error("{0}")]
    Audience(String),
}

/// Verifies a document against one key; nothing of the payload is looked at before the signature holds. `audience` is
/// absent for a machine that has no node id yet: then only what the caller holds the body against decides.
///
/// # Errors
/// See [`DocumentError`].
pub fn verify_document<T: Document>(
    envelope: &Envelope,
    key: &PublicKey,
    audience: Option<&Audience>,
) -> Result<Verified<T>, DocumentError> {
    if envelope.payload_type != T::TYPE {
        return Err(DocumentError::Type(shown(&envelope.payload_type), T::TYPE));
    }
    let message = pre_authentication(&envelope.payload_type, &envelope.payload);
    let id = key.id();
    let mut own = envelope.signatures.iter().filter(|signature| signature.key_id == id.0.as_slice());
    if !own.any(|signature| key.verifies(&message, &signature.signature)) {
        return Err(DocumentError::Signature(id.to_string()));
    }
    let document: T = strict::parse(&envelope.payload).map_err(|error| match error {
        StrictError::UnsupportedField(field) => DocumentError::UnknownField(field),
        StrictError::Invalid(detail) => DocumentError::Body(detail),
    })?;
    if let Some(audience) = audience {
        check_audience(document.trust_domain(), document.node_id(), audience)
            .map_err(DocumentError::Audience)?;
    }
    Ok(Verified { document, signer: None })
}

impl Envelope {
    /// What of it is to be kept once it was verified: the payload with the signature of `key` that holds, without a
    /// chain. Everything else is bytes that nobody signed, and that whoever relays it may add without end.
    #[must_use]
    pub fn as_signed_by(self, key: &PublicKey) -> Self {
        let (message, id) = (pre_authentication(&self.payload_type, &self.payload), key.id());
        let holds = |signature: &Signature| {
            signature.key_id == id.0.as_slice() && key.verifies(&message, &signature.signature)
        };
        let own = self.signatures.into_iter().find(holds);
        let signatures = own.map(|own| Signature { chain: Vec::new(), ..own }).into_iter().collect();
        Self { signatures, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::dsse::{sign, signing_key};

    #[derive(Debug, serde::Deserialize)]
    struct Note {
        trust_domain: String,
        node_id: NodeId,
    }

    impl Document for Note {
        const TYPE: &'static str = "application/vnd.bcd.v1.note";

        fn trust_domain(&self) -> &str {
            &self.trust_domain
        }

        fn node_id(&self) -> Option<&NodeId> {
            Some(&self.node_id)
        }
    }

    fn key() -> (std::sync::Arc<dyn rustls::sign::SigningKey>, PublicKey) {
        let pair = rcgen::KeyPair::generate().unwrap();
        let key = signing_key(pair.serialize_der()).unwrap();
        let public = PublicKey::from_spki(&key.public_key().unwrap()).unwrap();
        (key, public)
    }

    fn audience() -> Audience {
        Audience { trust_domain: "lab.example".into(), node_id: NodeId::new("n-1").unwrap() }
    }

    const BODY: &str = r#"{"trust_domain":"lab.example","node_id":"n-1"}"#;

    #[test]
    fn a_document_of_the_pinned_key_is_taken_and_every_changed_byte_is_seen() {
        let (signer, public) = key();
        let envelope = sign(Note::TYPE, BODY, &*signer, Vec::new()).unwrap();
        assert!(verify_document::<Note>(&envelope, &public, Some(&audience())).is_ok());
        for at in 0..BODY.len() {
            let mut bytes = BODY.as_bytes().to_vec();
            bytes[at] ^= 1;
            let changed = Envelope { payload: bytes.into(), ..envelope.clone() };
            let refused = verify_document::<Note>(&changed, &public, Some(&audience())).unwrap_err();
            assert!(matches!(refused, DocumentError::Signature(_)), "byte {at}: {refused}");
        }
    }

    #[test]
    fn of_a_verified_envelope_only_what_the_key_vouches_for_is_kept() {
        let ((signer, public), (other, _)) = (key(), key());
        let genuine = sign(Note::TYPE, BODY, &*signer, Vec::new()).unwrap();
        let foreign = sign(Note::TYPE, BODY, &*other, Vec::new()).unwrap().signatures.remove(0);
        let junk = bytes::Bytes::from(vec![0; 1000]);
        let mut padded = genuine.clone();
        padded.signatures[0].chain.push(junk.clone());
        let forged = Signature { signature: junk, ..genuine.signatures[0].clone() };
        padded.signatures.splice(0..0, [foreign, forged]);
        assert!(verify_document::<Note>(&padded, &public, None).is_ok());
        assert_eq!(padded.as_signed_by(&public), genuine);
    }

    #[test]
    fn another_key_another_type_another_node_and_an_unknown_field_are_each_refused() {
        let ((signer, public), (other, _)) = (key(), key());
        let verify = |envelope: &Envelope| {
            verify_document::<Note>(envelope, &public, Some(&audience())).map(Verified::into_inner)
        };
        let foreign = sign(Note::TYPE, BODY, &*other, Vec::new()).unwrap();
        assert!(matches!(verify(&foreign).unwrap_err(), DocumentError::Signature(_)));
        let mut renamed = foreign;
        renamed.signatures[0].key_id = bytes::Bytes::copy_from_slice(&public.id().0);
        assert!(matches!(verify(&renamed).unwrap_err(), DocumentError::Signature(_)));
        let mut typed = sign("application/vnd.bcd.v1.result", BODY, &*signer, Vec::new()).unwrap();
        assert!(matches!(verify(&typed).unwrap_err(), DocumentError::Type(..)));
        typed.payload_type = Note::TYPE.into();
        assert!(matches!(verify(&typed).unwrap_err(), DocumentError::Signature(_)));
        for (from, to, unknown) in
            [("n-1", "n-2", false), ("lab.", "prod.", false), ("\"n-1\"", "\"n-1\",\"x\":1", true)]
        {
            let envelope = sign(Note::TYPE, BODY.replace(from, to), &*signer, Vec::new()).unwrap();
            let refused = verify(&envelope).unwrap_err();
            assert_eq!(matches!(refused, DocumentError::UnknownField(_)), unknown, "{refused}");
            assert_eq!(matches!(refused, DocumentError::Audience(_)), !unknown, "{refused}");
        }
    }
}
