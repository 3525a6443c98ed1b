//! The gRPC services: Join, and the opening of a session.

use std::sync::{Arc, Weak};

use futures_util::StreamExt as _;
use futures_util::stream::{self, BoxStream};
use prost::Message as _;
use rustls::pki_types::CertificateDer;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use super::hello::{self, Checked};
use super::hub::{Hub, Live, SessionEnd, revoked_message};
use super::lies;
use super::neighbours;
use super::peer::Peer;
use super::renewals;
use super::session::{self, Begun, Opening, Outgoing, chain};
use super::store::Renewing;
use super::store::{HelloRefusal, Route, StoreError};
use super::tls::PeerLeaf;
use super::worker::{Ask, Noted, Told};
use crate::failpoint;
use crate::model::limits::ID_BYTES;
use crate::model::{Digest, Incarnation, NodeId, Reason};
use crate::wire::der::Der;
use crate::wire::dsse::{Audience, Envelope, PublicKey};
use crate::wire::enroll::{REJOIN_BYTES, RejoinProof, X509POP, join_request_digest};
use crate::wire::frames::read_envelope;
use crate::wire::version::{self, Range};
use crate::wire::{pb, status};

/// Both services over one hub.
#[derive(Clone)]
pub struct Service(pub Arc<Hub>);

impl Service {
    /// The certificate of the call.
    fn leaf<T>(&self, request: &Request<T>) -> Result<Der, Status> {
        let leaf = request.extensions().get::<PeerLeaf>().and_then(|shown| shown.0.as_ref());
        leaf.map(|leaf| (&**leaf).into()).ok_or_else(|| {
            let message = "the call needs a node certificate";
            self.0.refuse(Code::Unauthenticated, Reason::CertificateMissing, message, None)
        })
    }

    /// The certificate of the call, read.
    fn peer<T>(&self, request: &Request<T>) -> Result<Peer, Status> {
        let hub = &self.0;
        let leaf = self.leaf(request)?;
        Peer::read(&CertificateDer::from(&*leaf.0), &hub.settings.trust_domain).map_err(|error| {
            hub.refuse(Code::PermissionDenied, Reason::WrongIdentity, &error.to_string(), None)
        })
    }

    fn internal(&self, error: &StoreError) -> Status {
        tracing::error!(error = %chain(error), "the store failed");
        self.0.refuse(Code::Internal, Reason::Internal, "the gateway's store failed", None)
    }

    /// Everything from the first frame to a running session. Runs as a task of its own: a node that hangs up in
    /// the middle must not leave an epoch without a session that ends.
    async fn open(
        self,
        peer: Peer,
        mut inbound: Streaming<pb::NodeFrame>,
        caller: Weak<()>,
    ) -> Result<mpsc::Receiver<Result<pb::GatewayFrame, Status>>, Status> {
        let hub = self.0.clone();
        let place = hub.stream()?;
        hub.admit()?;
        let hello = self.first_hello(&mut inbound).await?;
        let checked = hello::check(&hello, &peer, hub.settings.protocol, hub.now())
            .map_err(|refused| hub.refuse(refused.code, refused.reason, &refused.message, None))?;
        let (slot, reformed) = (hub.hello_slot()?, hub.is_reformed());
        let begun = self.transact(checked, &peer, caller, hello.trust_version).await?;
        drop(slot);
        let (out, frames): (Outgoing, _) = mpsc::channel(session::OUTGOING);
        if !hub.take_over(&peer.node, &begun.live) {
            let message = "a newer session of the same identity took over";
            return Err(hub.refuse(Code::Aborted, Reason::Superseded, message, None));
        }
        if hub.lease().as_ref() != Some(&begun.opening.route.lease) {
            // The lease was lost while this Hello was on its way, and its end has not told it.
            begun.live.end(SessionEnd::fenced());
        }
        if reformed != hub.is_reformed() {
            // Its Welcome may be a lie that was drawn before.
            begun.live.end(SessionEnd::put_right());
        }
        if hub.is_draining() {
            // The drain began while this Hello was on its way, and has not told it.
            begun.live.end(SessionEnd::told(Code::Unavailable, Reason::Draining, "the gateway is draining"));
        }
        tokio::spawn(session::run(hub, begun, inbound, out, place));
        Ok(frames)
    }

    async fn first_hello(&self, inbound: &mut Streaming<pb::NodeFrame>) -> Result<pb::Hello, Status> {
        let missing = |message| self.0.refuse(Code::InvalidArgument, Reason::HelloMissing, message, None);
        let first = tokio::time::timeout(self.0.settings.limits.first_frame, inbound.message()).await;
        let first = first.map_err(|_| missing("no frame came in time"))??;
        match first.and_then(|frame| frame.frame) {
            Some(pb::node_frame::Frame::Hello(hello)) => Ok(hello),
            _ => Err(missing("the first frame must be Hello")),
        }
    }

