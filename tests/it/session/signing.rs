//! Results that the node signs: those whose kind asks for it, when they are sent, by the key of that moment.

use bcd::blocking::inline::Inline;
use bcd::wire::dsse::{Document as _, PublicKey, verify_document};
use bcd::wire::frames::read_envelope;
use bcd::wire::report::{Fact, SignedResult};

use super::*;

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
