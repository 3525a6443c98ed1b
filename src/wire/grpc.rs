//! gRPC over HTTP/2 over TLS 1.3: the connection (used by join as well), and the session's link.
//!
//! hyper's connection is driven here rather than behind tonic's `Channel`: a channel redials by itself, behind the
//! back-off schedule, and hides why a connection ended (GOAWAY ENHANCE_YOUR_CALM, a keep-alive timeout and an alert
//! all reach a call as `Unknown`). One task a connection; its result says why it ended.

mod dial;
mod link;

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tonic::Status;
use tonic::body::Body;

use super::link::{EndKind, Endpoint, LinkEnd, Validity};
use super::status;
use crate::model::{Reason, ServerTime};
use crate::ports::Connect;

pub use link::{GrpcDialer, session};

/// A peer that does not answer a keep-alive within this is gone.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Header lists of a gateway are a dozen short fields.
const HEADER_LIST_BYTES: u32 = 16 << 10;
/// A call that broke may fail a moment before its connection says why.
const CONNECTION_VERDICT: Duration = Duration::from_millis(250);

/// An HTTP/2 connection to a gateway. Dropping it ends the connection and every call on it.
#[derive(Debug)]
pub struct Connection {
    service: Service,
    origin: http::Uri,
    server: CertificateDer<'static>,
    validity: Validity,
    ended: watch::Receiver<Option<LinkEnd>>,
    task: tokio::task::AbortHandle,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Opens a connection: a byte stream, TLS, HTTP/2. The caller sets the deadline ([`super::link::DIAL_DEADLINE`]).
///
/// # Errors
/// Why there is no connection.
pub async fn connect(
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    bytes: &dyn Connect,
    keep_alive: Duration,
) -> Result<Connection, LinkEnd> {
    let tls = dial::tls(endpoint, tls, bytes).await?;
    let server = tls.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    // The handshake has read it already; without it the first time that this gateway tells could not be judged.
    let (server, validity) = server
        .and_then(|leaf| Some((leaf.clone().into_owned(), validity(leaf)?)))
        .ok_or_else(|| unreadable(endpoint))?;
    let alert = Arc::new(OnceLock::new());
    let io = TokioIo::new(AlertWatch { inner: tls, alert: Arc::clone(&alert) });
    let (send, connection) = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(keep_alive)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true)
        .max_header_list_size(HEADER_LIST_BYTES)
        .handshake(io)
        .await
        .map_err(|error| connection_end(Err(error), alert.get()))?;
    let (say, ended) = watch::channel(None);
    let task = tokio::spawn(async move {
        let result = connection.await;
        say.send_replace(Some(connection_end(result, alert.get())));
    });
    // The scheme says http because TLS is done below; tonic must not do it a second time.
    let origin =
        http::Uri::builder().scheme("http").authority(endpoint.to_string()).path_and_query("/").build();
    let origin = origin.map_err(|error| {
        LinkEnd::local(EndKind::Lost, Reason::DialFailed, format!("{endpoint} makes no URI: {error}"))
    })?;
    Ok(Connection { service: Service(send), origin, server, validity, ended, task: task.abort_handle() })
}

fn validity(leaf: &CertificateDer<'_>) -> Option<Validity> {
    let (_, leaf) = x509_parser::parse_x509_certificate(leaf).ok()?;
    let ms = |at: x509_parser::time::ASN1Time| ServerTime(at.timestamp().saturating_mul(1000));
    Some(Validity { not_before: ms(leaf.validity().not_before), not_after: ms(leaf.validity().not_after) })
}

fn unreadable(endpoint: &Endpoint) -> LinkEnd {
    let detail = format!("{endpoint} shows a certificate that cannot be read");
    LinkEnd::local(EndKind::ServerUntrusted, Reason::DialFailed, detail)
}

impl Connection {
    /// For `Client::with_origin`.
    pub fn service(&self) -> Service {
        self.service.clone()
    }