    async fn transact(
        &self,
        checked: Checked,
        peer: &Peer,
        caller: Weak<()>,
        trust_version: u64,
    ) -> Result<Begun, Status> {
        let hub = &self.0;
        let Checked { facts, proto } = checked;
        let lease = hub.need_lease()?;
        let (boot_id, journal_id) = (facts.boot_id.clone(), facts.journal_id.clone());
        let (incarnation, running) = (facts.incarnation.clone(), facts.running.clone());
        let opened =
            hub.store.hello(facts, lease.clone(), caller).await.map_err(|error| self.internal(&error))?;
        if let Err(HelloRefusal::Revoked(_)) = &opened {
            // A quarantine has added events, and the other machine's session may be here.
            hub.event_added();
            neighbours::look_at(hub, &peer.node).await.map_err(|error| self.internal(&error))?;
        }
        let signed = match &opened {
            Err(HelloRefusal::Revoked(_) | HelloRefusal::IdentitySuperseded) => self.signed(&peer.node).await,
            _ => None,
        };
        let opened = opened.map_err(|refusal| match refusal {
            HelloRefusal::Gone => Status::cancelled("the caller has hung up"),
            HelloRefusal::Fenced => {
                let message = "the gateway holds no lease";
                hub.refuse(Code::Unavailable, Reason::NotStarted, message, None)
            }
            HelloRefusal::Revoked(reason) => {
                revoked(hub.refuse(Code::Unauthenticated, reason, revoked_message(reason), None), signed)
            }
            HelloRefusal::UnknownNode => {
                let message = "this gateway does not know the node; join again";
                hub.refuse(Code::PermissionDenied, Reason::UnknownNode, message, None)
            }
            HelloRefusal::IdentitySuperseded => {
                let message = "the node has joined again since this certificate was signed";
                revoked(hub.refuse(Code::Unauthenticated, Reason::IdentitySuperseded, message, None), signed)
            }
        })?;
        failpoint::hit(failpoint::GATEWAY_HELLO);
        hub.event_added();
        hub.commands_ended(&opened.effects.ended());
        if opened.effects.to_judge {
            hub.results.notify_one();
        }
        let settings = &hub.settings;
        let (server_time, lie) = hub.welcome_time(peer.not_after);
        if let Some(lie) = lie {
            let detail = serde_json::json!({ "lie": lie.name(), "said_ms": server_time.0 });
            let noted = hub.store.note_lie(peer.node.clone(), lies::TOLD, detail).await;
            noted.map_err(|error| self.internal(&error))?;
        }
        let welcome = pb::Welcome {
            session_id: hub.with_rng(session_id),
            gateway_id: settings.gateway_id.clone(),
            epoch: opened.epoch,
            proto,
            proto_min: settings.protocol.min(),
            proto_max: settings.protocol.max(),
            server_time_ms: server_time.0,
            heartbeat_interval_ms: u32::try_from(settings.heartbeat_interval.as_millis()).unwrap_or(u32::MAX),
            lane_credits: settings.lane_credits.iter().map(|(lane, n)| (lane.name().into(), *n)).collect(),
            journal_id: journal_id.to_string(),
            acked_event_seq: opened.acked_event_seq,
            upgrade_required: settings.upgrade_only,
            trust_bundle: hub.bundle().for_welcome(trust_version),
            ..Default::default()
        };
        tracing::info!(node = %peer.node, epoch = opened.epoch, "session opened");
        let connected = session::connected_detail(
            opened.epoch,
            boot_id.as_str(),
            opened.journal_changed,
            opened.boot_changed,
            opened.duplicate,
        );
        let (live, orders, told) = Live::new(opened.epoch, peer.serial.clone());
        let opening = Opening {
            route: Route { node: peer.node.clone(), epoch: opened.epoch, lease },
            incarnation,
            not_after: peer.not_after,
            running,
            connected,
            welcome,
            acks: opened.effects.acks(),
        };
        Ok(Begun { live, opening, orders, told })
    }

    /// What the join service has signed of a node's revocation. A refusal stands without it, too.
    async fn signed(&self, node: &NodeId) -> Option<Vec<u8>> {
        let signed = self.0.store.signed_revocation(node.clone()).await;
        signed.unwrap_or_else(|error| {
            tracing::warn!(error = %chain(&error), "a refusal goes without its signed revocation");
            None
        })
    }

