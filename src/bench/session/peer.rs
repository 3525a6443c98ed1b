//! The other end of the session: it welcomes, acks, gives commands and waits for their results. Mutual TLS as with a
//! gateway; the certificate of the node is verified, and nothing else is asked.

use std::collections::HashMap;
use std::sync::Arc;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::clock::{Clock, SystemClock};
use crate::identity::Identity;
use crate::model::{CommandId, ServerTime};
use crate::wire::dsse::COMMAND_TYPE;
use crate::wire::link::Endpoint;
use crate::wire::pb;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;
use crate::wire::tls::ALPN;
use crate::wire::version::Range;

/// Why the other end does not work.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It cannot listen.
    #[error("cannot listen on 127.0.0.1")]
    Listen(#[from] std::io::Error),
    /// Its certificate cannot be made.
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
    /// Its TLS cannot be set up.
    #[error("TLS cannot be set up for the other end")]
    Tls(#[from] rustls::Error),
    /// The node's certificates cannot be verified.
    #[error("the node's certificates cannot be verified")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
    /// The session is over.
    #[error("the session ended")]
    Ended,
    /// The node did not do as it was told.
    #[error("the node answered a command with {0}")]
    Refused(String),
}

/// A session's two directions, as the service hands them over.
type Session = (Streaming<pb::NodeFrame>, mpsc::Sender<Result<pb::GatewayFrame, Status>>);

/// Frames that may wait for the transport.
const QUEUE: usize = 16;
const HOUR_MS: i64 = 3_600_000;

/// The listening end, and its one session.
pub(super) struct Peer {
    ca: CertificateDer<'static>,
    endpoint: Endpoint,
    sessions: mpsc::Receiver<Session>,
    session: Option<Session>,
    rng: StdRng,
    commands: u64,
    done: Option<String>,
}

impl Peer {
    /// Listens on loopback for the node of `identity`.
    pub(super) async fn listen(identity: &Identity) -> Result<Self, PeerError> {
        let (ca, config) = tls(identity)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let endpoint = Endpoint { host: "127.0.0.1".into(), port: listener.local_addr()?.port() };
        let (connections, incoming) =
            mpsc::channel::<std::io::Result<TlsStream<tokio::net::TcpStream>>>(QUEUE);
        tokio::spawn(async move {
            let acceptor = TlsAcceptor::from(Arc::new(config));
            while let Ok((tcp, _)) = listener.accept().await {
                let _ = tcp.set_nodelay(true);
                if connections.send(acceptor.accept(tcp).await).await.is_err() {
                    return;
                }
            }
        });
        let (say, sessions) = mpsc::channel(1);
        let service = Service(say);
        tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(pb::node_server::NodeServer::new(service.clone()))
                .add_service(pb::enrollment_server::EnrollmentServer::new(service))
                .serve_with_incoming(ReceiverStream::new(incoming)),
        );
        let rng = StdRng::from_os_rng();
        Ok(Self { ca, endpoint, sessions, session: None, rng, commands: 0, done: None })
    }

    pub(super) fn ca(&self) -> &CertificateDer<'static> {
        &self.ca
    }

    pub(super) fn endpoint(&self) -> Endpoint {
        self.endpoint.clone()
    }

    /// Takes the node's session up to its first heartbeat, with which it has taken the Welcome.
    pub(super) async fn welcome(&mut self) -> Result<(), PeerError> {
        self.session = self.sessions.recv().await;
        let In::Hello(hello) = self.receive().await? else { return Err(PeerError::Ended) };
        let welcome = pb::Welcome {
            session_id: "s-bench".into(),
            gateway_id: "g-bench".into(),
            epoch: 1,
            proto: Range::OWN.max(),
            proto_min: Range::OWN.min(),
            proto_max: Range::OWN.max(),
            server_time_ms: SystemClock.wall_ms(),
            heartbeat_interval_ms: 10_000,
            lane_credits: HashMap::from(["control", "work", "bulk"].map(|lane| (lane.into(), 16)))
                .into_iter()
                .collect(),
            journal_id: hello.journal_id,
            ..Default::default()
        };
        self.send(Out::Welcome(welcome)).await?;
        loop {
            if let In::Heartbeat(_) = self.receive().await? {
                return Ok(());
            }
        }
    }

    /// A new command that does as little as any.
    pub(super) fn command(&mut self, identity: &Identity) -> (String, pb::Command) {
        let id = CommandId::random(&mut self.rng).to_string();
        let now = ServerTime(SystemClock.wall_ms());
        let payload = json!({
            "trust_domain": identity.trust_domain, "node_id": identity.node_id.as_str(), "id": id, "kind": "node.probe",
            "issued_at": now.to_string(), "not_after": ServerTime(now.0 + HOUR_MS).to_string(), "args": {},
        })
        .to_string();
        self.commands += 1;
        let envelope = pb::Envelope {
            payload_type: COMMAND_TYPE.into(),
            payload: payload.into(),
            signatures: Vec::new(),
        };
        let command = pb::Command {
            seq: self.commands,
            delivery_attempt: 1,
            envelope: Some(envelope),
            ..Default::default()
        };
        (id, command)
    }

    /// Sends a command and returns with its result.
    pub(super) async fn carry_out(&mut self, (id, command): (String, pb::Command)) -> Result<(), PeerError> {
        self.send(Out::Command(command)).await?;
        loop {
            let In::CommandUpdate(update) = self.receive().await? else { continue };
            if update.command_id != id {
                continue;
            }
            match update.state() {
                pb::CommandState::Accepted | pb::CommandState::Running => {}
                pb::CommandState::Succeeded => {
                    self.done = Some(id);
                    return Ok(());
                }
                other => return Err(PeerError::Refused(format!("{other:?}: {}", update.message))),
            }
        }
    }

    /// Acks the result of the last command, so that the journal forgets it.
    pub(super) async fn settle(&mut self) -> Result<(), PeerError> {
        let result_ids = self.done.take().into_iter().collect();
        self.send(Out::Ack(pb::Ack { result_ids, ..Default::default() })).await
    }

    /// The next frame; events and heartbeats are acked in passing.
    async fn receive(&mut self) -> Result<In, PeerError> {
        let (inbound, _) = self.session.as_mut().ok_or(PeerError::Ended)?;
        let frame = inbound.message().await.ok().flatten().and_then(|frame| frame.frame);
        let frame = frame.ok_or(PeerError::Ended)?;
        let ack = match &frame {
            In::Heartbeat(beat) => pb::Ack { heartbeat_seq: beat.seq, ..Default::default() },
            In::EventBatch(batch) => pb::Ack {
                journal_id: batch.journal_id.clone(),
                event_seq: batch.events.last().map_or(0, |event| event.seq),
                ..Default::default()
            },
            _ => return Ok(frame),
        };
        self.send(Out::Ack(ack)).await?;
        Ok(frame)
    }

    async fn send(&mut self, frame: Out) -> Result<(), PeerError> {
        let (_, out) = self.session.as_ref().ok_or(PeerError::Ended)?;
        out.send(Ok(pb::GatewayFrame { frame: Some(frame) })).await.map_err(|_| PeerError::Ended)
    }
}

