//! TLS for the node's side: 1.3 only, no system roots, no resumption, the server judged by the working clock.
//!
//! What can be wrong with a server's certificate stays typed ([`rustls::CertificateError`]) up to
//! [`super::grpc`], where it becomes an [`super::link::EndKind`].

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

use crate::model::{Digest, ServerTime};

/// HTTP/2, the only protocol offered.
pub const ALPN: &[u8] = b"h2";

/// When this program was built: nothing that ended before it can hold now.
pub const BUILD_TIME: ServerTime = match i64::from_str_radix(env!("BCD_BUILD_TIME_S"), 10) {
    Ok(seconds) => ServerTime(seconds * 1000),
    Err(_) => panic!("BCD_BUILD_TIME_S is set by build.rs"),
};

/// What a gateway's certificate is held against.
#[derive(Debug, Clone)]
pub enum Roots {
    /// The SHA-256 of the DER of the CA certificate, which the server sends with its chain (a join ticket's pin).
    Pinned(Digest),
    /// CA certificates held by this node.
    Certificates(Vec<CertificateDer<'static>>),
}

/// The time that certificates are judged by.
pub trait JudgeTime: Send + Sync + std::fmt::Debug {
    /// The time, and whether it is server time. Otherwise it is a floor (the later of build time and mark): a
    /// certificate that had run out by then is refused, one that seems too young is not.
    fn now(&self) -> (UnixTime, bool);
}

/// The floor of a machine that has never heard of server time: one that joins.
#[derive(Debug, Clone, Copy, Default)]
pub struct BuildTime;

impl JudgeTime for BuildTime {
    fn now(&self) -> (UnixTime, bool) {
        (unix_time(BUILD_TIME), false)
    }
}

/// Server time as TLS counts it.
pub fn unix_time(time: ServerTime) -> UnixTime {
    let ms = u64::try_from(time.0).unwrap_or(0);
    UnixTime::since_unix_epoch(std::time::Duration::from_millis(ms))
}

/// A client configuration for one identity. `client` is absent for a join.
///
/// # Errors
/// The roots cannot be used.
pub fn client_config(
    roots: &Roots,
    client: Option<Arc<CertifiedKey>>,
    time: Arc<dyn JudgeTime>,
) -> Result<ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = GatewayVerifier {
        anchors: Anchors::new(roots)?,
        provider: Arc::clone(&provider),
        time: Arc::clone(&time),
    };
    let builder = ClientConfig::builder_with_details(provider, Arc::new(TlsClock(time)))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match client {
        Some(key) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(key))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![ALPN.to_vec()];
    // A resumed session would skip the certificates, and its store costs memory a dial an hour never repays.
    config.resumption = Resumption::disabled();
    Ok(config)
}

#[derive(Debug)]
struct TlsClock(Arc<dyn JudgeTime>);

impl rustls::time_provider::TimeProvider for TlsClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.0.now().0)
    }
}

#[derive(Debug)]
enum Anchors {
    Pinned(Digest),
    Held(Arc<RootCertStore>),
}

impl Anchors {
    fn new(roots: &Roots) -> Result<Self, Error> {
        match roots {
            Roots::Pinned(digest) => Ok(Self::Pinned(*digest)),
            Roots::Certificates(certificates) => {
                let mut store = RootCertStore::empty();
                for certificate in certificates {
                    store.add(certificate.clone())?;
                }
                if store.is_empty() {
                    return Err(Error::General("no CA certificate for gateways is held".into()));
                }
                Ok(Self::Held(Arc::new(store)))
            }
        }
    }

    /// The trust anchors for what the server presented.
    fn resolve(&self, presented: &[CertificateDer<'_>]) -> Result<Arc<RootCertStore>, Error> {
        match self {
            Self::Held(store) => Ok(Arc::clone(store)),
            Self::Pinned(pin) => {
                let pinned = presented.iter().find(|certificate| Digest::of(certificate) == *pin);
                let pinned = pinned.ok_or(CertificateError::UnknownIssuer)?;
                let mut store = RootCertStore::empty();
                store.add(pinned.clone().into_owned())?;
                Ok(Arc::new(store))
            }
        }
    }
}

#[derive(Debug)]
struct GatewayVerifier {
    anchors: Anchors,
    provider: Arc<CryptoProvider>,
    time: Arc<dyn JudgeTime>,
}

impl GatewayVerifier {
    /// The moment to judge a chain at. Without server time the floor is moved past every notBefore, so that only a
    /// notAfter before the floor is refused: certificates of one honest chain overlap.
    fn moment(&self, leaf: &CertificateDer<'_>, rest: &[CertificateDer<'_>]) -> Result<UnixTime, Error> {
        let (now, server_time) = self.time.now();
        if server_time {
            return Ok(now);
        }
        let mut moment = now.as_secs();
        for certificate in std::iter::once(leaf).chain(rest) {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate)
                .map_err(|_| CertificateError::BadEncoding)?;
            let not_before = parsed.validity().not_before.timestamp();
            moment = moment.max(u64::try_from(not_before).unwrap_or(0));
        }
        Ok(UnixTime::since_unix_epoch(std::time::Duration::from_secs(moment)))
    }
}

impl ServerCertVerifier for GatewayVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let roots = self.anchors.resolve(intermediates)?;
        let moment = self.moment(end_entity, intermediates)?;
        WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&self.provider))
            .build()
            .map_err(|error| Error::General(error.to_string()))?
            .verify_server_cert(end_entity, intermediates, server_name, ocsp_response, moment)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
