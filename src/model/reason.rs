//! Every reason token, once. Peers decide by these words; a text beside one is for people and may change.
//!
//! docs/errors.md shows the same table to users; a test holds the two together.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where a token is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// In the trailer `bcd-reason` of a refused or ended call.
    Call,
    /// In a refused or ended command.
    Command,
    /// As the why of a `busy`: the whole message beside it.
    Busy,
    /// As the reason of a Goodbye, or of a session that the node ended.
    Session,
}

macro_rules! reasons {
    ($($name:ident, $token:literal, $used:ident, $means:literal;)+) => {
        /// A reason token.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Reason {
            $(#[doc = $means] $name,)+
        }

        impl Reason {
            /// Every token, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// The token.
            pub fn token(self) -> &'static str {
                match self { $(Self::$name => $token,)+ }
            }

            /// What it means, for docs/errors.md.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $means,)+ }
            }

            /// Where it is used.
            pub fn used(self) -> Use {
                match self { $(Self::$name => Use::$used,)+ }
            }
        }
    };
}

reasons! {
    NotStarted, "not-started", Call, "the gateway is not ready yet; the node retries";
    Draining, "draining", Call, "the gateway is being emptied; the node retries elsewhere";
    Storm, "storm", Call, "too many handshakes at once; the node waits the pushback";
    Full, "full", Call, "the gateway holds as many sessions as it may; the node waits the pushback";
    HeartbeatTimeout, "heartbeat-timeout", Call, "no frame came from the node for three heartbeat intervals";
    Superseded, "superseded", Call, "a newer session of the same identity took over: another machine uses this identity, unless the node redialed";
    GatewayFenced, "gateway-fenced", Call, "the gateway lost its lease";
    CertificateExpired, "certificate-expired", Call, "the node certificate has run out; renew it or join again";
    CertificateRevoked, "certificate-revoked", Call, "the node certificate was revoked";
    DuplicateIdentity, "duplicate-identity", Call, "two machines used one identity; it is quarantined";
    IdentitySuperseded, "identity-superseded", Call, "the node has joined again, or used a newer certificate, since; this is its older identity";
    UnknownNode, "unknown-node", Call, "the control plane does not know this node; join again";
    WrongIdentity, "wrong-identity", Call, "the node id in Hello is not the certificate's";
    RoleMismatch, "role-mismatch", Call, "the role in Hello is not the certificate's";
    CertificateMissing, "certificate-missing", Call, "the call needs a node certificate";
    HelloMissing, "hello-missing", Call, "the first frame must be Hello, in time";
    HelloInvalid, "hello-invalid", Call, "a required field of Hello is missing or malformed";
    ProtocolRange, "protocol-range", Call, "the version range is empty or zero";
    ProtocolTooOld, "protocol-too-old", Call, "the node speaks only versions that are too old: upgrade the node";
    ProtocolTooNew, "protocol-too-new", Call, "the node speaks only versions that are too new: upgrade the gateway";
    TicketInvalid, "ticket-invalid", Call, "the join token is not known here";
    TicketExpired, "ticket-expired", Call, "the join ticket has run out; ask for a new one";
    TicketUsed, "ticket-used", Call, "the join ticket has been used up; ask for a new one";
    ProofTime, "proof-time", Call, "the proof of a renewal is over 60 s old or young by the control plane's clock";
    RejoinTooLate, "rejoin-too-late", Call, "the certificate ran out longer ago than the join service lets its key join again: join with a new ticket";
    CertificateValid, "certificate-valid", Call, "the certificate holds still by the join service's clock: renew it";
    JoinInvalid, "join-invalid", Call, "the join request is malformed";
    Internal, "internal", Call, "the gateway failed; its log says how";

    TimeBackwards, "time-backwards", Session, "the Welcome's time is over 5 minutes older than the mark that this node keeps, or older than the gateway's own certificate";
    TimeAhead, "time-ahead", Session, "the Welcome's time lies at or after the end of the certificate that the session was opened with, or of the gateway's own";
    ProtocolError, "protocol-error", Session, "the gateway sent a frame that has no place here";
    WelcomeInvalid, "welcome-invalid", Session, "a field of Welcome is missing or out of range";
    ProtocolVersion, "protocol-version", Session, "the Welcome names a version outside the node's range";
    WelcomeTimeout, "welcome-timeout", Session, "no Welcome came within 10 s of Hello";
    DialTimeout, "dial-timeout", Session, "name, connect, TLS and HTTP/2 together took more than 10 s";
    DialFailed, "dial-failed", Session, "the gateway could not be reached";
    HalfOpen, "half-open", Session, "no frame came from the gateway for three heartbeat intervals";
    LinkLost, "link-lost", Session, "the connection broke";
    FrameTooLarge, "frame-too-large", Session, "a frame was larger than 4 MiB, or of over 32,768 elements";
    DrainRequested, "drain-requested", Session, "the gateway asked the node to redial elsewhere";
    IdentityExpiring, "identity-expiring", Session, "less than a quarter of the node certificate's life is left, since it could not be renewed";
    IdentityExpired, "identity-expired", Session, "the node certificate has run out by the working clock; the node does not offer it, and joins again with its key";
    RejoinRefused, "rejoin-refused", Session, "the join service does not let the node join again with the key of the certificate that has run out: join again with a new ticket";
    OldCopy, "old-copy", Session, "the gateway has events that this journal has not sent yet: it is an older copy of itself, takes a new id and redials";
    Stop, "stop", Session, "the daemon was asked to stop";

    Invalid, "invalid", Command, "the frame is malformed or over a limit";
    SignatureRequired, "signature-required", Command, "the command carries no signature and the policy asks for one";
    SignatureInvalid, "signature-invalid", Command, "the signature or its signer does not hold";
    WrongNode, "wrong-node", Command, "the body is for another node or another trust domain";
    NotAfterTooFar, "not-after-too-far", Command, "not_after lies more than 7 days after issued_at";
    CommandIdConflict, "command-id-conflict", Command, "the id is known with other bytes";
    UpgradeRequired, "upgrade-required", Command, "the session admits only daemon.upgrade";
    UnsupportedField, "unsupported-field", Command, "the body has a field that this build does not know";
    InvalidArguments, "invalid-arguments", Command, "the body or the arguments cannot be read";
    UnknownKind, "unknown-kind", Command, "this build does not run the kind";
    KindNotAllowed, "kind-not-allowed", Command, "the node's role or certificate may not run the kind";
    DeniedByOperator, "denied-by-operator", Command, "the kind is in [kinds] deny of bcd.toml";
    Expired, "expired", Command, "not_after has passed";
    JournalLost, "journal-lost", Command, "the journal that knew the command is lost, and the kind may not run twice";
    StaleGeneration, "stale-generation", Command, "the command needs a desired state newer than the one applied here";
    RolloutBehind, "rollout-behind", Command, "the rollout generation is below the highest one accepted";
    Busy, "busy", Command, "not now; the message says why";
    Interrupted, "interrupted", Command, "the daemon ended while the command ran, so nobody knows how far it came";
    ExitStatus, "exit-status", Command, "the program ended with a status other than 0";
    Signal, "signal", Command, "a signal ended the program";
    TimeLimit, "time-limit", Command, "the program ran into its time limit and was ended";
    OutOfMemory, "out-of-memory", Command, "the kernel killed the program for want of memory: its own limit's, or the host's";
    CouldNotStart, "could-not-start", Command, "the program could not be started; the message has the errno";
    Rebooted, "rebooted", Command, "the machine has a new boot since the command began";
    InventoryUnknown, "inventory-unknown", Command, "the node could not look at what it holds; that is not the same as empty";
    Cancelled, "cancelled", Command, "the command was cancelled";
    NodeDeleted, "node-deleted", Command, "the node was deleted before the command had ended";
    ResultAltered, "result-altered", Command, "what came beside a signed result is not what its node has signed";
    AlreadyDone, "already-done", Command, "the command was done before; nothing was started";

    Credits, "credits", Busy, "no credit is free on the lane";
    JournalFull, "journal-full", Busy, "the journal holds as many unacked results, or events that are never dropped, as it may";
    Disk, "disk", Busy, "no space, quota or inodes left for the journal";
    ReadOnly, "read-only", Busy, "the journal's file system is read-only";
    IoError, "io-error", Busy, "the journal's disk reports an error";
    Stopping, "stopping", Busy, "the daemon is stopping";
    Held, "held", Busy, "the operator of this host holds it (bcd hold); bcd release ends that";
    NoBirth, "no-birth", Busy, "the journal has no birth time, so the age of the command cannot be judged";
}

impl Reason {
    /// By its token.
    pub fn from_token(token: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|reason| reason.token() == token)
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.token())
    }
}

impl Serialize for Reason {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.token())
    }
}

impl<'de> Deserialize<'de> for Reason {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let token = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        Self::from_token(&token).ok_or_else(|| serde::de::Error::custom("unknown reason token"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn tokens_are_unique_lower_case_and_found_by_their_text() {
        let mut seen = BTreeSet::new();
        for reason in Reason::ALL {
            let token = reason.token();
            assert!(seen.insert(token), "{token} stands twice");
            assert!(token.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{token}");
            assert_eq!(Reason::from_token(token), Some(*reason));
        }
    }
}
