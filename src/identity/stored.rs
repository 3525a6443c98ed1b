//! The identity's files: identity.json, whose rename is the switch to a new identity, and join-pending.json, which
//! lets a join that was killed go on with the same key.

use std::path::Path;

use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::keys;
use crate::model::strict::{self, StrictError, StrictMap};
use crate::model::{Digest, Machine, NodeId, Role};
use crate::state_dir::{StateDir, StateError};
use crate::wire::bundle::{BundleError, Trust};
use crate::wire::der::Der;
use crate::wire::dsse::{Envelope, PublicKey};

/// The file whose rename switches identities.
pub const IDENTITY: &str = "identity.json";
/// Names the key of a join that has begun.
pub const PENDING: &str = "join-pending.json";
/// The format that this build writes, and the newest that it reads.
const FORMAT: u32 = 1;
/// Four certificates and a hundred roots fit many times over.
const FILE_BYTES: u64 = 1 << 20;

/// Why one of the files cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file itself.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its content.
    #[error("{0} is damaged: {1}", .path.display(), .detail)]
    Damaged {
        /// Which file.
        path: std::path::PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// It would be one that no start can read.
    #[error("{0} would have {1} bytes, at most {FILE_BYTES}; what it was to take is left out", .path.display(), .bytes)]
    TooLarge {
        /// Which file.
        path: std::path::PathBuf,
        /// How large it would be.
        bytes: usize,
    },
    /// A newer release wrote it.
    #[error("{0} has format {1}, this bcd reads up to {FORMAT}; install the newer bcd again", .path.display(), .format)]
    Newer {
        /// Which file.
        path: std::path::PathBuf,
        /// Its format.
        format: u32,
    },
}

/// identity.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredIdentity {
    format: u32,
    /// The node.
    pub node_id: NodeId,
    /// Identity generation.
    pub generation: u64,
    /// host or ramdisk.
    pub role: Role,
    /// Where the machine stands.
    pub site: String,
    /// What the operator calls such machines.
    #[serde(default, skip_serializing_if = "StrictMap::is_empty")]
    pub labels: StrictMap<String>,
    /// The deployment's name.
    pub trust_domain: String,
    /// The chain, leaf first.
    pub chain: Vec<Der>,
    /// The key's file in `keys/`.
    pub key: KeyName,
    /// How the machine proved itself.
    pub attestor: String,
    /// SHA-256 of the token of the ticket that it has joined with; absent: an earlier build joined.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_sha256: Option<Digest>,
    /// What ties this file to the machine that has joined; empty: nothing does.
    #[serde(default, skip_serializing_if = "Machine::is_unknown")]
    pub machine: Machine,
    /// Signs join answers, trust bundles and revocations; pinned at the join.
    pub join_signing_key: PublicKey,
    /// The newest trust bundle, as it was signed.
    pub trust_bundle: Envelope,
    /// The revocation of the certificate, as it was signed; absent: it was not revoked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revocation: Option<Envelope>,
}

/// join-pending.json.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pending {
    format: u32,
    /// The key's file in `keys/`.
    pub key: KeyName,
    /// SHA-256 of the ticket's token: with another token the join starts anew.
    pub token_sha256: Digest,
}

/// The name of a key's file in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyName(pub Digest);

impl Serialize for KeyName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&keys::file_name(&self.0))
    }
}

impl<'de> Deserialize<'de> for KeyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        let digest = text.strip_suffix(".key").and_then(Digest::from_hex);
        digest.map(Self).ok_or_else(|| serde::de::Error::custom("not the name of a key file"))
    }
}

/// A file of ours with its name.
pub trait Stored: Serialize + serde::de::DeserializeOwned {
    /// Its name in the state directory.
    const NAME: &'static str;

