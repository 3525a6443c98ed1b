//! The serving certificate: what new handshakes are answered with. Where it comes from files, they are looked at while
//! the gateway runs; a pair that does not match is refused, and the one before it goes on.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::hub::lock;
use super::session::chain;
use crate::blocking;
use crate::model::Digest;

/// Between two looks at the files.
const LOOK: Duration = Duration::from_secs(2);

/// Where a serving certificate lies.
#[derive(Debug, Clone)]
pub struct ServingFiles {
    /// PEM, leaf first.
    pub certificate: PathBuf,
    /// PEM.
    pub key: PathBuf,
}

/// Why a serving certificate is not used.
#[derive(Debug, thiserror::Error)]
pub enum ServingError {
    /// A file cannot be read as PEM.
    #[error("cannot read {path} of the serving certificate")]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: rustls::pki_types::pem::Error,
    },
    /// The key is not the certificate's, or not one to serve with.
    #[error("the serving certificate and its key do not belong together, or cannot be used")]
    Pair(#[source] rustls::Error),
}

/// The pair in use.
#[derive(Debug)]
pub struct Serving(Mutex<Arc<CertifiedKey>>);

impl Serving {
    /// Begins with a pair.
    ///
    /// # Errors
    /// See [`ServingError`].
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self, ServingError> {
        Ok(Self(Mutex::new(Arc::new(pair(chain, key)?))))
    }

    /// Takes the pair of the files, if it is one. Blocks.
    ///
    /// # Errors
    /// See [`ServingError`]; the pair in use stays.
    pub fn load(&self, files: &ServingFiles) -> Result<(), ServingError> {
        let fails = |path: &Path| {
            let path = path.to_owned();
            move |source| ServingError::File { path, source }
        };
        let chain = CertificateDer::pem_file_iter(&files.certificate)
            .and_then(Iterator::collect)
            .map_err(fails(&files.certificate))?;
        let key = PrivateKeyDer::from_pem_file(&files.key).map_err(fails(&files.key))?;
        *lock(&self.0) = Arc::new(pair(chain, key)?);
        Ok(())
    }
}

impl ResolvesServerCert for Serving {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(lock(&self.0).clone())
    }
}

/// Both, found to belong together.
fn pair(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, ServingError> {
    CertifiedKey::from_der(chain, key, &rustls::crypto::ring::default_provider()).map_err(ServingError::Pair)
}

/// Looks at the files for ever and takes what is new there.
pub async fn reload(serving: Arc<Serving>, files: ServingFiles) {
    let mut seen = None;
    loop {
        let (into, from) = (serving.clone(), files.clone());
        let looked = blocking::run(move || look(&into, &from, seen)).await;
        match looked {
            Ok(now) => seen = now,
            Err(error) => tracing::error!(%error, "the serving certificate was not looked at"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Takes what the files hold if it is not what was seen before; what is seen now.
fn look(serving: &Serving, files: &ServingFiles, seen: Option<(Digest, Digest)>) -> Option<(Digest, Digest)> {
    let digest = |path: &Path| std::fs::read(path).ok().map(|bytes| Digest::of(&bytes));
    // A file that cannot be read is in the middle of being replaced.
    let Some(now) = digest(&files.certificate).zip(digest(&files.key)) else { return seen };
    if seen.is_some_and(|seen| seen != now) {
        match serving.load(files) {
            Ok(()) => tracing::info!("the serving certificate was read again"),
            Err(error) => tracing::error!(error = %chain(&error), "the old serving certificate stays in use"),
        }
    }
    Some(now)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new_pair() -> (String, String) {
        let key = rcgen::KeyPair::generate().expect("a key");
        let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).expect("a name");
        (params.self_signed(&key).expect("a certificate").pem(), key.serialize_pem())
    }

    fn write(files: &ServingFiles, certificate: &str, key: &str) {
        std::fs::write(&files.certificate, certificate).expect("written");
        std::fs::write(&files.key, key).expect("written");
    }

    fn leaf(serving: &Serving) -> Vec<u8> {
        lock(&serving.0).cert[0].to_vec()
    }

    #[test]
    fn a_new_pair_is_taken_and_one_that_does_not_match_leaves_the_old_in_use() {
        let dir = tempfile::tempdir().expect("a directory");
        let files = ServingFiles { certificate: dir.path().join("c"), key: dir.path().join("k") };
        let (first, second) = (new_pair(), new_pair());
        let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
        let key = PrivateKeyDer::from_pem_slice(first.1.as_bytes()).expect("a key");
        let serving = Serving::new(vec![der(&first.0)], key).expect("a pair");
        write(&files, &second.0, &first.1);
        assert!(matches!(serving.load(&files), Err(ServingError::Pair(_))));
        assert_eq!(leaf(&serving), der(&first.0).to_vec());
        let seen = look(&serving, &files, None);
        write(&files, &second.0, "no key");
        assert!(matches!(serving.load(&files), Err(ServingError::File { path, .. }) if path == files.key));
        write(&files, &second.0, &second.1);
        let again = look(&serving, &files, seen);
        assert!(again.is_some() && again != seen);
        assert_eq!(leaf(&serving), der(&second.0).to_vec());
    }
}
