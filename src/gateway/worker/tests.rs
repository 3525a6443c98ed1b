use std::collections::BTreeMap;

use rcgen::{CertificateParams, KeyPair, PublicKeyData as _};

use super::*;
use crate::wire::bundle::Trust;
use crate::wire::dsse::{CommandRoots, PublicKey, signing_key, verify_document};
use crate::wire::enroll::SealingKey;
use crate::wire::enroll::{RenewAnswer, RenewProof};
use crate::wire::frames::read_envelope;
use crate::wire::report::LeaveKind;

mod rejoin;

pub(super) const NOW: ServerTime = ServerTime(1_800_000_000_000);
const HOUR: Duration = Duration::from_secs(3600);

pub(super) struct Lab {
    pub(super) worker: Worker,
    options: Options,
    _dir: tempfile::TempDir,
}

struct Pins {
    key: PublicKey,
    seal: SealingKey,
    token: String,
}

impl Pins {
    fn of(line: &str) -> Self {
        let json = data_encoding::BASE64URL_NOPAD.decode(line.strip_prefix("bcd1.").unwrap().as_bytes());
        let ticket: serde_json::Value = serde_json::from_slice(&json.unwrap()).unwrap();
        let field = |name: &str| ticket[name].as_str().unwrap().to_owned();
        Self {
            key: field("join_signing_key").parse().unwrap(),
            seal: SealingKey::try_from(field("join_encryption_key")).unwrap(),
            token: field("token"),
        }
    }
}

/// A machine with a certificate.
pub(super) struct Node {
    pub(super) pair: KeyPair,
    pub(super) issued: Issued,
    trust: Trust,
}

pub(super) fn lab() -> Lab {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        state: dir.path().join("worker"),
        trust_domain: "lab.example".into(),
        certificate_life: 24 * HOUR,
        rejoin_within: 7 * 24 * HOUR,
    };
    let worker = Worker::open(&options, NOW).unwrap();
    let lab = Lab { worker, options, _dir: dir };
    lab.serve(&["gw1:443"]);
    lab
}

fn request(pair: &KeyPair) -> Vec<u8> {
    CertificateParams::default().serialize_request(pair).unwrap().der().to_vec()
}

fn same(pair: &KeyPair) -> KeyPair {
    KeyPair::from_pem(&pair.serialize_pem()).unwrap()
}

impl Lab {
    fn serve(&self, endpoints: &[&str]) {
        let endpoints: Vec<String> = endpoints.iter().map(|text| (*text).to_owned()).collect();
        let csr = Der::from(&*request(&KeyPair::generate().unwrap()));
        let told = self.worker.answer(Ask::Serve { csr, gateway: "g-1".into(), endpoints }, NOW);
        assert!(matches!(told, Told::Serving { .. }), "{told:?}");
    }

    /// The worker, started again over its directory.
    pub(super) fn again(self) -> Self {
        let Self { worker, options, _dir } = self;
        drop(worker);
        let worker = Worker::open(&options, NOW).unwrap();
        Self { worker, options, _dir }
    }

    fn pins(&self) -> Pins {
        let order = Order::Ticket(TicketTerms::new(9, HOUR.as_secs(), "fra1"));
        let Told::Ticket(line) = self.worker.obey(order, NOW) else { panic!("no ticket") };
        Pins::of(&line)
    }

    /// `sealed_for`: for another request than its own.
    fn join_as(&self, pins: &Pins, pair: &KeyPair, sealed_for: Option<&[u8]>) -> Told {
        let csr = request(pair);
        let request = pb::JoinRequest {
            sealed_token: pins.seal.seal(&pins.token, sealed_for.unwrap_or(&csr)).unwrap().into(),
            csr: csr.into(),
            proto_max: 1,
            ..Default::default()
        };
        self.worker.answer(Ask::Join(Der(request.encode_to_vec().into())), NOW)
    }

