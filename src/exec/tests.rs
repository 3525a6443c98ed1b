//! The executor over a real journal: what is answered, what is started, what is not.

mod barrier;
mod cancelling;
mod outliving;
mod reboot;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::clock::TokioClock;
use crate::journal::{At, Faults, Journal, Locked, Mode, Options};
use crate::model::{BootId, Effect, Incarnation, JournalId, Lane, NodeId, Outcome, ServerTime, Terminal};
use crate::ports::RebootError;
use crate::session::outbox::{Outbox, outbox};
use crate::wire::dsse::{CANCEL_TYPE, COMMAND_TYPE, CommandRoots};
use crate::wire::frames::CommandFrame;

const ISSUED: &str = "2026-11-29T10:00:00Z";
const NOT_AFTER: &str = "2026-11-29T11:00:00Z";
const SQLITE_FULL: i32 = 13;

fn time(text: &str) -> ServerTime {
    ServerTime::parse(text).expect("a time")
}

fn id(text: &str) -> CommandId {
    CommandId::new(text).expect("an id")
}

/// Another one for every test: programs are found, and ended, by it.
fn journal_id() -> JournalId {
    JournalId::random(&mut rand::rngs::StdRng::from_os_rng())
}

/// The program `bcd`, which the build of this test's package leaves above the test itself.
pub(super) fn program() -> PathBuf {
    let test = std::env::current_exe().expect("this program");
    let program = test.parent().and_then(|deps| deps.parent()).expect("a target directory").join("bcd");
    assert!(program.exists(), "{} is missing: cargo build --features fakehw", program.display());
    program
}

/// A running executor with everything around it.
struct Bench {
    dir: TempDir,
    journal: Journal,
    faults: Faults,
    lanes: Lanes,
    deliveries: mpsc::Sender<Delivery>,
    stop: watch::Sender<bool>,
    outbox: Outbox,
    run: JoinHandle<()>,
    reboots: Arc<CountedReboots>,
}

/// Counts, and answers as it is told to.
#[derive(Debug, Default)]
struct CountedReboots {
    asked: AtomicUsize,
    refuses: AtomicBool,
    panics: AtomicBool,
}

impl Reboot for CountedReboots {
    fn reboot(&self) -> BoxFuture<'static, Result<(), RebootError>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        assert!(!self.panics.load(Ordering::SeqCst), "as the test asked");
        let refused = self.refuses.load(Ordering::SeqCst);
        let answer = if refused { Err(RebootError::Refused("not today".into())) } else { Ok(()) };
        std::future::ready(answer).boxed()
    }
}

fn options(dir: &TempDir, incarnation: &str, boot: &str) -> Options {
    Options {
        incarnation: Incarnation::new(incarnation).expect("an id"),
        boot_id: BootId::new(boot).expect("an id"),
        ..Options::of_a_test(dir.path().to_owned(), Mode::Thread)
    }
}

impl Bench {
    fn new() -> Self {
        let own_alone = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let dir = tempfile::Builder::new().permissions(own_alone).tempdir().expect("a directory");
        let options = options(&dir, "i-1", "b-1");
        let birth = Some(time("2026-11-29T09:00:00Z"));
        Locked::create(&options, birth, journal_id()).expect("a journal");
        Self::over(dir, "i-1")
    }

    /// Another daemon process over the same state.
    fn over(dir: TempDir, incarnation: &str) -> Self {
        Self::over_in(dir, incarnation, "b-1")
    }

    /// One that takes signed commands alone.
    async fn signed_alone() -> Self {
        Self::over_with(Self::new().crash().await, "i-2", "b-1", Policy::All)
    }

    /// Another daemon process over the same state, in that boot.
    fn over_in(dir: TempDir, incarnation: &str, boot: &str) -> Self {
        Self::over_with(dir, incarnation, boot, Policy::None)
    }

