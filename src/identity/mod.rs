//! Who this node is: the join, the renewal, the files that keep the identity, and the key.
//!
//! Files of the state directory: `keys/<SPKI digest>.key` comes first, `join-pending.json` names it while a join
//! runs, and the rename of `identity.json` is the switch, for a renewal too. Nothing here judges whether the certificate still holds:
//! that takes server time, which the session has.

mod accept;
mod again;
mod certificate;
pub mod join;
mod keys;
pub mod renew;
mod reset;
pub mod schedule;
mod seal;
mod stored;
mod ticket;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::CertificateDer;
use rustls::sign::CertifiedKey;

pub use accept::{Accepted, Answer, AnswerError, Asked, accept};
pub use again::{Mark, join_again, rejoins};
pub use certificate::{CertificateError, Leaf, chains_to};
pub use keys::KeyError;
pub use reset::{Aside, ResetError, finish_reset, reset};
pub use seal::{SealError, Sealed, seal};
pub use stored::{FileError, joined_with, pending_join};
pub use ticket::{Ticket, TicketError, Token};

use crate::model::strict::StrictMap;
use crate::model::{Digest, Exit, Machine, NodeId, Role};
use crate::state_dir::{StateDir, StateError};
use crate::wire::bundle::{BundleError, Trust};
use crate::wire::dsse::{Audience, PublicKey};
use crate::wire::revocation::Revocation;
use again::join_again_beside;
use keys::NodeKey;
use stored::{Stored as _, StoredIdentity};

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
    /// What the operator calls such machines.
    pub labels: StrictMap<String>,
    /// The deployment's name.
    pub trust_domain: String,
    /// The certificate chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// The chain with its key, for TLS.
    pub key: Arc<CertifiedKey>,
    /// SHA-256 of the key's public half.
    pub fingerprint: Digest,
    /// What it is tied to.
    pub machine: Machine,
    /// Signs join answers, trust bundles and revocations; pinned at the join.
    pub join_signing_key: PublicKey,
    /// Whom to believe, and where to dial.
    pub trust: Arc<Trust>,
    /// What the leaf says.
    pub leaf: Leaf,
    /// SHA-256 of the leaf: another for every certificate.
    pub certificate: Digest,
    /// The join service has revoked it: it is not used again.
    pub revoked: bool,
}

/// Why an identity cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// There is none.
    #[error("this machine has not joined: {} is missing; join it with: bcd join --ticket FILE", .0.display())]
    NotJoined(PathBuf),
    /// A file or directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// identity.json cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// identity.json names a key that is not there.
    #[error("the identity's key {} is missing; restore it, or {}", .path.display(), join_again(.state))]
    KeyMissing {
        /// The key's file.
        path: PathBuf,
        /// The state directory.
        state: PathBuf,
    },
    /// The certificate in identity.json is none of a node.
    #[error("the certificate in {} cannot be used; {}", .path.display(), join_again_beside(.path))]
    Certificate {
        /// identity.json.
        path: PathBuf,
        /// What is wrong with it.
        source: CertificateError,
    },
    /// identity.json contradicts its own certificate or key.
    #[error("{}: {what} is not the certificate's; {}", .path.display(), join_again_beside(.path))]
    Contradiction {
        /// identity.json.
        path: PathBuf,
        /// Which field.
        what: &'static str,
    },
    /// The trust bundle in identity.json is not one of the pinned key.
    #[error("the trust bundle in {} cannot be used; {}", .path.display(), join_again_beside(.path))]
    Trust {
        /// identity.json.
        path: PathBuf,
        /// What is wrong with it.
        source: BundleError,
    },
}

impl LoadError {
    /// The system's error, where a file could not be read.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::State(error) | Self::File(FileError::State(error)) | Self::Key(KeyError::State(error)) => {
                error.errno()
            }
            _ => None,
        }
    }

    /// The exit code that it stands for. All but a lack of permission are the operator's to mend before a restart
    /// can help, so a supervisor must not restart on them.
    pub fn exit(&self) -> Exit {
        match self {
            Self::State(error) | Self::File(FileError::State(error)) | Self::Key(KeyError::State(error)) => {
                error.exit()
            }
            Self::File(FileError::Newer { .. }) => Exit::ForeignState,
            _ => Exit::Configuration,
        }
    }
}

impl Identity {
    /// Loads the identity of a state directory. An expired certificate is loaded: the session says so. Blocks.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub fn load(state: &Path) -> Result<Self, LoadError> {
        let path = state.join(stored::IDENTITY);
        let Some(dir) = StateDir::open(state)? else { return Err(LoadError::NotJoined(path)) };
        let Some(stored) = StoredIdentity::read(&dir)? else { return Err(LoadError::NotJoined(path)) };
        let key = NodeKey::load(&dir, &stored.key.0)?.ok_or_else(|| LoadError::KeyMissing {
            path: state.join(keys::FOLDER).join(keys::file_name(&stored.key.0)),
            state: state.to_owned(),
        })?;
        assemble(stored, &key, path)
    }
}

fn assemble(stored: StoredIdentity, key: &NodeKey, path: PathBuf) -> Result<Identity, LoadError> {
    let contradiction = |what| LoadError::Contradiction { path: path.clone(), what };
    let chain: Vec<_> = stored.chain.iter().map(|der| CertificateDer::from(der.0.to_vec())).collect();
    let first = chain.first().ok_or_else(|| contradiction("the empty chain"))?;
    let leaf = match Leaf::read(first) {
        Ok(leaf) => leaf,
        Err(source) => return Err(LoadError::Certificate { path, source }),
    };
    for (what, same) in [
        ("the node id", leaf.node_id == stored.node_id),
        ("the role", leaf.role == stored.role),
        ("the site", leaf.site == stored.site),
        ("the trust domain", leaf.trust_domain == stored.trust_domain),
        ("the key", leaf.spki == key.spki()),
        ("the generation 0", stored.generation > 0),
    ] {
        if !same {
            return Err(contradiction(what));
        }
    }
    let provider = rustls::crypto::ring::default_provider();
    let tls = CertifiedKey::from_der(chain.clone(), key.to_tls(), &provider)
        .map_err(|_| contradiction("the key"))?;
    let certificate = Digest::of(first);
    let audience = Audience { trust_domain: stored.trust_domain.clone(), node_id: stored.node_id.clone() };
    let revoked = match &stored.revocation {
        None => false,
        Some(envelope) => Revocation::verify(envelope, &stored.join_signing_key, &audience)
            .map_err(|_| contradiction("the revocation"))?
            .names(&leaf.serial),
    };
    let trust = stored.trust().map_err(|source| LoadError::Trust { path, source })?;
    Ok(Identity {
        node_id: stored.node_id,
        generation: stored.generation,
        role: stored.role,
        site: stored.site,
        labels: stored.labels,
        trust_domain: stored.trust_domain,
        chain,
        key: Arc::new(tls),
        fingerprint: key.spki(),
        machine: stored.machine,
        join_signing_key: stored.join_signing_key,
        trust: Arc::new(trust),
        leaf,
        certificate,
        revoked,
    })
}

#[cfg(test)]
pub(crate) mod tests;