    /// A refusal to renew, with the signed revocation where that is why.
    async fn with_revocation(&self, node: &NodeId, refused: Status) -> Status {
        match refused.code() {
            Code::Unauthenticated => revoked(refused, self.signed(node).await),
            _ => refused,
        }
    }

    async fn join_request(&self, request: pb::JoinRequest) -> Result<Begins, Status> {
        let hub = &self.0;
        let range = Range::from_wire(request.proto_min, request.proto_max).map_err(|reason| {
            hub.refuse(Code::InvalidArgument, reason, "the version range is empty or zero", None)
        })?;
        hub.settings.protocol.choose(range).map_err(|reason| {
            let message = version::no_common(reason, range, hub.settings.protocol);
            hub.refuse(Code::FailedPrecondition, reason, &message, None)
        })?;
        let again = request.attestor == X509POP;
        let encoded = Der(request.encode_to_vec().into());
        if again && encoded.0.len() > REJOIN_BYTES {
            // What is asked is kept until its proof is here.
            return Err(self.join_invalid("the request is too long for a re-join"));
        }
        let place = if again { Some(hub.proof_place()?) } else { None };
        match hub.worker.ask(Ask::Join(encoded.clone())).await {
            Told::Joined(response, noted) => {
                self.relay(&response, *noted, None).await.map(Box::new).map(Begins::Ends)
            }
            Told::Challenged { node, serial, key, time, challenge } => {
                let renewing = Renewing { node, serial, incarnation: None, session: None, rejoins: true };
                let rejoining = Rejoining {
                    digest: join_request_digest(&request),
                    request: encoded,
                    key,
                    given: challenge.clone(),
                    renewing,
                    _place: place,
                };
                let challenge = pb::AttestationChallenge { challenge, server_time_ms: time.0 };
                Ok(Begins::Challenged { challenge, rejoining: Box::new(rejoining) })
            }
            other => Err(self.refused(other)),
        }
    }

    /// The second half of a join that was challenged. A quarantine is this store's, and no worker knows of it.
    async fn rejoin(
        self,
        rejoining: Rejoining,
        mut inbound: Streaming<pb::JoinFrame>,
    ) -> Result<pb::JoinAnswer, Status> {
        let answer = tokio::time::timeout(self.0.settings.limits.first_frame, inbound.message()).await;
        let answer = answer.map_err(|_| self.join_invalid("no proof came in time"))??;
        let proof = match answer.and_then(|frame| frame.frame) {
            Some(pb::join_frame::Frame::Answer(pb::AttestationAnswer { proof: Some(proof) })) => proof,
            _ => {
                return Err(
                    self.join_invalid("the frame behind a challenge must be its answer, with a proof")
                );
            }
        };
        let proof = read_envelope(proof).map_err(|error| self.join_invalid(&error.to_string()))?;
        self.check_proof(&rejoining, &proof)?;
        let Rejoining { request, renewing, _place, .. } = rejoining;
        let hindered = self.0.store.not_renewed(renewing.clone()).await;
        if let Some(reason) = hindered.map_err(|error| self.internal(&error))? {
            let refused = self.not_renewed(reason);
            return Err(self.told_refusal(renewing, reason, refused).await);
        }
        match self.0.worker.ask(Ask::Rejoin { request, proof }).await {
            Told::Joined(response, noted) => {
                Ok(answered(self.relay(&response, *noted, Some(renewing)).await?))
            }
            Told::Refused { reason, message } if reason != Reason::JoinInvalid => {
                let refused = self.refused(Told::Refused { reason, message });
                Err(self.told_refusal(renewing, reason, refused).await)
            }
            other => Err(self.refused(other)),
        }
    }

    /// Whoever has no more than a certificate, or than what was said once before, learns nothing of its node and tells
    /// nobody anything.
    fn check_proof(&self, rejoining: &Rejoining, proof: &Envelope) -> Result<(), Status> {
        let key = PublicKey::from_spki(&rejoining.key.0);
        let key = key.map_err(|error| self.join_invalid(&error.to_string()))?;
        let node_id = rejoining.renewing.node.clone();
        let node = Audience { trust_domain: self.0.settings.trust_domain.clone(), node_id };
        let proof = RejoinProof::verify(proof, &key, node, rejoining.digest);
        let proof = proof.map_err(|error| self.join_invalid(&error.to_string()))?;
        if proof.get().challenge == rejoining.given {
            return Ok(());
        }
        Err(self.join_invalid("the proof is over another challenge than the one that was given"))
    }

