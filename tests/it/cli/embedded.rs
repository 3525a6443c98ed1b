//! The composition root without the program around it, as the simulator uses it.

use std::sync::Arc;
use std::time::Duration;

use bcd::clock::SystemClock;
use bcd::identity::Ticket;
use bcd::identity::join::{JournalOptions, Options as JoinOptions, join};
use bcd::journal::{Mode, OpenError};
use bcd::model::{BootId, Exit, Incarnation};
use bcd::node::{BuildError, Node, Options};
use bcd::wire::dsse::Policy;
use bcd::wire::tls::BUILD_TIME;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;

use super::Gateway;

const WAL_BYTES: u64 = 64 << 10;

fn options(state: &std::path::Path, seed: u64) -> Options {
    Options {
        state: state.to_owned(),
        endpoints: Vec::new(),
        policy: Policy::None,
        denied: Arc::default(),
        run_dir: None,
        clock: Arc::new(SystemClock),
        rng: StdRng::seed_from_u64(seed),
        boot_id: BootId::new("b-1").unwrap(),
        wal_bytes: WAL_BYTES,
        journal: Mode::Thread,
        reboot: Arc::new(bcd::host::fake_machine::FakeReboot::none()),
        dialer: None,
    }
}

/// The journal's thread may still be on its way out.
async fn build(options: &Options) -> Node {
    for _ in 0..100 {
        match Node::build(options.clone()) {
            Err(BuildError::Journal(OpenError::Held { .. })) => {
                tokio::time::sleep(Duration::from_millis(20)).await
            }
            other => return other.unwrap(),
        }
    }
    panic!("the journal is still held after 2 s");
}

#[tokio::test]
async fn a_node_whose_future_is_dropped_gives_its_journal_back_and_a_clean_stop_ends_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(dir.path());
    let (gateway, line) = tokio::task::spawn_blocking(move || {
        let line = gateway.ticket(1, 3600);
        (gateway, line)
    })
    .await
    .unwrap();
    let state = dir.path().join("state");
    let join_options = JoinOptions {
        state: state.clone(),
        ticket: Ticket::parse(&line, BUILD_TIME).unwrap(),
        patience: Some(Duration::from_secs(10)),
        journal: JournalOptions {
            incarnation: Incarnation::new("i-1").unwrap(),
            boot_id: BootId::new("b-1").unwrap(),
            wal_bytes: WAL_BYTES,
        },
        facts: Default::default(),
        rng: StdRng::seed_from_u64(1),
    };
    let joined = join(join_options, |_| {}).await.unwrap();

    for seed in 0..3 {
        let node = build(&options(&state, seed)).await;
        assert_eq!(*node.node_id(), joined.node_id);
        let (_hold, stop) = watch::channel(false);
        let crashed = tokio::time::timeout(Duration::from_millis(300), node.run(stop)).await;
        assert!(crashed.is_err(), "it ran until it was dropped");
    }

    let node = build(&options(&state, 9)).await;
    let (say, stop) = watch::channel(false);
    let run = tokio::spawn(node.run(stop));
    tokio::time::sleep(Duration::from_millis(300)).await;
    say.send(true).unwrap();
    let exit = tokio::time::timeout(Duration::from_secs(10), run).await.unwrap().unwrap();
    assert_eq!(exit, Exit::Done);
    tokio::task::spawn_blocking(move || drop(gateway)).await.unwrap();
}