    fn over_with(dir: TempDir, incarnation: &str, boot: &str, policy: Policy) -> Self {
        let faults = Faults::default();
        let locked = Locked::open(options(&dir, incarnation, boot), journal_id()).expect("a journal");
        let boot_id = BootId::new(boot).expect("an id");
        let programs: Arc<dyn Programs> = Arc::new(Supervisors::new(program()));
        let leftovers =
            Leftovers::settle(Arc::clone(&programs), &locked, dir.path(), &boot_id).expect("records");
        let (journal, recovered) = locked
            .with_faults(faults.clone())
            .recover_with(None, &mut |begun| leftovers.left(begun))
            .expect("a recovery");
        let lanes = Lanes::default();
        lanes.set_terms(&BTreeMap::from([(Lane::Control, 2), (Lane::Work, 2)]), false);
        let (sender, outbox) = outbox();
        let (deliveries, received) = mpsc::channel(16);
        let (stop, stopped) = watch::channel(false);
        let reboots = Arc::new(CountedReboots::default());
        let parts = Parts {
            journal: journal.clone(),
            working: WorkingClock::new(
                Arc::new(TokioClock::starting_at(0)),
                Some(time("2026-11-29T10:00:10Z")),
                None,
            ),
            lanes: lanes.clone(),
            outbox: sender,
            audience: Audience {
                trust_domain: "lab.example".into(),
                node_id: NodeId::new("n-1").expect("an id"),
            },
            policy,
            roots: watch::channel(CommandRoots::default()).1,
            role: Role::Host,
            denied: Arc::default(),
            facts: ProbeFacts {
                node_id: NodeId::new("n-1").expect("an id"),
                site: "fra1".into(),
                role: Role::Host,
                daemon_version: "0.1.0".into(),
                boot_id: BootId::new(boot).expect("an id"),
            },
            state: dir.path().to_owned(),
            reboot: reboots.clone(),
            programs,
            reattached: recovered.reattached,
        };
        let run = tokio::spawn(Executor::new(parts).run(received, stopped));
        Self { dir, journal, faults, lanes, deliveries, stop, outbox, run, reboots }
    }

    async fn deliver(&self, body: &Value) {
        self.deliver_as(1, body).await;
    }

    async fn deliver_as(&self, seq: u64, body: &Value) {
        let envelope = envelope(COMMAND_TYPE, body);
        let frame = CommandFrame { seq, delivery_attempt: 1, envelope, approvals: Vec::new() };
        self.deliveries.send(Delivery::Command(frame)).await.expect("a running executor");
    }

    async fn cancel(&self, command: &str) {
        let body = json!({"trust_domain": "lab.example", "node_id": "n-1", "command_id": command, "issued_at": ISSUED});
        let envelope = envelope(CANCEL_TYPE, &body);
        let delivery = Delivery::Cancel { command_id: id(command), envelope };
        self.deliveries.send(delivery).await.expect("a running executor");
    }

    /// The next answer, as `ACCEPTED`, `RUNNING`, `REFUSED reason detail`, or the result.
    async fn answer(&mut self) -> Said {
        let next = timeout(Duration::from_secs(20), self.outbox.next()).await.expect("an answer in time");
        match next.expect("a running executor") {
            Outgoing::Passing(Answer { state, .. }) => match state {
                AnswerState::Refused { reason, detail } => Said::Refused(reason, detail),
                AnswerState::Accepted => Said::Accepted,
                AnswerState::Running { attempt } => Said::Running(attempt),
                AnswerState::Done(_) => panic!("a result outside the journal"),
            },
            Outgoing::Result(done) => Said::Done(Box::new(done.into_inner().outcome)),
        }
    }

    async fn result(&mut self) -> Outcome {
        loop {
            match self.answer().await {
                Said::Done(outcome) => return *outcome,
                Said::Refused(reason, detail) => panic!("refused {reason}: {detail}"),
                Said::Accepted | Said::Running(_) => {}
            }
        }
    }

