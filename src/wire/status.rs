//! The reason token and the pushback in gRPC metadata.

use std::time::Duration;

use tonic::metadata::BinaryMetadataValue;
use tonic::{Code, Status};

use super::dsse::Envelope;
use super::frames::read_envelope;
use super::link::{EndKind, LinkEnd};
use super::{pb, shape};
use crate::model::{Reason, limits};

/// The trailer with the reason token.
pub const REASON: &str = "bcd-reason";
/// The standard trailer that says when to come back, ms.
pub const PUSHBACK: &str = "grpc-retry-pushback-ms";
/// Metadata of a call beside the session: the caller's incarnation.
pub const INCARNATION: &str = "bcd-incarnation";
/// And its session.
pub const SESSION: &str = "bcd-session";
/// Beside `proof-time`: the control plane's clock, ms since the Unix epoch.
pub const SERVER_TIME: &str = "bcd-server-time-ms";
/// And what the next proof is to sign with it.
pub const CHALLENGE: &str = "bcd-challenge";
/// Beside a refusal of the certificate: the signed revocation, an encoded Envelope.
pub const REVOCATION: &str = "bcd-revocation-bin";
/// It has at most so many bytes: a header list has 16 KiB, and this grows by a third on its way.
pub const REVOCATION_BYTES: usize = 8 << 10;
/// A pushback is followed up to this.
pub const MAX_PUSHBACK: Duration = Duration::from_secs(15 * 60);

/// A refusal or end with its token and, where the other side should come back at a time, the pushback.
pub fn refusal(code: Code, reason: Reason, message: &str, pushback: Option<Duration>) -> Status {
    let mut status = Status::new(code, message);
    let metadata = status.metadata_mut();
    metadata.insert(REASON, tonic::metadata::MetadataValue::from_static(reason.token()));
    if let Some(pushback) = pushback
        && let Ok(value) = pushback.as_millis().to_string().parse()
    {
        metadata.insert(PUSHBACK, value);
    }
    status
}

/// The same refusal with the revocation that the join service has signed; one that is too long is left out.
pub fn with_revocation(mut status: Status, envelope: &[u8]) -> Status {
    if envelope.len() <= REVOCATION_BYTES {
        status.metadata_mut().insert_bin(REVOCATION, BinaryMetadataValue::from_bytes(envelope));
    }
    status
}

/// The revocation of a status, where it can be read; `Err` where something else stands in its place.
fn revocation(status: &Status) -> Result<Option<Box<Envelope>>, &'static str> {
    let mut values = status.metadata().get_all_bin(REVOCATION).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return Err("it stands there twice");
    }
    // Before it is decoded: base64 is longer than what it stands for.
    if value.as_encoded_bytes().len() > 2 * REVOCATION_BYTES {
        return Err("it is too long");
    }
    let bytes = value.to_bytes().map_err(|_| "it is not base64")?;
    let envelope = shape::decode::<pb::Envelope>(&bytes).map_err(|_| "it is no envelope")?;
    let envelope = read_envelope(envelope).map_err(|_| "it is over a limit")?;
    Ok(Some(Box::new(envelope)))
}

/// The token of a status, when it carries one that this build knows.
pub fn reason(status: &Status) -> Option<Reason> {
    Reason::from_token(status.metadata().get(REASON)?.to_str().ok()?)
}

/// The pushback of a status: missing, malformed or negative is none; more than 15 minutes is 15 minutes.
pub fn pushback(status: &Status) -> Option<Duration> {
    let ms: u64 = status.metadata().get(PUSHBACK)?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(ms).min(MAX_PUSHBACK))
}

