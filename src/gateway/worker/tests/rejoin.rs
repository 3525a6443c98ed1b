use super::*;
use crate::wire::enroll::{RejoinProof, rejoin_digest};

const SECOND: Duration = Duration::from_secs(1);
const DAY: Duration = Duration::from_secs(24 * 3600);

/// When the certificate of a node that joined at [`NOW`] runs out.
const END: ServerTime = ServerTime(NOW.0 + 24 * 3600 * 1000);

fn asks(node: &Node, new: &KeyPair) -> pb::JoinRequest {
    pb::JoinRequest {
        csr: request(new).into(),
        attestor: X509POP.into(),
        evidence: node.issued.chain.iter().flat_map(|der| der.0.to_vec()).collect(),
        proto_max: 1,
        ..Default::default()
    }
}

impl Lab {
    fn challenge(&self, request: &pb::JoinRequest, at: ServerTime) -> RejoinProof {
        let told = self.worker.answer(Ask::Join(Der(request.encode_to_vec().into())), at);
        let Told::Challenged { node, time, challenge, .. } = told else { panic!("{told:?}") };
        RejoinProof {
            trust_domain: "lab.example".into(),
            node_id: node,
            request_sha256: join_request_digest(request),
            challenge,
            issued_at: time,
        }
    }

    fn prove(
        &self,
        request: &pb::JoinRequest,
        proof: &RejoinProof,
        signer: &KeyPair,
        at: ServerTime,
    ) -> Told {
        let key = signing_key(signer.serialize_der()).unwrap();
        let proof = sign(RejoinProof::TYPE, json(proof), &*key, Vec::new()).unwrap();
        self.worker.answer(Ask::Rejoin { request: Der(request.encode_to_vec().into()), proof }, at)
    }

    fn rejoin(&self, node: &Node, new: &KeyPair, at: ServerTime) -> Told {
        let request = asks(node, new);
        let proof = self.challenge(&request, at);
        self.prove(&request, &proof, &node.pair, at)
    }
}

fn generation(told: &Told) -> Option<(NodeId, u64)> {
    match told {
        Told::Joined(_, noted) => Some((noted.node.clone(), noted.generation)),
        _ => None,
    }
}

#[test]
fn a_rejoin_keeps_the_node_and_raises_its_generation_once_for_a_certificate_and_a_new_key() {
    let lab = lab();
    let (node, new) = (lab.node(), KeyPair::generate().unwrap());
    let second = Some((node.issued.node_id.clone(), 2));
    for hours in [0, 1, 30] {
        assert_eq!(generation(&lab.rejoin(&node, &new, END.plus(hours * HOUR))), second, "{hours} h later");
    }
    let other = lab.rejoin(&node, &KeyPair::generate().unwrap(), END.plus(HOUR));
    assert_eq!(reason(&other), Some(Reason::IdentitySuperseded), "the old key is worth nothing any more");
}

#[test]
fn the_answer_is_bound_to_the_request_and_to_the_proof() {
    let lab = lab();
    let (node, pins) = (lab.node(), lab.pins());
    let request = asks(&node, &KeyPair::generate().unwrap());
    let proof = lab.challenge(&request, END);
    let Told::Joined(response, _) = lab.prove(&request, &proof, &node.pair, END) else {
        panic!("not joined")
    };
    let response = pb::JoinResponse::decode(&*response.0).unwrap();
    let signed = read_envelope(response.signed_response.unwrap()).unwrap();
    let JoinAnswer(issued) = verify_document(&signed, &pins.key, None).unwrap().into_inner();
    let proof = pb::Envelope { payload: json(&proof), ..Default::default() };
    assert_eq!(issued.request_sha256, rejoin_digest(&join_request_digest(&request), &proof));
    assert_eq!(issued.identity_generation, 2);
}

#[test]
fn a_rejoin_is_granted_from_the_end_of_the_certificate_for_seven_days_or_as_long_as_the_operator_says() {
    let lab = lab();
    let at = |at| reason(&lab.rejoin(&lab.node(), &KeyPair::generate().unwrap(), at));
    assert_eq!(at(END.minus(SECOND)), Some(Reason::CertificateValid));
    assert_eq!(at(END), None);
    assert_eq!(at(END.plus(7 * DAY)), None);
    assert_eq!(at(END.plus(7 * DAY + SECOND)), Some(Reason::RejoinTooLate));
    let Lab { worker, mut options, _dir } = lab;
    drop(worker);
    options.rejoin_within = Duration::ZERO;
    let lab = Lab { worker: Worker::open(&options, NOW).unwrap(), options, _dir };
    let refused = lab.rejoin(&lab.node(), &KeyPair::generate().unwrap(), END.plus(SECOND));
    assert!(
        matches!(&refused, Told::Refused { message, .. } if message.contains("join again with a new ticket"))
    );
}

