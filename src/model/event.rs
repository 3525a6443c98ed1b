//! Events: what a node tells of beside results. One table names every type with its class.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What may become of an event when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventClass {
    /// A change of state. Never dropped.
    Transition,
    /// Somebody tried what must not be. Never dropped; at most once a minute a type where a peer can cause it.
    Security,
    /// For whoever looks for a cause. Dropped when the journal is full of what may not be dropped.
    Log,
    /// A measurement. The oldest are dropped first.
    Metric,
}

impl EventClass {
    /// Every class.
    pub const ALL: [Self; 4] = [Self::Transition, Self::Security, Self::Log, Self::Metric];

    /// Its name in documents and answers.
    pub fn name(self) -> &'static str {
        match self {
            Self::Transition => "transition",
            Self::Security => "security",
            Self::Log => "log",
            Self::Metric => "metric",
        }
    }

    /// Whether it is kept whatever the journal holds.
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Transition | Self::Security)
    }
}

macro_rules! events {
    ($($name:ident, $token:literal, $class:ident, $means:literal;)+) => {
        /// A type of event.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum EventType {
            $(#[doc = $means] $name,)+
        }

        impl EventType {
            /// Every type, in the order of the table.
            pub const ALL: &[Self] = &[$(Self::$name,)+];

            /// Its name on the wire and on disk.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $token,)+ }
            }

            /// Its class.
            pub fn class(self) -> EventClass {
                match self { $(Self::$name => EventClass::$class,)+ }
            }

            /// What it tells, with the fields of its body, for docs/events.md.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $means,)+ }
            }
        }
    };
}

events! {
    DaemonStarted, "daemon.started", Transition, "a daemon has recovered: `version`, `incarnation`, `boot_id`, and what it found: `interrupted`, `waiting`, `unacked` (counts)";
    DaemonStopped, "daemon.stopped", Transition, "a daemon was asked to stop and did: `incarnation`";
    JournalMovedAside, "journal.moved-aside", Transition, "the journal was corrupt and a new one was begun: `kept` (name of the file)";
    JournalOldCopy, "journal.old-copy", Transition, "the journal was an older copy of itself and took a new id: `former` (its id), `acked` (the sequence that gave it away), `gaps` (events dropped before and not yet told)";
    CommandAccepted, "command.accepted", Transition, "a command is known durably: `id`, `kind`";
    CommandRunning, "command.running", Transition, "its effect may start: `id`, `attempt`";
    CommandDone, "command.done", Transition, "it has ended, and its result is owed: `id`, `attempt`, `state`, `reason` (absent for none), `effect`";
    AdmissionHeld, "admission.held", Transition, "the operator of the host holds it, so that no command is admitted; told when that begins and at each start while it stands: `why` (the operator's word, may be empty)";
    AdmissionReleased, "admission.released", Transition, "the operator has ended the hold";
    TrustBundleTaken, "trust-bundle.taken", Transition, "a newer trust bundle is in force from the next dial on: `version`";
    NodeLeaving, "node.leaving", Transition, "the machine is to be a node no more: `report` (the envelope of the signed report `leave`)";
    IdentityRevoked, "identity.revoked", Transition, "the join service has revoked the certificate in use, which is not used again: `serial`";
    TrustBundleRefused, "trust-bundle-refused", Security, "a trust bundle came that is not of the pinned key, is older than one held, or cannot be used: `detail`, `count` since the last such event";
    RevocationRefused, "revocation-refused", Security, "a revocation came that is not of the pinned key, or not for this node: `detail`, `count` since the last such event";
    RenewalRefused, "renewal-refused", Security, "an answer to a renewal came that is not of the pinned key, not for this request or not this node's, and nothing of it was kept: `detail`, `count` since the last such event";
    CommandIdConflict, "command-id-conflict", Security, "a known id came with other bytes: `id`, `body_sha256` of what came, `count` since the last such event";
    SignatureInvalid, "signature-invalid", Security, "a command or a cancellation came whose signature or signer does not hold, or that has none where one is needed: `detail`, `count` since the last such event";
    WrongNode, "wrong-node", Security, "a signed body for another node or trust domain came: `detail`, `count` since the last such event";
    SessionOpened, "session.opened", Log, "a Welcome was applied: `gateway`, `epoch`, `attempt` (dials that failed before), `last_end` (reason of the last end; absent before the first)";
    NodeLoad, "node.load", Metric, "every 5 minutes: `load` (averages over 1, 5, 15 minutes), `available_memory` (bytes), `running` (commands)";
}

impl fmt::Display for EventType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An event that has no sequence yet.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    /// Its type.
    pub kind: EventType,
    /// Its body, an object.
    pub body: Value,
}

impl NewEvent {
    /// An event of a type with a body.
    pub fn new(kind: EventType, body: Value) -> Self {
        Self { kind, body }
    }
}

/// An event as it stands in the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Its number within its journal, from 1; they rise.
    pub seq: u64,
    /// Its class.
    pub class: EventClass,
    /// Its type's name. Text, since an older or newer build may have written it.
    pub kind: String,
    /// JSON.
    pub body: String,
    /// The machine's wall clock when it was written, ms since the Unix epoch. Advisory.
    pub at_ms: i64,
    /// Boot time when it was written, ms; absent when that was in another boot.
    pub boot_ms: Option<u64>,
    /// First and last of the numbers right before this one whose events were dropped.
    pub dropped: Option<(u64, u64)>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_type_has_a_name_of_its_own_that_fits_the_wire() {
        let names: BTreeSet<_> = EventType::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), EventType::ALL.len());
        for name in names {
            assert!(
                name.len() <= 64 && name.bytes().all(|b| b.is_ascii_lowercase() || b".-".contains(&b)),
                "{name}"
            );
        }
    }

    #[test]
    fn what_tells_of_a_command_or_a_peer_is_never_dropped() {
        let kept = |prefix: &str| {
            EventType::ALL
                .iter()
                .filter(|kind| kind.name().starts_with(prefix))
                .all(|kind| kind.class().is_kept())
        };
        assert!(kept("command") && kept("daemon") && kept("journal") && kept("wrong-node"));
        assert!(EventClass::ALL.iter().any(|class| !class.is_kept()));
    }
}
