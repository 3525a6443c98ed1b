//! From an endpoint to a TLS stream that speaks HTTP/2.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use rustls::{CertificateError, ClientConfig};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::model::Reason;
use crate::wire::link::{EndKind, Endpoint, LinkEnd};
use crate::wire::tls::ALPN;

/// The second address family starts this much later, unless the first has failed before.
const SECOND_FAMILY: Duration = Duration::from_millis(250);

fn failed(detail: String) -> LinkEnd {
    LinkEnd::local(EndKind::Lost, Reason::DialFailed, detail)
}

/// Name, connect and TLS.
pub(super) async fn tls(
    endpoint: &Endpoint,
    config: &Arc<ClientConfig>,
) -> Result<TlsStream<TcpStream>, LinkEnd> {
    // An address as host gets no SNI and is looked for among the certificate's IP addresses.
    let name = ServerName::try_from(endpoint.host.clone())
        .map_err(|_| failed(format!("{:?} is neither a name nor an address", endpoint.host)))?;
    // tokio resolves on its blocking threads; an address is not looked up.
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host((endpoint.host.as_str(), endpoint.port))
        .await
        .map_err(|error| failed(format!("the name {} cannot be resolved: {error}", endpoint.host)))?
        .collect();
    let tcp = race(addresses).await.map_err(|error| failed(format!("cannot connect: {error}")))?;
    tcp.set_nodelay(true).map_err(|error| failed(format!("cannot use the socket to {endpoint}: {error}")))?;
    let stream = TlsConnector::from(Arc::clone(config))
        .connect(name, tcp)
        .await
        .map_err(|error| tls_end(endpoint, &error))?;
    if stream.get_ref().1.alpn_protocol() != Some(ALPN) {
        return Err(failed(format!("{endpoint} speaks TLS but not HTTP/2 (no ALPN h2)")));
    }
    Ok(stream)
}

/// Both address families race; within a family the addresses are tried in the resolver's order.
pub(super) async fn race(addresses: Vec<SocketAddr>) -> std::io::Result<TcpStream> {
    let first_family = addresses.first().map(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| Some(address.is_ipv6()) == first_family);
    let mut first = Box::pin(in_turn(first));
    let early = tokio::time::timeout(SECOND_FAMILY, &mut first).await;
    if second.is_empty() {
        return match early {
            Ok(result) => result,
            Err(_) => first.await,
        };
    }
    let second = Box::pin(in_turn(second));
    match early {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(_)) => second.await,
        Err(_) => match futures_util::future::select_ok([first as ConnectFuture, second]).await {
            Ok((stream, _loser)) => Ok(stream),
            Err(error) => Err(error),
        },
    }
}

type ConnectFuture = std::pin::Pin<Box<dyn Future<Output = std::io::Result<TcpStream>> + Send>>;

async fn in_turn(addresses: Vec<SocketAddr>) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = std::io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(last)
}

/// What a failed handshake means.
fn tls_end(endpoint: &Endpoint, error: &std::io::Error) -> LinkEnd {
    let tls = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
    let end = |kind, reason, detail| LinkEnd { kind, reason, pushback: None, detail };
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
