//! The session with its driver: a real journal, an in-memory link, and the gateway's part played by the test.

mod events;
mod results;
mod signing;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bcd::admission::Context;
use bcd::clock::TokioClock;
use bcd::exec::Lanes;
use bcd::journal::{Admission, Durable, EventLimits, Journal, Locked, Mode, Options};
use bcd::model::{
    Answer, AnswerState, BootId, CommandId, Digest, Done, Effect, Incarnation, JournalId, Lane, NodeId,
    Outcome, Role, ServerTime, Terminal,
};
use bcd::session::Offered;
use bcd::session::outbox::{OutboxSender, Outgoing, outbox};
use bcd::session::{
    Credentials, HelloFacts, Renewals, Session, SessionParts, SessionState, SessionStatus, WorkingClock,
};
use bcd::wire::dsse::{Audience, Envelope, Policy, signing_key, verify_command};
use bcd::wire::frames::Delivery;
use bcd::wire::link::{EndKind, Endpoint, LinkEnd, Validity};
use bcd::wire::memory::{Attempt, Dials, FarEnd, QUEUE, dialer};
use bcd::wire::pb;
use bcd::wire::pb::gateway_frame::Frame as Down;
use bcd::wire::pb::node_frame::Frame as Up;
use bcd::wire::report::Signer;
use futures_util::future::BoxFuture;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::sync::{mpsc, watch};

const NOW: ServerTime = ServerTime(1_900_000_000_000);
const DELIVERIES: usize = 2;

struct Node {
    journal: Journal,
    working: WorkingClock,
    outbox: OutboxSender,
    deliveries: mpsc::Receiver<Delivery>,
    lanes: Lanes,
    status: watch::Receiver<SessionStatus>,
    stop: watch::Sender<bool>,
    running: tokio::task::JoinHandle<()>,
    dials: Dials,
    _state: tempfile::TempDir,
}

fn node_id() -> NodeId {
    NodeId::new("n-1").expect("an id")
}

fn open_journal(state: &std::path::Path, mode: Mode, limits: EventLimits) -> Journal {
    let mut rng = StdRng::seed_from_u64(1);
    let options = Options {
        // Made by the journal, with the permissions that it asks for.
        state: state.join("state"),
        node_id: node_id(),
        incarnation: Incarnation::random(&mut rng),
        boot_id: BootId::random(&mut rng),
        wal_bytes: 64 << 10,
        mode,
    };
    let id = JournalId::random(&mut rng);
    let locked = Locked::open(options, id).expect("a journal").with_event_limits(limits);
    locked.recover(Some(NOW)).expect("recovered").0
}

/// A node whose journal holds what `prepare` has put there.
async fn node_with(prepare: impl AsyncFnOnce(&Journal)) -> Node {
    node_with_limits(EventLimits::default(), prepare).await
}

async fn node_with_limits(limits: EventLimits, prepare: impl AsyncFnOnce(&Journal)) -> Node {
    node_at(&["gw1.lab.example"], limits, prepare).await
}

/// The same, with gateways at these hosts.
async fn node_at(hosts: &[&str], limits: EventLimits, prepare: impl AsyncFnOnce(&Journal)) -> Node {
    let state = tempfile::tempdir().expect("a directory");
    let journal = open_journal(state.path(), Mode::Inline, limits);
    prepare(&journal).await;
    node_over(hosts, state, journal)
}

/// Where newer credentials are put for a session to find.
type Newer = Arc<std::sync::Mutex<Option<Credentials>>>;

struct Looks(Newer);

impl Renewals for Looks {
    fn look(&self) -> BoxFuture<'static, Option<Credentials>> {
        let found = self.0.lock().expect("a lock").take();
        Box::pin(std::future::ready(found))
    }

    fn replaced(&self) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }
}

fn node_over(hosts: &[&str], state: tempfile::TempDir, journal: Journal) -> Node {
    node_that_renews(hosts, state, journal, None).0
}

/// The same; it finds newer credentials in `newer`. With those that it has now.
fn node_that_renews(
    hosts: &[&str],
    state: tempfile::TempDir,
    journal: Journal,
    newer: Option<Newer>,
) -> (Node, Credentials) {
    node_that_signs(hosts, state, journal, newer, signer("0a"))
}

