//! One call of `Enrollment.Renew`, over a connection of its own with the certificate that is to be renewed.

use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use tonic::{Request, Status};

use crate::identity::accept::Answer;
use crate::model::limits::{FRAME_BYTES, ID_BYTES};
use crate::model::{Incarnation, Reason, ServerTime};
use crate::ports::Connect;
use crate::wire::frames::read_envelope;
use crate::wire::link::{EndKind, Endpoint, LinkEnd, Validity};
use crate::wire::pb::enrollment_client::EnrollmentClient;
use crate::wire::{grpc, pb, status};

/// A renewal is over long before the first keep-alive.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Dial and answer together.
const ATTEMPT: Duration = Duration::from_secs(20);

/// Who calls: those of a superseded incarnation are refused.
#[derive(Debug, Clone)]
pub struct Caller {
    /// This process.
    pub incarnation: Incarnation,
    /// Its live session; absent while there is none.
    pub session: Option<String>,
}

/// What a gateway gives to a node whose clock it does not share: to be signed in the next proof. It moves no clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Challenge {
    /// The time to sign.
    pub time: ServerTime,
    /// The words to sign.
    pub text: String,
}

/// The call brought no answer.
#[derive(Debug)]
pub struct Refused {
    /// How it ended.
    pub end: LinkEnd,
    /// To be answered.
    pub challenge: Option<Challenge>,
}

impl From<LinkEnd> for Refused {
    fn from(end: LinkEnd) -> Self {
        Self { end, challenge: None }
    }
}

/// The answer as it came, and when the certificate holds that the gateway has shown.
pub(super) type Answered = (Answer, Validity);

pub(super) async fn call(
    endpoint: &Endpoint,
    tls: &Arc<ClientConfig>,
    connect: &dyn Connect,
    caller: &Caller,
    request: pb::RenewRequest,
) -> Result<Answered, Refused> {
    let call = async {
        let connection = grpc::connect(endpoint, tls, connect, KEEP_ALIVE).await?;
        let mut client = EnrollmentClient::with_origin(connection.service(), connection.origin())
            .max_decoding_message_size(FRAME_BYTES);
        let response = match client.renew(marked(request, caller)).await {
            Ok(response) => response.into_inner(),
            Err(status) => {
                let challenge = challenge(&status);
                return Err(Refused { end: connection.end_of(&status).await, challenge });
            }
        };
        let answer = read_answer(response.signed_response, response.trust_bundle)?;
        Ok((answer, connection.server_validity()))
    };
    tokio::time::timeout(ATTEMPT, call).await.unwrap_or_else(|_| {
        let detail = format!("{endpoint} gave no answer within {} s", ATTEMPT.as_secs());
        Err(LinkEnd::local(EndKind::Lost, Reason::DialTimeout, detail).into())
    })
}

/// Both documents of an answer.
pub fn read_answer(signed: Option<pb::Envelope>, bundle: Option<pb::Envelope>) -> Result<Answer, LinkEnd> {
    let (signed, bundle) = signed.zip(bundle).ok_or_else(|| unusable("its answer is not signed"))?;
    let read = |envelope| read_envelope(envelope).map_err(|error| unusable(&error.to_string()));
    Ok(Answer { response: read(signed)?, trust_bundle: read(bundle)? })
}

fn marked(request: pb::RenewRequest, caller: &Caller) -> Request<pb::RenewRequest> {
    let mut request = Request::new(request);
    let session = caller.session.as_deref().map(|session| (status::SESSION, session));
    for (name, value) in [(status::INCARNATION, caller.incarnation.as_str())].into_iter().chain(session) {
        if let Ok(value) = value.parse() {
            request.metadata_mut().insert(name, value);
        }
    }
    request
}

fn challenge(refused: &Status) -> Option<Challenge> {
    if status::reason(refused) != Some(Reason::ProofTime) {
        return None;
    }
    let text = |name| refused.metadata().get(name)?.to_str().ok();
    let time = ServerTime::from_wire(text(status::SERVER_TIME)?.parse().ok()?)?;
    let text = text(status::CHALLENGE).filter(|text| (1..=ID_BYTES).contains(&text.len()))?;
    Some(Challenge { time, text: text.to_owned() })
}

/// The end of a call whose answer cannot be used.
pub fn unusable(detail: &str) -> LinkEnd {
    LinkEnd { kind: EndKind::Refused, reason: None, pushback: None, revocation: None, detail: detail.into() }
}
