//! The development CA: one key that signs the gateways' serving certificates and the nodes' certificates, told apart
//! by their extended key usage. A deployment keeps these two apart; here they show a node the same chains.

use std::io::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType,
};
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use time::OffsetDateTime;

use super::enrol::{Enrolled, Holder};
use crate::gateway::peer::Peer;
use crate::model::{Digest, Role, ServerTime};
use crate::wire::dsse::PublicKey;

/// Certificates begin to hold this long before they are signed, for clocks that lag; but no longer than a tenth of their
/// life, since a node renews by the share of it that has passed.
const BACKDATE: Duration = Duration::from_secs(300);
/// The CA holds this long: ten years.
const CA_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// The serving certificate holds this long; a new one is made at each start.
const SERVING_LIFE: Duration = Duration::from_secs(365 * 24 * 3600);
/// A ramdisk's certificate holds at most this long.
const RAMDISK_LIFE: Duration = Duration::from_secs(2 * 3600);
/// A CSR, bytes, at most.
const CSR_BYTES: usize = 16 << 10;

/// Why the CA cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    /// A file cannot be read or made.
    #[error("cannot use {path}")]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A key or certificate cannot be made or read.
    #[error("cannot make or read a certificate of the development CA")]
    Certificate(#[from] rcgen::Error),
}

/// Why a CSR is not signed.
#[derive(Debug, thiserror::Error)]
pub enum CsrError {
    /// Longer than a CSR of ours can be.
    #[error("the certificate request is over {CSR_BYTES} bytes")]
    TooLong,
    /// Not a CSR, or not signed by its own key.
    #[error("the certificate request cannot be read, or its own signature does not hold")]
    Unreadable(#[source] rcgen::Error),
    /// Another kind of key.
    #[error("the certificate request's key is not ECDSA P-256")]
    Key,
}

/// A verified CSR.
pub struct Csr {
    public_key: rcgen::SubjectPublicKeyInfo,
    /// The key, as it verifies.
    pub key: PublicKey,
    /// SHA-256 of its public key.
    pub spki: Digest,
}

/// A node certificate.
#[derive(Debug)]
pub struct NodeCertificate {
    /// Leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Hex.
    pub serial: String,
    /// When it runs out.
    pub not_after: ServerTime,
}

/// The CA, loaded.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
}

