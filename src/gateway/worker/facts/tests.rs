use prost::Message as _;

use super::*;
use crate::gateway::worker::tests::{Lab, NOW, Node, lab};
use crate::gateway::worker::{Ask, Order};
use crate::wire::der::Der;
use crate::wire::dsse::signing_key;
use crate::wire::report::Signer;

fn serial(node: &Node) -> String {
    let leaf = crate::wire::x509::read(&rustls::pki_types::CertificateDer::from(&*node.issued.chain[0].0))
        .expect("a leaf")
        .0
        .raw_serial()
        .to_vec();
    data_encoding::HEXLOWER.encode(&leaf)
}

fn signer(node: &Node) -> Signer {
    Signer {
        trust_domain: "lab.example".into(),
        node_id: node.issued.node_id.clone(),
        serial: serial(node).into(),
        key: signing_key(node.pair.serialize_der()).expect("a key"),
    }
}

fn unsigned(command: &str) -> pb::CommandUpdate {
    pb::CommandUpdate {
        command_id: command.into(),
        body_sha256: vec![7; 32].into(),
        state: pb::CommandState::Succeeded.into(),
        attempt: 1,
        effect: pb::Effect::Complete.into(),
        output: "{\"code\":0}".into(),
        ..Default::default()
    }
}

fn signed_by(signer: &Signer, command: &str) -> pb::CommandUpdate {
    let mut update = unsigned(command);
    signer.sign_result(&mut update, NOW).expect("signed");
    update
}

fn judge(lab: &Lab, node: &Node, update: &pb::CommandUpdate) -> Option<Reason> {
    judged(lab, node, update).refused
}

fn judged(lab: &Lab, node: &Node, update: &pb::CommandUpdate) -> Judged {
    let claim = Claim { node: node.issued.node_id.clone(), update: Der(update.encode_to_vec().into()) };
    let told = lab.worker.answer(Ask::Facts(vec![claim]), NOW);
    let Told::Judged(mut judged) = told else { panic!("{told:?}") };
    assert_eq!(judged.len(), 1);
    judged.remove(0)
}

fn kept(lab: &Lab) -> Vec<FactView> {
    let Told::Facts(facts) = lab.worker.obey(Order::Facts { after: 0 }, NOW) else { panic!("no facts") };
    facts
}

#[test]
fn a_result_under_the_key_that_was_certified_holds_and_is_kept_once_however_often_it_is_said() {
    let lab = lab();
    let node = lab.node();
    for _ in 0..2 {
        assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), "c-1")), None);
    }
    let facts = kept(&lab);
    assert_eq!(facts.len(), 1, "{facts:?}");
    let fact = &facts[0];
    assert_eq!((fact.command.as_str(), &fact.node), ("c-1", &node.issued.node_id));
    assert_eq!((&*fact.state, &*fact.effect, fact.attempt, &*fact.refused), ("succeeded", "complete", 1, ""));
    assert_eq!(fact.serial, serial(&node));
}

#[test]
fn a_result_that_holds_shows_that_its_node_has_the_certificate() {
    let lab = lab();
    let node = lab.node();
    let renewed = lab.renewed(&node);
    let used = || {
        let sql = "SELECT 1 FROM certificates WHERE serial = ? AND used = 1";
        lab.worker.enrolment().0.prepare(sql).expect("sql").exists([serial(&renewed)]).expect("read")
    };
    let mut altered = signed_by(&signer(&renewed), "c-1");
    altered.attempt += 1;
    assert_eq!(judge(&lab, &renewed, &altered), Some(Reason::ResultAltered));
    assert!(!used());
    assert_eq!(judge(&lab, &renewed, &signed_by(&signer(&renewed), "c-1")), None);
    assert!(used());
}

#[test]
fn a_result_that_is_signed_anew_after_a_renewal_is_the_same_fact() {
    let lab = lab();
    let node = lab.node();
    assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), "c-1")), None);
    let renewed = lab.renewed(&node);
    assert_ne!(serial(&renewed), serial(&node));
    assert_eq!(judge(&lab, &renewed, &signed_by(&signer(&renewed), "c-1")), None);
    assert_eq!(kept(&lab).len(), 1);
}

#[test]
fn whatever_a_gateway_changes_beside_the_signed_body_is_refused_result_altered() {
    let lab = lab();
    let node = lab.node();
    let changes: [fn(&mut pb::CommandUpdate); 6] = [
        |update| update.state = pb::CommandState::Failed.into(),
        |update| update.output = "{\"code\":1}".into(),
        |update| update.command_id = "c-2".into(),
        |update| update.body_sha256 = vec![8; 32].into(),
        |update| update.reason = "exit-status".into(),
        |update| update.effect = pb::Effect::None.into(),
    ];
    for change in changes {
        let mut update = signed_by(&signer(&node), "c-1");
        change(&mut update);
        assert_eq!(judge(&lab, &node, &update), Some(Reason::ResultAltered), "{update:?}");
    }
    let facts = kept(&lab);
    assert!(facts.iter().all(|fact| fact.refused == "result-altered" && fact.serial.is_empty()), "{facts:?}");
}

