//! The server's side of TLS: 1.3 only, client certificates optional (a join has none) and chained to the node CA.
//!
//! Expiry is not judged here. A TLS 1.3 client has finished its handshake before the server looks at its certificate,
//! and would find a dead connection without a reason; so an expired certificate gets in, and the service refuses it
//! with a token.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::serving::Serving;
use crate::clock::Clock;
use crate::model::ServerTime;
use crate::ports::ByteStream;
use crate::wire::tls::unix_time;

/// A handshake takes at most this long.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Handshakes at once: about 2 ms of CPU each, so that more would only queue.
const HANDSHAKES: usize = 512;
/// After an accept that failed (no descriptors left, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// rustls says so.
    #[error("cannot set up the gateway's TLS")]
    Rustls(#[from] Error),
    /// The node CA cannot verify.
    #[error("cannot set up the verification of node certificates")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// The server's configuration.
///
/// # Errors
/// See [`TlsError`].
pub fn server_config(
    serving: Arc<Serving>,
    node_ca: &CertificateDer<'static>,
    clock: Arc<dyn Clock>,
) -> Result<rustls::ServerConfig, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    roots.add(node_ca.clone())?;
    let chained = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()?;
    let mut config = rustls::ServerConfig::builder_with_details(provider, Arc::new(ControlPlaneTime(clock)))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::new(ExpiredToo(chained)))
        .with_cert_resolver(serving);
    // Without tickets no connection is resumed under an identity that was revoked since.
    config.send_tls13_tickets = 0;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

/// Certificates are judged by the control plane's clock, as everything else is.
#[derive(Debug)]
struct ControlPlaneTime(Arc<dyn Clock>);

impl rustls::time_provider::TimeProvider for ControlPlaneTime {
    fn current_time(&self) -> Option<UnixTime> {
        Some(unix_time(ServerTime(self.0.wall_ms())))
    }
}

