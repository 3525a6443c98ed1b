//! Against a real TLS server on loopback, with certificates made for each test.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tonic::{Code, Request};

use super::*;
use crate::host::tcp::Tcp;
use crate::model::Digest;
use crate::model::limits::FRAME_ELEMENTS;
use crate::wire::contract::{self, heartbeat};
use crate::wire::link::{Dialer, Link};
use crate::wire::pb;
use crate::wire::pb::node_server::{Node, NodeServer};
use crate::wire::tls::{self, JudgeTime, Roots};

/// 2030-01-01, s.
const NOW: i64 = 1_893_456_000;
const DAY: i64 = 86_400;

#[derive(Debug)]
struct At(i64, bool);

impl JudgeTime for At {
    fn now(&self) -> (UnixTime, bool) {
        (UnixTime::since_unix_epoch(Duration::from_secs(self.0.unsigned_abs())), self.1)
    }
}

struct Ca {
    der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

fn moment(seconds: i64) -> time::OffsetDateTime {
    time::OffsetDateTime::from_unix_timestamp(seconds).expect("a time")
}

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        (params.not_before, params.not_after) = (moment(NOW - 365 * DAY), moment(NOW + 365 * DAY));
        let key = KeyPair::generate().expect("a key");
        let der = params.self_signed(&key).expect("a certificate").der().clone();
        Self { der, issuer: Issuer::new(params, key) }
    }

    fn pin(&self) -> Roots {
        Roots::Pinned(Digest::of(&self.der))
    }

    /// A server configuration whose certificate is for `name`, from yesterday to `not_after`.
    fn server(&self, name: &str, not_after: i64) -> rustls::ServerConfig {
        let mut params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        (params.not_before, params.not_after) = (moment(NOW - DAY), moment(not_after));
        let key = KeyPair::generate().expect("a key");
        let leaf = params.signed_by(&key, &self.issuer).expect("a certificate");
        let chain = vec![leaf.der().clone(), self.der.clone()];
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let ring = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(ring)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .expect("a configuration");
        config.alpn_protocols = vec![tls::ALPN.to_vec()];
        config
    }
}

/// Accepts TLS connections for ever and leaves them open.
async fn listen(config: rustls::ServerConfig) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let endpoint =
        Endpoint { host: "127.0.0.1".into(), port: listener.local_addr().expect("an address").port() };
    tokio::spawn(async move {
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let mut open = Vec::new();
        while let Ok((tcp, _)) = listener.accept().await {
            open.push(acceptor.accept(tcp).await);
        }
    });
    endpoint
}

fn client(roots: &Roots, time: At) -> Arc<ClientConfig> {
    Arc::new(tls::client_config(roots, None, Arc::new(time)).expect("a configuration"))
}

async fn dial(endpoint: &Endpoint, roots: &Roots, time: At) -> Result<Connection, LinkEnd> {
    connect(endpoint, &client(roots, time), &Tcp, Duration::from_secs(20)).await
}

async fn refused(endpoint: &Endpoint, roots: &Roots, time: At) -> EndKind {
    dial(endpoint, roots, time).await.expect_err("a refusal").kind
}

#[tokio::test]
async fn the_gateway_whose_ca_the_ticket_pins_is_trusted_and_another_is_not() {
    let ca = Ca::new();
    let endpoint = listen(ca.server("127.0.0.1", NOW + DAY)).await;
    dial(&endpoint, &ca.pin(), At(NOW, true)).await.expect("a connection");
    dial(&endpoint, &Roots::Certificates(vec![ca.der.clone()]), At(NOW, true)).await.expect("a connection");
    let other = Ca::new();
    assert_eq!(refused(&endpoint, &other.pin(), At(NOW, true)).await, EndKind::ServerUntrusted);
    let held = Roots::Certificates(vec![other.der.clone()]);
    assert_eq!(refused(&endpoint, &held, At(NOW, true)).await, EndKind::ServerUntrusted);
}

#[tokio::test]
async fn a_pinned_ca_that_did_not_sign_the_leaf_is_not_trusted() {
    let (pinned, actual) = (Ca::new(), Ca::new());
    let forged = Ca { der: pinned.der.clone(), issuer: actual.issuer };
    let endpoint = listen(forged.server("127.0.0.1", NOW + DAY)).await;
    assert_eq!(refused(&endpoint, &pinned.pin(), At(NOW, true)).await, EndKind::ServerUntrusted);
}

#[tokio::test]
async fn a_certificate_for_another_name_is_told_apart() {
    let ca = Ca::new();
    let endpoint = listen(ca.server("gw1.lab.example", NOW + DAY)).await;
    assert_eq!(refused(&endpoint, &ca.pin(), At(NOW, true)).await, EndKind::ServerNameWrong);
}

