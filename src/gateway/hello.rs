//! What is checked of a Hello before the store sees it. Pure.

use std::collections::BTreeSet;

use tonic::Code;

use super::peer::Peer;
use super::store::HelloFacts;
use super::update::Update;
use crate::model::limits::{CAPABILITIES, ENTRIES, HELLO_RESULTS_BYTES};
use crate::model::{BootId, CommandId, Incarnation, JournalId, Reason, Role, ServerTime};
use crate::wire::pb;
use crate::wire::version::{self, Range};

/// A diagnostic text of a Hello, bytes.
const VERSION_BYTES: usize = 64;
/// Results in a Hello: as many as its bytes can hold, since each has a digest of 32 bytes. A node must never be
/// locked out by having many results to tell.
const RESULTS: usize = HELLO_RESULTS_BYTES / 32;

/// A refusal with its status code and token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {message}")]
pub struct Refused {
    /// gRPC's.
    pub code: Code,
    /// The token.
    pub reason: Reason,
    /// For people.
    pub message: String,
}

/// A Hello that passed.
#[derive(Debug)]
pub struct Checked {
    /// For the store.
    pub facts: HelloFacts,
    /// Chosen.
    pub proto: u32,
}

/// Checks a Hello against its certificate, in the order of what a peer must not learn first.
///
/// # Errors
/// See [`Refused`].
pub fn check(hello: &pb::Hello, peer: &Peer, own: Range, now: ServerTime) -> Result<Checked, Refused> {
    let refuse = |code, reason, message: String| Refused { code, reason, message };
    if peer.not_after <= now {
        let message = format!("the certificate ran out at {}; join again", peer.not_after);
        return Err(refuse(Code::Unauthenticated, Reason::CertificateExpired, message));
    }
    let node_range = Range::from_wire(hello.proto_min, hello.proto_max).map_err(|reason| {
        refuse(Code::InvalidArgument, reason, "the version range is empty or zero".into())
    })?;
    if hello.node_id != peer.node.as_str() {
        let message = format!("the certificate is {}'s", peer.node);
        return Err(refuse(Code::PermissionDenied, Reason::WrongIdentity, message));
    }
    if Role::from_name(&hello.role) != Some(peer.role) {
        let message = format!("the certificate's role is {}", peer.role.name());
        return Err(refuse(Code::PermissionDenied, Reason::RoleMismatch, message));
    }
    let invalid = |what: &str| refuse(Code::InvalidArgument, Reason::HelloInvalid, what.to_owned());
    let boot_id = BootId::new(&*hello.boot_id).map_err(|_| invalid("boot_id is missing or malformed"))?;
    let journal_id =
        JournalId::new(&*hello.journal_id).map_err(|_| invalid("journal_id is missing or malformed"))?;
    let incarnation =
        Incarnation::new(&*hello.incarnation).map_err(|_| invalid("incarnation is missing or malformed"))?;
    if hello.running_command_ids.len() > ENTRIES || hello.done_results.len() > RESULTS {
        return Err(invalid("a list has too many entries"));
    }
    let running = hello.running_command_ids.iter().map(|id| CommandId::new(&**id));
    let running =
        running.collect::<Result<_, _>>().map_err(|_| invalid("a running command's id is malformed"))?;
    let proto = own.choose(node_range).map_err(|reason| {
        refuse(Code::FailedPrecondition, reason, version::no_common(reason, node_range, own))
    })?;
    let facts = HelloFacts {
        node: peer.node.clone(),
        serial: peer.serial.clone(),
        boot_id,
        journal_id,
        incarnation,
        version: hello.daemon_version.chars().take(VERSION_BYTES).collect(),
        capabilities: capabilities(&hello.capabilities),
        last_epoch: hello.last_epoch,
        results: hello.done_results.iter().filter_map(|result| Update::read(result).ok()).collect(),
        running,
    };
    Ok(Checked { facts, proto })
}