    pub(super) fn node(&self) -> Node {
        let (pins, pair) = (self.pins(), KeyPair::generate().unwrap());
        let Told::Joined(response, noted) = self.join_as(&pins, &pair, None) else { panic!("not joined") };
        let response = pb::JoinResponse::decode(&*response.0).unwrap();
        let envelope = |envelope: Option<pb::Envelope>| read_envelope(envelope.unwrap()).unwrap();
        let signed = envelope(response.signed_response);
        let JoinAnswer(issued) = verify_document(&signed, &pins.key, None).unwrap().into_inner();
        assert_eq!((&issued.node_id, issued.identity_generation), (&noted.node, noted.generation));
        let trust = Trust::verify(envelope(response.trust_bundle), &pins.key, "lab.example").unwrap();
        assert_eq!(trust.sha256, issued.trust_bundle_sha256);
        Node { pair, issued, trust }
    }

    pub(super) fn renew(&self, node: &Node, at: ServerTime, change: impl FnOnce(&mut RenewProof)) -> Told {
        self.renew_signed_by(node, &node.pair, at, change)
    }

    fn renew_signed_by(
        &self,
        node: &Node,
        signer: &KeyPair,
        at: ServerTime,
        change: impl FnOnce(&mut RenewProof),
    ) -> Told {
        self.renew_to(&KeyPair::generate().unwrap(), node, signer, at, change)
    }

    /// The node with its next certificate.
    pub(super) fn renewed(&self, node: &Node) -> Node {
        let (pins, pair) = (self.pins(), KeyPair::generate().unwrap());
        let told = self.renew_to(&pair, node, &node.pair, NOW, |_| {});
        let Told::Renewed(response, _) = told else { panic!("{told:?}") };
        let response = pb::RenewResponse::decode(&*response.0).unwrap();
        let envelope = |envelope: Option<pb::Envelope>| read_envelope(envelope.unwrap()).unwrap();
        let signed = envelope(response.signed_response);
        let RenewAnswer(issued) = verify_document(&signed, &pins.key, None).unwrap().into_inner();
        let trust = Trust::verify(envelope(response.trust_bundle), &pins.key, "lab.example").unwrap();
        Node { pair, issued, trust }
    }

    fn renew_to(
        &self,
        pair: &KeyPair,
        node: &Node,
        signer: &KeyPair,
        at: ServerTime,
        change: impl FnOnce(&mut RenewProof),
    ) -> Told {
        let csr = request(pair);
        let mut proof = RenewProof {
            trust_domain: "lab.example".into(),
            node_id: node.issued.node_id.clone(),
            csr_sha256: Digest::of(&csr),
            nonce: "00".repeat(16),
            issued_at: at,
            challenge: None,
        };
        change(&mut proof);
        let proof =
            sign(RenewProof::TYPE, json(&proof), &*signing_key(signer.serialize_der()).unwrap(), Vec::new())
                .unwrap();
        let request = pb::RenewRequest { csr: csr.into(), proof: Some(proof.into()) };
        let leaf = node.issued.chain[0].clone();
        self.worker.answer(Ask::Renew { request: Der(request.encode_to_vec().into()), leaf }, at)
    }
}

fn reason(told: &Told) -> Option<Reason> {
    match told {
        Told::Refused { reason, .. } => Some(*reason),
        Told::ProofTime { .. } => Some(Reason::ProofTime),
        _ => None,
    }
}

