//! What `bcd status` shows. Moments are CLOCK_BOOTTIME in ms, so that they become ages without a wall clock.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::identity::Identity;
use crate::journal::Vitals;
use crate::journal::inspect::Snapshot;
use crate::model::{
    CommandId, Digest, Incarnation, JournalId, Lane, NodeId, Reason, Role, ServerTime, limits,
};
use crate::session::{SessionState, SessionStatus};
use crate::upkeep::Condition;
use crate::wire::link::Validity;

/// A certificate of whose life so much has passed is told of as a fault, ‰: it should have been renewed long before.
const LOW: u32 = 750;

/// Version of the document.
pub const SCHEMA: u32 = 1;

/// The daemon's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`]; rises with a change of shape that is not an addition.
    pub schema: u32,
    /// Version of the daemon.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// When this was said, boot time, ms.
    pub boot_ms: u64,
    /// Server time as the daemon knows it; absent before the first one ever.
    pub server_time: Option<ServerTime>,
    /// Who this node is.
    pub node: Node,
    /// The session.
    pub session: SessionStatus,
    /// Free credits by lane.
    pub lanes: BTreeMap<Lane, u32>,
    /// Commands running in this daemon.
    pub running: Vec<CommandId>,
    /// The journal; absent when it cannot be read, which is then among the conditions.
    pub journal: Option<Journal>,
    /// The node certificate.
    pub certificate: Certificate,
    /// Standing local faults.
    pub conditions: Vec<Condition>,
}

/// Who a node is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Node {
    /// Its id.
    pub id: NodeId,
    /// host or ramdisk.
    pub role: Role,
    /// Where it stands.
    pub site: String,
    /// What the operator calls such machines.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The deployment's name.
    pub trust_domain: String,
    /// Identity generation.
    pub generation: u64,
    /// SHA-256 of the key's public half.
    pub fingerprint: Digest,
}

/// Counts of the journal.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Journal {
    /// Id of the file.
    pub id: JournalId,
    /// Its birth; absent when it has none.
    pub birth: Option<ServerTime>,
    /// The latest session's epoch; 0 before the first.
    pub last_epoch: u64,
    /// Commands known, not started.
    pub accepted: u64,
    /// Commands perhaps started.
    pub running: u64,
    /// Results not acked.
    pub unacked: u64,
    /// Commands ended and acked.
    pub tombstones: u64,
}

/// The node certificate's life.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Certificate {
    /// Its end.
    pub not_after: ServerTime,
    /// What is left of it by server time, seconds, 0 when it has run out; absent before the first server time ever.
    pub remaining_s: Option<u64>,
    /// Less than a quarter of its life is left: its renewals have failed for long.
    #[serde(default)]
    pub low: bool,
}

impl Node {
    /// Of an identity.
    pub fn of(identity: &Identity) -> Self {
        Self {
            id: identity.node_id.clone(),
            role: identity.role,
            site: identity.site.clone(),
            labels: identity.labels.0.clone(),
            trust_domain: identity.trust_domain.clone(),
            generation: identity.generation,
            fingerprint: identity.fingerprint,
        }
    }
}

impl Certificate {
    /// A certificate that holds so long, looked at at `now`.
    pub fn at(validity: Validity, now: Option<ServerTime>) -> Self {
        let not_after = validity.not_after;
        let low = now.is_some_and(|now| now > validity.passed(LOW));
        Self { not_after, remaining_s: now.map(|now| not_after.since(now).as_secs()), low }
    }
}

impl Journal {
    /// The counts of a snapshot.
    pub fn of(snapshot: &Snapshot) -> Self {
        Self {
            id: snapshot.journal_id.clone(),
            birth: snapshot.birth,
            last_epoch: snapshot.last_epoch,
            accepted: snapshot.counts.accepted,
            running: snapshot.counts.running,
            unacked: snapshot.counts.done,
            tombstones: snapshot.counts.tombstones,
        }
    }
}