fn node_that_signs(
    hosts: &[&str],
    state: tempfile::TempDir,
    journal: Journal,
    newer: Option<Newer>,
    signer: Signer,
) -> (Node, Credentials) {
    let clock = Arc::new(TokioClock::starting_at(0));
    let working = WorkingClock::new(clock, Some(NOW), Some(NOW));
    let (dialer, dials) = dialer();
    let (outbox, outbox_end) = outbox();
    let (deliver, deliveries) = mpsc::channel(DELIVERIES);
    let (status, status_end) = watch::channel(SessionStatus::new(Duration::ZERO));
    let (stop, stop_end) = watch::channel(false);
    let lanes = Lanes::default();
    let mut rng = StdRng::seed_from_u64(2);
    let hello = HelloFacts {
        node_id: node_id(),
        role: Role::Host,
        boot_id: BootId::random(&mut rng),
        incarnation: Incarnation::random(&mut rng),
        daemon_version: "0.1.0".into(),
        protocol: bcd::wire::version::Range::OWN,
    };
    let credentials = Credentials {
        dialer,
        endpoints: hosts.iter().map(|host| Endpoint { host: (*host).into(), port: 443 }).collect(),
        offered: Offered {
            certificate: Digest::of(b"a certificate"),
            validity: Validity { not_before: NOW, not_after: NOW.plus(Duration::from_secs(86_400)) },
            revoked: false,
            mend: "join again".into(),
            rejoins: String::new(),
        },
        trust_version: 1,
        signer,
    };
    let session = Session::new(SessionParts {
        credentials: credentials.clone(),
        renewals: newer.map(|newer| Box::new(Looks(newer)) as Box<dyn Renewals>),
        notices: mpsc::channel(1).0,
        hello,
        journal: journal.clone(),
        working: working.clone(),
        lanes: lanes.clone(),
        deliveries: deliver,
        outbox: outbox_end,
        status,
        rng,
    });
    let running = tokio::spawn(session.run(stop_end));
    let node = Node {
        journal,
        working,
        outbox,
        deliveries,
        lanes,
        status: status_end,
        stop,
        running,
        dials,
        _state: state,
    };
    (node, credentials)
}

/// The key of a certificate with this serial.
fn signer(serial: &str) -> Signer {
    let key = signing_key(rcgen::KeyPair::generate().expect("a key").serialize_der()).expect("a key");
    Signer { trust_domain: "lab.example".into(), node_id: node_id(), serial: serial.into(), key }
}

async fn node() -> Node {
    node_with(async |_| {}).await
}

fn envelope(id: &str) -> Envelope {
    envelope_of(id, "node.probe", "{}")
}

fn envelope_of(id: &str, kind: &str, args: &str) -> Envelope {
    let body = format!(
        r#"{{"trust_domain":"lab.example","node_id":"n-1","id":"{id}","kind":"{kind}",
        "issued_at":"{NOW}","not_after":"{}","args":{args}}}"#,
        NOW.plus(Duration::from_secs(3600))
    );
    Envelope {
        payload_type: "application/vnd.bcd.v1.command".into(),
        payload: body.into(),
        signatures: Vec::new(),
    }
}

/// A result that stands in the journal, by the whole path.
async fn result(journal: &Journal, id: &str, output: usize) -> Durable<Done> {
    ended(journal, &envelope(id), output).await
}

async fn ended(journal: &Journal, envelope: &Envelope, output: usize) -> Durable<Done> {
    let audience = Audience { trust_domain: "lab.example".into(), node_id: node_id() };
    let command = verify_command(envelope, &audience, &Policy::None.into()).expect("a command");
    let context = Context {
        upgrade_only: false,
        role: Role::Host,
        denied: Arc::new(BTreeSet::new()),
        now: Some(NOW),
        signed: Some(NOW),
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    };
    let Admission::Accepted(accepted) = journal.admit(command, context).await.expect("written") else {
        panic!("not accepted");
    };
    let running = journal.start(accepted, Some(NOW)).await.expect("written");
    let outcome = Outcome {
        state: Terminal::Succeeded,
        reason: None,
        message: String::new(),
        effect: Effect::Complete,
        attempt: 1,
        started: Some(NOW),
        finished: Some(NOW),
        duration_ms: 1,
        output: vec![b'1'; output],
    };
    journal.finish(running, outcome).await.expect("written")
}