/// A CA of this run, and a configuration whose certificate is for 127.0.0.1.
fn tls(identity: &Identity) -> Result<(CertificateDer<'static>, rustls::ServerConfig), PeerError> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate()?;
    let ca = params.self_signed(&key)?.der().clone();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate()?;
    let leaf = CertificateParams::new(vec!["127.0.0.1".to_owned()])?.signed_by(&key, &issuer)?;

    let ring = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = rustls::RootCertStore::empty();
    for root in &identity.gateway_roots {
        // The reference gateway's CA signs nodes as well.
        roots.add(root.clone())?;
    }
    let nodes =
        rustls::server::WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&ring))
            .build()?;
    let mut config = rustls::ServerConfig::builder_with_provider(ring)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(nodes)
        .with_single_cert(
            vec![leaf.der().clone(), ca.clone()],
            PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        )?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok((ca, config))
}

/// Hands the session over, and answers the empty call.
#[derive(Clone)]
struct Service(mpsc::Sender<Session>);

#[tonic::async_trait]
impl pb::node_server::Node for Service {
    type SessionStream = ReceiverStream<Result<pb::GatewayFrame, Status>>;
    type TunnelStream = ReceiverStream<Result<pb::TunnelFrame, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<pb::NodeFrame>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let (out, frames) = mpsc::channel(QUEUE);
        let sent = self.0.send((request.into_inner(), out)).await;
        sent.map_err(|_| Status::new(Code::Unavailable, "the bench is over"))?;
        Ok(Response::new(ReceiverStream::new(frames)))
    }

    async fn tunnel(
        &self,
        _request: Request<Streaming<pb::TunnelFrame>>,
    ) -> Result<Response<Self::TunnelStream>, Status> {
        Err(Status::new(Code::Unimplemented, "no tunnels here"))
    }
}

#[tonic::async_trait]
impl pb::enrollment_server::Enrollment for Service {
    type JoinStream = ReceiverStream<Result<pb::JoinAnswer, Status>>;

    async fn join(
        &self,
        _request: Request<Streaming<pb::JoinFrame>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        Err(Status::new(Code::Unimplemented, "no joins here"))
    }

    async fn renew(
        &self,
        _request: Request<pb::RenewRequest>,
    ) -> Result<Response<pb::RenewResponse>, Status> {
        Ok(Response::new(pb::RenewResponse::default()))
    }
}
