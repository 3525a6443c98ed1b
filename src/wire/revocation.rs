//! A revocation: certificates of a node that are never to be used again, signed by the join-signing key.

use serde::{Deserialize, Serialize};

use super::dsse::{Audience, Document, DocumentError, Envelope, PublicKey, verify_document};
use crate::model::{NodeId, ServerTime};

/// Certificates that one revocation names.
pub const SERIALS: usize = 1024;

/// A revocation's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node.
    pub node_id: NodeId,
    /// Serials of the certificates, hex as in their DER.
    pub serials: Vec<String>,
    /// When it was signed.
    pub issued_at: ServerTime,
}

impl Document for Revocation {
    const TYPE: &'static str = "application/vnd.bcd.v1.revocation";

    fn trust_domain(&self) -> &str {
        &self.trust_domain
    }

    fn node_id(&self) -> Option<&NodeId> {
        Some(&self.node_id)
    }
}

impl Revocation {
    /// Takes a revocation of certificates of `audience` under the pinned key.
    ///
    /// # Errors
    /// See [`DocumentError`].
    pub fn verify(envelope: &Envelope, key: &PublicKey, audience: &Audience) -> Result<Self, DocumentError> {
        let revocation: Self = verify_document(envelope, key, Some(audience))?.into_inner();
        if revocation.serials.len() > SERIALS {
            return Err(DocumentError::Body(format!("it names over {SERIALS} certificates")));
        }
        Ok(revocation)
    }

    /// Whether it names the certificate of this serial.
    pub fn names(&self, serial: &str) -> bool {
        self.serials.iter().any(|revoked| revoked == serial)
    }
}