#[test]
fn a_token_that_was_sealed_for_one_request_is_worth_nothing_beside_another() {
    let lab = lab();
    let (pins, victim, thief) = (lab.pins(), KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let stolen = lab.join_as(&pins, &thief, Some(&request(&victim)));
    assert_eq!(reason(&stolen), Some(Reason::JoinInvalid), "{stolen:?}");
    let joined = lab.join_as(&pins, &victim, None);
    assert!(matches!(joined, Told::Joined(..)), "{joined:?}");
}

#[test]
fn a_bundle_has_a_new_version_only_when_it_says_something_else() {
    let lab = lab();
    assert_eq!(lab.node().trust.bundle.version, 1);
    assert_eq!(lab.node().trust.bundle.version, 1);
    lab.serve(&["gw1:443", "gw2:443"]);
    let trust = lab.node().trust;
    assert_eq!((trust.bundle.version, trust.endpoints.len()), (2, 2));
    let Lab { worker, options, _dir } = lab;
    drop(worker);
    let lab = Lab { worker: Worker::open(&options, NOW).unwrap(), options, _dir };
    assert_eq!(lab.node().trust.bundle.version, 2, "after a restart too");
}

#[test]
fn a_signed_command_holds_under_the_bundles_command_roots_hours_later_too() {
    let lab = lab();
    let roots: CommandRoots = lab.node().trust.command_roots;
    for hours in [0, 1, 30] {
        let now = NOW.plus(hours * HOUR);
        let Told::Signed(envelope) = lab.worker.obey(Order::Command(draft("{}")), now) else {
            panic!("not signed")
        };
        let body = crate::model::Command::parse(envelope.payload.clone()).unwrap();
        assert_eq!(body.header.issued_at, now);
        assert_eq!(roots.signer(&envelope, now).unwrap().name, "reference");
        assert!(roots.signer(&envelope, now.plus(2 * HOUR)).is_err(), "the certificate is short-lived");
    }
}

fn draft(args: &str) -> Draft {
    let args = serde_json::value::RawValue::from_string(args.into()).unwrap();
    let node = NodeId::new("n-1").unwrap();
    Draft { node, kind: "node.probe".into(), args, ttl_s: 60, id: None }
}

#[test]
fn a_node_that_was_revoked_renews_nothing_until_that_is_taken_back() {
    let lab = lab();
    let node = lab.node();
    let id = node.issued.node_id.clone();
    assert!(matches!(lab.worker.obey(Order::Revoke(id.clone()), NOW), Told::Done));
    assert_eq!(reason(&lab.renew(&node, NOW, |_| {})), Some(Reason::CertificateRevoked));
    assert!(matches!(lab.worker.obey(Order::Unrevoke(id), NOW), Told::Done));
    assert!(matches!(lab.renew(&node, NOW, |_| {}), Told::Renewed(..)));
    let unknown = lab.worker.obey(Order::Revoke(NodeId::new("n-none").unwrap()), NOW);
    assert!(matches!(&unknown, Told::Failed(why) if why.contains("n-none")), "{unknown:?}");
}

#[test]
fn a_node_that_was_forgotten_renews_nothing_and_its_ticket_lets_it_in_as_another_node() {
    let lab = lab();
    let (pins, pair) = (lab.pins(), KeyPair::generate().unwrap());
    let Told::Joined(_, before) = lab.join_as(&pins, &pair, None) else { panic!("not joined") };
    let Told::Joined(_, again) = lab.join_as(&pins, &pair, None) else { panic!("not joined") };
    assert_eq!(before.node, again.node);
    let node = lab.node();
    for forgotten in [&before.node, &node.issued.node_id] {
        assert!(matches!(lab.worker.obey(Order::Forget(forgotten.clone()), NOW), Told::Done));
    }
    assert_eq!(reason(&lab.renew(&node, NOW, |_| {})), Some(Reason::UnknownNode));
    let Told::Joined(_, anew) = lab.join_as(&pins, &pair, None) else { panic!("not joined") };
    assert_ne!(before.node, anew.node);
}

#[test]
fn what_lives_too_long_or_has_no_site_is_signed_for_nobody() {
    let lab = lab();
    let long = Draft { ttl_s: LONGEST_LIFE_S + 1, ..draft("{}") };
    let orders = [
        (Order::Command(long), "seconds"),
        (Order::Ticket(TicketTerms::new(1, LONGEST_LIFE_S + 1, "fra1")), "seconds"),
        (Order::Ticket(TicketTerms::new(0, 1, "fra1")), "one use"),
        (Order::Ticket(TicketTerms::new(1, 1, "a b")), "not a site"),
    ];
    for (order, why) in orders {
        let told = lab.worker.obey(order, NOW);
        assert!(matches!(&told, Told::Failed(said) if said.contains(why)), "{told:?}");
    }
}

#[test]
fn a_renewal_gives_a_new_certificate_of_the_same_node() {
    let lab = lab();
    let node = lab.node();
    let told = lab.renew(&node, NOW.plus(HOUR), |_| {});
    let Told::Renewed(response, noted) = told else { panic!("{told:?}") };
    assert_eq!((noted.node, noted.generation), (node.issued.node_id, 1));
    assert_eq!(noted.not_after, NOW.plus(25 * HOUR));
    assert!(pb::RenewResponse::decode(&*response.0).unwrap().trust_bundle.is_some());
}

#[test]
fn a_renewal_without_proof_of_the_old_key_is_refused() {
    let lab = lab();
    let (node, other) = (lab.node(), KeyPair::generate().unwrap());
    assert_eq!(reason(&lab.renew_signed_by(&node, &other, NOW, |_| {})), Some(Reason::JoinInvalid));
    let changes: [(&str, fn(&mut RenewProof)); 3] = [
        ("another request", |proof| proof.csr_sha256 = Digest::of(b"another")),
        ("another node", |proof| proof.node_id = NodeId::new("n-2").unwrap()),
        ("another domain", |proof| proof.trust_domain = "evil.example".into()),
    ];
    for (what, change) in changes {
        assert_eq!(reason(&lab.renew(&node, NOW, change)), Some(Reason::JoinInvalid), "{what}");
    }
    let old = lab.renew(&node, NOW, |proof| proof.issued_at = NOW.minus(Duration::from_secs(61)));
    assert_eq!(reason(&old), Some(Reason::ProofTime));
}

#[test]
fn a_node_with_another_clock_renews_by_a_challenge_that_is_taken_once_and_soon() {
    let lab = lab();
    let node = lab.node();
    let wrong = NOW.minus(HOUR);
    let challenge = || match lab.renew(&node, NOW, |proof| proof.issued_at = wrong) {
        Told::ProofTime { time, challenge, .. } => (time, challenge),
        other => panic!("{other:?}"),
    };
    let (time, text) = challenge();
    assert_eq!(time, NOW);
    let answer = |at: ServerTime, issued_at: ServerTime, text: &str| {
        let told = lab.renew(&node, at, |proof| {
            proof.issued_at = issued_at;
            proof.challenge = Some(text.to_owned());
        });
        matches!(told, Told::Renewed(..))
    };
    assert!(!answer(NOW, NOW, "0123"), "one that nobody gave");
    assert!(!answer(NOW, wrong, &text), "with another time than it was given");
    assert!(answer(NOW.plus(Duration::from_secs(60)), NOW, &text));
    assert!(!answer(NOW, NOW, &text), "a second time");
    let (_, late) = challenge();
    assert!(!answer(NOW.plus(Duration::from_secs(61)), NOW, &late));
}

#[test]
fn a_revocation_names_the_certificates_of_its_node_and_holds_under_the_pinned_key() {
    let lab = lab();
    let (node, pins) = (lab.node(), lab.pins());
    let order = Order::RevokeForGood(node.issued.node_id.clone());
    let Told::Signed(envelope) = lab.worker.obey(order, NOW) else { panic!("not signed") };
    let audience = |node_id: &str| Audience {
        trust_domain: "lab.example".into(),
        node_id: NodeId::new(node_id).unwrap(),
    };
    let own = audience(node.issued.node_id.as_str());
    let revocation = Revocation::verify(&envelope, &pins.key, &own).unwrap();
    let (leaf, _) = crate::wire::x509::read(&node.issued.chain[0].0).unwrap();
    assert!(revocation.names(&data_encoding::HEXLOWER.encode(leaf.raw_serial())));
    assert!(!revocation.names("4b"));
    assert_eq!(reason(&lab.renew(&node, NOW, |_| {})), Some(Reason::CertificateRevoked));
    assert!(Revocation::verify(&envelope, &pins.key, &audience("n-other")).is_err());
}

#[test]
fn a_revocation_names_what_may_still_join_again_and_is_told_as_failed_where_it_would_name_nothing() {
    let Lab { worker, mut options, _dir } = lab();
    drop(worker);
    options.rejoin_within = 30 * 24 * HOUR;
    let lab = Lab { worker: Worker::open(&options, NOW).unwrap(), options, _dir };
    let (node, pins) = (lab.node(), lab.pins());
    let node_id = node.issued.node_id.clone();
    let order =
        |days: u32| lab.worker.obey(Order::RevokeForGood(node_id.clone()), NOW.plus((1 + days) * 24 * HOUR));
    let Told::Signed(envelope) = order(10) else { panic!("not signed") };
    let audience = Audience { trust_domain: "lab.example".into(), node_id: node_id.clone() };
    assert_eq!(Revocation::verify(&envelope, &pins.key, &audience).unwrap().serials.len(), 1);
    let told = order(31);
    assert!(matches!(&told, Told::Failed(why) if why.contains("without --for-good")), "{told:?}");
}

#[test]
fn a_node_older_than_a_revocation_is_long_is_revoked_by_the_certificates_that_can_still_be_used() {
    let lab = lab();
    let (node, pins) = (lab.node(), lab.pins());
    let node_id = node.issued.node_id.clone();
    let day = 24 * HOUR;
    let revoked = |at: ServerTime| {
        let order = Order::RevokeForGood(node_id.clone());
        let Told::Signed(envelope) = lab.worker.obey(order, at) else { panic!("not signed") };
        let audience = Audience { trust_domain: "lab.example".into(), node_id: node_id.clone() };
        Revocation::verify(&envelope, &pins.key, &audience).unwrap()
    };
    let enrolled = Enrolled {
        node: node_id.clone(),
        site: "fra1".into(),
        labels: BTreeMap::new(),
        role: Role::Host,
        generation: node.issued.identity_generation,
    };
    let key = PublicKey::from_spki(&KeyPair::generate().unwrap().subject_public_key_info()).unwrap();
    let add = |serial: &str, until| {
        lab.worker.enrolment().add_certificate(serial, &enrolled, &key, until).unwrap();
    };
    add("old", NOW.minus(7 * day));
    add("late", NOW.minus(7 * day).plus(Duration::from_secs(1)));
    let revocation = revoked(NOW);
    assert_eq!(revocation.serials.len(), 2, "its own, and one that ran out within the week");
    assert!(revocation.names("late") && !revocation.names("old"));
    for number in 0..1100 {
        add(&format!("new-{number:04}"), NOW.plus(2 * day).plus(Duration::from_secs(number)));
    }
    let revocation = revoked(NOW);
    assert!(revocation.names("new-1099") && !revocation.names("new-0000"), "the newest are named");
}

#[test]
fn a_certificate_that_ran_out_or_is_not_ours_is_not_renewed() {
    let lab = lab();
    let node = lab.node();
    assert_eq!(reason(&lab.renew(&node, NOW.plus(24 * HOUR), |_| {})), Some(Reason::CertificateExpired));
    let foreign = self::lab().node();
    assert_eq!(reason(&lab.renew(&foreign, NOW, |_| {})), Some(Reason::WrongIdentity));
    let mut own_key = lab.node();
    own_key.pair = same(&node.pair);
    assert_eq!(reason(&lab.renew(&own_key, NOW, |_| {})), Some(Reason::JoinInvalid));
}

/// The report of a leave of `node`, signed by `signer`, which shows the certificate of `shown`.
fn leave(node: &Node, signer: &KeyPair, shown: Option<&Node>) -> Envelope {
    let body = Leave {
        kind: LeaveKind::Leave,
        trust_domain: "lab.example".into(),
        node_id: node.issued.node_id.clone(),
        issued_at: NOW,
        not_after: NOW.plus(HOUR),
    };
    let chain = shown.map(|shown| Bytes::copy_from_slice(&shown.issued.chain[0].0)).into_iter().collect();
    let key = signing_key(signer.serialize_der()).unwrap();
    sign(Leave::TYPE, json(&body), &*key, chain).unwrap()
}

/// What a session of `node` asks.
fn leaves(node: &Node, report: Envelope) -> Ask {
    Ask::Leave { node: node.issued.node_id.clone(), report }
}

#[test]
fn a_node_leaves_by_a_report_under_its_own_key_alone_and_once() {
    let lab = lab();
    let (node, other) = (lab.node(), lab.node());
    let mut changed = leave(&node, &node.pair, Some(&node));
    changed.payload = leave(&other, &other.pair, Some(&other)).payload;
    let mut retyped = leave(&node, &node.pair, Some(&node));
    retyped.payload_type = RenewProof::TYPE.into();
    let forged = [
        ("of a gateway's key", leave(&node, &KeyPair::generate().unwrap(), Some(&node))),
        ("of another node's key", leave(&node, &other.pair, Some(&other))),
        ("under another's certificate", leave(&node, &node.pair, Some(&other))),
        ("without a certificate", leave(&node, &node.pair, None)),
        ("with other bytes", changed),
        ("of another type", retyped),
    ];
    for (what, report) in forged {
        let told = lab.worker.answer(leaves(&node, report), NOW);
        assert!(matches!(told, Told::Refused { reason: Reason::JoinInvalid, .. }), "{what}: {told:?}");
        assert!(matches!(lab.renew(&node, NOW, |_| {}), Told::Renewed(..)), "{what}: it is a node still");
    }
    let report = leave(&node, &node.pair, Some(&node));
    for _ in 0..2 {
        let told = lab.worker.answer(leaves(&node, report.clone()), NOW);
        assert!(matches!(&told, Told::Left(left) if *left == node.issued.node_id), "{told:?}");
    }
    assert_eq!(reason(&lab.renew(&node, NOW, |_| {})), Some(Reason::UnknownNode));
    assert!(matches!(lab.renew(&other, NOW, |_| {}), Told::Renewed(..)));
    let late =
        lab.worker.answer(leaves(&other, leave(&other, &other.pair, Some(&other))), NOW.plus(25 * HOUR));
    assert!(matches!(late, Told::Refused { .. }), "a certificate that has run out proves nothing: {late:?}");
}

#[test]
fn a_report_of_a_leave_that_another_node_sends_makes_neither_leave() {
    let lab = lab();
    let (node, other) = (lab.node(), lab.node());
    let told = lab.worker.answer(leaves(&other, leave(&node, &node.pair, Some(&node))), NOW);
    assert_eq!(reason(&told), Some(Reason::JoinInvalid));
    for node in [&node, &other] {
        assert!(matches!(lab.renew(node, NOW, |_| {}), Told::Renewed(..)), "nothing was forgotten");
    }
}

#[test]
fn a_leave_that_was_given_up_counts_for_nothing_later_and_one_that_held_is_answered_whatever_the_time() {
    let lab = lab();
    let node = lab.node();
    let report = leave(&node, &node.pair, Some(&node));
    let late = NOW.plus(HOUR + Duration::from_millis(1));
    let given_up = lab.worker.answer(leaves(&node, report.clone()), late);
    assert_eq!(reason(&given_up), Some(Reason::Expired));
    assert!(matches!(lab.renew(&node, NOW, |_| {}), Told::Renewed(..)), "the node has stayed");
    // Whoever was killed behind the first answer may ask again only after a long time.
    for at in [NOW, late, NOW.plus(48 * HOUR)] {
        let told = lab.worker.answer(leaves(&node, report.clone()), at);
        assert!(matches!(&told, Told::Left(left) if *left == node.issued.node_id), "{at}: {told:?}");
    }
}

#[test]
fn a_revoked_certificate_speaks_for_its_node_no_more_not_even_to_leave() {
    let lab = lab();
    let node = lab.node();
    lab.worker.obey(Order::Revoke(node.issued.node_id.clone()), NOW);
    let told = lab.worker.answer(leaves(&node, leave(&node, &node.pair, Some(&node))), NOW);
    assert_eq!(reason(&told), Some(Reason::CertificateRevoked));
    lab.worker.obey(Order::Unrevoke(node.issued.node_id.clone()), NOW);
    assert!(matches!(lab.renew(&node, NOW, |_| {}), Told::Renewed(..)), "nothing was forgotten");
}

#[test]
fn labels_of_a_ticket_stand_in_every_answer_of_its_nodes_and_what_is_none_is_refused() {
    let lab = lab();
    let ticket = |labels: &[(&str, &str)]| {
        let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        lab.worker.obey(Order::Ticket(TicketTerms { labels, ..TicketTerms::new(1, 60, "fra1") }), NOW)
    };
    for bad in [("", "x"), ("a b", "x"), ("rack", "a,b"), ("rack", &"x".repeat(64))] {
        assert!(matches!(ticket(&[bad]), Told::Failed(why) if why.contains("not a label")), "{bad:?}");
    }
    let Told::Ticket(line) = ticket(&[("bc/rack", "r12"), ("empty", "")]) else { panic!("no ticket") };
    let pins = Pins::of(&line);
    let pair = KeyPair::generate().unwrap();
    for _ in 0..2 {
        let Told::Joined(_, noted) = lab.join_as(&pins, &pair, None) else { panic!("not joined") };
        assert_eq!(
            noted.labels,
            BTreeMap::from([("bc/rack", "r12"), ("empty", "")].map(|(n, v)| (n.into(), v.into())))
        );
    }
}
