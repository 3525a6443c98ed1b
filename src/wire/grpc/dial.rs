//! From an endpoint to a TLS stream that speaks HTTP/2.

use std::error::Error as _;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::model::Reason;
use crate::ports::{ByteStream, Connect, ConnectError};
use crate::wire::link::{EndKind, Endpoint, LinkEnd};
use crate::wire::tls::ALPN;

fn failed(detail: String) -> LinkEnd {
    LinkEnd::local(EndKind::Lost, Reason::DialFailed, detail)
}

/// A byte stream, and TLS over it.
pub(super) async fn tls(
    endpoint: &Endpoint,
    config: &Arc<ClientConfig>,
    connect: &dyn Connect,
) -> Result<TlsStream<ByteStream>, LinkEnd> {
    // An address as host gets no SNI and is looked for among the certificate's IP addresses.
    let name = ServerName::try_from(endpoint.host.clone())
        .map_err(|_| failed(format!("{:?} is neither a name nor an address", endpoint.host)))?;
    let bytes = connect.connect(&endpoint.host, endpoint.port).await.map_err(|error| no_stream(&error))?;
    let stream = TlsConnector::from(Arc::clone(config))
        .connect(name, bytes)
        .await
        .map_err(|error| tls_end(endpoint, &error))?;
    if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
        return Err(failed(format!("{endpoint} speaks TLS but not HTTP/2 (no ALPN h2)")));
    }
    Ok(stream)
}

fn no_stream(error: &ConnectError) -> LinkEnd {
    let why = error.source().map(|why| format!(": {why}")).unwrap_or_default();
    failed(format!("{error}{why}"))
}

/// What a failed handshake means.
fn tls_end(endpoint: &Endpoint, error: &std::io::Error) -> LinkEnd {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let end = |kind, reason, detail| LinkEnd { kind, reason, pushback: None, revocation: None, detail };
    match tls {
        Some(rustls::Error::InvalidCertificate(certificate)) => {
            let kind = untrusted(certificate);
            end(kind, None, format!("the certificate of {endpoint} does not hold: {certificate}"))
        }
        Some(rustls::Error::AlertReceived(alert)) => {
            let detail = format!("{endpoint} refused the TLS handshake with the alert {alert:?}");
            end(EndKind::Unauthenticated, None, detail)
        }
        _ => failed(format!("the TLS handshake with {endpoint} failed: {error}")),
    }
}

fn untrusted(error: &CertificateError) -> EndKind {
    match error {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => EndKind::ServerOutOfTime,
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            EndKind::ServerNameWrong
        }
        _ => EndKind::ServerUntrusted,
    }
}