#[test]
fn a_proof_is_taken_once_within_a_minute_from_the_old_key_and_over_its_own_request_alone() {
    let lab = lab();
    let (node, new) = (lab.node(), KeyPair::generate().unwrap());
    let (request, invalid) = (asks(&node, &new), Some(Reason::JoinInvalid));
    let fresh = || lab.challenge(&request, END);
    let by_another = lab.prove(&request, &fresh(), &new, END);
    assert_eq!(reason(&by_another), invalid, "who has the certificate has not its key");
    let stolen = asks(&node, &KeyPair::generate().unwrap());
    assert_eq!(reason(&lab.prove(&stolen, &fresh(), &node.pair, END)), invalid, "another new key");
    let dated = RejoinProof { issued_at: END.plus(SECOND), ..fresh() };
    assert_eq!(reason(&lab.prove(&request, &dated, &node.pair, END)), invalid, "another time");
    let late = lab.prove(&request, &fresh(), &node.pair, END.plus(61 * SECOND));
    assert_eq!(reason(&late), invalid, "a minute later");
    let own = RejoinProof { challenge: "00".repeat(16), ..fresh() };
    assert_eq!(reason(&lab.prove(&request, &own, &node.pair, END)), invalid, "nobody gave it");
    let proof = fresh();
    assert!(generation(&lab.prove(&request, &proof, &node.pair, END)).is_some());
    assert_eq!(reason(&lab.prove(&request, &proof, &node.pair, END)), invalid, "a replay");
    let other = lab.node();
    let proof = RejoinProof { node_id: other.issued.node_id, ..fresh() };
    assert_eq!(reason(&lab.prove(&request, &proof, &node.pair, END)), invalid, "another node");
}

#[test]
fn a_key_that_a_renewal_has_retired_lets_nobody_in_once_its_successor_has_signed_something() {
    let lab = lab();
    let lost = lab.node();
    lab.renewed(&lost);
    assert!(
        generation(&lab.rejoin(&lost, &KeyPair::generate().unwrap(), END)).is_some(),
        "nobody has seen the answer to its renewal"
    );
    let (first, superseded) = (lab.node(), Some(Reason::IdentitySuperseded));
    let second = lab.renewed(&first);
    let third = lab.renewed(&second);
    let told = |node| reason(&lab.rejoin(node, &KeyPair::generate().unwrap(), END));
    assert_eq!(told(&first), superseded, "the second has asked for the third");
    assert_eq!(told(&second), None, "the third has proven nothing");
    assert_eq!(told(&third), superseded, "the second has joined again since");
}

#[test]
fn certificates_of_an_earlier_build_are_followed_in_the_order_of_their_ends() {
    let lab = lab();
    let first = lab.node();
    let second = lab.renewed(&first);
    lab.renewed(&second);
    let number = |sql: &str| lab.worker.enrolment().0.execute(sql, []).unwrap();
    number(
        "UPDATE certificates SET issued = 0, not_after_ms = not_after_ms + 1 WHERE used = 1 AND issued > 1",
    );
    number("UPDATE certificates SET issued = 0");
    let told = |node| reason(&lab.rejoin(node, &KeyPair::generate().unwrap(), END));
    assert_eq!(told(&first), Some(Reason::IdentitySuperseded));
    assert_eq!(told(&second), None);
}

#[test]
fn neither_a_revoked_nor_a_forgotten_node_is_let_in_again_and_a_revocation_can_be_taken_back() {
    let lab = lab();
    let (node, new) = (lab.node(), KeyPair::generate().unwrap());
    let id = node.issued.node_id.clone();
    lab.worker.obey(Order::Revoke(id.clone()), NOW);
    assert_eq!(reason(&lab.rejoin(&node, &new, END)), Some(Reason::CertificateRevoked));
    lab.worker.obey(Order::Unrevoke(id.clone()), NOW);
    assert!(generation(&lab.rejoin(&node, &new, END)).is_some());
    lab.worker.obey(Order::Forget(id), NOW);
    assert_eq!(reason(&lab.rejoin(&node, &new, END)), Some(Reason::UnknownNode));
}

#[test]
fn evidence_that_is_no_certificate_of_this_deployment_is_challenged_for_nobody() {
    let lab = lab();
    let node = lab.node();
    let good = asks(&node, &KeyPair::generate().unwrap());
    let foreign = super::lab().node();
    let foreign: Vec<u8> = foreign.issued.chain.iter().flat_map(|der| der.0.to_vec()).collect();
    for evidence in [Vec::new(), b"no certificate".to_vec(), vec![0x30; 64 << 10], foreign] {
        let request = pb::JoinRequest { evidence: evidence.into(), ..good.clone() };
        let told = lab.worker.answer(Ask::Join(Der(request.encode_to_vec().into())), END);
        assert!(matches!(reason(&told), Some(Reason::WrongIdentity | Reason::JoinInvalid)), "{told:?}");
    }
}