    /// Ends this daemon process as a crash would: nothing more is written.
    async fn crash(self) -> TempDir {
        self.run.abort();
        let _ = self.run.await;
        self.journal.close().await;
        self.dir
    }

    fn witness(&self) -> std::path::PathBuf {
        self.dir.path().join("witness")
    }

    /// How often the effect of [`Bench::exec`] happened.
    fn effects(&self) -> usize {
        std::fs::read(self.witness()).map_or(0, |text| text.len())
    }

    /// A program that leaves a trace, then does `more`.
    fn exec(&self, command: &str, more: &str) -> Value {
        let script = format!("printf x >> {}; {more}", self.witness().display());
        body(command, "node.exec", json!({"argv": ["/bin/sh", "-c", script], "grace_s": 1}))
    }

    async fn credits_are_back(&self) {
        for _ in 0..500 {
            if self.lanes.free()[&Lane::Work] == 2 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("a credit did not come back");
    }

    async fn effect_has_started(&self) {
        for _ in 0..500 {
            if self.effects() > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the program did not start");
    }
}

#[derive(Debug, PartialEq)]
enum Said {
    Refused(Reason, String),
    Accepted,
    Running(u32),
    Done(Box<Outcome>),
}

fn envelope(payload_type: &str, body: &Value) -> Envelope {
    Envelope { payload_type: payload_type.into(), payload: body.to_string().into(), signatures: Vec::new() }
}

fn body(command: &str, kind: &str, args: Value) -> Value {
    json!({"trust_domain": "lab.example", "node_id": "n-1", "id": command, "kind": kind,
           "issued_at": ISSUED, "not_after": NOT_AFTER, "args": args})
}

fn probe(command: &str) -> Value {
    body(command, "node.probe", json!({}))
}

fn ending(outcome: &Outcome) -> (Terminal, Option<Reason>, Effect) {
    (outcome.state, outcome.reason, outcome.effect)
}

#[tokio::test]
async fn a_command_is_accepted_runs_and_ends_in_this_order_and_frees_its_credit() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    assert_eq!(bench.answer().await, Said::Running(1));
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Succeeded, None, Effect::Complete));
    assert_eq!((outcome.attempt, bench.effects()), (1, 1));
    assert!(outcome.started.is_some() && outcome.finished >= outcome.started);
    assert!(bench.dir.path().join("begun").join("c-1.json").exists(), "it may not run twice");
    bench.credits_are_back().await;
    assert!(bench.lanes.running_ids().is_empty());
}

#[tokio::test]
async fn a_probe_needs_no_begun_record_and_carries_its_output() {
    let mut bench = Bench::new();
    bench.deliver(&probe("c-1")).await;
    let outcome = bench.result().await;
    assert_eq!(outcome.state, Terminal::Succeeded);
    let report: Value = serde_json::from_slice(&outcome.output).expect("JSON");
    assert_eq!(report["node_id"], "n-1");
    assert!(!bench.dir.path().join("begun").join("c-1.json").exists());
}

