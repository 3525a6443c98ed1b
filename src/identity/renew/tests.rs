use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, PublicKeyData as _, SanType};
use rustls::pki_types::CertificateDer;

use super::*;
use crate::identity::tests::{Fixture, URIS, joined};
use crate::model::{NodeId, Role};
use crate::wire::bundle::TrustBundle;
use crate::wire::der::Der;
use crate::wire::dsse::Envelope;
use crate::wire::enroll::Issued;

const NOW: ServerTime = ServerTime(1_790_000_000_000);

struct Case {
    fixture: Fixture,
    held: Identity,
    request: Request,
    digest: Digest,
    issuer: Issuer<'static, KeyPair>,
    root: CertificateDer<'static>,
    issued: Issued,
    bundle: TrustBundle,
    floor: u64,
}

impl Case {
    fn good() -> Self {
        let fixture = joined();
        let held = fixture.load().unwrap();
        let request = Request::new().unwrap();
        let (issuer, root) = ca();
        let mut case = Self {
            digest: Digest::of(b"the request"),
            issued: Issued {
                trust_domain: "lab.example".into(),
                request_sha256: Digest::of(b"the request"),
                node_id: NodeId::new("n-1").unwrap(),
                role: Role::Host,
                site: "fra1".into(),
                labels: Default::default(),
                identity_generation: 1,
                chain: Vec::new(),
                trust_bundle_sha256: Digest([0; 32]),
                issued_at: NOW,
            },
            bundle: TrustBundle {
                version: 2,
                node_roots: vec![Der::from(&*root)],
                ..fixture.service.bundle(&root)
            },
            fixture,
            held,
            request,
            issuer,
            root,
            floor: 0,
        };
        case.issue(&URIS);
        case
    }

    /// A certificate with these URIs for the new key.
    fn issue(&mut self, uris: &[&str]) {
        let key = rcgen::SubjectPublicKeyInfo::from_der(&self.request.key_spki()).unwrap();
        let mut params = CertificateParams::default();
        params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        self.issued.chain = vec![Der::from(&**leaf.der()), Der::from(&*self.root)];
    }

    fn answer(&self) -> Answer {
        let trust_bundle: Envelope = self.fixture.service.sign_bundle(&self.bundle);
        let issued = Issued { trust_bundle_sha256: Digest::of(&trust_bundle.payload), ..self.issued.clone() };
        Answer { response: self.fixture.service.sign(RenewAnswer::TYPE, &issued), trust_bundle }
    }

    fn judge(&self) -> Result<Accepted, AnswerError> {
        let asked = Asked { spki: &self.request.key.spki(), request: &self.digest };
        accept_renewal(&self.held, self.floor, asked, &self.answer())
    }
}

impl Request {
    fn key_spki(&self) -> Vec<u8> {
        rcgen::CertificateSigningRequestParams::from_der(&self.csr.as_slice().into())
            .unwrap()
            .public_key
            .subject_public_key_info()
    }
}

fn ca() -> (Issuer<'static, KeyPair>, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let root = params.self_signed(&key).unwrap().der().clone();
    (Issuer::new(params, key), root)
}

#[test]
fn an_answer_that_holds_takes_the_place_of_the_identity_and_the_old_key_goes() {
    let case = Case::good();
    let accepted = case.judge().unwrap();
    install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap();
    let renewed = case.fixture.load().unwrap();
    assert_eq!(renewed.fingerprint, case.request.key.spki());
    assert_eq!((renewed.node_id, renewed.generation), (case.held.node_id.clone(), 1));
    assert_eq!(renewed.trust.bundle.version, 2);
    let keys = std::fs::read_dir(case.fixture.state().join("keys")).unwrap().count();
    assert_eq!(keys, 1, "the old key is gone");
    // The identity that it renewed is no longer there: an answer that comes twice changes nothing.
    let again = install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap_err();
    assert!(matches!(again, KeepError::Replaced), "{again:?}");
}