/// Verifies a chain as of the leaf's last second when it has run out since. Verification stops at an expired
/// certificate before it looks at any signature, so that an expiry must never be waved through without a second,
/// whole verification.
#[derive(Debug)]
struct ExpiredToo(Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for ExpiredToo {
    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.0.verify_client_cert(leaf, intermediates, now) {
            Err(Error::InvalidCertificate(
                error @ (CertificateError::Expired | CertificateError::ExpiredContext { .. }),
            )) => {
                let last = last_second(leaf).ok_or(Error::InvalidCertificate(error))?;
                self.0.verify_client_cert(leaf, intermediates, last)
            }
            other => other,
        }
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn client_auth_mandatory(&self) -> bool {
        self.0.client_auth_mandatory()
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

fn last_second(leaf: &CertificateDer<'_>) -> Option<UnixTime> {
    let (_, certificate) = X509Certificate::from_der(leaf).ok()?;
    let seconds = u64::try_from(certificate.validity().not_after.timestamp()).ok()?;
    Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
}

/// Where connections come from.
pub trait Listener: Send + 'static {
    /// The next one, and whom it comes from for the log. Dropping the future loses none.
    fn accept(&mut self) -> impl Future<Output = io::Result<(ByteStream, String)>> + Send;
}

impl Listener for TcpListener {
    async fn accept(&mut self) -> io::Result<(ByteStream, String)> {
        let (stream, peer) = Self::accept(self).await?;
        let _ = stream.set_nodelay(true);
        Ok((Box::new(stream), peer.to_string()))
    }
}

impl Listener for mpsc::Receiver<ByteStream> {
    async fn accept(&mut self) -> io::Result<(ByteStream, String)> {
        match self.recv().await {
            Some(stream) => Ok((stream, "memory".into())),
            None => std::future::pending().await,
        }
    }
}

/// A connection whose handshake is done.
#[derive(Debug)]
pub struct Accepted(TlsStream<ByteStream>);

/// The certificate that the other end has shown, if any; with every call on the connection.
#[derive(Debug, Clone)]
pub struct PeerLeaf(pub Option<CertificateDer<'static>>);

impl Connected for Accepted {
    type ConnectInfo = PeerLeaf;

    fn connect_info(&self) -> PeerLeaf {
        let shown = self.0.get_ref().1.peer_certificates();
        PeerLeaf(shown.and_then(|chain| chain.first()).map(|leaf| leaf.clone().into_owned()))
    }
}

impl AsyncRead for Accepted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl AsyncWrite for Accepted {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }
}

/// Accepts connections until `out` is closed; handshakes run beside each other, each within [`HANDSHAKE`].
pub async fn accept(
    mut listener: impl Listener,
    config: Arc<rustls::ServerConfig>,
    out: mpsc::Sender<io::Result<Accepted>>,
) {
    let acceptor = TlsAcceptor::from(config);
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    loop {
        let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            biased;
            () = out.closed() => return,
            accepted = Listener::accept(&mut listener) => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (acceptor, out) = (acceptor.clone(), out.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
                Ok(Ok(stream)) => {
                    let _ = out.send(Ok(Accepted(stream))).await;
                }
                Ok(Err(error)) => tracing::debug!(%peer, %error, "a TLS handshake failed"),
                Err(_) => tracing::debug!(%peer, "a TLS handshake took too long"),
            }
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::worker::{Ca, Csr, Enrolled};
    use crate::model::{NodeId, Role};
    use rand::SeedableRng;

    const DAY: Duration = Duration::from_secs(24 * 3600);
    const START: ServerTime = ServerTime(1_790_000_000_000);

    fn csr() -> Csr {
        let key = rcgen::KeyPair::generate().expect("a key");
        let csr = rcgen::CertificateParams::default().serialize_request(&key).expect("a CSR");
        Csr::verify(csr.der()).expect("it holds")
    }

    /// A CA of its own, and a node's chain of it that ran out a day after the start.
    fn expired_of(dir: &std::path::Path) -> (Ca, Vec<CertificateDer<'static>>) {
        let ca = Ca::open(dir, START).expect("a CA");
        let node = NodeId::new("n-1").expect("an id");
        let node = Enrolled {
            node,
            site: "lab".into(),
            labels: Default::default(),
            role: Role::Host,
            generation: 1,
        };
        let mut rng = rand::rngs::StdRng::seed_from_u64(1);
        let signed = ca.sign(&csr(), &node, "lab.example", DAY, START, &mut rng).expect("signed");
        (ca, signed.chain)
    }

    fn verifier(ca: &Ca) -> ExpiredToo {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.certificate().clone()).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let chained = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
        ExpiredToo(chained.build().expect("a verifier"))
    }

    #[test]
    fn an_expired_certificate_gets_in_only_when_its_signature_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        let (ours, expired) = expired_of(&dir.path().join("ours"));
        let (_, forged) = expired_of(&dir.path().join("theirs"));
        let seconds = u64::try_from(START.plus(3 * DAY).0 / 1000).expect("positive");
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let verifier = verifier(&ours);
        verifier.verify_client_cert(&expired[0], &expired[1..], now).expect("ours gets in");
        let refused = verifier.verify_client_cert(&forged[0], &forged[1..], now);
        assert!(
            matches!(
                refused,
                Err(Error::InvalidCertificate(
                    CertificateError::BadSignature | CertificateError::UnknownIssuer
                ))
            ),
            "{refused:?}"
        );
    }

    #[test]
    fn a_serving_certificate_is_no_node() {
        let dir = tempfile::tempdir().expect("a directory");
        let (ours, _) = expired_of(&dir.path().join("ours"));
        let mut rng = rand::rngs::StdRng::seed_from_u64(2);
        let chain = ours.serving(&csr(), &[], START, &mut rng).expect("signed");
        let seconds = u64::try_from(START.0 / 1000).expect("positive");
        let now = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        assert!(verifier(&ours).verify_client_cert(&chain[0], &chain[1..], now).is_err());
    }
}