#[tokio::test]
async fn a_duplicate_delivery_starts_nothing_and_gets_the_state_or_the_result() {
    let mut bench = Bench::new();
    let command = bench.exec("c-1", "sleep 0.5");
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    assert_eq!(bench.answer().await, Said::Running(1));
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Running(1));
    let first = bench.result().await;
    bench.deliver(&command).await;
    assert_eq!(bench.result().await, first);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn two_deliveries_at_once_start_one_effect() {
    let mut bench = Bench::new();
    let command = bench.exec("c-1", "");
    for _ in 0..10 {
        bench.deliver(&command).await;
    }
    let mut results = 0;
    // Ten answers, and the RUNNING and the result of the one that started.
    for _ in 0..12 {
        results += usize::from(matches!(bench.answer().await, Said::Done(_)));
    }
    assert!(results >= 1);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn each_refusal_has_its_token_and_leaves_no_trace() {
    let mut bench = Bench::new();
    let mut elsewhere = probe("c-1");
    elsewhere["node_id"] = "n-2".into();
    let mut too_far = probe("c-1");
    too_far["not_after"] = "2026-12-29T10:00:00Z".into();
    for (command, token) in [(elsewhere, Reason::WrongNode), (too_far, Reason::NotAfterTooFar)] {
        bench.deliver(&command).await;
        let said = bench.answer().await;
        assert!(matches!(&said, Said::Refused(reason, _) if *reason == token), "{said:?}");
    }
    let malformed = Delivery::Malformed { body_sha256: Digest::of(b""), detail: "no envelope".into() };
    bench.deliveries.send(malformed).await.expect("a running executor");
    assert_eq!(bench.answer().await, Said::Refused(Reason::Invalid, "no envelope".into()));
    bench.deliver(&probe("c-1")).await;
    assert_eq!(bench.answer().await, Said::Accepted, "the id is free still");
}

#[tokio::test]
async fn a_rejection_is_a_result_and_starts_nothing() {
    let mut bench = Bench::new();
    bench.deliver(&body("c-1", "node.exec", json!({"argv": [], "more": 1}))).await;
    bench.deliver(&body("c-2", "disk.wipe", json!({}))).await;
    for _ in 0..2 {
        let outcome = bench.result().await;
        assert_eq!((outcome.state, outcome.effect), (Terminal::Rejected, Effect::None));
    }
}

#[tokio::test]
async fn without_a_free_credit_a_command_is_refused_busy() {
    let mut bench = Bench::new();
    bench.lanes.set_terms(&BTreeMap::new(), false);
    bench.deliver(&probe("c-1")).await;
    assert_eq!(bench.answer().await, Said::Refused(Reason::Busy, "credits".into()));
}

#[tokio::test]
async fn a_held_node_refuses_what_is_new_and_still_tells_ends_and_cancels_what_it_runs() {
    let mut bench = Bench::new();
    let command = bench.exec("c-1", "sleep 60");
    bench.deliver(&command).await;
    bench.effect_has_started().await;
    assert_eq!((bench.answer().await, bench.answer().await), (Said::Accepted, Said::Running(1)));
    bench.lanes.set_on_hold(true);
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.answer().await, Said::Refused(Reason::Busy, "held".into()));
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Running(1));
    bench.cancel("c-1").await;
    assert_eq!(bench.result().await.state, Terminal::Cancelled);
    bench.lanes.set_on_hold(false);
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded, "the refusal left no trace");
}

#[tokio::test]
async fn what_no_worker_vouches_for_or_is_for_another_node_is_a_security_event_and_does_nothing() {
    let mut bench = Bench::signed_alone().await;
    for _ in 0..2 {
        bench.deliver(&bench.exec("c-1", "")).await;
        assert!(matches!(bench.answer().await, Said::Refused(Reason::SignatureRequired, _)));
    }
    bench.cancel("c-1").await;
    let Bench { dir, run, journal, deliveries, .. } = bench;
    drop(deliveries);
    run.await.expect("an end");
    let told = told(&journal).await;
    assert_eq!(told, [("signature-invalid".to_owned(), 1)], "once a minute a type");
    journal.close().await;
    let mut bench = Bench::over(dir, "i-3");
    let mut elsewhere = bench.exec("c-2", "");
    elsewhere["node_id"] = "n-2".into();
    bench.deliver(&elsewhere).await;
    assert!(matches!(bench.answer().await, Said::Refused(Reason::WrongNode, _)));
    assert_eq!(self::told(&bench.journal).await[1], ("wrong-node".to_owned(), 1));
    assert_eq!(bench.effects(), 0);
}

/// The security events that wait, with their counts.
async fn told(journal: &Journal) -> Vec<(String, u64)> {
    let page = journal.events(0, 100, 1 << 20).await.expect("events");
    let of_security = page.events.iter().filter(|event| event.class == crate::model::EventClass::Security);
    of_security
        .map(|event| {
            let body: Value = serde_json::from_str(&event.body).expect("JSON");
            (event.kind.clone(), body["count"].as_u64().expect("a count"))
        })
        .collect()
}