#[test]
fn each_field_that_makes_the_node_who_it_is_must_stay_and_is_named_when_it_does_not() {
    let uris = |name: &'static str, more: &[&'static str]| [&[name, URIS[1]], more].concat();
    let changes: [(&str, &dyn Fn(&mut Case)); 6] = [
        ("node id", &|case| {
            case.issue(&uris("spiffe://lab.example/node/fra1/n-2", &[]));
            case.issued.node_id = NodeId::new("n-2").unwrap();
        }),
        ("role", &|case| {
            case.issue(&[URIS[0], "urn:bc:role:ramdisk"]);
            case.issued.role = Role::Ramdisk;
        }),
        ("site", &|case| {
            case.issue(&uris("spiffe://lab.example/node/ams1/n-1", &[]));
            case.issued.site = "ams1".into();
        }),
        ("identity generation", &|case| case.issued.identity_generation = 2),
        ("attestation key", &|case| case.issue(&uris(URIS[0], &["urn:bc:tpm-ak:00ff"]))),
        ("tenancy", &|case| case.issue(&uris(URIS[0], &["urn:bc:tenant"]))),
    ];
    for (what, change) in changes {
        let mut case = Case::good();
        change(&mut case);
        assert_eq!(case.judge().unwrap_err(), AnswerError::Changed(what));
    }
}

#[test]
fn an_answer_to_another_request_for_another_key_or_outside_its_own_time_is_refused() {
    let changes: [(&str, &dyn Fn(&mut Case)); 5] = [
        ("another request", &|case| case.issued.request_sha256 = Digest::of(b"another")),
        ("another key", &|case| case.request = Request::new().unwrap()),
        ("another trust domain", &|case| case.issued.trust_domain = "evil.example".into()),
        ("before every certificate", &|case| case.issued.issued_at = ServerTime(86_400_000)),
        ("no chain", &|case| case.issued.chain.clear()),
    ];
    for (what, change) in changes {
        let mut case = Case::good();
        change(&mut case);
        assert!(case.judge().is_err(), "{what}");
    }
}

#[test]
fn a_certificate_that_no_node_root_vouches_for_is_refused() {
    let mut case = Case::good();
    case.bundle.node_roots = vec![Der::from(&*ca().1)];
    let refused = case.judge().unwrap_err();
    assert!(matches!(refused, AnswerError::Certificate(CertificateError::Chain { .. })), "{refused:?}");
    case.bundle.node_roots.clear();
    assert!(case.judge().is_err(), "no roots vouch for nobody");
}

#[test]
fn only_the_pinned_key_answers_and_only_renewals() {
    let case = Case::good();
    let asked = Asked { spki: &case.request.key.spki(), request: &case.digest };
    let other = Case::good();
    let mut forged = case.answer();
    forged.response = other.fixture.service.sign(RenewAnswer::TYPE, &case.issued);
    assert!(matches!(accept_renewal(&case.held, 0, asked, &forged), Err(AnswerError::Response(_))));
    // The answer to a join is signed by the same key.
    let mut joined = case.answer();
    joined.response = case.fixture.service.sign("application/vnd.bcd.v1.join-response", &case.issued);
    assert!(matches!(accept_renewal(&case.held, 0, asked, &joined), Err(AnswerError::Response(_))));
}

#[test]
fn a_bundle_that_is_no_newer_leaves_the_held_one_and_the_certificate_must_hold_under_that() {
    let mut case = Case::good();
    case.bundle.version = 1;
    // The held bundle has no node roots.
    assert!(matches!(case.judge(), Err(AnswerError::Certificate(CertificateError::Chain { .. }))));
    let held = TrustBundle { version: 7, ..case.bundle.clone() };
    let held =
        Trust::verify(case.fixture.service.sign_bundle(&held), &case.held.join_signing_key, "lab.example");
    case.held.trust = held.unwrap().into();
    assert_eq!(case.judge().unwrap().trust.bundle.version, 7);
    case.bundle.version = 8;
    assert_eq!(case.judge().unwrap().trust.bundle.version, 8);
    case.floor = 9;
    assert_eq!(case.judge().unwrap().trust.bundle.version, 7, "a version below the floor was outdone once");
}

#[test]
fn a_newer_bundle_is_kept_with_the_certificate_as_it_was() {
    let case = Case::good();
    let envelope = case.fixture.service.sign_bundle(&case.bundle);
    let trust = Trust::verify(envelope, &case.held.join_signing_key, "lab.example").unwrap();
    keep_bundle(&case.fixture.state(), &case.held, trust).unwrap();
    let loaded = case.fixture.load().unwrap();
    assert_eq!((loaded.trust.bundle.version, loaded.certificate), (2, case.held.certificate));
}

