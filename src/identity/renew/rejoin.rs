//! A node whose certificate has run out joins again by itself, with the key of it (`x509pop`): its id stays, its identity
//! generation rises.
//!
//! The new key is in its file before it is offered, and an attempt offers the one that is there: the join service raises the
//! generation once for an old certificate and a new key, so that a node which was killed before it had the answer gets the
//! same one again. The old certificate is in the request, and is not offered to TLS.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::call::{Answered, read_answer, unusable};
use super::{KeepError, RenewError, Request, accept_again, taken};
use crate::clock::Clock;
use crate::failpoint;
use crate::identity::Identity;
use crate::identity::accept::{Accepted, Answer, AnswerError, Asked};
use crate::identity::keys::NodeKey;
use crate::model::limits::{FRAME_BYTES, ID_BYTES};
use crate::model::{Digest, Reason, ServerTime};
use crate::ports::Connect;
use crate::state_dir::StateDir;
use crate::wire::dsse::{Document as _, SignError, Verified, sign, verify_document};
use crate::wire::enroll::{JoinAnswer, RejoinProof, X509POP, join_request_digest, rejoin_digest};
use crate::wire::link::{EndKind, Endpoint, LinkEnd};
use crate::wire::pb::enrollment_client::EnrollmentClient;
use crate::wire::pb::{join_answer, join_frame};
use crate::wire::{grpc, pb, version};

/// A join is over long before the first keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Dial, challenge and answer together.
const ATTEMPT: Duration = Duration::from_secs(30);
/// The request and the answer to its challenge.
const FRAMES: usize = 2;

/// The new key of `held` and the certificate request for it: the key that an attempt before this one has offered, else a new
/// one. Blocks.
///
/// # Errors
/// See [`KeepError`].
pub fn offer(state: &Path, held: &Identity) -> Result<Request, KeepError> {
    super::change(state, held, |dir: &StateDir, _| Ok(Request::of(NodeKey::unused(dir, &held.fingerprint)?)?))
}

/// A re-join of one identity.
pub struct Rejoin<'a> {
    /// The identity.
    pub held: &'a Identity,
    /// The lowest version of a trust bundle that is taken.
    pub trust_floor: u64,
    /// Gateways, asked in turn, once each.
    pub endpoints: &'a [Endpoint],
    /// Offers no certificate.
    pub tls: Arc<ClientConfig>,
    /// The way to the gateways.
    pub connect: Arc<dyn Connect>,
    /// Measures how long an answer takes, a suspended machine's too.
    pub clock: Arc<dyn Clock>,
    /// Whether server time has been heard; else the gateway's certificate is held against the answer's time.
    pub heard: bool,
}

