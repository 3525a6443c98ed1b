//! The worker's keys: what answers joins, what tokens are sealed to, and what signs commands.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use rand::TryRngCore as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData as _, SanType,
};
use rustls::sign::SigningKey;

use super::ca::{Ca, validity, write_whole};
use crate::model::{Digest, ServerTime};
use crate::wire::der::Der;
use crate::wire::dsse::{Envelope, KeyError, PublicKey, SignError, sign, signing_key};
use crate::wire::enroll::{OpeningKey, SealError, SealingKey};

/// A worker's certificate is short-lived, and replaced when half of it has passed.
const WORKER_LIFE: Duration = Duration::from_secs(3600);
/// The command root holds this long: ten years.
const ROOT_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// What the one worker of a reference deployment is called.
const WORKER: &str = "urn:bc:worker:reference";

/// Why the keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file cannot be read or made.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key or certificate cannot be made or read.
    #[error("cannot make or read a key of the worker")]
    Key(#[from] rcgen::Error),
    /// It cannot sign.
    #[error("cannot use a key of the worker")]
    Sign(#[from] SignError),
    /// It has no public half of ours.
    #[error("a key of the worker is none")]
    Public(#[from] KeyError),
    /// The sealing key.
    #[error("the worker's sealing key is none")]
    Sealing(#[from] SealError),
}

/// What a ticket pins of a deployment.
#[derive(Debug, Clone)]
pub struct Pins {
    /// The CA of the gateways.
    pub gateway_ca: Digest,
    /// Signs join answers.
    pub join_signing_key: PublicKey,
    /// Tokens are sealed to it.
    pub join_encryption_key: SealingKey,
}

/// The keys, loaded.
pub struct Keys {
    /// Signs join answers, bundles and revocations.
    pub join_signing: Arc<dyn SigningKey>,
    join_public: PublicKey,
    opening: OpeningKey,
    command_issuer: Issuer<'static, KeyPair>,
    command_root: Bytes,
    worker: Mutex<WorkerKey>,
}

/// The worker's own key and its present certificate.
struct WorkerKey {
    pair: KeyPair,
    key: Arc<dyn SigningKey>,
    leaf: Bytes,
    renew_at: ServerTime,
}

impl Keys {
    /// Loads the keys of a directory, or makes them there. Blocks.
    ///
    /// # Errors
    /// See [`KeysError`].
    pub fn open(dir: &Path, now: ServerTime) -> Result<Self, KeysError> {
        let pair = pair(&dir.join("join-signing.key"))?;
        let join_signing = signing_key(pair.serialize_der())?;
        let opening = OpeningKey::new(&secret(&dir.join("join-encryption.key"))?)?;
        let root_pair = self::pair(&dir.join("command-root.key"))?;
        let root_path = dir.join("command-root.der");
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| KeysError::Io { path, source }
        };
        if !root_path.exists() {
            let root = root_params(now)?.self_signed(&root_pair)?;
            write_whole(&root_path, root.der()).map_err(io(&root_path))?;
        }
        let command_root = std::fs::read(&root_path).map_err(io(&root_path))?;
        let der = rustls::pki_types::CertificateDer::from(command_root.as_slice());
        let command_issuer = Issuer::from_ca_cert_der(&der, root_pair)?;
        let own = KeyPair::generate()?;
        let worker = WorkerKey {
            key: signing_key(own.serialize_der())?,
            pair: own,
            leaf: Bytes::new(),
            // None yet: made at the first signature.
            renew_at: ServerTime(i64::MIN),
        };
        Ok(Self {
            join_public: PublicKey::from_spki(&pair.subject_public_key_info())?,
            join_signing,
            opening,
            command_issuer,
            command_root: command_root.into(),
            worker: Mutex::new(worker),
        })
    }

    /// The CA of workers.
    pub fn command_root(&self) -> Der {
        Der(self.command_root.clone())
    }

    /// What a ticket pins.
    pub fn pins(&self, ca: &Ca) -> Pins {
        Pins {
            gateway_ca: ca.digest(),
            join_signing_key: self.join_public.clone(),
            join_encryption_key: self.opening.public(),
        }
    }

    /// Opens a token that was sealed for this certificate request.
    ///
    /// # Errors
    /// It was not.
    pub fn open_token(&self, sealed: &[u8], csr: &[u8]) -> Result<Vec<u8>, SealError> {
        self.opening.open(sealed, csr)
    }

    /// Signs a body with the worker's certificate, a new one where the old one is half over.
    ///
    /// # Errors
    /// See [`SignError`].
    pub fn sign_as_worker(
        &self,
        payload_type: &str,
        body: Bytes,
        now: ServerTime,
    ) -> Result<Envelope, SignError> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if now >= worker.renew_at {
            let leaf =
                worker_params(now).and_then(|params| params.signed_by(&worker.pair, &self.command_issuer));
            worker.leaf = Bytes::copy_from_slice(leaf.map_err(|_| SignError::Key)?.der());
            worker.renew_at = now.plus(WORKER_LIFE / 2);
        }
        sign(payload_type, body, &*worker.key, vec![worker.leaf.clone()])
    }
}

fn root_params(now: ServerTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, "bcd command root");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    validity(&mut params, now, ROOT_LIFE);
    Ok(params)
}

fn worker_params(now: ServerTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::default();
    params.subject_alt_names = vec![SanType::URI(WORKER.try_into()?)];
    params.distinguished_name.push(DnType::CommonName, "bcd worker");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::CodeSigning];
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    validity(&mut params, now, WORKER_LIFE);
    Ok(params)
}

/// The P-256 key of a file, made there when it is missing.
fn pair(path: &Path) -> Result<KeyPair, KeysError> {
    let io = |source| KeysError::Io { path: path.to_owned(), source };
    match std::fs::read_to_string(path) {
        Ok(pem) => Ok(KeyPair::from_pem(&pem)?),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let pair = KeyPair::generate()?;
            write_whole(path, pair.serialize_pem().as_bytes()).map_err(io)?;
            Ok(pair)
        }
        Err(error) => Err(io(error)),
    }
}

/// The 32 secret bytes of a file, made there when it is missing.
fn secret(path: &Path) -> Result<Vec<u8>, KeysError> {
    let io = |source| KeysError::Io { path: path.to_owned(), source };
    match std::fs::read(path) {
        Ok(bytes) => Ok(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let mut bytes = [0_u8; 32];
            rand::rngs::OsRng.try_fill_bytes(&mut bytes).map_err(|error| io(std::io::Error::other(error)))?;
            write_whole(path, &bytes).map_err(io)?;
            Ok(bytes.to_vec())
        }
        Err(error) => Err(io(error)),
    }
}