#[tokio::test]
async fn a_server_certificate_is_judged_by_server_time_where_it_is_known() {
    let ca = Ca::new();
    let endpoint = listen(ca.server("127.0.0.1", NOW + DAY)).await;
    assert_eq!(refused(&endpoint, &ca.pin(), At(NOW + 2 * DAY, true)).await, EndKind::ServerOutOfTime);
    assert_eq!(refused(&endpoint, &ca.pin(), At(NOW - 2 * DAY, true)).await, EndKind::ServerOutOfTime);
}

#[tokio::test]
async fn without_server_time_only_an_end_before_the_floor_is_refused() {
    let ca = Ca::new();
    let endpoint = listen(ca.server("127.0.0.1", NOW + DAY)).await;
    dial(&endpoint, &ca.pin(), At(NOW - 1000 * DAY, false)).await.expect("notBefore is not judged");
    assert_eq!(refused(&endpoint, &ca.pin(), At(NOW + 2 * DAY, false)).await, EndKind::ServerOutOfTime);
}

#[tokio::test]
async fn a_server_without_http2_and_a_port_without_a_server_are_lost_dials() {
    let ca = Ca::new();
    let mut config = ca.server("127.0.0.1", NOW + DAY);
    config.alpn_protocols = Vec::new();
    let end = dial(&listen(config).await, &ca.pin(), At(NOW, true)).await.expect_err("no h2");
    assert_eq!((end.kind, end.reason), (EndKind::Lost, Some(Reason::DialFailed)));
    assert!(end.detail.contains("ALPN"), "{end}");

    let free = TcpListener::bind("127.0.0.1:0").await.expect("a socket").local_addr().expect("an address");
    let nobody = Endpoint { host: "127.0.0.1".into(), port: free.port() };
    let end = dial(&nobody, &ca.pin(), At(NOW, true)).await.expect_err("nobody listens");
    assert_eq!((end.kind, end.reason), (EndKind::Lost, Some(Reason::DialFailed)));
}

/// What the gateway of a test does with a session, by the node id in Hello.
struct Script {
    /// The frames behind Hello of a session that keeps the contract.
    seen: mpsc::UnboundedSender<pb::NodeFrame>,
}

type Frames = std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<pb::GatewayFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Node for Script {
    type SessionStream = Frames;
    type TunnelStream =
        std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<pb::TunnelFrame, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<tonic::Streaming<pb::NodeFrame>>,
    ) -> Result<tonic::Response<Frames>, Status> {
        let mut frames = request.into_inner();
        let Some(pb::node_frame::Frame::Hello(hello)) = frames.message().await?.and_then(|first| first.frame)
        else {
            return Err(Status::invalid_argument("no Hello"));
        };
        let pushback = Some(Duration::from_millis(1500));
        let storm = status::refusal(Code::ResourceExhausted, Reason::Storm, "too many", pushback);
        match hello.node_id.as_str() {
            "refused" => Err(storm),
            "too-large" => {
                let drain = pb::Drain { max_delay_ms: 0, reason: "x".repeat(5 << 20) };
                let frame = pb::GatewayFrame { frame: Some(pb::gateway_frame::Frame::Drain(drain)) };
                Ok(tonic::Response::new(Box::pin(tokio_stream::once(Ok(frame)))))
            }
            "too-many" => {
                let ack = pb::Ack { result_ids: vec![String::new(); FRAME_ELEMENTS], ..Default::default() };
                let frame = pb::GatewayFrame { frame: Some(pb::gateway_frame::Frame::Ack(ack)) };
                Ok(tonic::Response::new(Box::pin(tokio_stream::once(Ok(frame)))))
            }
            "ended" => Ok(tonic::Response::new(Box::pin(tokio_stream::once(Err(storm))))),
            "contract" => {
                let (say, said) = mpsc::channel(64);
                let seen = self.seen.clone();
                tokio::spawn(async move {
                    while let Ok(Some(frame)) = frames.message().await {
                        let reply = match contract::reply(&frame) {
                            Some(contract::Reply::Say(frame)) => Ok(pb::GatewayFrame { frame: Some(frame) }),
                            Some(contract::Reply::End) => Err(storm.clone()),
                            None => continue,
                        };
                        let _ = seen.send(frame);
                        let ends = reply.is_err();
                        if say.send(reply).await.is_err() || ends {
                            return;
                        }
                    }
                });
                Ok(tonic::Response::new(Box::pin(tokio_stream::wrappers::ReceiverStream::new(said))))
            }
            // Answers every frame with an ack until the node's half ends.
            _ => {
                let acks = tokio_stream::StreamExt::map(frames, |frame| {
                    let seq = match frame?.frame {
                        Some(pb::node_frame::Frame::Heartbeat(heartbeat)) => heartbeat.seq,
                        _ => 0,
                    };
                    let ack = pb::Ack { heartbeat_seq: seq, ..Default::default() };
                    Ok(pb::GatewayFrame { frame: Some(pb::gateway_frame::Frame::Ack(ack)) })
                });
                Ok(tonic::Response::new(Box::pin(acks)))
            }
        }
    }

    async fn tunnel(
        &self,
        _request: Request<tonic::Streaming<pb::TunnelFrame>>,
    ) -> Result<tonic::Response<Self::TunnelStream>, Status> {
        Err(Status::unimplemented("no tunnels"))
    }
}