impl Ca {
    /// Loads the CA of a directory, or makes it there. Blocks.
    ///
    /// # Errors
    /// See [`CaError`].
    pub fn open(dir: &Path, now: ServerTime) -> Result<Self, CaError> {
        let (key_path, cert_path) = (dir.join("ca.key"), dir.join("ca.der"));
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| CaError::Io { path, source }
        };
        match std::fs::DirBuilder::new().mode(0o700).create(dir) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(io(dir)(error)),
            _ => {}
        }
        if !cert_path.exists() {
            let key = KeyPair::generate()?;
            let certificate = ca_params(now)?.self_signed(&key)?;
            // The certificate's rename is the switch: a key without one is written over.
            write_whole(&key_path, key.serialize_pem().as_bytes()).map_err(io(&key_path))?;
            write_whole(&cert_path, certificate.der()).map_err(io(&cert_path))?;
        }
        let pem = std::fs::read_to_string(&key_path).map_err(io(&key_path))?;
        let certificate = CertificateDer::from(std::fs::read(&cert_path).map_err(io(&cert_path))?);
        let issuer = Issuer::from_ca_cert_der(&certificate, KeyPair::from_pem(&pem)?)?;
        Ok(Self { issuer, certificate })
    }

    /// The CA's certificate.
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// What a ticket pins.
    pub fn digest(&self) -> Digest {
        Digest::of(&self.certificate)
    }

    /// A serving certificate for these hosts and for the loopback, with the CA behind it.
    ///
    /// # Errors
    /// See [`CaError`].
    pub fn serving(
        &self,
        csr: &Csr,
        hosts: &[String],
        now: ServerTime,
        rng: &mut impl rand::RngCore,
    ) -> Result<Vec<CertificateDer<'static>>, CaError> {
        let mut params = CertificateParams::default();
        let loopback = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
        let mut names: Vec<SanType> = loopback.into_iter().map(SanType::IpAddress).collect();
        names.push(SanType::DnsName("localhost".try_into()?));
        for host in hosts {
            let name = match host.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(host.as_str().try_into()?),
            };
            if !names.contains(&name) {
                names.push(name);
            }
        }
        params.subject_alt_names = names;
        params.distinguished_name.push(DnType::CommonName, "bcd gateway");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        validity(&mut params, now, SERVING_LIFE);
        params.serial_number = Some(serial(rng).0);
        let leaf = params.signed_by(&csr.public_key, &self.issuer)?;
        Ok(vec![leaf.der().clone(), self.certificate.clone()])
    }

    /// Who holds a certificate, if it is one that this CA signed for a node. Whether it holds now is not judged.
    pub fn holder(&self, leaf: &[u8], trust_domain: &str) -> Option<Holder> {
        use x509_parser::prelude::{FromDer, X509Certificate};
        let (_, ca) = X509Certificate::from_der(&self.certificate).ok()?;
        let (rest, certificate) = X509Certificate::from_der(leaf).ok()?;
        certificate.verify_signature(Some(ca.public_key())).ok()?;
        let peer = Peer::read(&CertificateDer::from(leaf), trust_domain).ok()?;
        rest.is_empty().then_some(())?;
        Some(Holder {
            serial: data_encoding::HEXLOWER.encode(certificate.raw_serial()),
            key: PublicKey::from_spki(certificate.public_key().raw).ok()?,
            node: peer.node,
            not_after: peer.not_after,
        })
    }

    /// Signs a node's certificate.
    ///
    /// # Errors
    /// See [`CaError`].
    pub fn sign(
        &self,
        csr: &Csr,
        node: &Enrolled,
        trust_domain: &str,
        life: Duration,
        now: ServerTime,
        rng: &mut impl rand::RngCore,
    ) -> Result<NodeCertificate, CaError> {
        let life = if node.role == Role::Ramdisk { life.min(RAMDISK_LIFE) } else { life };
        let mut params = CertificateParams::default();
        let spiffe = format!("spiffe://{trust_domain}/node/{}/{}", node.site, node.node);
        let role = format!("urn:bc:role:{}", node.role.name());
        params.subject_alt_names =
            vec![SanType::URI(spiffe.as_str().try_into()?), SanType::URI(role.as_str().try_into()?)];
        params.distinguished_name.push(DnType::CommonName, node.node.as_str());
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        validity(&mut params, now, life);
        let (number, serial) = serial(rng);
        params.serial_number = Some(number);
        let leaf = params.signed_by(&csr.public_key, &self.issuer)?;
        let chain = vec![leaf.der().clone(), self.certificate.clone()];
        // X.509 counts seconds.
        let not_after = ServerTime(now.plus(life).0 / 1000 * 1000);
        Ok(NodeCertificate { chain, serial, not_after })
    }
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").field("certificate", &self.digest()).finish_non_exhaustive()
    }
}

impl Csr {
    /// Reads a CSR and verifies that its own key signed it. Nothing but the key is taken from it.
    ///
    /// # Errors
    /// See [`CsrError`].
    pub fn verify(der: &[u8]) -> Result<Self, CsrError> {
        use rcgen::PublicKeyData;
        if der.len() > CSR_BYTES {
            return Err(CsrError::TooLong);
        }
        let der = CertificateSigningRequestDer::from(der);
        let csr = CertificateSigningRequestParams::from_der(&der).map_err(CsrError::Unreadable)?;
        if csr.public_key.algorithm() != &rcgen::PKCS_ECDSA_P256_SHA256 {
            return Err(CsrError::Key);
        }
        let spki = csr.public_key.subject_public_key_info();
        let public_key = rcgen::SubjectPublicKeyInfo::from_der(&spki).map_err(CsrError::Unreadable)?;
        let key = PublicKey::from_spki(&spki).map_err(|_| CsrError::Key)?;
        Ok(Self { public_key, key, spki: Digest::of(&spki) })
    }
}

fn ca_params(now: ServerTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.distinguished_name.push(DnType::CommonName, "bcd development CA");
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    validity(&mut params, now, CA_LIFE);
    Ok(params)
}

pub(super) fn validity(params: &mut CertificateParams, now: ServerTime, life: Duration) {
    params.not_before = offset(now.minus(BACKDATE.min(life / 10)));
    params.not_after = offset(now.plus(life));
}

fn offset(at: ServerTime) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(at.0.div_euclid(1000)).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

fn serial(rng: &mut impl rand::RngCore) -> (rcgen::SerialNumber, String) {
    let mut bytes = [0_u8; 16];
    rng.fill_bytes(&mut bytes);
    // Positive and of full length, so that its DER form is these bytes.
    bytes[0] = bytes[0] & 0x7f | 0x40;
    (rcgen::SerialNumber::from_slice(&bytes), data_encoding::HEXLOWER.encode(&bytes))
}

/// Writes a file whole or not at all, 0600 from its creation.
pub fn write_whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let new = path.with_extension("new");
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&new, path)?;
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => std::fs::File::open(dir)?.sync_all(),
        _ => std::fs::File::open(".")?.sync_all(),
    }
}
