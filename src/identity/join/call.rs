//! One attempt of a join: `Enrollment.Join` over TLS that the ticket pins.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;

use super::super::{accept, ticket::Ticket};
use super::JoinError;
use crate::model::limits::FRAME_BYTES;
use crate::model::{Digest, Reason, Role};
use crate::ports::Connect;
use crate::wire::enroll::join_request_digest;
use crate::wire::frames::read_envelope;
use crate::wire::link::{EndKind, Endpoint, LinkEnd};
use crate::wire::pb::enrollment_client::EnrollmentClient;
use crate::wire::pb::{join_answer, join_frame};
use crate::wire::{grpc, pb, tls, version};

/// A join is over long before the first keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// What came back, and from whom.
pub(super) struct Answer {
    pub(super) answer: accept::Answer,
    /// The gateway's own certificate.
    pub(super) gateway: CertificateDer<'static>,
}

/// What every attempt sends.
pub(super) struct Call {
    tls: Arc<ClientConfig>,
    connect: Arc<dyn Connect>,
    request: pb::JoinRequest,
}

impl Call {
    pub(super) fn new(
        ticket: &Ticket,
        csr: Vec<u8>,
        facts: BTreeMap<String, String>,
        connect: Arc<dyn Connect>,
    ) -> Result<Self, JoinError> {
        let roots = tls::Roots::Pinned(ticket.gateway_ca_sha256);
        let own = version::Range::OWN;
        let request = pb::JoinRequest {
            sealed_token: ticket.join_encryption_key.seal(ticket.token.reveal(), &csr)?.into(),
            csr: csr.into(),
            attestor: "token".into(),
            evidence: Default::default(),
            facts: facts.into_iter().collect(),
            proto_min: own.min(),
            proto_max: own.max(),
            role: Role::Host.name().into(),
        };
        let tls = Arc::new(tls::client_config(&roots, None, Arc::new(tls::BuildTime))?);
        Ok(Self { tls, connect, request })
    }

    /// What an answer must be bound to.
    pub(super) fn digest(&self) -> Digest {
        join_request_digest(&self.request)
    }

    pub(super) async fn attempt(&self, endpoint: &Endpoint) -> Result<Answer, LinkEnd> {
        let connection = grpc::connect(endpoint, &self.tls, &*self.connect, KEEP_ALIVE).await?;
        let gateway = connection.server_certificate().clone();
        let mut client = EnrollmentClient::with_origin(connection.service(), connection.origin())
            .max_decoding_message_size(FRAME_BYTES);
        let frame = pb::JoinFrame { frame: Some(join_frame::Frame::Request(self.request.clone())) };
        let answer =
            async { client.join(tokio_stream::once(frame)).await?.into_inner().message().await }.await;
        match answer {
            Ok(Some(pb::JoinAnswer { frame: Some(join_answer::Frame::Response(response)) })) => {
                let both = response.signed_response.zip(response.trust_bundle);
                let (signed, bundle) = both.ok_or_else(|| unusable("its answer is not signed"))?;
                let read = |envelope| read_envelope(envelope).map_err(|error| unusable(&error.to_string()));
                let answer = accept::Answer { response: read(signed)?, trust_bundle: read(bundle)? };
                Ok(Answer { answer, gateway })
            }
            Ok(Some(pb::JoinAnswer { frame: Some(join_answer::Frame::Challenge(_)) })) => Err(unusable(
                "it asks for a proof of the machine that this bcd cannot give; use a ticket whose attestor is token",
            )),
            Ok(Some(pb::JoinAnswer { frame: None })) => {
                Err(unusable("it answers with a frame that this bcd does not know; install a newer bcd"))
            }
            Ok(None) => {
                Err(LinkEnd::local(EndKind::Closed, Reason::LinkLost, "it ended the call without an answer"))
            }
            Err(status) => Err(connection.end_of(&status).await),
        }
    }
}

fn unusable(detail: &str) -> LinkEnd {
    LinkEnd { kind: EndKind::Refused, reason: None, pushback: None, revocation: None, detail: detail.into() }
}
