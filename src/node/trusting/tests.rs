use super::*;
use crate::clock::TokioClock;
use crate::identity::tests::{Fixture, joined};
use crate::journal::{Locked, Mode, Options};
use crate::model::{JournalId, ServerTime};
use crate::wire::dsse::Signature;

struct Node {
    fixture: Fixture,
    trusting: Trusting,
    journal: Journal,
    replaced: Arc<Notify>,
}

fn node() -> Node {
    let fixture = joined();
    let options = Options::of_a_test(fixture.state(), Mode::Inline);
    let (journal, _) = Locked::open(options, JournalId::new("j-1").unwrap()).unwrap().recover(None).unwrap();
    let replaced = Arc::new(Notify::new());
    let trusting = Trusting {
        state: fixture.state(),
        identity: watch::channel(fixture.load().unwrap()).0,
        trust_floor: 0,
        working: WorkingClock::new(Arc::new(TokioClock::starting_at(0)), None, None),
        journal: journal.clone(),
        notices: mpsc::channel(1).1,
        replaced: Arc::clone(&replaced),
    };
    Node { fixture, trusting, journal, replaced }
}

impl Node {
    /// The events that were told, without the journal's own.
    async fn told(&self) -> Vec<String> {
        let page = self.journal.events(0, 100, 1 << 20).await.unwrap();
        let own = |kind: &String| !kind.starts_with("daemon.") && !kind.starts_with("journal.");
        page.events.iter().map(|event| event.kind.clone()).filter(own).collect()
    }

    /// Whether the session was told to take the identity from the disk.
    async fn replaced(&self) -> bool {
        tokio::time::timeout(std::time::Duration::from_millis(1), self.replaced.notified()).await.is_ok()
    }

    fn held(&self) -> Identity {
        self.fixture.load().unwrap()
    }
}

#[tokio::test]
async fn a_newer_bundle_of_the_pinned_key_is_on_the_disk_before_the_session_hears_of_it() {
    let node = node();
    node.trusting.bundle(node.fixture.bundle(2, true)).await;
    assert_eq!(node.held().trust.bundle.version, 2);
    assert!(node.replaced().await);
    assert_eq!(node.told().await, ["trust-bundle.taken"]);
    let signed = node.trusting.working.signed().expect("its time is signed");
    assert!(signed.since(ServerTime(1_790_000_000_000)) < std::time::Duration::from_secs(60), "{signed}");
}

#[tokio::test]
async fn a_forged_or_older_bundle_changes_nothing_and_is_told_and_the_held_one_is_nobodys_fault() {
    let node = node();
    node.trusting.bundle(node.held().trust.envelope.clone()).await;
    assert_eq!(node.told().await, [""; 0]);
    let mut node = self::node();
    node.trusting.trust_floor = 5;
    // Another kind of refusal within a minute is counted, not told anew.
    for refused in [node.fixture.bundle(9, false), node.fixture.bundle(1, true), node.fixture.bundle(4, true)]
    {
        node.trusting.bundle(refused).await;
        assert_eq!(node.held().trust.bundle.version, 1);
        assert!(!node.replaced().await);
    }
    assert_eq!(node.told().await, ["trust-bundle-refused"]);
    node.trusting.bundle(node.fixture.bundle(5, true)).await;
    assert_eq!(node.held().trust.bundle.version, 5);
}

#[tokio::test]
async fn a_signed_revocation_of_the_own_certificate_is_kept_for_every_process_to_come() {
    let node = node();
    let serial = node.held().leaf.serial;
    node.trusting.revocation(node.fixture.revocation("n-1", &["00", &serial])).await;
    assert!(node.held().revoked);
    assert!(node.replaced().await);
    assert_eq!(node.told().await, ["identity.revoked"]);
}

#[tokio::test(start_paused = true)]
async fn a_revocation_that_cannot_be_kept_yet_is_kept_when_it_can_be() {
    let node = node();
    let serial = node.held().leaf.serial;
    let revocation = node.fixture.revocation("n-1", &[&serial]);
    let state = crate::state_dir::StateDir::open(&node.fixture.state()).unwrap().unwrap();
    let busy = state.lock().unwrap();
    let lets_go = async {
        tokio::time::sleep(Duration::from_secs(10)).await;
        assert!(!node.held().revoked);
        assert!(node.trusting.identity.borrow().revoked, "no disk is needed to stop using it");
        assert!(node.replaced().await, "and the session hears of it");
        drop(busy);
    };
    tokio::join!(node.trusting.revocation(revocation), lets_go);
    assert!(node.held().revoked);
    assert!(node.replaced().await);
    assert_eq!(node.told().await, ["identity.revoked"]);
}

#[tokio::test]
async fn a_revocation_of_another_certificate_another_node_or_another_key_revokes_nothing() {
    let node = node();
    let serial = node.held().leaf.serial;
    node.trusting.revocation(node.fixture.revocation("n-1", &["00"])).await;
    assert_eq!(node.told().await, [""; 0], "serials that are not ours");
    let forged = joined().revocation("n-1", &[&serial]);
    for refused in [forged, node.fixture.revocation("n-2", &[&serial])] {
        node.trusting.revocation(refused).await;
        assert!(!node.held().revoked);
    }
    assert_eq!(node.told().await, ["revocation-refused"]);
    assert!(!node.replaced().await);
}

/// The envelope with bytes that nobody signed, more than identity.json may have.
fn padded(mut envelope: Envelope) -> Envelope {
    let junk = vec![0; 2 << 20];
    envelope.signatures[0].chain.push(junk.clone().into());
    let foreign = Signature { key_id: vec![1; 32].into(), signature: junk.into(), chain: Vec::new() };
    envelope.signatures.push(foreign);
    envelope
}

#[tokio::test]
async fn what_a_gateway_pads_a_genuine_document_with_is_not_kept_and_the_identity_still_loads() {
    let node = node();
    node.trusting.bundle(padded(node.fixture.bundle(2, true))).await;
    assert_eq!(node.held().trust.bundle.version, 2);
    let serial = node.held().leaf.serial;
    node.trusting.revocation(padded(node.fixture.revocation("n-1", &[&serial]))).await;
    assert!(node.held().revoked);
}

#[tokio::test]
async fn of_two_bundles_back_to_back_the_newer_one_stays_whichever_comes_first() {
    let node = node();
    // The identity in use is still the one with version 1: the session has not looked at the disk.
    let newer = node.fixture.bundle(5, true);
    node.trusting.bundle(newer.clone()).await;
    node.trusting.bundle(newer).await;
    assert_eq!(node.told().await, ["trust-bundle.taken"], "told once more, it is nobody's fault");
    node.trusting.bundle(node.fixture.bundle(4, true)).await;
    assert_eq!(node.held().trust.bundle.version, 5);
    assert_eq!(node.told().await, ["trust-bundle.taken", "trust-bundle-refused"]);
}