#[tokio::test]
async fn a_stopping_daemon_refuses_and_does_not_wait_for_its_programs() {
    let mut bench = Bench::new();
    let go = bench.dir.path().join("go");
    bench.deliver(&bench.exec("c-1", &format!("while ! [ -e {} ]; do sleep 0.02; done", go.display()))).await;
    bench.effect_has_started().await;
    bench.stop.send(true).expect("a running executor");
    while !bench.lanes.stopping() {
        tokio::task::yield_now().await;
    }
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    assert_eq!(bench.answer().await, Said::Running(1));
    assert_eq!(bench.answer().await, Said::Refused(Reason::Busy, "stopping".into()));
    drop(bench.deliveries);
    timeout(Duration::from_secs(5), bench.run).await.expect("it ends").expect("without a panic");
    bench.journal.close().await;
    let mut bench = Bench::over(bench.dir, "i-2");
    // Not before: a program that has ended by then is told to whoever asks for it.
    std::fs::write(go, "").expect("a file");
    assert_eq!(bench.result().await.state, Terminal::Succeeded, "the stop has ended its program");
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn an_accept_that_cannot_be_written_is_refused_and_starts_nothing() {
    let mut bench = Bench::new();
    bench.faults.fail(At::Commit, SQLITE_FULL);
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Refused(Reason::Busy, "disk".into()));
    assert_eq!(bench.effects(), 0);
    bench.faults.clear();
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn before_running_is_durable_nothing_starts_and_the_credit_is_kept() {
    let mut bench = Bench::new();
    // The accept passes, RUNNING cannot be written; then the disk has room again.
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 1, u32::MAX);
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!((bench.effects(), bench.lanes.free()[&Lane::Work]), (0, 1));
    bench.faults.clear();
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_result_that_cannot_be_written_waits_and_is_not_lost() {
    let mut bench = Bench::new();
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 2, 2);
    bench.deliver(&bench.exec("c-1", "exit 3")).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::ExitStatus), Effect::Complete));
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_begun_record_that_exists_forbids_the_start() {
    let mut bench = Bench::new();
    std::fs::write(bench.dir.path().join("begun").join("c-1.json"), "{}").expect("a record");
    bench.deliver(&bench.exec("c-1", "")).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
    assert_eq!(bench.effects(), 0);
}

#[test]
fn a_document_without_a_signature_moves_signed_time_only_where_the_policy_vouches_for_all() {
    assert!(!vouched(Policy::Destructive, false));
    assert!(vouched(Policy::Destructive, true));
    assert!(vouched(Policy::All, true));
}

#[tokio::test]
async fn a_panic_in_a_kinds_code_ends_that_command_and_nothing_else() {
    let mut bench = Bench::new();
    bench.reboots.panics.store(true, Ordering::SeqCst);
    bench.deliver(&body("c-1", "node.reboot", json!({}))).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
    assert!(bench.lanes.running_ids().is_empty() && !bench.lanes.is_rebooting());
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
}

#[tokio::test]
async fn what_a_dead_daemon_left_ends_when_signed_time_passes_it_though_nobody_delivers_it_again() {
    let mut bench = Bench::new();
    // It cannot be started: the disk is full after the accept.
    bench.faults.fail_some(At::Commit, SQLITE_FULL, 1, u32::MAX);
    bench.deliver(&bench.exec("c-1", "")).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    let dir = bench.crash().await;

    let mut bench = Bench::over(dir, "i-2");
    // A signed document of a later time; no word of c-1.
    let mut later = probe("c-2");
    later["issued_at"] = NOT_AFTER.into();
    later["not_after"] = "2026-11-29T12:00:00Z".into();
    bench.deliver(&later).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(61)).await;
    tokio::time::resume();
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Rejected, Some(Reason::Expired), Effect::None));
    assert_eq!(bench.effects(), 0);
}