    /// For `Client::with_origin`.
    pub fn origin(&self) -> http::Uri {
        self.origin.clone()
    }

    /// The gateway's certificate, as it was verified.
    pub fn server_certificate(&self) -> &CertificateDer<'static> {
        &self.server
    }

    /// When that certificate holds.
    pub fn server_validity(&self) -> Validity {
        self.validity
    }

    /// How a call that ended by `status` really ended: what the peer said, or else why the connection broke.
    pub async fn end_of(&self, status: &Status) -> LinkEnd {
        end_of(self.ended.clone(), status).await
    }
}

async fn end_of(mut ended: watch::Receiver<Option<LinkEnd>>, status: &Status) -> LinkEnd {
    if let Some(end) = status::end_by_peer(status) {
        return end;
    }
    if status.code() == tonic::Code::OutOfRange {
        return LinkEnd::local(EndKind::Local, Reason::FrameTooLarge, status.message());
    }
    let verdict = tokio::time::timeout(CONNECTION_VERDICT, ended.wait_for(Option::is_some)).await;
    match verdict {
        Ok(Ok(end)) if end.is_some() => end.clone().unwrap_or_else(|| broken(status)),
        _ => broken(status),
    }
}

fn broken(status: &Status) -> LinkEnd {
    LinkEnd::local(EndKind::Lost, Reason::LinkLost, format!("the call broke: {}", status.message()))
}

/// What the end of a connection means. An alert outranks the rest: a gateway that refuses a certificate inside TLS
/// says so after the handshake, and HTTP/2 turns that into text.
fn connection_end(result: hyper::Result<()>, alert: Option<&rustls::AlertDescription>) -> LinkEnd {
    if let Some(alert) = alert {
        let detail = format!("the gateway ended TLS with the alert {alert:?}");
        return LinkEnd {
            kind: EndKind::Unauthenticated,
            reason: None,
            pushback: None,
            revocation: None,
            detail,
        };
    }
    let lost = |detail: String| LinkEnd::local(EndKind::Lost, Reason::LinkLost, detail);
    let Err(error) = result else { return lost("the gateway closed the connection".into()) };
    if error.is_timeout() {
        return lost(format!("no answer to a keep-alive within {} s", KEEP_ALIVE_TIMEOUT.as_secs()));
    }
    let h2 = chain(&error).find_map(|error| error.downcast_ref::<h2::Error>());
    if h2.is_some_and(|h2| h2.is_go_away() && h2.reason() == Some(h2::Reason::ENHANCE_YOUR_CALM)) {
        let detail = "the gateway asked for calm (GOAWAY ENHANCE_YOUR_CALM)".into();
        return LinkEnd { kind: EndKind::Calm, reason: None, pushback: None, revocation: None, detail };
    }
    // A process that was killed leaves its kernel to close the socket, without TLS's own word for it.
    let io = chain(&error).find_map(|error| error.downcast_ref::<std::io::Error>());
    if io.is_some_and(|io| io.kind() == std::io::ErrorKind::UnexpectedEof) {
        return lost("the gateway is gone: its end of the connection closed without a word".into());
    }
    let text = chain(&error).map(ToString::to_string).collect::<Vec<_>>().join(": ");
    lost(format!("the connection broke: {text}"))
}

fn chain<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |error| error.source())
}

/// A connection as a generated client wants it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Service(http2::SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Service {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Keeps the alert of the first failed read: further up it is only text.
struct AlertWatch<S> {
    inner: S,
    alert: Arc<OnceLock<rustls::AlertDescription>>,
}

fn alert_in(error: &std::io::Error) -> Option<rustls::AlertDescription> {
    match error.get_ref()?.downcast_ref::<rustls::Error>()? {
        rustls::Error::AlertReceived(alert) => Some(*alert),
        _ => None,
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AlertWatch<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        if let Poll::Ready(Err(error)) = &polled
            && let Some(alert) = alert_in(error)
        {
            let _ = self.alert.set(alert);
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AlertWatch<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests;