    /// Reads it; absent when there is none.
    ///
    /// # Errors
    /// See [`FileError`].
    fn read(state: &StateDir) -> Result<Option<Self>, FileError> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        let Some(bytes) = state.read(Self::NAME, FILE_BYTES)? else { return Ok(None) };
        let path = state.path().join(Self::NAME);
        let damaged = |detail: String| FileError::Damaged { path: path.clone(), detail };
        let Format { format } = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
        if format > FORMAT {
            return Err(FileError::Newer { path, format });
        }
        strict::parse(&bytes).map(Some).map_err(|error: StrictError| damaged(error.to_string()))
    }

    /// Replaces it, durably.
    ///
    /// # Errors
    /// See [`FileError`].
    fn write(&self, state: &StateDir) -> Result<(), FileError> {
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| FileError::Damaged {
            path: state.path().join(Self::NAME),
            detail: error.to_string(),
        })?;
        bytes.push(b'\n');
        if bytes.len() as u64 > FILE_BYTES {
            return Err(FileError::TooLarge { path: state.path().join(Self::NAME), bytes: bytes.len() });
        }
        Ok(state.write(Self::NAME, &bytes)?)
    }
}

impl Stored for StoredIdentity {
    const NAME: &'static str = IDENTITY;
}

impl Stored for Pending {
    const NAME: &'static str = PENDING;
}

impl Pending {
    /// A join with this key and token.
    pub fn new(key: Digest, token_sha256: Digest) -> Self {
        Self { format: FORMAT, key: KeyName(key), token_sha256 }
    }
}

/// The ticket, by its token's digest, of a join that has begun and is not done. Blocks.
///
/// # Errors
/// See [`FileError`].
pub fn pending_join(state: &Path) -> Result<Option<Digest>, FileError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(None) };
    let Some(pending) = Pending::read(&dir)? else { return Ok(None) };
    // Beside an identity it is the join that made it, or nobody's.
    let done = StoredIdentity::read(&dir)?.is_some_and(|stored| stored.key != pending.key);
    Ok((!done).then_some(pending.token_sha256))
}

/// Whose identity a machine has that has joined with this token. Blocks.
///
/// # Errors
/// See [`FileError`].
pub fn joined_with(state: &Path, token: &Digest) -> Result<Option<NodeId>, FileError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(None) };
    let stored = StoredIdentity::read(&dir)?.filter(|stored| stored.token_sha256.as_ref() == Some(token));
    Ok(stored.map(|stored| stored.node_id))
}

impl StoredIdentity {
    /// Whether it is the file of an identity that was loaded.
    pub fn is_of(&self, held: &super::Identity) -> bool {
        let same = |(stored, held): (&Der, &CertificateDer<'_>)| *stored.0 == **held;
        self.key.0 == held.fingerprint
            && self.chain.len() == held.chain.len()
            && self.chain.iter().zip(&held.chain).all(same)
    }

    /// Its trust bundle.
    ///
    /// # Errors
    /// It is not one of the pinned key.
    pub fn trust(&self) -> Result<Trust, BundleError> {
        Trust::verify(self.trust_bundle.clone(), &self.join_signing_key, &self.trust_domain)
    }

    /// With a renewed certificate. The machine, and how it proved itself, stay as they were.
    #[must_use]
    pub fn renewed(self, accepted: &super::Accepted) -> Self {
        let Self { attestor, token_sha256, .. } = self;
        Self { attestor, token_sha256, ..Self::new(accepted, self.machine) }
    }

    /// With another trust bundle.
    #[must_use]
    pub fn with_bundle(self, trust: &Trust) -> Self {
        Self { trust_bundle: trust.envelope.clone(), ..self }
    }

    /// With the certificate revoked.
    #[must_use]
    pub fn with_revocation(self, revocation: Envelope) -> Self {
        let revocation = revocation.as_signed_by(&self.join_signing_key);
        Self { revocation: Some(revocation), ..self }
    }

    /// What [`super::Accepted`] says, in the form of the file, of this machine.
    pub fn new(accepted: &super::Accepted, machine: Machine) -> Self {
        Self {
            format: FORMAT,
            node_id: accepted.leaf.node_id.clone(),
            generation: accepted.generation,
            role: accepted.leaf.role,
            site: accepted.leaf.site.clone(),
            labels: accepted.labels.clone(),
            trust_domain: accepted.leaf.trust_domain.clone(),
            chain: accepted.chain.iter().map(|certificate| (&**certificate).into()).collect(),
            key: KeyName(accepted.leaf.spki),
            attestor: "token".into(),
            token_sha256: None,
            machine,
            join_signing_key: accepted.join_signing_key.clone(),
            trust_bundle: accepted.trust.envelope.clone(),
            revocation: None,
        }
    }
}