/// The faults that stand, beside those of the disk.
///
/// `rejoins` is what becomes of a node whose certificate has run out.
pub fn conditions(journal: Vitals, certificate: Certificate, rejoins: &str) -> Vec<(Reason, String)> {
    let mut found = Vec::new();
    let mut say = |token: Reason, detail: String| found.push((token, detail));
    if journal.owed >= limits::UNACKED_RESULTS {
        say(Reason::JournalFull, format!("{} results are owed or to come", journal.owed));
    }
    if journal.birth.is_none() {
        say(Reason::NoBirth, Reason::NoBirth.meaning().into());
    }
    if certificate.remaining_s == Some(0) {
        let detail = format!("the node certificate ran out at {}; {rejoins}", certificate.not_after);
        say(Reason::IdentityExpired, detail);
    } else if certificate.low {
        let detail = format!(
            "the node certificate holds only until {}, and has not been renewed; the log says why each try failed",
            certificate.not_after
        );
        say(Reason::IdentityExpiring, detail);
    }
    found
}

impl Report {
    /// How long before this answer a moment was.
    pub fn age(&self, boot_ms: u64) -> Duration {
        Duration::from_millis(self.boot_ms.saturating_sub(boot_ms))
    }

    /// Ready means: a heartbeat was acked within the last three intervals.
    ///
    /// # Errors
    /// Why it is not ready.
    pub fn ready(&self) -> Result<(), String> {
        let Some(live) = &self.session.live else {
            return Err(match self.session.state {
                SessionState::Stopped => "the daemon is stopping".into(),
                _ => "there is no session with a gateway".into(),
            });
        };
        let Some(acked) = live.acked_boot_ms else { return Err("no heartbeat has been acked yet".into()) };
        let age = self.age(acked);
        if age < Duration::from_millis(live.heartbeat_interval_ms).saturating_mul(3) {
            Ok(())
        } else {
            Err(format!("the last ack is {:.0} s old", age.as_secs_f32()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::status::LiveStatus;

    fn holds(until: i64) -> Validity {
        Validity { not_before: ServerTime(0), not_after: ServerTime(until) }
    }

    fn report(boot_ms: u64, live: Option<LiveStatus>) -> Report {
        let session = SessionStatus { live, ..SessionStatus::new(Duration::ZERO) };
        Report {
            schema: SCHEMA,
            version: "1".into(),
            pid: 1,
            incarnation: Incarnation::new("i-1").unwrap(),
            boot_ms,
            server_time: None,
            node: Node {
                id: NodeId::new("n-1").unwrap(),
                role: Role::Host,
                site: "fra1".into(),
                labels: BTreeMap::new(),
                trust_domain: "lab.example".into(),
                generation: 1,
                fingerprint: Digest::of(b"key"),
            },
            session,
            lanes: BTreeMap::new(),
            running: Vec::new(),
            journal: None,
            certificate: Certificate::at(holds(1), None),
            conditions: Vec::new(),
        }
    }

    fn live(acked_boot_ms: Option<u64>) -> Option<LiveStatus> {
        let gateway_id = "gw".into();
        let session_id = "s-1".into();
        Some(LiveStatus {
            session_id,
            gateway_id,
            epoch: 1,
            proto: 1,
            heartbeat_interval_ms: 10_000,
            acked_boot_ms,
        })
    }

    #[test]
    fn ready_is_an_ack_younger_than_three_heartbeats() {
        assert!(report(50_000, live(Some(20_001))).ready().is_ok());
        assert!(report(50_000, live(Some(20_000))).ready().is_err());
        assert!(report(50_000, live(None)).ready().is_err());
        assert!(report(50_000, None).ready().is_err());
    }

    #[test]
    fn faults_stand_as_conditions_with_their_tokens() {
        let journal = |birth, owed| Vitals { owed, birth };
        let at = |now| Certificate::at(holds(100_000), Some(ServerTime(now)));
        let (good, low, past) = (at(75_000), at(75_001), at(200_000));
        let tokens = |journal, certificate| -> Vec<Reason> {
            conditions(journal, certificate, "join again").into_iter().map(|(token, _)| token).collect()
        };
        let sound = journal(Some(ServerTime(1)), 0);
        assert_eq!(tokens(sound, good), []);
        assert_eq!(tokens(sound, low), [Reason::IdentityExpiring]);
        let full = journal(None, limits::UNACKED_RESULTS);
        assert_eq!(tokens(full, good), [Reason::JournalFull, Reason::NoBirth]);
        assert_eq!(tokens(sound, past), [Reason::IdentityExpired]);
    }
}