impl Rejoin<'_> {
    /// Asks each gateway once, until one gives an answer that holds; `failed` is told of each error, and may take what came
    /// with it.
    ///
    /// # Errors
    /// See [`RenewError`]; of a gateway that refuses for good before that of one that is down.
    pub async fn ask(
        &self,
        request: &Request,
        mut failed: impl FnMut(&mut RenewError),
    ) -> Result<Accepted, RenewError> {
        let mut told = RenewError::NoEndpoint;
        for endpoint in self.endpoints {
            match self.ask_one(endpoint, request).await {
                Ok(accepted) => return Ok(accepted),
                Err(mut error) => {
                    failed(&mut error);
                    if refuses(&told).is_none() {
                        told = error;
                    }
                }
            }
        }
        Err(told)
    }

    async fn ask_one(&self, endpoint: &Endpoint, request: &Request) -> Result<Accepted, RenewError> {
        let own = version::Range::OWN;
        let join = pb::JoinRequest {
            csr: request.csr.clone().into(),
            attestor: X509POP.into(),
            evidence: self.held.chain.iter().flat_map(|der| der.iter().copied()).collect(),
            proto_min: own.min(),
            proto_max: own.max(),
            role: self.held.role.name().into(),
            ..Default::default()
        };
        let began = self.clock.boot();
        let call = self.call(endpoint, join);
        let answered = tokio::time::timeout(ATTEMPT, call).await.unwrap_or_else(|_| {
            let detail = format!("{endpoint} gave no answer within {} s", ATTEMPT.as_secs());
            Err(Ended::Link(LinkEnd::local(EndKind::Lost, Reason::DialTimeout, detail)))
        });
        let ((answer, gateway), digest) = answered.map_err(|ended| match ended {
            Ended::Link(source) => RenewError::Ended { endpoint: endpoint.clone(), source },
            Ended::Proof(error) => RenewError::Proof(error),
        })?;
        let took = self.clock.boot().saturating_sub(began);
        taken(endpoint, took, self.heard, gateway, || {
            let asked = Asked { spki: &request.key.spki(), request: &digest };
            accept_rejoin(self.held, self.trust_floor, asked, &answer)
        })
    }

    /// One call of `Enrollment.Join`; what came back, and the digest of what was asked in all.
    async fn call(&self, endpoint: &Endpoint, request: pb::JoinRequest) -> Result<(Answered, Digest), Ended> {
        let digest = join_request_digest(&request);
        let connection = grpc::connect(endpoint, &self.tls, &*self.connect, KEEP_ALIVE).await?;
        let mut client = EnrollmentClient::with_origin(connection.service(), connection.origin())
            .max_decoding_message_size(FRAME_BYTES);
        let (say, frames) = mpsc::channel(FRAMES);
        let frame = |frame| pb::JoinFrame { frame: Some(frame) };
        // There is room for both.
        let _ = say.try_send(frame(join_frame::Frame::Request(request)));
        let mut answers = match client.join(ReceiverStream::new(frames)).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return Err(connection.end_of(&status).await.into()),
        };
        let challenge = match answers.message().await {
            Ok(Some(pb::JoinAnswer { frame: Some(join_answer::Frame::Challenge(challenge)) })) => challenge,
            Ok(_) => return Err(unusable("it asks for no proof").into()),
            Err(status) => return Err(connection.end_of(&status).await.into()),
        };
        let proof: pb::Envelope = self.prove(digest, challenge)?;
        let digest = rejoin_digest(&digest, &proof);
        failpoint::hit(failpoint::REJOIN_PROVEN);
        let answer = pb::AttestationAnswer { proof: Some(proof) };
        let _ = say.try_send(frame(join_frame::Frame::Answer(answer)));
        match answers.message().await {
            Ok(Some(pb::JoinAnswer { frame: Some(join_answer::Frame::Response(response)) })) => {
                let answer = read_answer(response.signed_response, response.trust_bundle)?;
                Ok(((answer, connection.server_validity()), digest))
            }
            Ok(_) => Err(unusable("it answers the proof with no certificate").into()),
            Err(status) => Err(connection.end_of(&status).await.into()),
        }
    }

    fn prove(&self, request: Digest, challenge: pb::AttestationChallenge) -> Result<pb::Envelope, Ended> {
        let time = ServerTime::from_wire(challenge.server_time_ms);
        let time = time.filter(|_| (1..=ID_BYTES).contains(&challenge.challenge.len()));
        let proof = RejoinProof {
            trust_domain: self.held.trust_domain.clone(),
            node_id: self.held.node_id.clone(),
            request_sha256: request,
            challenge: challenge.challenge,
            issued_at: time.ok_or_else(|| unusable("its challenge is out of shape"))?,
        };
        // Ids, times and hex cannot fail to serialise.
        let body = serde_json::to_vec(&proof).unwrap_or_default();
        let signed = sign(RejoinProof::TYPE, body, &*self.held.key.key, Vec::new()).map_err(Ended::Proof)?;
        Ok(signed.into())
    }
}

/// How a call ended that brought no answer.
enum Ended {
    Link(LinkEnd),
    Proof(SignError),
}

impl From<LinkEnd> for Ended {
    fn from(end: LinkEnd) -> Self {
        Self::Link(end)
    }
}

/// Why the join service lets the node in no more, until somebody does something about it.
pub fn refuses(error: &RenewError) -> Option<Reason> {
    error.refusal().filter(|reason| {
        matches!(
            reason,
            Reason::CertificateRevoked
                | Reason::DuplicateIdentity
                | Reason::IdentitySuperseded
                | Reason::UnknownNode
                | Reason::RejoinTooLate
                | Reason::WrongIdentity
        )
    })
}

/// Judges the answer to a re-join of `held`: nothing that makes the node who it is may have changed, but for the generation,
/// which is higher.
///
/// # Errors
/// See [`AnswerError`].
pub fn accept_rejoin(
    held: &Identity,
    trust_floor: u64,
    asked: Asked<'_>,
    answer: &Answer,
) -> Result<Accepted, AnswerError> {
    let issued: Verified<JoinAnswer> =
        verify_document(&answer.response, &held.join_signing_key, None).map_err(AnswerError::Response)?;
    accept_again(held, trust_floor, asked, &issued.get().0, answer, |generation| generation > held.generation)
}
