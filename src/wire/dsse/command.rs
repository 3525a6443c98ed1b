//! Commands and cancellations: steps 1 and 2 of admission, on the bytes alone.

use super::{Audience, CommandRoots, Envelope, Verified, Worker, check_audience, shown};
use crate::model::limits::COMMAND_LIFE;
use crate::model::{Command, CommandId, Digest, Kind, NodeId, Reason, ServerTime, strict};
use crate::mutant::{self, Mutant};

/// Which commands need a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// All.
    #[default]
    All,
    /// Destructive kinds only.
    Destructive,
    /// None: whoever can reach the node commands it. Simulation builds only.
    #[cfg(feature = "fakehw")]
    None,
}

/// What a command's signature is held against.
#[derive(Debug, Clone)]
pub struct Authority {
    /// Which commands need one.
    pub policy: Policy,
    /// Who may sign.
    pub roots: CommandRoots,
    /// Server time by the working clock: signers are judged by it. Absent: not known yet, and no signature holds.
    pub now: Option<ServerTime>,
}

impl From<Policy> for Authority {
    /// The policy of a node that holds no command roots.
    fn from(policy: Policy) -> Self {
        Self { policy, roots: CommandRoots::default(), now: None }
    }
}

impl Authority {
    /// Who vouches for an envelope; absent where the policy needs nobody.
    fn judge(&self, envelope: &Envelope, destructive: bool) -> Result<Option<Worker>, (Reason, String)> {
        if mutant::is(Mutant::SignatureUnchecked) {
            return Ok(None);
        }
        let required = match self.policy {
            Policy::All => true,
            Policy::Destructive => destructive,
            #[cfg(feature = "fakehw")]
            Policy::None => return Ok(None),
        };
        match (envelope.signatures.is_empty(), required) {
            (true, true) => {
                let detail = "the policy asks for a signature and there is none";
                Err((Reason::SignatureRequired, detail.to_owned()))
            }
            (true, false) => Ok(None),
            // A signature that does not hold is never better than none.
            (false, _) => {
                let now = self.now.ok_or_else(|| {
                    (Reason::SignatureInvalid, "this node does not know the time yet".to_owned())
                })?;
                let signer = self.roots.signer(envelope, now);
                signer.map(Some).map_err(|error| (Reason::SignatureInvalid, error.to_string()))
            }
        }
    }
}

/// A refusal on the bytes alone (admission steps 1 and 2): never written, no trace of the id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The command, where the body could name one.
    pub id: Option<CommandId>,
    /// SHA-256 of the payload.
    pub body_sha256: Digest,
    /// `invalid`, `signature-required`, `signature-invalid`, `wrong-node` or `not-after-too-far`.
    pub reason: Reason,
    /// For people.
    pub detail: String,
}

/// The signed body of a cancellation.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
pub struct CancelBody {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it is for.
    pub node_id: NodeId,
    /// The command to cancel.
    pub command_id: CommandId,
    /// When it was signed.
    pub issued_at: ServerTime,
}

/// Payload type of a command.
pub const COMMAND_TYPE: &str = "application/vnd.bcd.v1.command";
/// Payload type of a cancellation.
pub const CANCEL_TYPE: &str = "application/vnd.bcd.v1.cancel";

/// Verifies a command's envelope: steps 1 and 2 of admission.
///
/// # Errors
/// See [`Refusal`].
pub fn verify_command(
    envelope: &Envelope,
    audience: &Audience,
    authority: &Authority,
) -> Result<Verified<Command>, Box<Refusal>> {
    let refusal = |id: Option<&CommandId>, reason, detail: String| {
        let body_sha256 = Digest::of(&envelope.payload);
        Box::new(Refusal { id: id.cloned(), body_sha256, reason, detail })
    };
    if envelope.payload_type != COMMAND_TYPE {
        let detail =
            format!("the envelope's type is {:?}, not {COMMAND_TYPE}", shown(&envelope.payload_type));
        return Err(refusal(None, Reason::Invalid, detail));
    }
    let command = Command::parse(envelope.payload.clone())
        .map_err(|error| refusal(None, Reason::Invalid, error.to_string()))?;
    let header = &command.header;
    let id = Some(&header.id);
    // A kind that this build does not know is taken for destructive: absent knowledge relaxes nothing.
    let destructive = Kind::from_name(&header.kind).is_none_or(|kind| kind.properties().destructive);
    let signer =
        authority.judge(envelope, destructive).map_err(|(reason, detail)| refusal(id, reason, detail))?;
    check_audience(&header.trust_domain, Some(&header.node_id), audience)
        .map_err(|detail| refusal(id, Reason::WrongNode, detail))?;
    if header.not_after.since(header.issued_at) > COMMAND_LIFE {
        let detail =
            format!("issued at {}, not after {}: more than 7 days", header.issued_at, header.not_after);
        return Err(refusal(id, Reason::NotAfterTooFar, detail));
    }
    Ok(Verified { document: command, signer })
}

