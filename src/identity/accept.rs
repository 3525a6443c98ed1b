//! Judging the answer of a join: nothing is written before every word of it holds. Pure.

use rustls::pki_types::CertificateDer;

use super::certificate::{CertificateError, Leaf, holds_at};
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
    /// The node's certificate is no node certificate, or the gateway's is unreadable.
    #[error("a certificate of it cannot be used")]
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
    /// The gateway's certificate does not hold at the time that came over it.
    #[error("the gateway's own certificate does not hold at the time {0} that it tells")]
    GatewayValidity(ServerTime),
    /// The certificate does not hold at the time that came with it.
    #[error("its certificate does not hold at its own time {0}")]
    Validity(ServerTime),
}

/// Judges an answer to a join with `ticket` and the key of digest `spki`, given over a connection on which the
/// gateway showed the certificate `gateway`.
///
/// # Errors
/// See [`AnswerError`].
pub fn accept(
    ticket: &Ticket,
    spki: &Digest,
    gateway: &CertificateDer<'_>,
    answer: &pb::JoinResponse,
) -> Result<Accepted, AnswerError> {
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
    // The dial could not judge it: there was no server time yet.
    if !holds_at(gateway, server_time)? {
        return Err(AnswerError::GatewayValidity(server_time));
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::certificate::tests::certificate;
    use rcgen::{KeyPair, PublicKeyData as _};

    struct Case {
        ticket: Ticket,
        spki: Digest,
        gateway: CertificateDer<'static>,
        answer: pb::JoinResponse,
    }

    impl Case {
        fn good() -> Self {
            let key = KeyPair::generate().unwrap();
            let uris = ["spiffe://lab.example/node/fra1/n-1", "urn:bc:role:host"];
            let leaf = certificate(&key, &uris);
            let ca = certificate(&KeyPair::generate().unwrap(), &[]);
            let json = serde_json::json!({
                "v": 1, "trust_domain": "lab.example", "endpoints": ["gw:1"], "token": "t",
                "gateway_ca_sha256": Digest::of(&ca), "expires_at": "2100-01-01T00:00:00Z",
            });
            let line = format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(json.to_string().as_bytes()));
            Self {
                ticket: Ticket::parse(&line, ServerTime(1)).unwrap(),
                spki: Digest::of(&key.subject_public_key_info()),
                gateway: ca.clone(),
                answer: pb::JoinResponse {
                    node_id: "n-1".into(),
                    chain: vec![leaf.to_vec().into()],
                    role: "host".into(),
                    site: "fra1".into(),
                    trust_domain: "lab.example".into(),
                    identity_generation: 1,
                    server_time_ms: 1_790_000_000_000,
                    gateway_roots: vec![ca.to_vec().into()],
                    ..Default::default()
                },
            }
        }

        fn judge(&self) -> Result<Accepted, AnswerError> {
            accept(&self.ticket, &self.spki, &self.gateway, &self.answer)
        }
    }

    #[test]
    fn an_answer_that_holds_is_taken() {
        let accepted = Case::good().judge().unwrap();
        assert_eq!(accepted.leaf.node_id.as_str(), "n-1");
        assert_eq!(accepted.server_time, ServerTime(1_790_000_000_000));
    }

    #[test]
    fn every_word_of_an_answer_must_hold() {
        let changes: [(&str, &dyn Fn(&mut pb::JoinResponse)); 11] = [
            ("another node id", &|answer| answer.node_id = "n-2".into()),
            ("another site", &|answer| answer.site = "ams1".into()),
            ("another role", &|answer| answer.role = "ramdisk".into()),
            ("another trust domain", &|answer| answer.trust_domain = "evil.example".into()),
            ("generation 0", &|answer| answer.identity_generation = 0),
            ("no server time", &|answer| answer.server_time_ms = 0),
            ("a time outside of every certificate", &|answer| answer.server_time_ms = 86_400_000),
            ("no chain", &|answer| answer.chain.clear()),
            ("a long chain", &|answer| answer.chain = vec![answer.chain[0].clone(); limits::CHAIN + 1]),
            ("no roots", &|answer| answer.gateway_roots.clear()),
            ("foreign roots", &|answer| answer.gateway_roots = answer.chain.clone()),
        ];
        for (what, change) in changes {
            let mut case = Case::good();
            change(&mut case.answer);
            assert!(case.judge().is_err(), "{what}");
        }
    }

    #[test]
    fn a_certificate_for_another_key_is_refused() {
        let case = Case { spki: Digest::of(b"another"), ..Case::good() };
        assert_eq!(case.judge().unwrap_err(), AnswerError::ForeignKey);
    }
}
