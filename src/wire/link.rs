//! A link, whatever carries it: it is opened, frames are sent and received, and it is closed.

use std::time::Duration;

use futures_util::future::BoxFuture;

use super::dsse::Envelope;
use super::pb;
use crate::model::{Reason, ServerTime};

/// `host:port` of a gateway. A host may be a name, an IPv4 address or an IPv6 address in brackets.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    /// Without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

/// How an attempt or a session ended, as far as the peer or the transport said.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct LinkEnd {
    /// What kind of end.
    pub kind: EndKind,
    /// The reason token: the peer's `bcd-reason`, or our own word for a local end. Absent: none or unknown.
    pub reason: Option<Reason>,
    /// The peer's `grpc-retry-pushback-ms`, when well-formed; at most 15 minutes.
    pub pushback: Option<Duration>,
    /// The revocation that came with a refusal of the certificate, as the peer relayed it: not verified.
    pub revocation: Option<Box<Envelope>>,
    /// For people: one sentence.
    pub detail: String,
}

/// What kind of end, as session.md's reactions need it. gRPC's codes end here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EndKind {
    /// UNAVAILABLE or RESOURCE_EXHAUSTED from the peer.
    Unavailable,
    /// ABORTED from the peer.
    Aborted,
    /// UNAUTHENTICATED from the peer, or a TLS alert.
    Unauthenticated,
    /// PERMISSION_DENIED, INVALID_ARGUMENT or FAILED_PRECONDITION from the peer: an operator must act.
    Refused,
    /// The peer closed the stream in order.
    Closed,
    /// The peer asked for calm (GOAWAY ENHANCE_YOUR_CALM): double the keep-alive interval.
    Calm,
    /// The server's certificate is signed by none of our CAs: another deployment's gateway.
    ServerUntrusted,
    /// The server's certificate is of one of our CAs but for another name.
    ServerNameWrong,
    /// The server's certificate has run out, or does not hold yet.
    ServerOutOfTime,
    /// This node ended it; the reason says why.
    Local,
    /// Everything else: name, connect, timeout, broken connection, unknown status.
    Lost,
}

/// When a gateway's certificate holds: `not_before` is within, `not_after` is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// From here on.
    pub not_before: ServerTime,
    /// Until here.
    pub not_after: ServerTime,
}

impl Validity {
    /// The moment at which this share of the life is over, ‰.
    pub fn passed(self, permille: u32) -> ServerTime {
        let life = self.not_after.since(self.not_before);
        self.not_before.plus(life.saturating_mul(permille) / 1000)
    }

    /// Whether it holds at `time`.
    pub fn holds_at(self, time: ServerTime) -> bool {
        self.not_before <= time && time < self.not_after
    }
}

/// The send queue is full or the link has ended; the frame is given back.
#[derive(Debug)]
pub struct NotSent(pub Box<pb::NodeFrame>);

/// An open link. Frames go out in the order of `send`.
pub trait Link: Send {
    /// Queues a frame; never waits.
    ///
    /// # Errors
    /// The bounded queue is full, or the link has ended (`receive` says how).
    fn send(&mut self, frame: pb::NodeFrame) -> Result<(), NotSent>;

    /// When the certificate holds that the gateway has shown; absent where the transport has none.
    fn gateway_validity(&self) -> Option<Validity> {
        None
    }

    /// How many frames may be queued now.
    fn room(&self) -> usize;

    /// The next frame; `Err` once, when the link has ended. Dropping the future loses nothing.
    fn receive(&mut self) -> BoxFuture<'_, Result<pb::GatewayFrame, LinkEnd>>;

    /// Resolves when everything queued has been handed to the transport, or the link has ended. Until then `send`
    /// may find no room.
    fn flushed(&self) -> BoxFuture<'static, ()>;

    /// Ends the link: queued frames (a Goodbye among them) are flushed for at most `within`, then the call is
    /// cancelled.
    fn close(self: Box<Self>, within: Duration) -> BoxFuture<'static, ()>;
}

impl LinkEnd {
    /// An end that this side saw or made.
    pub fn local(kind: EndKind, reason: Reason, detail: impl Into<String>) -> Self {
        Self { kind, reason: Some(reason), pushback: None, revocation: None, detail: detail.into() }
    }
}

/// Name, connect, TLS and HTTP/2 together have this long.
pub const DIAL_DEADLINE: Duration = Duration::from_secs(10);

/// Opens links.
pub trait Dialer: Send + Sync {
    /// Name, connect, TLS and HTTP/2 together; the caller sets the deadline. The first frame goes with the call.
    fn open(
        &self,
        endpoint: &Endpoint,
        first: pb::NodeFrame,
        keep_alive: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Link>, LinkEnd>>;
}

/// A string that names no endpoint.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not an endpoint: {0:?} (host:port, such as gw1.lab.example:443 or [::1]:7443)")]
pub struct BadEndpoint(pub String);

impl std::str::FromStr for Endpoint {
    type Err = BadEndpoint;
    fn from_str(text: &str) -> Result<Self, BadEndpoint> {
        let bad = || BadEndpoint(text.chars().take(80).collect());
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let host = match host.strip_prefix('[') {
            Some(inner) => inner.strip_suffix(']').ok_or_else(bad)?,
            None if host.contains(':') => return Err(bad()),
            None => host,
        };
        let port = port.parse().ok().filter(|port| *port != 0).ok_or_else(bad)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
        if host.is_empty() || host.len() > 253 || !host.chars().all(plain) {
            return Err(bad());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_a_life_is_counted_from_its_beginning() {
        let day =
            Validity { not_before: ServerTime(1_000_000), not_after: ServerTime(1_000_000 + 86_400_000) };
        assert_eq!(day.passed(600).since(day.not_before), Duration::from_secs(14 * 3600 + 24 * 60));
        assert_eq!((day.passed(0), day.passed(1000)), (day.not_before, day.not_after));
        assert!(day.holds_at(day.not_before) && !day.holds_at(day.not_after));
        let none = Validity { not_before: ServerTime(5), not_after: ServerTime(4) };
        assert_eq!(none.passed(900), ServerTime(5));
    }

    #[test]
    fn an_endpoint_is_a_name_or_an_address_with_a_port_and_reads_back_from_its_text() {
        for good in ["gw1.lab.example:443", "10.0.0.7:7443", "[::1]:7443", "localhost:1"] {
            let endpoint: Endpoint = good.parse().expect(good);
            assert_eq!(endpoint.to_string(), good);
        }
        for bad in
            ["", "gw1", "gw1:", ":443", "gw1:0", "gw1:65536", "::1:443", "[::1:443", "a b:1", "gw1/x:443"]
        {
            assert!(bad.parse::<Endpoint>().is_err(), "{bad}");
        }
    }
}