/// Verifies a cancellation's envelope. `command_id` is the frame's and must be the body's.
///
/// # Errors
/// See [`Refusal`].
pub fn verify_cancel(
    envelope: &Envelope,
    command_id: &CommandId,
    audience: &Audience,
    authority: &Authority,
) -> Result<Verified<CancelBody>, Box<Refusal>> {
    let refusal = |reason, detail: String| {
        let body_sha256 = Digest::of(&envelope.payload);
        Box::new(Refusal { id: Some(command_id.clone()), body_sha256, reason, detail })
    };
    if envelope.payload_type != CANCEL_TYPE {
        let detail = format!("the envelope's type is {:?}, not {CANCEL_TYPE}", shown(&envelope.payload_type));
        return Err(refusal(Reason::Invalid, detail));
    }
    let body: CancelBody =
        strict::parse(&envelope.payload).map_err(|error| refusal(Reason::Invalid, error.to_string()))?;
    if body.command_id != *command_id {
        return Err(refusal(Reason::Invalid, format!("the signed body cancels {}", body.command_id)));
    }
    // Whatever is cancelled, a gateway alone must not cancel it: judged as a destructive kind.
    let signer = authority.judge(envelope, true).map_err(|(reason, detail)| refusal(reason, detail))?;
    check_audience(&body.trust_domain, Some(&body.node_id), audience)
        .map_err(|detail| refusal(Reason::WrongNode, detail))?;
    Ok(Verified { document: body, signer })
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::wire::dsse::Signature;

    fn audience() -> Audience {
        Audience { trust_domain: "lab.example".into(), node_id: NodeId::new("n-1").expect("an id") }
    }

    fn envelope(node: &str, domain: &str, not_after: &str, kind: &str) -> Envelope {
        let payload = format!(
            r#"{{"trust_domain":"{domain}","node_id":"{node}","id":"c-1","kind":"{kind}",
            "issued_at":"2026-11-29T10:00:00Z","not_after":"{not_after}","args":{{}}}}"#
        );
        Envelope { payload_type: COMMAND_TYPE.into(), payload: payload.into(), signatures: Vec::new() }
    }

    fn good() -> Envelope {
        envelope("n-1", "lab.example", "2026-11-29T11:00:00Z", "node.exec")
    }

    fn signed(mut envelope: Envelope) -> Envelope {
        let signature =
            Signature { key_id: Bytes::from_static(&[1; 32]), signature: Bytes::new(), chain: Vec::new() };
        envelope.signatures.push(signature);
        envelope
    }

    fn reason(envelope: &Envelope, policy: Policy) -> Option<Reason> {
        verify_command(envelope, &audience(), &policy.into()).err().map(|refusal| refusal.reason)
    }

    #[test]
    fn an_unsigned_command_is_refused_signature_required_under_the_default_policy() {
        assert_eq!(reason(&good(), Policy::default()), Some(Reason::SignatureRequired));
        let refusal = verify_command(&good(), &audience(), &Policy::All.into()).expect_err("refused");
        assert_eq!(refusal.id, CommandId::new("c-1").ok());
        assert_eq!(refusal.body_sha256, Digest::of(&good().payload));
    }

    #[test]
    fn the_policy_destructive_relaxes_only_kinds_known_to_destroy_nothing() {
        let of = |kind| envelope("n-1", "lab.example", "2026-11-29T11:00:00Z", kind);
        assert_eq!(reason(&of("node.probe"), Policy::Destructive), None);
        assert_eq!(reason(&of("node.exec"), Policy::Destructive), Some(Reason::SignatureRequired));
        assert_eq!(reason(&of("disk.wipe"), Policy::Destructive), Some(Reason::SignatureRequired));
    }

    #[test]
    fn a_signature_that_no_root_vouches_for_is_refused_signature_invalid() {
        assert_eq!(reason(&signed(good()), Policy::All), Some(Reason::SignatureInvalid));
        let probe = envelope("n-1", "lab.example", "2026-11-29T11:00:00Z", "node.probe");
        assert_eq!(reason(&signed(probe), Policy::Destructive), Some(Reason::SignatureInvalid));
    }

    #[cfg(feature = "fakehw")]
    #[test]
    fn another_nodes_or_another_domains_command_is_refused_wrong_node() {
        for (node, domain) in [("n-2", "lab.example"), ("n-1", "prod.example")] {
            let other = envelope(node, domain, "2026-11-29T11:00:00Z", "node.exec");
            assert_eq!(reason(&other, Policy::None), Some(Reason::WrongNode));
        }
        assert_eq!(reason(&good(), Policy::None), None);
    }

    #[cfg(feature = "fakehw")]
    #[test]
    fn a_life_of_more_than_seven_days_is_refused_not_after_too_far() {
        let with = |not_after| reason(&envelope("n-1", "lab.example", not_after, "node.exec"), Policy::None);
        assert_eq!(with("2026-12-06T10:00:00Z"), None);
        assert_eq!(with("2026-12-06T10:00:01Z"), Some(Reason::NotAfterTooFar));
    }

    #[test]
    fn a_body_without_a_readable_header_or_of_another_type_is_refused_invalid_without_an_id() {
        let broken = Envelope { payload: Bytes::from_static(b"{\"id\":"), ..good() };
        let foreign = Envelope { payload_type: CANCEL_TYPE.into(), ..good() };
        for envelope in [broken, foreign] {
            let refusal = verify_command(&envelope, &audience(), &Policy::All.into()).expect_err("refused");
            assert_eq!((refusal.id, refusal.reason), (None, Reason::Invalid));
        }
    }

    #[cfg(feature = "fakehw")]
    #[test]
    fn a_cancel_holds_only_for_the_command_that_its_signed_body_names() {
        let payload = r#"{"trust_domain":"lab.example","node_id":"n-1","command_id":"c-1",
            "issued_at":"2026-11-29T10:00:00Z"}"#;
        let envelope =
            Envelope { payload_type: CANCEL_TYPE.into(), payload: payload.into(), signatures: Vec::new() };
        let verify = |id: &str, policy: Policy| {
            let id = CommandId::new(id).expect("an id");
            verify_cancel(&envelope, &id, &audience(), &policy.into()).err().map(|refusal| refusal.reason)
        };
        assert_eq!(verify("c-1", Policy::None), None);
        assert_eq!(verify("c-2", Policy::None), Some(Reason::Invalid));
        assert_eq!(verify("c-1", Policy::Destructive), Some(Reason::SignatureRequired));
    }
}