async fn gateway(ca: &Ca) -> Endpoint {
    gateway_that_says(ca, mpsc::unbounded_channel().0).await
}

async fn gateway_that_says(ca: &Ca, seen: mpsc::UnboundedSender<pb::NodeFrame>) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let endpoint =
        Endpoint { host: "127.0.0.1".into(), port: listener.local_addr().expect("an address").port() };
    let acceptor = TlsAcceptor::from(Arc::new(ca.server("127.0.0.1", NOW + DAY)));
    let (accepted, incoming) = tokio::sync::mpsc::channel(4);
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let _ = accepted.send(acceptor.accept(tcp).await).await;
        }
    });
    let incoming = tokio_stream::wrappers::ReceiverStream::new(incoming);
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(NodeServer::new(Script { seen }))
            .serve_with_incoming(incoming),
    );
    endpoint
}

async fn session(node_id: &str) -> Box<dyn Link> {
    let ca = Ca::new();
    session_with(&ca, &gateway(&ca).await, node_id).await
}

async fn session_with(ca: &Ca, endpoint: &Endpoint, node_id: &str) -> Box<dyn Link> {
    let dialer = GrpcDialer::new(client(&ca.pin(), At(NOW, true)), Arc::new(Tcp));
    let hello = pb::Hello { node_id: node_id.into(), ..Default::default() };
    let first = pb::NodeFrame { frame: Some(pb::node_frame::Frame::Hello(hello)) };
    dialer.open(endpoint, first, Duration::from_secs(20)).await.expect("a link")
}

#[tokio::test]
async fn a_refusals_token_and_pushback_arrive_before_and_within_the_stream() {
    for node_id in ["refused", "ended"] {
        let end = session(node_id).await.receive().await.expect_err("the end");
        assert_eq!(end.kind, EndKind::Unavailable, "{node_id}: {end}");
        assert_eq!((end.reason, end.pushback), (Some(Reason::Storm), Some(Duration::from_millis(1500))));
    }
}

#[tokio::test]
async fn a_frame_over_the_limit_ends_the_session_as_too_large() {
    for how in ["too-large", "too-many"] {
        let end = session(how).await.receive().await.expect_err("the end");
        assert_eq!((end.kind, end.reason), (EndKind::Local, Some(Reason::FrameTooLarge)), "{how}: {end}");
    }
}

#[tokio::test]
async fn frames_go_both_ways_and_a_dropped_receive_loses_none() {
    let mut link = session("live").await;
    for seq in 1..=3 {
        link.send(heartbeat(seq)).expect("room");
        let _ = tokio::time::timeout(Duration::from_millis(1), link.receive()).await;
    }
    link.send(heartbeat(4)).expect("room");
    let mut last = 0;
    while last < 4 {
        match link.receive().await.expect("an ack").frame {
            Some(pb::gateway_frame::Frame::Ack(ack)) => last = ack.heartbeat_seq,
            other => panic!("{other:?}"),
        }
    }
    link.flushed().await;
    tokio::time::timeout(Duration::from_secs(5), link.close(Duration::from_secs(60)))
        .await
        .expect("the gateway ends the call when the node's half has ended");
}

#[tokio::test]
async fn the_link_keeps_its_contract_and_knows_how_long_the_gateways_certificate_holds() {
    let ca = Ca::new();
    contract::holds(async || {
        let (say, seen) = mpsc::unbounded_channel();
        let link = session_with(&ca, &gateway_that_says(&ca, say).await, "contract").await;
        let ms = |s: i64| ServerTime(s * 1000);
        let validity = Validity { not_before: ms(NOW - DAY), not_after: ms(NOW + DAY) };
        assert_eq!(link.gateway_validity(), Some(validity));
        (link, seen)
    })
    .await;
}

