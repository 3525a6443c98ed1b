//! The reason token and the pushback in gRPC metadata.

use std::time::Duration;

use tonic::{Code, Status};

use super::link::{EndKind, LinkEnd};
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
    let detail = format!("the gateway ended the call: {:?}{token}: {said}", status.code());
    Some(LinkEnd { kind, reason, pushback: pushback(status), detail })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
    fn an_unknown_token_is_no_token_and_a_long_message_is_cut() {
        let mut status = Status::unauthenticated("x".repeat(1 << 20));
        status.metadata_mut().insert(REASON, "from-the-future".parse().expect("ascii"));
        let end = end_by_peer(&status).expect("the peer's");
        assert_eq!((end.kind, end.reason), (EndKind::Unauthenticated, None));
        assert!(end.detail.len() < 2 * limits::TEXT_BYTES);
    }
}