fn accepted(id: &str) -> Outgoing {
    let id = Some(CommandId::new(id).expect("an id"));
    Outgoing::Passing(Answer { id, body_sha256: Digest::of(b""), state: AnswerState::Accepted })
}

fn welcome() -> pb::Welcome {
    pb::Welcome {
        session_id: "s-1".into(),
        gateway_id: "g-1".into(),
        epoch: 7,
        proto: 1,
        proto_min: 1,
        proto_max: 1,
        server_time_ms: NOW.plus(Duration::from_secs(60)).0,
        heartbeat_interval_ms: 10_000,
        lane_credits: BTreeMap::from([("control".to_owned(), 8)]).into_iter().collect(),
        ..Default::default()
    }
}

fn hello(attempt: &Attempt) -> pb::Hello {
    match &attempt.first.frame {
        Some(Up::Hello(hello)) => hello.clone(),
        other => panic!("not a Hello: {other:?}"),
    }
}

fn ids(updates: &[pb::CommandUpdate]) -> Vec<&str> {
    updates.iter().map(|update| update.command_id.as_str()).collect()
}

fn ack(seq: u64) -> Down {
    Down::Ack(pb::Ack { heartbeat_seq: seq, ..Default::default() })
}

fn lost() -> LinkEnd {
    LinkEnd { kind: EndKind::Lost, reason: None, pushback: None, revocation: None, detail: "cut".into() }
}

/// The next frame that is not of events.
async fn next(far: &mut FarEnd) -> Option<Up> {
    loop {
        match far.next().await {
            Some(Up::EventBatch(_)) => {}
            other => return other,
        }
    }
}

/// Everything but events that comes until the node is quiet; heartbeats are acked and counted.
async fn until_quiet(far: &mut FarEnd) -> (Vec<pb::CommandUpdate>, Vec<u64>) {
    let (mut updates, mut beats) = (Vec::new(), Vec::new());
    while let Ok(frame) = tokio::time::timeout(Duration::from_secs(2), next(far)).await {
        match frame {
            Some(Up::CommandUpdate(update)) => updates.push(update),
            Some(Up::Heartbeat(heartbeat)) => {
                beats.push(heartbeat.seq);
                far.send(ack(heartbeat.seq));
            }
            Some(other) => panic!("{other:?}"),
            None => break,
        }
    }
    (updates, beats)
}

impl Node {
    async fn live(&mut self) -> (pb::Hello, FarEnd) {
        let attempt = self.dials.next().await;
        let hello = hello(&attempt);
        let mut far = attempt.open();
        far.send(Down::Welcome(welcome()));
        let first = next(&mut far).await;
        assert!(matches!(first, Some(Up::Heartbeat(pb::Heartbeat { seq: 1, .. }))), "{first:?}");
        far.send(ack(1));
        (hello, far)
    }

    /// A session whose first heartbeat the node may hold back; what came before it, and its number.
    async fn live_after_results(&mut self) -> (pb::Hello, Vec<pb::CommandUpdate>, u64, FarEnd) {
        let attempt = self.dials.next().await;
        let hello = hello(&attempt);
        let mut far = attempt.open();
        far.send(Down::Welcome(welcome()));
        let mut updates = Vec::new();
        loop {
            match far.next().await {
                Some(Up::CommandUpdate(update)) => updates.push(update),
                Some(Up::Heartbeat(heartbeat)) => return (hello, updates, heartbeat.seq, far),
                other => panic!("{other:?}"),
            }
        }
    }

    async fn state(&mut self, wanted: SessionState) -> SessionStatus {
        self.status.wait_for(|status| status.state == wanted).await.expect("a session").clone()
    }
}

#[tokio::test(start_paused = true)]
async fn a_welcome_is_durable_and_in_force_when_the_first_heartbeat_tells_of_it() {
    let mut node = node().await;
    let (hello, far) = node.live().await;
    assert_eq!((hello.node_id.as_str(), hello.last_epoch), ("n-1", 0));
    assert_eq!(node.journal.last_epoch(), 7);
    assert_eq!(node.lanes.free()[&Lane::Control], 8);
    let status = node.state(SessionState::Live).await;
    let live = status.live.expect("live");
    assert_eq!((live.gateway_id.as_str(), live.epoch, live.heartbeat_interval_ms), ("g-1", 7, 10_000));
    far.end(lost());
    let (hello, _far) = node.live().await;
    assert_eq!(hello.last_epoch, 7);
}

