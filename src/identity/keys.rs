//! The node's key: P-256, PKCS#8 PEM, one file a key named by the digest of its public half.

use std::fmt;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, PKCS_ECDSA_P256_SHA256, PublicKeyData};
use rustls::pki_types::PrivateKeyDer;

use crate::model::Digest;
use crate::state_dir::{StateDir, StateError};

/// The directory of the keys within the state directory.
pub const FOLDER: &str = "keys";
/// A PKCS#8 PEM of a P-256 key has about 240 bytes.
const KEY_BYTES: u64 = 4096;

/// A node key.
pub struct NodeKey {
    pair: KeyPair,
    spki: Digest,
}

impl fmt::Debug for NodeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeKey({})", self.spki)
    }
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// Its file cannot.
    #[error(transparent)]
    State(#[from] StateError),
    /// The library refused.
    #[error("the key cannot be made or read")]
    Library(#[from] rcgen::Error),
    /// The file holds no key.
    #[error("the key file {} holds no P-256 key in PKCS#8 PEM", .0.display())]
    NotAKey(std::path::PathBuf),
    /// The file holds another key than its name says.
    #[error("the key file {} holds another key than the one that it is named for", .0.display())]
    Misnamed(std::path::PathBuf),
}

/// The file name of a key.
pub fn file_name(spki: &Digest) -> String {
    format!("{spki}.key")
}

impl NodeKey {
    /// A new key, from the system's randomness.
    ///
    /// # Errors
    /// The system has none.
    pub fn generate() -> Result<Self, KeyError> {
        Ok(Self::from_pair(KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?))
    }

    fn from_pair(pair: KeyPair) -> Self {
        let spki = Digest::of(&pair.subject_public_key_info());
        Self { pair, spki }
    }

    /// SHA-256 of the SubjectPublicKeyInfo: the key's name and fingerprint.
    pub fn spki(&self) -> Digest {
        self.spki
    }

    /// Keeps it in its own file, durably. The file must not exist yet.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn store(&self, state: &StateDir) -> Result<(), KeyError> {
        let keys = state.ensure_sub(FOLDER)?;
        keys.write_new(&file_name(&self.spki), self.pair.serialize_pem().as_bytes())?;
        Ok(())
    }

    /// A key in its file that `used` is not: one that was offered, or about to be, when the process that made it died.
    /// Made and stored where there is none.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn unused(state: &StateDir, used: &Digest) -> Result<Self, KeyError> {
        let mut names = state.ensure_sub(FOLDER)?.names()?;
        names.sort();
        let digests = names.iter().filter_map(|name| Digest::from_hex(name.strip_suffix(".key")?));
        for digest in digests.filter(|digest| digest != used) {
            match Self::load(state, &digest) {
                Ok(Some(key)) => return Ok(key),
                // What cannot be read was never offered.
                Ok(None) | Err(KeyError::NotAKey(_) | KeyError::Misnamed(_)) => {}
                Err(error) => return Err(error),
            }
        }
        let key = Self::generate()?;
        key.store(state)?;
        Ok(key)
    }

    /// Loads the key of that digest; absent when there is no such file.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn load(state: &StateDir, spki: &Digest) -> Result<Option<Self>, KeyError> {
        let path = state.path().join(FOLDER);
        let Some(keys) = StateDir::open(&path)? else { return Ok(None) };
        let Some(bytes) = keys.read(&file_name(spki), KEY_BYTES)? else { return Ok(None) };
        let not_a_key = || KeyError::NotAKey(path.join(file_name(spki)));
        let pem = std::str::from_utf8(&bytes).map_err(|_| not_a_key())?;
        let pair =
            KeyPair::from_pkcs8_pem_and_sign_algo(pem, &PKCS_ECDSA_P256_SHA256).map_err(|_| not_a_key())?;
        let key = Self::from_pair(pair);
        if key.spki == *spki { Ok(Some(key)) } else { Err(KeyError::Misnamed(path.join(file_name(spki)))) }
    }

    /// A certificate signing request, DER. Its subject is empty: the join service alone names a node.
    ///
    /// # Errors
    /// Signing failed.
    pub fn signing_request(&self) -> Result<Vec<u8>, KeyError> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        Ok(params.serialize_request(&self.pair)?.der().to_vec())
    }

    /// The private key for TLS.
    pub fn to_tls(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(self.pair.serialize_der().into())
    }
}

/// Removes every key but the one in use.
///
/// # Errors
/// See [`StateError`].
pub fn remove_unused(state: &StateDir, used: &Digest) -> Result<(), StateError> {
    let keys = state.ensure_sub(FOLDER)?;
    let used = file_name(used);
    for name in keys.names()?.iter().filter(|name| **name != used) {
        keys.remove(name)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_back_from_its_private_file_and_a_misnamed_one_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::ensure(&temp.path().join("state")).unwrap();
        let key = NodeKey::generate().unwrap();
        key.store(&state).unwrap();
        let path = temp.path().join("state/keys").join(file_name(&key.spki()));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(NodeKey::load(&state, &key.spki()).unwrap().unwrap().spki(), key.spki());

        let other = Digest::of(b"other");
        assert!(NodeKey::load(&state, &other).unwrap().is_none());
        std::fs::rename(&path, path.with_file_name(file_name(&other))).unwrap();
        assert!(matches!(NodeKey::load(&state, &other), Err(KeyError::Misnamed(_))));
        remove_unused(&state, &key.spki()).unwrap();
        assert!(NodeKey::load(&state, &other).unwrap().is_none());
    }
}