#[test]
fn another_nodes_signed_body_is_refused_wrong_node() {
    let lab = lab();
    let (node, other) = (lab.node(), lab.node());
    assert_eq!(judge(&lab, &node, &signed_by(&signer(&other), "c-1")), Some(Reason::WrongNode));
    // A node cannot sign as another one either.
    let posing = Signer { node_id: node.issued.node_id.clone(), ..signer(&other) };
    assert_eq!(judge(&lab, &node, &signed_by(&posing, "c-1")), Some(Reason::WrongNode));
    let elsewhere = Signer { trust_domain: "prod.example".into(), ..signer(&node) };
    assert_eq!(judge(&lab, &node, &signed_by(&elsewhere, "c-1")), Some(Reason::WrongNode));
}

#[test]
fn a_signed_body_that_was_changed_or_is_of_a_key_that_nobody_certified_is_refused_signature_invalid() {
    let lab = lab();
    let node = lab.node();
    let mut changed = signed_by(&signer(&node), "c-1");
    let envelope = changed.signed_result.as_mut().expect("signed");
    envelope.payload = String::from_utf8_lossy(&envelope.payload).replace("SUCCEEDED", "FAILED").into();
    changed.state = pb::CommandState::Failed.into();
    let own = signing_key(rcgen::KeyPair::generate().expect("a key").serialize_der()).expect("a key");
    let forged = signed_by(&Signer { key: own, ..signer(&node) }, "c-1");
    // The key id of the node's own over the forger's signature.
    let mut dressed = forged.clone();
    let id = signed_by(&signer(&node), "c-1").signed_result.expect("signed").signatures[0].key_id.clone();
    dressed.signed_result.as_mut().expect("signed").signatures[0].key_id = id;
    let another = signed_by(&Signer { serial: serial(&lab.node()).into(), ..signer(&node) }, "c-1");
    let mut retyped = signed_by(&signer(&node), "c-1");
    retyped.signed_result.as_mut().expect("signed").payload_type = "application/vnd.bcd.v1.report".into();
    for (what, update) in [
        ("changed", changed),
        ("forged", forged),
        ("dressed", dressed),
        ("another certificate", another),
        ("another type", retyped),
    ] {
        assert_eq!(judge(&lab, &node, &update), Some(Reason::SignatureInvalid), "{what}");
    }
}

#[test]
fn a_result_whose_signature_was_taken_away_is_refused_signature_required() {
    let lab = lab();
    let node = lab.node();
    assert_eq!(judge(&lab, &node, &unsigned("c-1")), Some(Reason::SignatureRequired));
    assert_eq!(kept(&lab)[0].refused, "signature-required");
}

#[test]
fn a_revoked_certificates_key_vouches_for_nothing_more() {
    let lab = lab();
    let node = lab.node();
    let _ = lab.worker.obey(Order::RevokeForGood(node.issued.node_id.clone()), NOW);
    assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), "c-1")), Some(Reason::CertificateRevoked));
}

#[test]
fn what_is_no_result_is_refused_invalid_and_leaves_no_trace() {
    let lab = lab();
    let node = lab.node();
    let running = pb::CommandUpdate { state: pb::CommandState::Running.into(), ..unsigned("c-1") };
    assert_eq!(judge(&lab, &node, &running), Some(Reason::Invalid));
    assert_eq!(kept(&lab), []);
}

#[test]
fn of_what_a_gateway_makes_up_the_latest_is_kept_and_no_more_than_that() {
    let lab = lab();
    let node = lab.node();
    assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), "c-true")), None);
    let many = usize::try_from(REFUSED).expect("few") + 10;
    let claims = (0..many).map(|n| Claim {
        node: node.issued.node_id.clone(),
        update: Der(unsigned(&format!("c-{n}")).encode_to_vec().into()),
    });
    let _ = lab.worker.answer(Ask::Facts(claims.collect()), NOW);
    let db = &lab.worker.enrolment().0;
    let count = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0)).expect("a count");
    assert_eq!(count("SELECT count(*) FROM facts WHERE refused <> ''"), REFUSED);
    assert_eq!(count("SELECT count(*) FROM facts WHERE refused = ''"), 1);
}

#[test]
fn a_result_of_more_text_than_a_node_says_is_none_and_leaves_no_trace() {
    let lab = lab();
    let node = lab.node();
    let longest = |extra: usize, change: fn(&mut pb::CommandUpdate, String)| {
        let limits = [REASON_BYTES, TEXT_BYTES].map(|limit| "x".repeat(limit + extra));
        limits.map(|text| {
            let mut update = unsigned("c-1");
            change(&mut update, text);
            signer(&node).sign_result(&mut update, NOW).expect("signed");
            judge(&lab, &node, &update)
        })
    };
    assert_eq!(longest(0, |update, text| update.message = text), [None, None]);
    let before = kept(&lab);
    assert_eq!(longest(1, |update, text| update.reason = text), [Some(Reason::Invalid); 2]);
    assert_eq!(longest(1, |update, text| update.message = text)[1], Some(Reason::Invalid));
    assert_eq!(kept(&lab), before);
}