#[tokio::test(start_paused = true)]
async fn an_ack_of_a_heartbeat_is_shown_but_wakes_nobody_who_watches_the_session() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    // The first ack after an interval has the session counted as one that holds.
    let Some(Up::Heartbeat(beat)) = next(&mut far).await else { panic!("no heartbeat") };
    far.send(ack(beat.seq));
    until_quiet(&mut far).await;
    let shown = node.status.borrow_and_update().clone();
    let before = shown.live.clone().expect("live").acked_boot_ms;
    let Some(Up::Heartbeat(beat)) = next(&mut far).await else { panic!("no heartbeat") };
    far.send(ack(beat.seq));
    until_quiet(&mut far).await;
    let after = node.status.borrow().live.clone().expect("live").acked_boot_ms;
    assert!(after > before, "{before:?} {after:?}");
    assert!(!node.status.has_changed().expect("a session"), "{shown:?} {:?}", node.status.borrow());
    far.end(lost());
    node.status.changed().await.expect("an end is news");
}

#[tokio::test(start_paused = true)]
async fn heartbeats_are_coalesced_when_the_wire_is_slow() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    let held_up = 3 * QUEUE as u64;
    for _ in 0..held_up {
        tokio::time::sleep(Duration::from_secs(10)).await;
        far.send(ack(0));
    }
    let (_, beats) = until_quiet(&mut far).await;
    assert!(beats.len() as u64 <= QUEUE as u64 + 2, "{beats:?}");
    assert!(beats.iter().any(|seq| *seq >= held_up), "the newest is among them: {beats:?}");
    assert!(beats.is_sorted());
}

#[tokio::test(start_paused = true)]
async fn a_command_that_finds_the_executors_queue_full_is_refused_busy_and_the_session_goes_on() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    for n in 1..=DELIVERIES + 1 {
        let envelope = envelope(&format!("c-{n}"));
        let envelope = pb::Envelope {
            payload_type: envelope.payload_type,
            payload: envelope.payload,
            signatures: Vec::new(),
        };
        far.send(Down::Command(pb::Command { envelope: Some(envelope), ..Default::default() }));
    }
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-3"]);
    assert_eq!((updates[0].reason.as_str(), updates[0].message.as_str()), ("busy", "credits"));
    for n in 1..=DELIVERIES {
        let Some(Delivery::Command(frame)) = node.deliveries.recv().await else { panic!("delivery {n}") };
        assert_eq!(frame.envelope, envelope(&format!("c-{n}")));
    }
    assert_eq!(node.status.borrow().state, SessionState::Live);
}

#[tokio::test(start_paused = true)]
async fn a_refused_welcome_is_told_and_its_epoch_recorded() {
    let mut node = node().await;
    let mut far = node.dials.next().await.open();
    let early = NOW.minus(Duration::from_secs(600));
    far.send(Down::Welcome(pb::Welcome { server_time_ms: early.0, ..welcome() }));
    let Some(Up::Goodbye(goodbye)) = next(&mut far).await else { panic!("no Goodbye") };
    assert_eq!((goodbye.intent.as_str(), goodbye.reason.as_str()), ("closing", "time-backwards"));
    assert_eq!(next(&mut far).await, None, "the call is cancelled");
    let (hello, _far) = node.live().await;
    assert_eq!(hello.last_epoch, 7);
    assert_eq!(hello.reconnect_attempt, 1);
}

#[tokio::test(start_paused = true)]
async fn a_command_before_welcome_is_told_and_the_daemon_dials_again() {
    let mut node = node().await;
    let mut far = node.dials.next().await.open();
    far.send(Down::Command(pb::Command::default()));
    let Some(Up::Goodbye(goodbye)) = next(&mut far).await else { panic!("no Goodbye") };
    assert_eq!((goodbye.intent.as_str(), goodbye.reason.as_str()), ("closing", "protocol-error"));
    node.live().await;
}

