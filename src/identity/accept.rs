//! Judging the answer of a join: nothing is written before every word of it holds. Pure.

use rustls::pki_types::CertificateDer;

use super::certificate::{CertificateError, Leaf};
use super::ticket::Ticket;
use crate::model::{Digest, Role, ServerTime, limits};
use crate::wire::link::Endpoint;
use crate::wire::pb;

/// An answer that holds.
#[derive(Debug, Clone)]
pub struct Accepted {
    /// What the certificate says.
    pub leaf: Leaf,
    /// Identity generation, at least 1.
    pub generation: u64,
    /// The chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// CAs that sign gateways; the ticket's is among them.
    pub gateway_roots: Vec<CertificateDer<'static>>,
    /// Where to dial.
    pub endpoints: Vec<Endpoint>,
    /// The control plane's clock.
    pub server_time: ServerTime,
}

/// Why an answer does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The node certificate is none.
    #[error("its node certificate cannot be used")]
    Certificate(#[from] CertificateError),
    /// A field is missing or out of range.
    #[error("its {0} is missing or out of range")]
    Field(&'static str),
    /// A field is not what the certificate says.
    #[error("its {0} is not the certificate's")]
    Contradiction(&'static str),
    /// The certificate is for another key.
    #[error("its certificate is for another key than the one that was offered")]
    ForeignKey,
    /// Another deployment.
    #[error("it is of the trust domain {answered:?}, and the ticket of {pinned:?}")]
    TrustDomain {
        /// The answer's.
        answered: String,
        /// The ticket's.
        pinned: String,
    },
    /// The CA of the ticket is not among the roots.
    #[error("its gateway roots do not hold the CA that the ticket pins")]
    PinMissing,
    /// The certificate does not hold at the time that came with it.
    #[error("its certificate does not hold at its own time {0}")]
    Validity(ServerTime),
}

/// Judges an answer to a join with `ticket` and the key of digest `spki`.
///
/// # Errors
/// See [`AnswerError`].
pub fn accept(ticket: &Ticket, spki: &Digest, answer: &pb::JoinResponse) -> Result<Accepted, AnswerError> {
    let certificates = |ders: &[bytes::Bytes], most: usize, what| {
        if ders.is_empty() || ders.len() > most {
            return Err(AnswerError::Field(what));
        }
        Ok(ders.iter().map(|der| CertificateDer::from(der.to_vec())).collect::<Vec<_>>())
    };
    let chain = certificates(&answer.chain, limits::CHAIN, "certificate chain")?;
    let gateway_roots = certificates(&answer.gateway_roots, limits::ENTRIES, "list of gateway roots")?;
    let server_time =
        ServerTime::from_wire(answer.server_time_ms).ok_or(AnswerError::Field("server time"))?;
    if answer.identity_generation == 0 {
        return Err(AnswerError::Field("identity generation"));
    }
    let leaf = Leaf::read(&chain[0])?;
    if leaf.spki != *spki {
        return Err(AnswerError::ForeignKey);
    }
    if leaf.trust_domain != ticket.trust_domain || answer.trust_domain != ticket.trust_domain {
        let answered = answer.trust_domain.chars().take(255).collect();
        return Err(AnswerError::TrustDomain { answered, pinned: ticket.trust_domain.clone() });
    }
    for (what, same) in [
        ("node id", answer.node_id == leaf.node_id.as_str()),
        ("site", answer.site == leaf.site),
        ("role", Role::from_name(&answer.role) == Some(leaf.role)),
    ] {
        if !same {
            return Err(AnswerError::Contradiction(what));
        }
    }
    if !gateway_roots.iter().any(|root| Digest::of(root) == ticket.gateway_ca_sha256) {
        return Err(AnswerError::PinMissing);
    }
    if server_time < leaf.not_before || server_time >= leaf.not_after {
        return Err(AnswerError::Validity(server_time));
    }
    let generation = answer.identity_generation;
    Ok(Accepted { leaf, generation, chain, gateway_roots, endpoints: ticket.endpoints.clone(), server_time })
}
