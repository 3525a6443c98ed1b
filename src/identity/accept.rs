//! Judging the answer of the join service: nothing is written before every word of it holds. Pure.

use rustls::pki_types::CertificateDer;

use super::certificate::{CertificateError, Leaf, holds_at};
use super::ticket::Ticket;
use crate::model::strict::StrictMap;
use crate::model::{Digest, ServerTime, limits};
use crate::wire::bundle::{BundleError, Trust};
use crate::wire::dsse::{DocumentError, Envelope, PublicKey, Verified, verify_document};
use crate::wire::enroll::{Issued, JoinAnswer};

/// An answer that holds.
#[derive(Debug, Clone)]
pub struct Accepted {
    /// What the certificate says.
    pub leaf: Leaf,
    /// Identity generation, at least 1.
    pub generation: u64,
    /// What the operator calls such machines, at most [`limits::LABELS`].
    pub labels: StrictMap<String>,
    /// The chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Who signed all of it, pinned from now on.
    pub join_signing_key: PublicKey,
    /// Whom to believe.
    pub trust: Trust,
    /// The control plane's clock.
    pub server_time: ServerTime,
}

/// An answer as it came: both documents, within the limits of the wire.
#[derive(Debug, Clone)]
pub struct Answer {
    /// What was issued.
    pub response: Envelope,
    /// The bundle that it names.
    pub trust_bundle: Envelope,
}

