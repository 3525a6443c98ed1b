//! Writes the corpora: one of each thing that is parsed, signed by keys that nobody has afterwards. Run it again when a shape
//! has changed: `cargo test --features fakehw --test fuzz -- --ignored corpora`.

use std::sync::Arc;

use bcd::gateway::control::Request;
use bcd::gateway::worker::{Ask, Draft, Order};
use bcd::model::{CommandId, Digest, NodeId, Role};
use bcd::wire::bundle::{Approvers, TrustBundle};
use bcd::wire::der::Der;
use bcd::wire::dsse::{CANCEL_TYPE, COMMAND_TYPE, Document, Envelope, PublicKey, sign, signing_key};
use bcd::wire::enroll::{
    Issued, JoinAnswer, OpeningKey, RejoinProof, RenewAnswer, RenewProof, join_request_digest,
};
use bcd::wire::pb;
use bcd::wire::pb::gateway_frame::Frame as Out;
use bcd::wire::pb::node_frame::Frame as In;
use bcd::wire::report::{Fact, Leave, LeaveKind, SignedResult};
use bcd::wire::revocation::Revocation;
use bytes::Bytes;
use prost::Message as _;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, PublicKeyData as _, SanType,
};
use rustls::sign::SigningKey;
use serde_json::json;
use serde_json::value::RawValue;

use crate::NOW;
use crate::harness::folder;

/// The names of every CA of the corpora: a test that signs a certificate anew signs it under this one.
pub const CA: &str = "corpora";
/// What node and worker are called.
pub const NODE_URIS: [&str; 2] = ["spiffe://lab.example/node/fra1/n-1", "urn:bc:role:host"];
const WORKER_URI: &str = "urn:bc:worker:w-1";
const CHALLENGE: &str = "00112233445566778899aabbccddeeff";

/// A CA of that name.
pub fn authority() -> (Issuer<'static, KeyPair>, Bytes) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, CA);
    let key = KeyPair::generate().unwrap();
    let der = Bytes::copy_from_slice(params.self_signed(&key).unwrap().der());
    (Issuer::new(params, key), der)
}

fn leaf(issuer: &Issuer<'_, KeyPair>, key: &KeyPair, uris: &[&str]) -> Bytes {
    let mut params = CertificateParams::default();
    params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
    Bytes::copy_from_slice(params.signed_by(key, issuer).unwrap().der())
}

fn write(name: &str, file: &str, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(folder(name)).unwrap();
    std::fs::write(folder(name).join(file), bytes).unwrap();
}

/// Writes a signed body, its envelope and itself.
fn signed(
    file: &str,
    payload_type: &str,
    body: String,
    key: &Arc<dyn SigningKey>,
    chain: &[Bytes],
) -> Envelope {
    write("bodies", &format!("{file}.json"), &body);
    let envelope = sign(payload_type, body, &**key, chain.to_vec()).unwrap();
    write("envelopes", &format!("{file}.pb"), pb::Envelope::from(envelope.clone()).encode_to_vec());
    envelope
}

fn document<T: Document + serde::Serialize>(file: &str, body: &T, key: &Arc<dyn SigningKey>) -> Envelope {
    signed(file, T::TYPE, serde_json::to_string(body).unwrap(), key, &[])
}

fn command(kind: &str, args: &str) -> String {
    format!(
        r#"{{"trust_domain":"lab.example","node_id":"n-1","id":"c-1","kind":"{kind}","issued_at":"2026-09-21T13:00:00Z","not_after":"2026-09-22T13:00:00Z","min_generation":0,"args":{args}}}"#
    )
}

const EXEC: &str = r#"{"argv":["/usr/bin/uname","-a"],"env":{"A":"1","B":"2"},"stdin_base64":"aGVsbG8=","cwd":"/tmp","user":"root","time_limit_s":30,"grace_s":5,"memory_bytes":1048576,"cpus":1,"tasks":8,"output_limit":65536,"retry_safe":false}"#;