#[tokio::test(start_paused = true)]
async fn a_half_open_link_is_found_within_three_intervals() {
    let mut node = node().await;
    let (_, _far) = node.live().await;
    let before = tokio::time::Instant::now();
    let status = node.state(SessionState::Waiting).await;
    assert_eq!(before.elapsed(), Duration::from_secs(30));
    let end = status.last_end.expect("an end");
    assert_eq!(end.reason, Some(bcd::model::Reason::HalfOpen));
    node.live().await;
}

#[tokio::test(start_paused = true)]
async fn a_dial_that_hangs_is_given_up_and_made_again() {
    let mut node = node().await;
    let _hanging = node.dials.next().await.hang();
    node.live().await;
    let status = node.state(SessionState::Live).await;
    assert_eq!(status.last_end.expect("an end").reason, Some(bcd::model::Reason::DialTimeout));
}

#[tokio::test(start_paused = true)]
async fn a_drained_session_moves_and_nothing_is_lost() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    let done = result(&node.journal, "c-1", 10).await;
    node.outbox.send(Outgoing::Result(done));
    far.send(Down::Drain(pb::Drain { max_delay_ms: 5000, reason: "draining".into() }));
    loop {
        match next(&mut far).await {
            Some(Up::Goodbye(goodbye)) => {
                assert_eq!(
                    (goodbye.intent.as_str(), goodbye.reason.as_str()),
                    ("closing", "drain-requested")
                );
                break;
            }
            Some(_) => {}
            None => panic!("no Goodbye"),
        }
    }
    let (hello, _far) = node.live().await;
    assert_eq!(ids(&hello.done_results), ["c-1"]);
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_cannot_be_written_does_not_end_the_session() {
    let mut node = node().await;
    node.journal.close().await;
    let began = tokio::time::Instant::now();
    let (hello, before, first, _far) = node.live_after_results().await;
    assert!(hello.done_results.is_empty() && before.is_empty());
    assert_eq!(first, 2, "what cannot be read holds the first heartbeat until the second is due");
    assert!(began.elapsed() < Duration::from_secs(12), "one interval after the first dial's jitter");
    assert_eq!(node.status.borrow().state, SessionState::Live);
}

#[tokio::test(start_paused = true)]
async fn an_epoch_that_could_not_be_recorded_is_said_by_the_process_that_knows_it() {
    let mut node = node().await;
    node.journal.close().await;
    let (hello, _, _, far) = node.live_after_results().await;
    assert_eq!(hello.last_epoch, 0);
    far.end(lost());
    let (hello, ..) = node.live_after_results().await;
    assert_eq!((hello.last_epoch, node.journal.last_epoch()), (7, 0));
}