/// Why an answer does not hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// It is not signed by the key that the ticket pins, or cannot be read.
    #[error("its signed response is not taken")]
    Response(#[source] DocumentError),
    /// Its trust bundle is not taken.
    #[error("its trust bundle is not taken")]
    Bundle(#[from] BundleError),
    /// Another bundle than the signed response names.
    #[error("its trust bundle is another one than its signed response names")]
    OtherBundle,
    /// It answers another request.
    #[error("it answers another request than the one that was sent")]
    OtherRequest,
    /// The node's certificate is no node certificate, or the gateway's is unreadable.
    #[error("a certificate of it cannot be used")]
    Certificate(#[from] CertificateError),
    /// A field is missing or out of range.
    #[error("its {0} is missing or out of range")]
    Field(&'static str),
    /// A field is not what the certificate says.
    #[error("its {0} is not the certificate's")]
    Contradiction(&'static str),
    /// A renewal may change none of these.
    #[error("its {0} is another one than this node has")]
    Changed(&'static str),
    /// The certificate is for another key.
    #[error("its certificate is for another key than the one that was offered")]
    ForeignKey,
    /// Another deployment.
    #[error("it is of the trust domain {answered:?}, and this machine of {pinned:?}")]
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

/// What was asked.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// SHA-256 of the new key's SubjectPublicKeyInfo.
    pub spki: &'a Digest,
    /// The request's digest.
    pub request: &'a Digest,
}

/// Judges the answer to a join with `ticket`, given over a connection on which the gateway showed the certificate
/// `gateway`.
///
/// # Errors
/// See [`AnswerError`].
pub fn accept(
    ticket: &Ticket,
    asked: Asked<'_>,
    gateway: &CertificateDer<'_>,
    answer: &Answer,
) -> Result<Accepted, AnswerError> {
    let key = &ticket.join_signing_key;
    let issued: Verified<JoinAnswer> =
        verify_document(&answer.response, key, None).map_err(AnswerError::Response)?;
    let accepted = judge(&ticket.trust_domain, key, asked, &issued.get().0, answer)?;
    // The dial could not judge it: there was no server time yet.
    if !holds_at(gateway, accepted.server_time)? {
        return Err(AnswerError::GatewayValidity(accepted.server_time));
    }
    let pinned = |root: &[u8]| Digest::of(root) == ticket.gateway_ca_sha256;
    if !accepted.trust.bundle.gateway_roots.iter().any(|root| pinned(&root.0)) {
        return Err(AnswerError::PinMissing);
    }
    Ok(accepted)
}

/// What holds for every answer, once its signature does.
pub fn judge(
    trust_domain: &str,
    key: &PublicKey,
    asked: Asked<'_>,
    issued: &Issued,
    answer: &Answer,
) -> Result<Accepted, AnswerError> {
    if issued.trust_domain != trust_domain {
        let answered = issued.trust_domain.chars().take(255).collect();
        return Err(AnswerError::TrustDomain { answered, pinned: trust_domain.to_owned() });
    }
    if issued.request_sha256 != *asked.request {
        return Err(AnswerError::OtherRequest);
    }
    let trust = Trust::verify(answer.trust_bundle.clone(), key, trust_domain)?;
    if trust.sha256 != issued.trust_bundle_sha256 {
        return Err(AnswerError::OtherBundle);
    }
    if issued.chain.is_empty() || issued.chain.len() > limits::CHAIN {
        return Err(AnswerError::Field("certificate chain"));
    }
    let chain: Vec<_> = issued.chain.iter().map(|der| CertificateDer::from(der.0.to_vec())).collect();
    let server_time = ServerTime::from_wire(issued.issued_at.0).ok_or(AnswerError::Field("server time"))?;
    if issued.identity_generation == 0 {
        return Err(AnswerError::Field("identity generation"));
    }
    if issued.labels.0.len() > limits::LABELS {
        return Err(AnswerError::Field("list of labels"));
    }
    let leaf = Leaf::read(&chain[0])?;
    if leaf.spki != *asked.spki {
        return Err(AnswerError::ForeignKey);
    }
    for (what, same) in [
        ("trust domain", leaf.trust_domain == issued.trust_domain),
        ("node id", leaf.node_id == issued.node_id),
        ("site", leaf.site == issued.site),
        ("role", leaf.role == issued.role),
    ] {
        if !same {
            return Err(AnswerError::Contradiction(what));
        }
    }
    if !leaf.validity.holds_at(server_time) {
        return Err(AnswerError::Validity(server_time));
    }
    let (generation, labels) = (issued.identity_generation, issued.labels.clone());
    Ok(Accepted { leaf, generation, labels, chain, join_signing_key: key.clone(), trust, server_time })
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use bytes::Bytes;
    use rcgen::{KeyPair, PublicKeyData as _};
    use rustls::sign::SigningKey;

    use super::*;
    use crate::identity::certificate::tests::certificate;
    use crate::model::{NodeId, Role};
    use crate::wire::bundle::TrustBundle;
    use crate::wire::der::Der;
    use crate::wire::dsse::{Document as _, sign, signing_key};
    use crate::wire::enroll::OpeningKey;

    /// A join service that signs whatever it is told to.
    pub(in crate::identity) struct Service {
        key: Arc<dyn SigningKey>,
        pub(in crate::identity) public: PublicKey,
    }

    impl Service {
        pub(in crate::identity) fn new() -> Self {
            let pair = KeyPair::generate().unwrap();
            let key = signing_key(pair.serialize_der()).unwrap();
            Self { public: PublicKey::from_spki(&pair.subject_public_key_info()).unwrap(), key }
        }

        pub(in crate::identity) fn bundle(&self, gateway_root: &[u8]) -> TrustBundle {
            TrustBundle {
                trust_domain: "lab.example".into(),
                version: 1,
                issued_at: ServerTime(1_790_000_000_000),
                endpoints: vec!["gw1.lab.example:443".into()],
                node_roots: Vec::new(),
                gateway_roots: vec![gateway_root.into()],
                command_roots: vec![gateway_root.into()],
                broker_key: None,
                release_keys: Vec::new(),
                approvers: None,
            }
        }

        pub(in crate::identity) fn sign(&self, payload_type: &str, body: &impl serde::Serialize) -> Envelope {
            let body = Bytes::from(serde_json::to_vec(body).unwrap());
            sign(payload_type, body, &*self.key, Vec::new()).unwrap()
        }

        pub(in crate::identity) fn sign_bundle(&self, bundle: &TrustBundle) -> Envelope {
            self.sign(TrustBundle::TYPE, bundle)
        }
    }

    struct Case {
        service: Service,
        ticket: Ticket,
        spki: Digest,
        request: Digest,
        gateway: CertificateDer<'static>,
        issued: Issued,
        bundle: TrustBundle,
    }

    impl Case {
        fn good() -> Self {
            let (service, key) = (Service::new(), KeyPair::generate().unwrap());
            let uris = ["spiffe://lab.example/node/fra1/n-1", "urn:bc:role:host"];
            let leaf = certificate(&key, &uris);
            let ca = authority();
            let sealing = OpeningKey::new(&[7; 32]).unwrap().public();
            let json = serde_json::json!({
                "v": 1, "trust_domain": "lab.example", "endpoints": ["gw:1"], "token": "t",
                "gateway_ca_sha256": Digest::of(&ca), "expires_at": "2100-01-01T00:00:00Z",
                "join_signing_key": service.public, "join_encryption_key": sealing,
            });
            let line = format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(json.to_string().as_bytes()));
            let request = Digest::of(b"the request");
            let issued = Issued {
                trust_domain: "lab.example".into(),
                request_sha256: request,
                node_id: NodeId::new("n-1").unwrap(),
                role: Role::Host,
                site: "fra1".into(),
                labels: StrictMap::default(),
                identity_generation: 1,
                chain: vec![(&*leaf).into()],
                trust_bundle_sha256: Digest([0; 32]),
                issued_at: ServerTime(1_790_000_000_000),
            };
            Self {
                bundle: service.bundle(&ca),
                service,
                ticket: Ticket::parse(&line, ServerTime(1)).unwrap(),
                spki: Digest::of(&key.subject_public_key_info()),
                request,
                gateway: ca,
                issued,
            }
        }

        fn answer(&self) -> Answer {
            let trust_bundle = self.service.sign_bundle(&self.bundle);
            let mut issued = self.issued.clone();
            if issued.trust_bundle_sha256 == Digest([0; 32]) {
                issued.trust_bundle_sha256 = Digest::of(&trust_bundle.payload);
            }
            Answer { response: self.service.sign(JoinAnswer::TYPE, &issued), trust_bundle }
        }

        fn judge(&self, answer: &Answer) -> Result<Accepted, AnswerError> {
            accept(&self.ticket, Asked { spki: &self.spki, request: &self.request }, &self.gateway, answer)
        }
    }

    /// A CA certificate of its own.
    pub(in crate::identity) fn authority() -> CertificateDer<'static> {
        let mut params = rcgen::CertificateParams::default();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn an_answer_that_holds_is_taken() {
        let case = Case::good();
        let accepted = case.judge(&case.answer()).unwrap();
        assert_eq!(accepted.leaf.node_id.as_str(), "n-1");
        assert_eq!(accepted.server_time, ServerTime(1_790_000_000_000));
        assert_eq!(accepted.trust.endpoints[0].host, "gw1.lab.example");
    }

    #[test]
    fn every_word_of_an_answer_must_hold_though_it_is_signed() {
        let many = || (0..=limits::LABELS).map(|n| (n.to_string(), String::new())).collect();
        let changes: [(&str, &dyn Fn(&mut Case)); 14] = [
            ("too many labels", &|case| case.issued.labels = StrictMap(many())),
            ("another node id", &|case| case.issued.node_id = NodeId::new("n-2").unwrap()),
            ("another site", &|case| case.issued.site = "ams1".into()),
            ("another role", &|case| case.issued.role = Role::Ramdisk),
            ("another trust domain", &|case| case.issued.trust_domain = "evil.example".into()),
            ("another request", &|case| case.issued.request_sha256 = Digest::of(b"another")),
            ("another bundle", &|case| case.issued.trust_bundle_sha256 = Digest::of(b"another")),
            ("generation 0", &|case| case.issued.identity_generation = 0),
            ("a time outside of every certificate", &|case| case.issued.issued_at = ServerTime(86_400_000)),
            ("no chain", &|case| case.issued.chain.clear()),
            ("a long chain", &|case| {
                case.issued.chain = vec![case.issued.chain[0].clone(); limits::CHAIN + 1];
            }),
            ("no gateway roots", &|case| case.bundle.gateway_roots.clear()),
            ("foreign gateway roots", &|case| case.bundle.gateway_roots = vec![Der::from(&*authority())]),
            ("a bundle of another trust domain", &|case| case.bundle.trust_domain = "evil.example".into()),
        ];
        for (what, change) in changes {
            let mut case = Case::good();
            change(&mut case);
            assert!(case.judge(&case.answer()).is_err(), "{what}");
        }
    }

    #[test]
    fn an_answer_of_a_gateway_that_has_no_join_signing_key_is_refused() {
        let case = Case::good();
        let forged = Case { service: Service::new(), ..Case::good() };
        let own = Case { issued: case.issued.clone(), ..forged };
        let refused = case.judge(&own.answer()).unwrap_err();
        assert!(matches!(refused, AnswerError::Response(DocumentError::Signature(_))), "{refused:?}");
        let mut mixed = case.answer();
        mixed.trust_bundle = own.answer().trust_bundle;
        let refused = case.judge(&mixed).unwrap_err();
        assert!(matches!(refused, AnswerError::Bundle(BundleError::Document(_))), "{refused:?}");
        let mut bare = case.answer();
        bare.response.signatures.clear();
        assert!(matches!(case.judge(&bare).unwrap_err(), AnswerError::Response(_)));
    }

    #[test]
    fn a_certificate_for_another_key_is_refused() {
        let case = Case { spki: Digest::of(b"another"), ..Case::good() };
        assert_eq!(case.judge(&case.answer()).unwrap_err(), AnswerError::ForeignKey);
    }
}
