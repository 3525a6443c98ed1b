//! Results that the node signs: those whose kind asks for it, when they are sent, by the key of that moment.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use bcd::blocking::inline::Inline;
use bcd::wire::dsse::{Document as _, PublicKey, verify_document};
use bcd::wire::frames::read_envelope;
use bcd::wire::report::{Fact, SignedResult};
use rustls::sign::SigningKey;
use rustls::{SignatureAlgorithm, SignatureScheme};

use super::*;

/// A key that errs while it is broken, and takes its time while it is held.
#[derive(Debug)]
struct Moody {
    key: Arc<dyn SigningKey>,
    broken: AtomicBool,
    held: AtomicBool,
    asked: AtomicUsize,
}

impl Moody {
    fn signer() -> (Arc<Self>, Signer) {
        let usual = signer("0a");
        let (broken, held) = (AtomicBool::new(false), AtomicBool::new(false));
        let moody = Arc::new(Self { key: usual.key.clone(), broken, held, asked: AtomicUsize::new(0) });
        (moody.clone(), Signer { key: moody, ..usual })
    }
}

impl SigningKey for Moody {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn rustls::sign::Signer>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        while self.held.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.broken.load(Ordering::SeqCst) { None } else { self.key.choose_scheme(offered) }
    }

    fn public_key(&self) -> Option<rustls::pki_types::SubjectPublicKeyInfoDer<'_>> {
        self.key.public_key()
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        self.key.algorithm()
    }
}