fn hello_frame() -> pb::NodeFrame {
    pb::NodeFrame { frame: Some(pb::node_frame::Frame::Hello(pb::Hello::default())) }
}

#[tokio::test]
async fn a_gateway_that_refuses_the_certificate_inside_tls_is_told_from_a_broken_wire() {
    let ca = Ca::new();
    let mut config = ca.server("127.0.0.1", NOW + DAY);
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca.der.clone()).expect("a CA");
    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let demanding = rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), ring);
    let with_clients = rustls::ServerConfig::builder_with_provider(Arc::clone(config.crypto_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3")
        .with_client_cert_verifier(demanding.build().expect("a verifier"))
        .with_cert_resolver(Arc::clone(&config.cert_resolver));
    config = with_clients;
    config.alpn_protocols = vec![tls::ALPN.to_vec()];
    let endpoint = listen(config).await;
    let dialer = GrpcDialer::new(client(&ca.pin(), At(NOW, true)), Arc::new(Tcp));
    // The dial may succeed: under TLS 1.3 the client is done before the server has judged it.
    let end = match dialer.open(&endpoint, hello_frame(), Duration::from_secs(20)).await {
        Ok(mut link) => link.receive().await.expect_err("the end"),
        Err(end) => end,
    };
    assert_eq!((end.kind, end.reason), (EndKind::Unauthenticated, None), "{end}");
    assert!(end.detail.contains("CertificateRequired"), "{end}");
}

#[tokio::test]
async fn a_gateway_that_asks_for_calm_is_heard() {
    let ca = Ca::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let endpoint =
        Endpoint { host: "127.0.0.1".into(), port: listener.local_addr().expect("an address").port() };
    let acceptor = TlsAcceptor::from(Arc::new(ca.server("127.0.0.1", NOW + DAY)));
    tokio::spawn(async move {
        let (tcp, _) = listener.accept().await.expect("a connection");
        let tls = acceptor.accept(tcp).await.expect("a handshake");
        let mut http = h2::server::handshake(tls).await.expect("HTTP/2");
        let _call = http.accept().await;
        http.abrupt_shutdown(h2::Reason::ENHANCE_YOUR_CALM);
        let _ = http.accept().await;
    });
    let dialer = GrpcDialer::new(client(&ca.pin(), At(NOW, true)), Arc::new(Tcp));
    let mut link = dialer.open(&endpoint, hello_frame(), Duration::from_secs(20)).await.expect("a link");
    let end = link.receive().await.expect_err("the end");
    assert_eq!(end.kind, EndKind::Calm, "{end}");
}

#[tokio::test]
async fn a_gateway_that_vanishes_is_a_lost_link() {
    let ca = Ca::new();
    let endpoint = {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
        let port = listener.local_addr().expect("an address").port();
        let acceptor = TlsAcceptor::from(Arc::new(ca.server("127.0.0.1", NOW + DAY)));
        tokio::spawn(async move {
            let (tcp, _) = listener.accept().await.expect("a connection");
            drop(acceptor.accept(tcp).await.expect("a handshake"));
        });
        Endpoint { host: "127.0.0.1".into(), port }
    };
    let dialer = GrpcDialer::new(client(&ca.pin(), At(NOW, true)), Arc::new(Tcp));
    let end = match dialer.open(&endpoint, hello_frame(), Duration::from_secs(20)).await {
        Ok(mut link) => link.receive().await.expect_err("the end"),
        Err(end) => end,
    };
    assert_eq!((end.kind, end.reason), (EndKind::Lost, Some(Reason::LinkLost)), "{end}");
}

#[tokio::test]
async fn a_silent_gateway_is_found_by_keep_alive() {
    let ca = Ca::new();
    let endpoint = listen(ca.server("127.0.0.1", NOW + DAY)).await;
    let dialer = GrpcDialer::new(client(&ca.pin(), At(NOW, true)), Arc::new(Tcp));
    let mut link = dialer.open(&endpoint, hello_frame(), Duration::from_secs(20)).await.expect("a link");
    // From here on only timers can move anything: the server has stopped reading.
    tokio::time::pause();
    let before = tokio::time::Instant::now();
    let end = link.receive().await.expect_err("the end");
    assert_eq!((end.kind, end.reason), (EndKind::Lost, Some(Reason::LinkLost)), "{end}");
    assert!(end.detail.contains("keep-alive"), "{end}");
    assert!(before.elapsed() < Duration::from_secs(35), "{:?}", before.elapsed());
}