#[test]
fn what_is_said_of_a_refused_result_is_short_whatever_was_in_it() {
    let lab = lab();
    let node = lab.node();
    let long = "x".repeat(64 << 10);
    let serial = signed_by(&Signer { serial: long.as_str().into(), ..signer(&node) }, "c-1");
    let mut stranger = unsigned("c-2");
    let body = serde_json::json!({
        "trust_domain": "lab.example", "node_id": node.issued.node_id, "issued_at": NOW, "certificate_serial": "0a",
        "fact": Fact::of(&stranger).expect("a fact"), (long.as_str()): 1,
    });
    let key = signer(&node).key;
    let signed = crate::wire::dsse::sign(
        <SignedResult as crate::wire::dsse::Document>::TYPE,
        body.to_string(),
        &*key,
        Vec::new(),
    );
    stranger.signed_result = Some(signed.expect("signed").into());
    for (update, token) in [(serial, Reason::SignatureInvalid), (stranger, Reason::UnsupportedField)] {
        let said = judged(&lab, &node, &update);
        assert_eq!(said.refused, Some(token));
        assert!(said.message.len() <= TEXT_BYTES, "{} bytes", said.message.len());
    }
    assert!(kept(&lab).iter().all(|fact| fact.detail.len() <= TEXT_BYTES));
}

#[test]
fn of_what_one_node_has_signed_the_latest_is_kept() {
    let lab = lab();
    let (node, other) = (lab.node(), lab.node());
    assert_eq!(judge(&lab, &other, &signed_by(&signer(&other), "c-other")), None);
    for n in 0..5 {
        assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), &format!("c-{n}"))), None);
    }
    assert_eq!(judge(&lab, &node, &unsigned("c-9")), Some(Reason::SignatureRequired));
    forget_oldest(&lab.worker.enrolment().0, node.issued.node_id.as_str(), 2).expect("forgotten");
    let left: Vec<_> = kept(&lab).into_iter().map(|fact| fact.command.as_str().to_owned()).collect();
    assert_eq!(left, ["c-other", "c-3", "c-4", "c-9"]);
}

#[test]
fn a_claim_of_more_elements_than_a_message_may_have_is_not_decoded() {
    let lab = lab();
    let node = lab.node();
    let mut update = signed_by(&signer(&node), "c-1");
    let envelope = update.signed_result.as_mut().expect("signed");
    envelope.signatures = vec![pb::Signature::default(); crate::model::limits::FRAME_ELEMENTS];
    assert_eq!(judge(&lab, &node, &update), Some(Reason::Invalid));
    assert_eq!(kept(&lab), [], "nothing of it was read");
}

#[test]
fn a_result_that_waits_while_its_node_is_deleted_is_unknown_node_and_one_of_a_key_that_nobody_has_stays_invalid()
 {
    let lab = lab();
    let (node, other) = (lab.node(), lab.node());
    let waiting = signed_by(&signer(&node), "c-1");
    let _ = lab.worker.obey(Order::Forget(node.issued.node_id.clone()), NOW);
    assert_eq!(judge(&lab, &node, &waiting), Some(Reason::UnknownNode));
    assert_eq!(judge(&lab, &other, &waiting), Some(Reason::SignatureInvalid), "of a node that is known");
    assert_eq!(kept(&lab).len(), 1, "a node that is not known leaves no trace");
}

#[test]
fn facts_that_an_earlier_build_has_kept_are_read_and_others_kept_beside_them() {
    let lab = lab();
    let node = lab.node();
    let old = "DROP TABLE facts; CREATE TABLE facts (
        number INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, command_id TEXT NOT NULL,
        node_id TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, effect TEXT NOT NULL,
        attempt INTEGER NOT NULL, output_sha256 TEXT NOT NULL, serial TEXT NOT NULL, refused TEXT NOT NULL,
        detail TEXT NOT NULL, UNIQUE (command_id, node_id, state, reason, effect, attempt, refused));
        INSERT INTO facts (at_ms, command_id, node_id, state, reason, effect, attempt, output_sha256, serial, refused,
          detail) VALUES (1, 'c-0', 'n-1', 'succeeded', '', 'complete', 1, '00', '0a', '', '')";
    lab.worker.enrolment().0.execute_batch(old).expect("an older table");
    let lab = lab.again();
    assert_eq!(judge(&lab, &node, &signed_by(&signer(&node), "c-1")), None);
    let kept: Vec<_> = kept(&lab).into_iter().map(|fact| fact.command.as_str().to_owned()).collect();
    assert_eq!(kept, ["c-0", "c-1"]);
}