    fn join_invalid(&self, message: &str) -> Status {
        self.0.refuse(Code::InvalidArgument, Reason::JoinInvalid, message, None)
    }

    /// Notes what was issued, then hands the answer on: a node that has it is known here.
    async fn relay<T: prost::Message + Default>(
        &self,
        response: &Der,
        noted: Noted,
        renewing: Option<Renewing>,
    ) -> Result<T, Status> {
        let noted = self.0.store.note_certificate(noted, renewing.clone()).await;
        if let Some(reason) = noted.map_err(|error| self.internal(&error))? {
            let refused = self.not_renewed(reason);
            let Some(renewing) = renewing else { return Err(refused) };
            return Err(self.told_refusal(renewing, reason, refused).await);
        }
        failpoint::hit(failpoint::GATEWAY_JOINED);
        T::decode(&*response.0).map_err(|_| {
            self.0.refuse(Code::Internal, Reason::Internal, "the worker's answer cannot be read", None)
        })
    }

    /// A refusal to let a node go on, told as an event, with the signed revocation where that is why.
    async fn told_refusal(&self, renewing: Renewing, reason: Reason, refused: Status) -> Status {
        let refused = self.with_revocation(&renewing.node, refused).await;
        self.tell_refused(renewing, reason).await;
        refused
    }

    /// The refusal stands whether or not it can be told.
    async fn tell_refused(&self, renewing: Renewing, reason: Reason) {
        match self.0.store.renewal_refused(renewing, reason).await {
            Ok(()) => self.0.event_added(),
            Err(error) => tracing::warn!(error = %chain(&error), "a refused renewal is in no event"),
        }
    }

    fn not_renewed(&self, reason: Reason) -> Status {
        let code = match reason {
            Reason::UnknownNode => Code::PermissionDenied,
            Reason::Superseded => Code::Aborted,
            _ => Code::Unauthenticated,
        };
        let message = match reason {
            Reason::IdentitySuperseded => "the node has used a newer certificate than this one",
            _ => "the certificate is not renewed: it was revoked, or its node is another process's now",
        };
        self.0.refuse(code, reason, message, None)
    }

    /// What the worker said instead of an answer, as the caller hears it.
    fn refused(&self, told: Told) -> Status {
        match told {
            Told::ProofTime { time, challenge, message } => {
                let mut status = self.0.refuse(Code::Unauthenticated, Reason::ProofTime, &message, None);
                for (name, value) in
                    [(status::SERVER_TIME, time.0.to_string()), (status::CHALLENGE, challenge)]
                {
                    if let Ok(value) = value.parse() {
                        status.metadata_mut().insert(name, value);
                    }
                }
                status
            }
            Told::Refused { reason, message } => {
                let code = match reason {
                    Reason::JoinInvalid => Code::InvalidArgument,
                    Reason::CertificateExpired | Reason::CertificateRevoked | Reason::IdentitySuperseded => {
                        Code::Unauthenticated
                    }
                    _ => Code::PermissionDenied,
                };
                self.0.refuse(code, reason, &message, None)
            }
            other => {
                tracing::error!(?other, "the worker did not answer");
                let message = "the join service did not answer";
                self.0.refuse(Code::Unavailable, Reason::Internal, message, None)
            }
        }
    }
}

/// What a JoinRequest has led to.
enum Begins {
    /// All that there is to say.
    Ends(Box<pb::JoinResponse>),
    /// A question, and what is kept until its answer.
    Challenged { challenge: pb::AttestationChallenge, rejoining: Box<Rejoining> },
}

/// A join that waits for its proof.
struct Rejoining {
    request: Der,
    digest: Digest,
    /// Of the old certificate.
    key: Der,
    /// The challenge.
    given: String,
    renewing: Renewing,
    _place: Option<OwnedSemaphorePermit>,
}

fn answered(response: pb::JoinResponse) -> pb::JoinAnswer {
    pb::JoinAnswer { frame: Some(pb::join_answer::Frame::Response(response)) }
}

fn revoked(refused: Status, signed: Option<Vec<u8>>) -> Status {
    match signed {
        Some(envelope) => status::with_revocation(refused, &envelope),
        None => refused,
    }
}

fn session_id(rng: &mut impl rand::RngCore) -> String {
    let mut bytes = [0_u8; 16];
    rng.fill_bytes(&mut bytes);
    format!("s-{}", data_encoding::HEXLOWER.encode(&bytes))
}

#[tonic::async_trait]
impl pb::node_server::Node for Service {
    type SessionStream = ReceiverStream<Result<pb::GatewayFrame, Status>>;
    type TunnelStream = BoxStream<'static, Result<pb::TunnelFrame, Status>>;