/// The end of a command whose kind asks for a signature.
async fn barrier(journal: &Journal, id: &str) -> Durable<Done> {
    ended(journal, &envelope_of(id, "inventory.barrier", r#"{"barrier_id":"b-1"}"#), 10).await
}

/// What a result says under the key of `signer`.
fn signed(update: &pb::CommandUpdate, signer: &Signer) -> SignedResult {
    let envelope = read_envelope(update.signed_result.clone().expect("a signature")).expect("an envelope");
    let key = signer.key.public_key().expect("a key");
    let key = PublicKey::from_spki(&key).expect("a key");
    let audience = Audience { trust_domain: "lab.example".into(), node_id: node_id() };
    let verified = verify_document::<SignedResult>(&envelope, &key, Some(&audience)).expect("it holds");
    verified.into_inner()
}

fn state() -> (tempfile::TempDir, Journal) {
    let state = tempfile::tempdir().expect("a directory");
    let journal = open_journal(state.path(), Mode::Inline, EventLimits::default());
    (state, journal)
}

#[tokio::test(start_paused = true)]
async fn a_result_whose_kind_asks_for_it_is_signed_wherever_it_is_said_and_a_probes_is_not() {
    let _inline = Inline::here();
    let (state, journal) = state();
    barrier(&journal, "c-1").await;
    result(&journal, "c-2", 10).await;
    let (mut node, credentials) = node_that_renews(&["gw1.lab.example"], state, journal, None);
    let (hello, mut far) = node.live().await;
    node.outbox.send(Outgoing::Result(barrier(&node.journal, "c-3").await));
    node.outbox.send(Outgoing::Result(result(&node.journal, "c-4", 10).await));
    let (updates, _) = until_quiet(&mut far).await;
    let said: Vec<_> = hello.done_results.iter().chain(&updates).collect();
    assert_eq!(
        said.iter().map(|update| update.command_id.as_str()).collect::<Vec<_>>(),
        ["c-1", "c-2", "c-3", "c-4"]
    );
    for update in said {
        if matches!(update.command_id.as_str(), "c-1" | "c-3") {
            let body = signed(update, &credentials.signer);
            assert_eq!(Some(&body.fact), Fact::of(update).as_ref());
            assert_eq!(body.certificate_serial, "0a");
            assert!(body.issued_at >= NOW, "{body:?}");
            let envelope = update.signed_result.as_ref().expect("a signature");
            assert_eq!(envelope.payload_type, SignedResult::TYPE);
            assert!(envelope.signatures.iter().all(|signature| signature.chain.is_empty()));
        } else {
            assert_eq!(update.signed_result, None);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_result_that_is_said_again_after_a_renewal_is_signed_anew_by_the_next_key_and_is_the_same_fact() {
    let _inline = Inline::here();
    let (state, journal) = state();
    barrier(&journal, "c-1").await;
    let newer = Newer::default();
    let (mut node, old) = node_that_renews(&["gw1.lab.example"], state, journal, Some(newer.clone()));
    let (first, far) = node.live().await;
    let renewed = Credentials { signer: signer("0b"), ..old.clone() };
    *newer.lock().expect("a lock") = Some(renewed.clone());
    far.end(lost());
    let (again, _far) = node.live().await;
    let first = signed(&first.done_results[0], &old.signer);
    let again = signed(&again.done_results[0], &renewed.signer);
    assert_eq!(first.fact, again.fact);
    assert_eq!((first.certificate_serial.as_str(), again.certificate_serial.as_str()), ("0a", "0b"));
}

#[tokio::test(start_paused = true)]
async fn many_signed_results_follow_a_hello_that_stays_small_once_each_in_order() {
    let _inline = Inline::here();
    let (state, journal) = state();
    let names: Vec<String> = (100..500).map(|n| format!("c-{n}")).collect();
    for name in &names {
        barrier(&journal, name).await;
    }
    let mut node = node_over(&["gw1.lab.example"], state, journal);
    let (hello, before, first, _far) = node.live_after_results().await;
    let bytes: usize = hello.done_results.iter().map(prost::Message::encoded_len).sum();
    assert!(bytes <= 300 << 10, "{bytes} bytes of results in Hello");
    assert_eq!(first, 1, "all of them come before the first heartbeat");
    let said: Vec<&str> = ids(&hello.done_results).into_iter().chain(ids(&before)).collect();
    assert_eq!(said, names);
    assert!(hello.done_results.iter().chain(&before).all(|update| update.signed_result.is_some()));
}

#[tokio::test]
async fn a_result_that_finds_the_queue_full_when_it_is_signed_is_sent_when_there_is_room() {
    let (state, journal) = state();
    let (key, signer) = Moody::signer();
    let (mut node, credentials) = node_that_signs(&["gw1.lab.example"], state, journal, None, signer);
    let (_, mut far) = node.live().await;
    let patience = Duration::from_secs(5);
    let until = async |what: &dyn Fn() -> bool| {
        let tick = || tokio::time::sleep(Duration::from_millis(1));
        let seen = async {
            while !what() {
                tick().await
            }
        };
        tokio::time::timeout(patience, seen).await.expect("it comes");
    };
    let done = barrier(&node.journal, "c-1").await;
    // Its events are read first: they take places too.
    while tokio::time::timeout(Duration::from_millis(100), far.frames.recv()).await.is_ok() {}
    key.held.store(true, Ordering::SeqCst);
    node.outbox.send(Outgoing::Result(done));
    until(&|| key.asked.load(Ordering::SeqCst) == 1).await;
    // Nobody takes these on, so that each is answered.
    for _ in 0..DELIVERIES + QUEUE {
        let envelope = Some(pb::Envelope { payload: "no command".into(), ..Default::default() });
        far.send(Down::Command(pb::Command { envelope, ..Default::default() }));
    }
    until(&|| far.frames.len() == QUEUE).await;
    key.held.store(false, Ordering::SeqCst);
    // It is signed, and there is no room.
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(far.frames.len(), QUEUE);
    let said = async {
        loop {
            match next(&mut far).await {
                Some(Up::CommandUpdate(update)) if update.command_id == "c-1" => return update,
                Some(_) => {}
                None => panic!("the session ended"),
            }
        }
    };
    let said = tokio::time::timeout(patience, said).await.expect("it was not lost");
    assert_eq!(Some(&signed(&said, &credentials.signer).fact), Fact::of(&said).as_ref());
}

#[tokio::test(start_paused = true)]
async fn while_the_key_errs_everything_else_is_said_and_what_it_owes_follows_once_it_signs() {
    let _inline = Inline::here();
    let (state, journal) = state();
    barrier(&journal, "c-1").await;
    result(&journal, "c-2", 10).await;
    let (key, signer) = Moody::signer();
    key.broken.store(true, Ordering::SeqCst);
    let (mut node, credentials) = node_that_signs(&["gw1.lab.example"], state, journal, None, signer);
    let attempt = node.dials.next().await;
    let hello = hello(&attempt);
    let mut far = attempt.open();
    far.send(Down::Welcome(welcome()));
    let mut before = Vec::new();
    // Events go on, too.
    loop {
        match next(&mut far).await {
            Some(Up::CommandUpdate(update)) => before.push(update),
            Some(Up::Heartbeat(heartbeat)) => break far.send(ack(heartbeat.seq)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ids(&hello.done_results), [""; 0]);
    assert_eq!(ids(&before), ["c-2"], "what needs no signature does not wait for one");
    node.outbox.send(Outgoing::Result(barrier(&node.journal, "c-3").await));
    node.outbox.send(accepted("c-4"));
    node.outbox.send(Outgoing::Result(result(&node.journal, "c-5", 10).await));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-4", "c-5"]);
    let until = tokio::time::Instant::now() + Duration::from_secs(120);
    while let Ok(frame) = tokio::time::timeout_at(until, next(&mut far)).await {
        let Some(Up::Heartbeat(heartbeat)) = frame else { panic!("{frame:?}") };
        far.send(ack(heartbeat.seq));
    }
    let asked = key.asked.load(Ordering::SeqCst);
    assert!((5..30).contains(&asked), "{asked} times: it is asked again, and ever more rarely");
    key.broken.store(false, Ordering::SeqCst);
    let mut said = Vec::new();
    while said.len() < 2 {
        match tokio::time::timeout(Duration::from_secs(60), next(&mut far)).await.expect("both come") {
            Some(Up::CommandUpdate(update)) => said.push(update),
            Some(Up::Heartbeat(heartbeat)) => far.send(ack(heartbeat.seq)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(ids(&said), ["c-1", "c-3"]);
    assert!(said.iter().all(|update| signed(update, &credentials.signer).certificate_serial == "0a"));
    let (again, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&again), [""; 0], "once each");
}
