use super::*;
use crate::clock::TokioClock;
use crate::host::tcp::Tcp;
use crate::identity::tests::{Fixture, URIS, joined};

struct Daemon {
    fixture: Fixture,
    renewal: Renewal,
    identity: watch::Receiver<Identity>,
    use_identity: watch::Sender<Identity>,
    ending: watch::Receiver<Option<Exit>>,
}

/// A daemon that runs with the identity of a new state directory.
fn daemon() -> Daemon {
    let fixture = joined();
    let state = fixture.state();
    let mark = Mark::of(&state).unwrap();
    let working = WorkingClock::new(Arc::new(TokioClock::starting_at(0)), None, None);
    let (current, identity) = watch::channel(Identity::load(&state).unwrap());
    let (end, ending) = watch::channel(None);
    let roots = watch::channel(CommandRoots::default()).0;
    let tell = Tell { identity: current.clone(), roots, ending: end };
    let replaced = Arc::new(Notify::new());
    let renewal = Renewal::new((state, mark), Vec::new(), Arc::new(Tcp), working, tell, replaced);
    Daemon { fixture, renewal, identity, use_identity: current, ending }
}

#[tokio::test]
async fn a_replaced_identity_of_the_same_node_is_taken_once() {
    let daemon = daemon();
    assert!(daemon.renewal.look().await.is_none(), "nothing has changed");
    daemon.fixture.replace(URIS, 2);
    let credentials = daemon.renewal.look().await.expect("the new identity");
    assert_eq!(credentials.offered.certificate, daemon.identity.borrow().certificate);
    assert_eq!(daemon.identity.borrow().generation, 2);
    assert!(daemon.renewal.look().await.is_none(), "it is taken");
    assert_eq!(*daemon.ending.borrow(), None);
}

#[tokio::test]
async fn an_identity_that_is_revoked_in_memory_is_revoked_for_the_session_before_the_disk_says_so_and_stays_so()
 {
    let daemon = daemon();
    daemon.use_identity.send_modify(|identity| identity.revoked = true);
    let credentials = daemon.renewal.look().await.expect("the session has to know");
    assert!(credentials.offered.revoked);
    assert!(daemon.renewal.look().await.is_none(), "it knows");
    // A bundle is kept meanwhile: the same certificate in a file that says nothing of the revocation.
    let path = daemon.fixture.state().join("identity.json");
    std::fs::copy(&path, path.with_extension("new")).unwrap();
    std::fs::rename(path.with_extension("new"), &path).unwrap();
    let credentials = daemon.renewal.look().await.expect("another file");
    assert!(credentials.offered.revoked && daemon.identity.borrow().revoked, "it revokes nothing less");
    daemon.fixture.replace(URIS, 2);
    let credentials = daemon.renewal.look().await.expect("another certificate");
    assert!(!credentials.offered.revoked);
}

#[tokio::test]
async fn an_identity_of_another_node_or_place_is_not_taken_and_ends_the_daemon() {
    for (name, exit) in [
        ("spiffe://lab.example/node/fra1/n-2", Exit::ForeignState),
        ("spiffe://lab.example/node/ams1/n-1", Exit::Failed),
        ("spiffe://other.example/node/fra1/n-1", Exit::Failed),
    ] {
        let daemon = daemon();
        daemon.fixture.replace([name, URIS[1]], 2);
        assert!(daemon.renewal.look().await.is_none(), "{name}");
        assert_eq!(*daemon.ending.borrow(), Some(exit), "{name}");
        assert_eq!(daemon.identity.borrow().generation, 1, "{name}");
    }
}

#[tokio::test]
async fn an_identity_that_cannot_be_used_leaves_the_old_one_until_it_is_mended() {
    let daemon = daemon();
    let path = daemon.fixture.state().join("identity.json");
    std::fs::write(&path, "{").unwrap();
    assert!(daemon.renewal.look().await.is_none());
    std::fs::remove_file(&path).unwrap();
    assert!(daemon.renewal.look().await.is_none(), "moved away for a join");
    assert_eq!(*daemon.ending.borrow(), None);
    daemon.fixture.replace(URIS, 3);
    assert!(daemon.renewal.look().await.is_some());
}