#[tokio::test(start_paused = true)]
async fn a_stop_says_goodbye_and_ends_within_ten_seconds_though_the_wire_stands_still() {
    let mut node = node().await;
    let (_, mut far) = node.live().await;
    node.stop.send_replace(true);
    let Some(Up::Goodbye(goodbye)) = next(&mut far).await else { panic!("no Goodbye") };
    assert_eq!((goodbye.intent.as_str(), goodbye.reason.as_str()), ("stopping", "stop"));
    node.running.await.expect("ended");
    assert_eq!(node.status.borrow().state, SessionState::Stopped);

    let mut node = self::node().await;
    let (_, _far) = node.live().await;
    for n in 0..4 * QUEUE {
        node.outbox.send(accepted(&format!("c-{n}")));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    node.stop.send_replace(true);
    tokio::time::timeout(Duration::from_secs(10), node.running).await.expect("within 10 s").expect("ended");
}

/// How the node takes a Welcome that is this far (ms) from its own time: the token of a refusal, or none.
async fn welcomed_at(node: &mut Node, offset_ms: i64) -> Option<String> {
    let mut far = node.dials.next().await.open();
    let now = node.working.now().expect("a time");
    far.send(Down::Welcome(pb::Welcome { server_time_ms: now.0 + offset_ms, ..welcome() }));
    let token = match far.next().await {
        Some(Up::Goodbye(goodbye)) => Some(goodbye.reason),
        Some(Up::Heartbeat(_)) => None,
        other => panic!("{other:?}"),
    };
    far.end(lost());
    token
}

#[tokio::test(start_paused = true)]
async fn gateways_that_rewind_and_fast_forward_never_set_the_working_clock_back_nor_past_the_certificate() {
    let mut node = node().await;
    let minute = 60_000;
    // The certificate of these nodes ends a day after NOW.
    let steps = [
        (0, None),
        (-4 * minute, None),
        (-6 * minute, Some("time-backwards")),
        (2 * 60 * minute, None),
        (-2 * 60 * minute, Some("time-backwards")),
        (48 * 60 * minute, Some("time-ahead")),
        (-400 * 24 * 60 * minute, Some("time-backwards")),
        (10 * 60 * minute, None),
        (400 * 24 * 60 * minute, Some("time-ahead")),
    ];
    let end = NOW.plus(Duration::from_secs(86_400));
    for (n, (offset, refusal)) in steps.into_iter().enumerate() {
        let (before, signed) = (node.working.now().expect("a time"), node.working.signed());
        let token = welcomed_at(&mut node, offset).await;
        assert_eq!(token.as_deref(), refusal, "step {n}");
        let after = node.working.now().expect("a time");
        assert!(after >= before, "step {n}: {before} became {after}");
        assert!(after < end, "step {n}: {after} is past the certificate's end");
        if refusal.is_some() {
            assert!(
                after.0 - before.0 < 5 * minute,
                "step {n}: a refused Welcome moved the clock to {after}"
            );
        }
        let carried = node.working.signed().expect("a time").0 - signed.expect("a time").0;
        assert!(carried < 5 * minute, "step {n}: a Welcome moved signed time");
    }
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_is_dead_and_one_whose_name_never_resolves_cost_a_dial_each() {
    // The node begins with the second one, by the draw of its seed.
    let hosts = ["lives.lab.example", "refuses.lab.example", "hangs.lab.example"];
    let mut node =
        node_at(&hosts, EventLimits::default(), async |journal| drop(result(journal, "c-1", 10).await)).await;
    let start = tokio::time::Instant::now();
    let mut dialed = Vec::new();
    let mut hanging = Vec::new();
    let far = loop {
        let attempt = node.dials.next().await;
        dialed.push(attempt.endpoint.host.clone());
        match attempt.endpoint.host.as_str() {
            "refuses.lab.example" => attempt.fail(lost()),
            "hangs.lab.example" => hanging.push(attempt.hang()),
            _ => {
                assert_eq!(ids(&hello(&attempt).done_results), ["c-1"]);
                break attempt.open();
            }
        }
    };
    assert_eq!(dialed, [hosts[1], hosts[2], hosts[0]]);
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    far.send(Down::Welcome(welcome()));
    node.state(SessionState::Live).await;
}

#[tokio::test(start_paused = true)]
async fn a_gateway_that_accepts_and_drops_is_dialed_ever_more_rarely() {
    let mut node = node().await;
    let start = tokio::time::Instant::now();
    for n in 0..20 {
        let attempt = node.dials.next().await;
        assert_eq!(hello(&attempt).reconnect_attempt, n);
        let mut far = attempt.open();
        let now = node.working.now().expect("a time");
        far.send(Down::Welcome(pb::Welcome { server_time_ms: now.0, ..welcome() }));
        assert!(matches!(far.next().await, Some(Up::Heartbeat(_))));
        far.send(ack(1));
        far.end(lost());
    }
    // Twenty waits of half a minute each, but for the first six; a dial a second would be 20 s.
    assert!(start.elapsed() > Duration::from_secs(180), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_upgrade_only_session_is_put_into_force_and_lifted_by_the_next() {
    let mut node = node().await;
    let mut far = node.dials.next().await.open();
    far.send(Down::Welcome(pb::Welcome { upgrade_required: true, ..welcome() }));
    assert!(matches!(far.next().await, Some(Up::Heartbeat(_))));
    assert!(node.lanes.upgrade_only());
    let done = result(&node.journal, "c-1", 10).await;
    node.outbox.send(Outgoing::Result(done));
    let (updates, _) = until_quiet(&mut far).await;
    assert_eq!(ids(&updates), ["c-1"], "results go as always");
    far.end(lost());
    let (_, _far) = node.live().await;
    assert!(!node.lanes.upgrade_only());
}