#[test]
#[ignore = "writes tests/corpora again"]
fn the_corpora_are_written() {
    let ((node_issuer, node_root), (command_issuer, command_root)) = (authority(), authority());
    let (node_pair, worker_pair, join_pair) =
        (KeyPair::generate().unwrap(), KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
    let node_leaf = leaf(&node_issuer, &node_pair, &NODE_URIS);
    let worker_leaf = leaf(&command_issuer, &worker_pair, &[WORKER_URI]);
    let key = |pair: &KeyPair| signing_key(pair.serialize_der()).unwrap();
    let (node_key, worker_key, join_key) = (key(&node_pair), key(&worker_pair), key(&join_pair));
    let join_public = PublicKey::from_spki(&join_pair.subject_public_key_info()).unwrap();
    let node_public = PublicKey::from_spki(&node_pair.subject_public_key_info()).unwrap();
    let sealing = OpeningKey::new(&[7; 32]).unwrap().public();
    let (lab, node) = ("lab.example".to_owned(), NodeId::new("n-1").unwrap());

    for (file, bytes) in [("node-root.der", &node_root), ("command-root.der", &command_root)] {
        write("trust", file, bytes);
    }
    write("trust", "join-key.txt", join_public.to_string());
    write("trust", "node-key.txt", node_public.to_string());
    let attested = [NODE_URIS[0], "urn:bc:role:ramdisk", "urn:bc:tenant", "urn:bc:tpm-ak:00ff"];
    for (file, der) in [
        ("node.der", node_leaf.clone()),
        ("attested.der", leaf(&node_issuer, &node_pair, &attested)),
        ("worker.der", worker_leaf.clone()),
        ("root.der", node_root.clone()),
    ] {
        write("certificates", file, der);
    }

    let chain = [worker_leaf];
    let exec = signed("exec", COMMAND_TYPE, command("node.exec", EXEC), &worker_key, &chain);
    for (file, kind, args) in [
        ("probe", "node.probe", "{}"),
        ("barrier", "inventory.barrier", r#"{"barrier_id":"b-1"}"#),
        ("reboot", "node.reboot", r#"{"delay_s":1,"drain_s":60}"#),
    ] {
        signed(file, COMMAND_TYPE, command(kind, args), &worker_key, &chain);
    }
    let body = r#"{"trust_domain":"lab.example","node_id":"n-1","command_id":"c-1","issued_at":"2026-09-21T13:00:00Z"}"#;
    let cancel = signed("cancel", CANCEL_TYPE, body.into(), &worker_key, &chain);
    let bundle = TrustBundle {
        trust_domain: lab.clone(),
        version: 3,
        issued_at: NOW,
        endpoints: vec!["gw1.lab.example:443".into(), "[::1]:7443".into()],
        node_roots: vec![Der(node_root.clone())],
        gateway_roots: vec![Der(node_root.clone())],
        command_roots: vec![Der(command_root)],
        broker_key: Some(node_public.clone()),
        release_keys: vec![node_public.clone()],
        approvers: Some(Approvers { epoch: 1, quorum: 1, keys: vec![node_public] }),
    };
    let bundle = document("trust-bundle", &bundle, &join_key);
    let serials = vec!["00aa".into(), "00bb".into()];
    let revocation = Revocation { trust_domain: lab.clone(), node_id: node.clone(), serials, issued_at: NOW };
    let revocation = document("revocation", &revocation, &join_key);

    let csr = CertificateParams::default().serialize_request(&node_pair).unwrap();
    let csr = Bytes::copy_from_slice(csr.der());
    let request = pb::JoinRequest {
        csr: csr.clone(),
        sealed_token: sealing.seal("bt_7Hq", &csr).unwrap().into(),
        attestor: "token".into(),
        facts: [("kernel".into(), "6.1".into()), ("os".into(), "debian".into())].into(),
        proto_min: 1,
        proto_max: 1,
        role: "host".into(),
        ..Default::default()
    };
    let issued = Issued {
        trust_domain: lab.clone(),
        request_sha256: join_request_digest(&request),
        node_id: node.clone(),
        role: Role::Host,
        site: "fra1".into(),
        labels: serde_json::from_value(json!({ "rack": "r12" })).unwrap(),
        identity_generation: 1,
        chain: vec![Der(node_leaf), Der(node_root.clone())],
        trust_bundle_sha256: Digest::of(&bundle.payload),
        issued_at: NOW,
    };
    let joined = document("join-response", &JoinAnswer(issued.clone()), &join_key);
    let renewed = document("renew-response", &RenewAnswer(issued), &join_key);
    let proof = RenewProof {
        trust_domain: lab.clone(),
        node_id: node.clone(),
        csr_sha256: Digest::of(&csr),
        nonce: "00112233445566778899aabbccddeeff".into(),
        issued_at: NOW,
        challenge: Some("ch-1".into()),
    };
    let proof = document("renew-request", &proof, &node_key);
    let rejoin = RejoinProof {
        trust_domain: lab.clone(),
        node_id: node.clone(),
        request_sha256: join_request_digest(&request),
        challenge: CHALLENGE.into(),
        issued_at: NOW,
    };
    let rejoin = document("rejoin-proof", &rejoin, &node_key);
    let result = SignedResult {
        trust_domain: lab.clone(),
        node_id: node.clone(),
        issued_at: NOW,
        certificate_serial: "00aa".into(),
        fact: Fact::of(&succeeded()).unwrap(),
    };
    let result = document("result", &result, &node_key);
    let leave = Leave {
        kind: LeaveKind::Leave,
        trust_domain: lab,
        node_id: node.clone(),
        issued_at: NOW,
        not_after: NOW.plus(std::time::Duration::from_secs(60)),
    };
    let leave = document("leave", &leave, &node_key);

    let ticket = json!({
        "v": 1, "trust_domain": "lab.example", "endpoints": ["gw1.lab.example:443", "[::1]:7443"],
        "gateway_ca_sha256": Digest::of(&node_root), "join_encryption_key": sealing, "join_signing_key": join_public,
        "token": "bt_7Hq", "uses": 1, "expires_at": "2036-12-01T12:00:00Z", "site": "fra1", "labels": {"rack": "r12"},
        "attestors": ["token"],
    });
    write("tickets", "ticket.json", ticket.to_string());
    write("tickets", "ticket.txt", crate::tickets::line(ticket.to_string().as_bytes()));
    frames(&exec, &cancel, &bundle, &revocation, (&leave, result));
    enrolment(request, csr, (joined, renewed, proof, rejoin), &bundle);
    lines(exec, cancel, leave, node);
}

/// What the node says of a command's end.
fn succeeded() -> pb::CommandUpdate {
    pb::CommandUpdate {
        command_id: "c-1".into(),
        body_sha256: vec![7; 32].into(),
        state: pb::CommandState::Succeeded.into(),
        attempt: 1,
        message: "done".into(),
        effect: pb::Effect::Complete.into(),
        started_ms: NOW.0,
        finished_ms: NOW.0 + 5,
        progress: Some(pb::Progress { permille: 1000, text: "all".into() }),
        output: br#"{"exit_status":0}"#[..].into(),
        ..Default::default()
    }
}

fn frames(
    exec: &Envelope,
    cancel: &Envelope,
    bundle: &Envelope,
    revocation: &Envelope,
    (leave, result): (&Envelope, Envelope),
) {
    let pb = |envelope: &Envelope| pb::Envelope::from(envelope.clone());
    let welcome = pb::Welcome {
        session_id: "s-1".into(),
        gateway_id: "gw-1".into(),
        epoch: 7,
        proto: 1,
        proto_min: 1,
        proto_max: 2,
        server_time_ms: NOW.0,
        heartbeat_interval_ms: 10_000,
        lane_credits: [("control".into(), 8), ("work".into(), 16), ("bulk".into(), 2)].into(),
        journal_id: "j-1".into(),
        acked_event_seq: 12,
        request_sections: vec!["gpus".into()],
        upgrade_required: false,
        trust_bundle: pb(bundle).encode_to_vec().into(),
    };
    let command = pb::Command {
        seq: 3,
        delivery_attempt: 1,
        lane_hint: "work".into(),
        envelope: Some(pb(exec)),
        approvals: vec![pb(exec), pb(exec)],
    };
    let ack = pb::Ack {
        heartbeat_seq: 4,
        journal_id: "j-1".into(),
        event_seq: 9,
        result_ids: vec!["c-1".into(), "c-2".into()],
    };
    for (file, frame) in [
        ("welcome", Out::Welcome(welcome)),
        ("ack", Out::Ack(ack)),
        ("command", Out::Command(command)),
        ("cancel", Out::Cancel(pb::Cancel { command_id: "c-1".into(), envelope: Some(pb(cancel)) })),
        ("trust-bundle", Out::TrustBundle(pb::TrustBundle { envelope: Some(pb(bundle)) })),
        ("revocation", Out::RevocationNotice(pb::RevocationNotice { envelope: Some(pb(revocation)) })),
        ("unsigned-revocation", Out::RevocationNotice(pb::RevocationNotice::default())),
        ("drain", Out::Drain(pb::Drain { max_delay_ms: 5000, reason: "maintenance".into() })),
    ] {
        write(
            "gateway-frames",
            &format!("{file}.pb"),
            pb::GatewayFrame { frame: Some(frame) }.encode_to_vec(),
        );
    }
    let update = succeeded();
    let signed = pb::CommandUpdate { signed_result: Some(result.into()), ..succeeded() };
    let refused = pb::CommandUpdate {
        state: pb::CommandState::Refused.into(),
        reason: "busy".into(),
        message: "credits".into(),
        ..update.clone()
    };
    let hello = pb::Hello {
        node_id: "n-1".into(),
        role: "host".into(),
        boot_id: "b-1".into(),
        journal_id: "j-1".into(),
        incarnation: "i-1".into(),
        daemon_version: "0.1.0".into(),
        proto_min: 1,
        proto_max: 1,
        last_epoch: 6,
        capabilities: vec!["cdi".into(), "nvml".into()],
        kinds: vec!["node.exec".into()],
        drivers: vec![pb::Driver { name: "nvidia".into(), kind: "gpu".into(), version: "1".into() }],
        inventory_hashes: [("gpus".into(), vec![1; 32].into())].into(),
        running_command_ids: vec!["c-3".into()],
        done_results: vec![update.clone(), refused.clone()],
        ..Default::default()
    };
    let report = json!({ "report": leave }).to_string();
    let events = [(1, "command.done", r#"{"id":"c-1"}"#.to_owned()), (5, "node.leaving", report)];
    let event = |(seq, kind, body): (u64, &str, String)| pb::Event {
        seq,
        class: pb::EventClass::Transition.into(),
        r#type: kind.into(),
        body: body.into(),
        at_ms: NOW.0,
        age_ms: Some(7),
        dropped_from: 2,
        dropped_to: 4,
    };
    let batch = pb::EventBatch { journal_id: "j-1".into(), events: events.map(event).into() };
    let heartbeat = pb::Heartbeat {
        seq: 2,
        free_credits: [("work".into(), 16)].into(),
        commands_received: 3,
        load: Some(pb::Load {
            load_averages: vec![0.5, 1.0],
            available_memory: 1 << 30,
            ..Default::default()
        }),
        ..Default::default()
    };
    for (file, frame) in [
        ("hello", In::Hello(hello)),
        ("heartbeat", In::Heartbeat(heartbeat)),
        ("succeeded", In::CommandUpdate(update)),
        ("signed", In::CommandUpdate(signed)),
        ("refused", In::CommandUpdate(refused)),
        ("events", In::EventBatch(batch)),
        ("goodbye", In::Goodbye(pb::Goodbye { intent: "stopping".into(), reason: "stop".into() })),
    ] {
        write("node-frames", &format!("{file}.pb"), pb::NodeFrame { frame: Some(frame) }.encode_to_vec());
    }
    let frame = |frame| pb::GatewayFrame { frame: Some(frame) }.encode_to_vec();
    let drain = frame(Out::Drain(pb::Drain { max_delay_ms: 1, reason: "a".into() }));
    let ack = frame(Out::Ack(pb::Ack { heartbeat_seq: 1, ..Default::default() }));
    write("grpc", "two", [crate::frames::prefixed(&drain), crate::frames::prefixed(&ack)].concat());
}

fn enrolment(
    request: pb::JoinRequest,
    csr: Bytes,
    (joined, renewed, proof, rejoin): (Envelope, Envelope, Envelope, Envelope),
    bundle: &Envelope,
) {
    let bundle = || Some(pb::Envelope::from(bundle.clone()));
    let response = pb::JoinResponse { signed_response: Some(joined.into()), trust_bundle: bundle() };
    let response = pb::join_answer::Frame::Response(response);
    write("join-answers", "response.pb", pb::JoinAnswer { frame: Some(response) }.encode_to_vec());
    let challenge = pb::AttestationChallenge { challenge: CHALLENGE.into(), server_time_ms: NOW.0 };
    let challenge = pb::join_answer::Frame::Challenge(challenge);
    write("join-answers", "challenge.pb", pb::JoinAnswer { frame: Some(challenge) }.encode_to_vec());
    let answer = pb::join_frame::Frame::Answer(pb::AttestationAnswer { proof: Some(rejoin.into()) });
    write("join-requests", "answer.pb", pb::JoinFrame { frame: Some(answer) }.encode_to_vec());
    let renewal = pb::RenewResponse { signed_response: Some(renewed.into()), trust_bundle: bundle() };
    write("renew-answers", "response.pb", renewal.encode_to_vec());
    write("trust", "join-request.pb", request.encode_to_vec());
    let request = pb::JoinFrame { frame: Some(pb::join_frame::Frame::Request(request)) };
    write("join-requests", "request.pb", request.encode_to_vec());
    let renewal = pb::RenewRequest { csr, proof: Some(proof.into()) };
    write("renew-requests", "request.pb", renewal.encode_to_vec());
}

fn lines(exec: Envelope, cancel: Envelope, leave: Envelope, node: NodeId) {
    let draft = Draft {
        node: node.clone(),
        kind: "node.exec".into(),
        args: RawValue::from_string(EXEC.into()).unwrap(),
        ttl_s: 60,
        id: CommandId::new("c-1").ok(),
    };
    for (file, line) in [
        ("enqueue", serde_json::to_string(&Request::Enqueue { command: exec }).unwrap()),
        ("cancel", {
            let cancel = Request::Cancel { id: CommandId::new("c-1").unwrap(), cancellation: cancel };
            serde_json::to_string(&cancel).unwrap()
        }),
        ("leave", serde_json::to_string(&Ask::Leave { node, report: leave }).unwrap()),
        ("command", serde_json::to_string(&Order::Command(draft)).unwrap()),
        ("ticket", r#"{"ticket":{"uses":1,"ttl_s":60,"site":"fra1","labels":{"rack":"r1"}}}"#.into()),
        ("job", job()),
        ("durable", r#"{"Durable":{"pid":17,"start_ticks":99,"boot_id":"b-1"}}"#.into()),
        ("failed", r#"{"Failed":{"detail":"no room","errno":28}}"#.into()),
        ("changed", r#"{"before":true}"#.into()),
    ] {
        write("lines", file, line);
    }
    for (file, line) in
        [("hold", "hold for a while\n"), ("status", "status\n"), ("export", "export rows:c-1\n")]
    {
        write("lines", file, line);
    }
}

fn job() -> String {
    format!(
        r#"{{"state":"/var/lib/bcd","boot_id":"b-1","begun":{{"node_id":"n-1","id":"c-1","body_sha256":"{}","kind":"node.exec","attempt":1,"journal_id":"j-1","not_after":"2026-09-22T13:00:00Z","started":null,"boot_id":"b-1","retry_safe":false,"supervisor":null}},"args":{EXEC}}}"#,
        "07".repeat(32)
    )
}