/// How a call ended by `status`, when it was the peer who said so; absent for a status that this side made up for a
/// broken connection or an unreadable answer.
pub fn end_by_peer(status: &Status) -> Option<LinkEnd> {
    // tonic attaches the transport's error to the statuses it makes up itself, but not to all of them.
    if std::error::Error::source(status).is_some() {
        return None;
    }
    let reason = reason(status);
    let kind = match status.code() {
        Code::Unavailable | Code::ResourceExhausted => EndKind::Unavailable,
        Code::Aborted => EndKind::Aborted,
        Code::Unauthenticated => EndKind::Unauthenticated,
        Code::PermissionDenied | Code::InvalidArgument | Code::FailedPrecondition => EndKind::Refused,
        Code::Ok => EndKind::Closed,
        _ if reason.is_some() || status.metadata().contains_key(PUSHBACK) => EndKind::Lost,
        _ => return None,
    };
    let said: String = status.message().chars().take(limits::TEXT_BYTES).collect();
    let token = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
    let mut detail = format!("the gateway ended the call: {:?}{token}: {said}", status.code());
    let revocation = match kind {
        EndKind::Unauthenticated => revocation(status).unwrap_or_else(|why| {
            detail.push_str(&format!("; its revocation cannot be read and counts for nothing: {why}"));
            None
        }),
        _ => None,
    };
    Some(LinkEnd { kind, reason, pushback: pushback(status), revocation, detail })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prost::Message as _;

    use super::*;

    #[test]
    fn a_refusal_carries_its_token_and_pushback() {
        let status = refusal(
            Code::ResourceExhausted,
            Reason::Storm,
            "too many handshakes",
            Some(Duration::from_millis(1500)),
        );
        assert_eq!(reason(&status), Some(Reason::Storm));
        assert_eq!(pushback(&status), Some(Duration::from_millis(1500)));
    }

    #[test]
    fn a_missing_malformed_or_negative_pushback_is_ignored_and_a_long_one_capped() {
        let with = |value: &'static str| {
            let mut status = Status::unavailable("x");
            status.metadata_mut().insert(PUSHBACK, value.parse().expect("ascii"));
            pushback(&status)
        };
        assert_eq!(pushback(&Status::unavailable("x")), None);
        assert_eq!(with("-1"), None);
        assert_eq!(with("soon"), None);
        assert_eq!(with("1e3"), None);
        assert_eq!(with("99999999"), Some(MAX_PUSHBACK));
    }

    #[test]
    fn each_code_that_the_peer_sends_has_its_kind() {
        for (code, kind) in [
            (Code::Unavailable, EndKind::Unavailable),
            (Code::ResourceExhausted, EndKind::Unavailable),
            (Code::Aborted, EndKind::Aborted),
            (Code::Unauthenticated, EndKind::Unauthenticated),
            (Code::PermissionDenied, EndKind::Refused),
            (Code::InvalidArgument, EndKind::Refused),
            (Code::FailedPrecondition, EndKind::Refused),
        ] {
            assert_eq!(end_by_peer(&Status::new(code, "")).map(|end| end.kind), Some(kind), "{code:?}");
        }
        let internal = refusal(Code::Internal, Reason::Internal, "its store failed", None);
        let end = end_by_peer(&internal).expect("the peer's");
        assert_eq!((end.kind, end.reason), (EndKind::Lost, Some(Reason::Internal)));
    }

    #[test]
    fn a_status_made_for_a_broken_connection_is_not_the_peers() {
        assert_eq!(end_by_peer(&Status::unknown("broken pipe")), None);
        let broken = Status::from_error(Box::new(std::io::Error::other("reset")));
        assert_eq!(end_by_peer(&broken), None);
        let mut dressed = Status::unavailable("keep-alive timed out");
        dressed.set_source(Arc::new(std::io::Error::other("reset")));
        assert_eq!(end_by_peer(&dressed), None);
    }

    #[test]
    fn a_refusal_of_the_certificate_brings_its_revocation_and_no_other_refusal_does() {
        let envelope = pb::Envelope { payload: "a body".into(), ..Default::default() };
        let refused = |code| {
            let refused = refusal(code, Reason::CertificateRevoked, "revoked", None);
            end_by_peer(&with_revocation(refused, &envelope.encode_to_vec())).expect("the peer's").revocation
        };
        let read = read_envelope(envelope.clone()).expect("an envelope");
        assert_eq!(refused(Code::Unauthenticated), Some(Box::new(read)));
        assert_eq!(refused(Code::PermissionDenied), None);
    }

    #[test]
    fn what_is_no_revocation_within_the_limits_is_none_and_the_refusal_says_so() {
        let long = pb::Envelope { payload: vec![0; REVOCATION_BYTES].into(), ..Default::default() };
        let over = pb::Envelope { signatures: vec![pb::Signature::default(); 9], ..Default::default() };
        let with = |values: &[&[u8]]| {
            let mut refused = refusal(Code::Unauthenticated, Reason::CertificateRevoked, "revoked", None);
            for value in values {
                refused.metadata_mut().append_bin(REVOCATION, BinaryMetadataValue::from_bytes(value));
            }
            end_by_peer(&refused).expect("the peer's")
        };
        let (long, over) = (long.encode_to_vec(), over.encode_to_vec());
        let far_too_long = vec![0; 2 * REVOCATION_BYTES];
        for values in [&[&b"\xff\xff"[..]][..], &[&over[..]], &[&far_too_long[..]], &[&b""[..], &b""[..]]] {
            let end = with(values);
            assert_eq!((end.revocation, end.reason), (None, Some(Reason::CertificateRevoked)));
            assert!(end.detail.contains("cannot be read and counts for nothing"), "{}", end.detail);
        }
        assert!(with(&[&long[..]]).revocation.is_some(), "what a newer gateway may send");
        let left_out = with_revocation(Status::unauthenticated("revoked"), &long);
        assert!(left_out.metadata().get_bin(REVOCATION).is_none());
    }

    #[test]
    fn an_unknown_token_is_no_token_and_a_long_message_is_cut() {
        let mut status = Status::unauthenticated("x".repeat(1 << 20));
        status.metadata_mut().insert(REASON, "from-the-future".parse().expect("ascii"));
        let end = end_by_peer(&status).expect("the peer's");
        assert_eq!((end.kind, end.reason), (EndKind::Unauthenticated, None));
        assert!(end.detail.len() < 2 * limits::TEXT_BYTES);
    }
}