#[test]
fn a_state_directory_that_a_join_has_taken_is_left_alone() {
    let case = Case::good();
    let accepted = case.judge().unwrap();
    let joins = case.fixture.dir.lock().unwrap();
    let busy = install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap_err();
    assert!(matches!(busy, KeepError::State(StateError::Busy(_))), "{busy:?}");
    drop(joins);
    install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap();
}

#[test]
fn a_newer_bundle_that_is_kept_while_the_gateway_is_asked_stays_with_the_renewed_certificate() {
    let case = Case::good();
    let accepted = case.judge().unwrap();
    let meanwhile = |version, node_roots| {
        let bundle = TrustBundle { version, node_roots, ..case.bundle.clone() };
        let signed = case.fixture.service.sign_bundle(&bundle);
        let trust = Trust::verify(signed, &case.held.join_signing_key, "lab.example").unwrap();
        assert!(keep_bundle(&case.fixture.state(), &case.held, trust).unwrap());
    };
    let install = || install(&case.fixture.state(), &case.held, &case.request, &accepted);
    meanwhile(3, vec![Der::from(&*ca().1)]);
    let refused = install().unwrap_err();
    assert!(matches!(refused, KeepError::Unvouched(_)), "{refused:?}");
    meanwhile(4, case.bundle.node_roots.clone());
    install().unwrap();
    let renewed = case.fixture.load().unwrap();
    assert_eq!((renewed.fingerprint, renewed.trust.bundle.version), (case.request.key.spki(), 4));
}

#[test]
fn a_revocation_that_is_kept_while_the_gateway_is_asked_is_not_erased_by_the_answer() {
    let case = Case::good();
    let accepted = case.judge().unwrap();
    let revocation = case.fixture.revocation("n-1", &[&case.held.leaf.serial]);
    keep_revocation(&case.fixture.state(), &case.held, revocation).unwrap();
    let refused = install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap_err();
    assert!(matches!(refused, KeepError::Replaced), "{refused:?}");
    assert!(case.fixture.load().unwrap().revoked);
}

#[test]
fn the_answer_to_a_rejoin_has_a_higher_generation_is_no_renewals_and_changes_nothing_else() {
    let judge = |case: &Case, kind: &str| {
        let mut answer = case.answer();
        let trust_bundle_sha256 = Digest::of(&answer.trust_bundle.payload);
        answer.response =
            case.fixture.service.sign(kind, &Issued { trust_bundle_sha256, ..case.issued.clone() });
        let asked = Asked { spki: &case.request.key.spki(), request: &case.digest };
        rejoin::accept_rejoin(&case.held, case.floor, asked, &answer)
    };
    let join = "application/vnd.bcd.v1.join-response";
    let mut case = Case::good();
    assert_eq!(judge(&case, join).unwrap_err(), AnswerError::Changed("identity generation"));
    case.issued.identity_generation = 2;
    assert!(matches!(judge(&case, RenewAnswer::TYPE), Err(AnswerError::Response(_))));
    let accepted = judge(&case, join).unwrap();
    install(&case.fixture.state(), &case.held, &case.request, &accepted).unwrap();
    let again = case.fixture.load().unwrap();
    assert_eq!((again.generation, again.node_id), (2, case.held.node_id.clone()));
    case.issued.site = "ams1".into();
    case.issue(&["spiffe://lab.example/node/ams1/n-1", URIS[1]]);
    assert_eq!(judge(&case, join).unwrap_err(), AnswerError::Changed("site"));
}

#[test]
fn a_rejoin_that_was_killed_offers_the_same_key_again_and_never_the_old_one() {
    let fixture = joined();
    let held = fixture.load().unwrap();
    let offer = || rejoin::offer(&fixture.state(), &held).unwrap().key.spki();
    let first = offer();
    assert_ne!(first, held.fingerprint);
    assert_eq!(offer(), first);
    std::fs::write(fixture.state().join("keys").join(keys::file_name(&first)), "cut").unwrap();
    let second = offer();
    assert!(second != first && second != held.fingerprint, "what cannot be read is offered by nobody");
    fixture.replace(URIS, 2);
    let other = rejoin::offer(&fixture.state(), &fixture.load().unwrap()).unwrap().key.spki();
    assert_eq!(other, second, "nor does a newer bundle change that");
}
