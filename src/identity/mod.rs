//! Who this node is: the join, the files that keep the identity, and the key.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::sign::CertifiedKey;

use crate::model::{NodeId, Role, ServerTime};
use crate::wire::link::Endpoint;

/// A durable identity, loaded.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Given at join.
    pub node_id: NodeId,
    /// Rises with each re-join.
    pub generation: u64,
    /// host or ramdisk.
    pub role: Role,
    /// Where the machine stands.
    pub site: String,
    /// The deployment's name.
    pub trust_domain: String,
    /// The certificate chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The chain with its key, for TLS.
    pub key: Arc<CertifiedKey>,
    /// CAs that sign gateways.
    pub gateway_roots: Vec<CertificateDer<'static>>,
    /// Where to dial.
    pub endpoints: Vec<Endpoint>,
    /// When the leaf begins to hold.
    pub not_before: ServerTime,
    /// When the leaf runs out.
    pub not_after: ServerTime,
}

/// Why an identity cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is none.
    #[error("this machine has not joined: {0} is missing; join it with: bcd join --ticket FILE")]
    NotJoined(std::path::PathBuf),
}

impl Identity {
    /// Loads the identity of a state directory. Blocks.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(_state: &Path) -> Result<Self, LoadError> {
        todo!()
    }
}