/// The well-formed ones, sorted, each once, as many as may be.
fn capabilities(claimed: &[String]) -> Vec<String> {
    let well_formed = |name: &&String| {
        let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
        let rest = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-');
        first && name.len() <= 64 && name.bytes().all(rest)
    };
    let unique: BTreeSet<&String> = claimed.iter().filter(well_formed).collect();
    unique.into_iter().take(CAPABILITIES).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::NodeId;

    const NOW: ServerTime = ServerTime(1_000_000);

    fn peer() -> Peer {
        let node = NodeId::new("n-1").expect("an id");
        Peer { node, role: Role::Host, serial: "40".into(), not_after: ServerTime(2_000_000) }
    }

    fn hello() -> pb::Hello {
        pb::Hello {
            node_id: "n-1".into(),
            role: "host".into(),
            boot_id: "b-1".into(),
            journal_id: "j-1".into(),
            incarnation: "i-1".into(),
            proto_min: 1,
            proto_max: 1,
            ..Default::default()
        }
    }

    fn refused(change: impl FnOnce(&mut pb::Hello)) -> (Code, Reason) {
        let mut hello = hello();
        change(&mut hello);
        let refused = check(&hello, &peer(), Range::OWN, NOW).expect_err("refused");
        (refused.code, refused.reason)
    }

    #[test]
    fn a_whole_hello_passes_at_the_highest_common_version() {
        let checked = check(&hello(), &peer(), Range::OWN, NOW).expect("passes");
        assert_eq!(checked.proto, 1);
    }

    #[test]
    fn each_missing_or_malformed_field_is_refused_with_its_code_and_token() {
        let invalid = (Code::InvalidArgument, Reason::HelloInvalid);
        assert_eq!(refused(|hello| hello.boot_id.clear()), invalid);
        assert_eq!(refused(|hello| hello.journal_id.clear()), invalid);
        assert_eq!(refused(|hello| hello.incarnation = "a/b".into()), invalid);
        assert_eq!(refused(|hello| hello.running_command_ids = vec!["c-1".into(); ENTRIES + 1]), invalid);
    }

    #[test]
    fn another_identity_or_role_than_the_certificates_is_denied() {
        let denied = Code::PermissionDenied;
        assert_eq!(refused(|hello| hello.node_id = "n-2".into()), (denied, Reason::WrongIdentity));
        assert_eq!(refused(|hello| hello.role = "ramdisk".into()), (denied, Reason::RoleMismatch));
        assert_eq!(refused(|hello| hello.role.clear()), (denied, Reason::RoleMismatch));
    }

    #[test]
    fn a_version_range_is_judged_before_any_other_effect() {
        let range = (Code::InvalidArgument, Reason::ProtocolRange);
        assert_eq!(refused(|hello| hello.proto_max = 0), range);
    }

    #[test]
    fn without_a_common_version_the_side_to_upgrade_and_both_ranges_are_told() {
        let judged = |node: (u32, u32), own: (u32, u32)| {
            let hello = pb::Hello { proto_min: node.0, proto_max: node.1, ..hello() };
            let own = Range::from_wire(own.0, own.1).expect("a range");
            check(&hello, &peer(), own, NOW).expect_err("refused")
        };
        let old = judged((1, 2), (3, 4));
        assert_eq!((old.code, old.reason), (Code::FailedPrecondition, Reason::ProtocolTooOld));
        let words = "the node speaks protocol versions 1 to 2, the gateway 3 to 4; upgrade the node";
        assert_eq!(old.message, words);
        let new = judged((90, 91), (1, 2));
        assert_eq!((new.code, new.reason), (Code::FailedPrecondition, Reason::ProtocolTooNew));
        assert!(new.message.ends_with("the gateway 1 to 2; upgrade the gateway"), "{}", new.message);
    }

    #[test]
    fn an_expired_certificate_is_told_apart() {
        let late = ServerTime(2_000_000);
        let refused = check(&hello(), &peer(), Range::OWN, late).expect_err("refused");
        assert_eq!((refused.code, refused.reason), (Code::Unauthenticated, Reason::CertificateExpired));
    }

    #[test]
    fn capabilities_are_sorted_unique_well_formed_and_bounded() {
        let claimed = ["nvml", "cdi", "nvml", "Bad", "-x", ""].map(String::from);
        assert_eq!(capabilities(&claimed), ["cdi", "nvml"]);
        let many: Vec<String> = (0..100).map(|n| format!("c{n}")).collect();
        assert_eq!(capabilities(&many).len(), CAPABILITIES);
    }
}