    async fn session(
        &self,
        request: Request<Streaming<pb::NodeFrame>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let peer = self.peer(&request)?;
        // Dropped with this call, which is when its node hangs up.
        let caller = Arc::new(());
        let opening = self.clone().open(peer, request.into_inner(), Arc::downgrade(&caller));
        let opened = tokio::spawn(opening).await;
        drop(caller);
        let frames = opened.map_err(|error| {
            tracing::error!(%error, "the opening of a session panicked");
            self.0.refuse(Code::Internal, Reason::Internal, "the session could not be opened", None)
        })??;
        Ok(Response::new(ReceiverStream::new(frames)))
    }

    async fn tunnel(
        &self,
        _request: Request<Streaming<pb::TunnelFrame>>,
    ) -> Result<Response<Self::TunnelStream>, Status> {
        // Without a token: nothing has failed, and the code itself is what a node branches on.
        Err(Status::unimplemented("this gateway opens no tunnels"))
    }
}

#[tonic::async_trait]
impl pb::enrollment_server::Enrollment for Service {
    type JoinStream = BoxStream<'static, Result<pb::JoinAnswer, Status>>;

    async fn join(
        &self,
        request: Request<Streaming<pb::JoinFrame>>,
    ) -> Result<Response<Self::JoinStream>, Status> {
        self.0.admit()?;
        let mut inbound = request.into_inner();
        let first = tokio::time::timeout(self.0.settings.limits.first_frame, inbound.message()).await;
        let first = first.map_err(|_| self.join_invalid("no request came in time"))??;
        let Some(pb::join_frame::Frame::Request(request)) = first.and_then(|frame| frame.frame) else {
            return Err(self.join_invalid("the first frame must be the request"));
        };
        Ok(Response::new(match self.join_request(request).await? {
            Begins::Ends(response) => tokio_stream::once(Ok(answered(*response))).boxed(),
            Begins::Challenged { challenge, rejoining } => {
                let frame = Some(pb::join_answer::Frame::Challenge(challenge));
                // A task of its own: whoever reads no answer must not keep its place for longer than a proof may take.
                let rest = tokio::spawn(self.clone().rejoin(*rejoining, inbound));
                let service = self.clone();
                let rest = async move {
                    rest.await.unwrap_or_else(|error| {
                        tracing::error!(%error, "the second half of a join panicked");
                        let message = "the join could not be answered";
                        Err(service.0.refuse(Code::Internal, Reason::Internal, message, None))
                    })
                };
                tokio_stream::once(Ok(pb::JoinAnswer { frame })).chain(stream::once(rest)).boxed()
            }
        }))
    }

    async fn renew(&self, request: Request<pb::RenewRequest>) -> Result<Response<pb::RenewResponse>, Status> {
        self.0.admit()?;
        let leaf = self.leaf(&request)?;
        let peer = self.peer(&request)?;
        let said = |name| request.metadata().get(name)?.to_str().ok().map(str::to_owned);
        let session = said(status::SESSION).filter(|session| session.len() <= ID_BYTES);
        let incarnation = said(status::INCARNATION).and_then(|text| Incarnation::new(text).ok());
        let renewing =
            Renewing { node: peer.node, serial: peer.serial, incarnation, session, rejoins: false };
        if renewing.incarnation.is_none() {
            // Whoever does not say which process it is might be a superseded one.
            self.tell_refused(renewing, Reason::JoinInvalid).await;
            let message = "the call names no incarnation (metadata bcd-incarnation)";
            return Err(self.0.refuse(Code::InvalidArgument, Reason::JoinInvalid, message, None));
        }
        let refused = self.0.store.not_renewed(renewing.clone()).await;
        if let Some(reason) = refused.map_err(|error| self.internal(&error))? {
            let refused = self.not_renewed(reason);
            return Err(self.told_refusal(renewing, reason, refused).await);
        }
        let ask = Ask::Renew { request: Der(request.into_inner().encode_to_vec().into()), leaf };
        match self.0.worker.ask(ask).await {
            Told::Renewed(response, noted) => {
                let node = renewing.node.clone();
                let truth = self.relay(&response, *noted, Some(renewing)).await?;
                let answer = renewals::answer(&self.0, &node, truth).await;
                Ok(Response::new(answer.map_err(|error| self.internal(&error))?))
            }
            other => {
                let node = renewing.node.clone();
                if let Told::Refused { reason, .. } = &other {
                    self.tell_refused(renewing, *reason).await;
                }
                Err(self.with_revocation(&node, self.refused(other)).await)
            }
        }
    }
}
