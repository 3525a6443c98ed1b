use std::collections::BTreeMap;

use bytes::Bytes;
use rand::SeedableRng;

use super::*;
use crate::wire::frames::Ack;
use crate::wire::version::Range;

mod moving;

const NOT_AFTER: ServerTime = ServerTime(10_000_000_000);
const START: ServerTime = ServerTime(1_000_000_000);
const INTERVAL: Duration = Duration::from_secs(10);

/// A machine with a clock of its own: the working clock goes with the monotonic one.
pub(super) struct Bench {
    machine: Machine,
    mono: Duration,
    working: Option<ServerTime>,
    heard: bool,
    validity: Option<Validity>,
}

fn endpoints(count: u16) -> Vec<Endpoint> {
    (1..=count).map(|n| Endpoint { host: format!("gw{n}.lab.example"), port: 443 }).collect()
}

fn welcome() -> Welcome {
    Welcome {
        session_id: "s-1".into(),
        gateway_id: "g-1".into(),
        epoch: 7,
        proto: 1,
        proto_max: 2,
        server_time: START,
        heartbeat_interval: INTERVAL,
        lane_credits: BTreeMap::new(),
        journal_id: None,
        acked_event_seq: 0,
        request_sections: Vec::new(),
        upgrade_required: false,
        trust_bundle: Bytes::new(),
    }
}

fn malformed() -> Delivery {
    Delivery::Malformed { body_sha256: Digest::of(b""), detail: "no payload".into() }
}

fn ack(seq: u64) -> Input {
    Input::Frame(Inbound::Ack(Ack { heartbeat_seq: Some(seq), ..Ack::default() }))
}

fn end(kind: EndKind, reason: Option<Reason>) -> LinkEnd {
    LinkEnd { kind, reason, pushback: None, revocation: None, detail: "the peer's words".into() }
}

fn offered(not_after: ServerTime) -> Offered {
    let validity = Validity { not_before: START, not_after };
    Offered {
        certificate: Digest::of(b"first"),
        validity,
        revoked: false,
        mend: "join again: like this".into(),
        rejoins: "it joins again by itself; else like this".into(),
    }
}

impl Bench {
    fn new(endpoint_count: u16) -> Self {
        let rng = StdRng::seed_from_u64(7);
        let machine = Machine::new(endpoints(endpoint_count), offered(NOT_AFTER), rng, Duration::ZERO);
        Self { machine, mono: Duration::ZERO, working: Some(START), heard: true, validity: None }
    }

    fn input(&mut self, input: Input) -> Vec<Output> {
        let now = Now { mono: self.mono, working: self.working, heard: self.heard };
        self.machine.handle(now, input)
    }

    fn pass(&mut self, by: Duration) {
        self.mono += by;
        self.working = self.working.map(|time| time.plus(by));
    }

    /// Lets time pass to the next due moment.
    fn due(&mut self) -> Vec<Output> {
        let due = self.machine.due().expect("something is due");
        self.pass(due.saturating_sub(self.mono));
        self.input(Input::Due)
    }

    fn dialed(&mut self) -> Vec<Output> {
        self.due()
    }

    fn hello_sent(&mut self) {
        self.dialed();
        assert_eq!(self.input(Input::Opened(self.validity)), []);
    }

    fn live(&mut self) {
        self.live_by(welcome());
    }

    fn live_by(&mut self, mut welcome: Welcome) {
        self.hello_sent();
        welcome.server_time = self.working.unwrap_or(START);
        let outputs = self.input(Input::Frame(Inbound::Welcome(Box::new(welcome))));
        assert!(matches!(outputs.as_slice(), [Output::Apply(_)]), "{outputs:?}");
        let outputs = self.input(Input::Applied);
        assert!(matches!(outputs.as_slice(), [Output::Resume, Output::Heartbeat(Beat { seq: 1, .. })]));
    }

    /// A session whose second heartbeat was acked.
    fn held(&mut self) {
        self.live();
        self.input(ack(1));
        self.due();
        self.input(ack(2));
        assert_eq!(self.machine.attempt(), 0);
    }

    fn wait(&self) -> Duration {
        let State::WaitingToDial { until } = self.machine.state() else {
            panic!("not waiting: {:?}", self.machine.state());
        };
        until.saturating_sub(self.mono)
    }

    fn last_reason(&self) -> Option<Reason> {
        self.machine.last_end().expect("an end").end.reason
    }
}

fn dialed_to(outputs: &[Output]) -> String {
    match outputs {
        [.., Output::Dial { endpoint, .. }] => endpoint.to_string(),
        other => panic!("no dial: {other:?}"),
    }
}

#[test]
fn the_first_dial_is_jittered_and_each_dial_takes_the_next_endpoint() {
    let mut bench = Bench::new(2);
    assert!(bench.wait() <= Duration::from_secs(1));
    assert_eq!(dialed_to(&bench.due()), "gw1.lab.example:443");
    bench.input(Input::Ended(end(EndKind::Lost, Some(Reason::DialFailed))));
    assert_eq!(dialed_to(&bench.due()), "gw2.lab.example:443");
    bench.input(Input::Ended(end(EndKind::Lost, Some(Reason::DialFailed))));
    assert_eq!(dialed_to(&bench.due()), "gw1.lab.example:443");
}

#[test]
fn a_dial_that_takes_ten_seconds_is_given_up() {
    let mut bench = Bench::new(1);
    bench.dialed();
    let dialed = bench.mono;
    let outputs = bench.due();
    assert_eq!(bench.mono.saturating_sub(dialed), Duration::from_secs(10));
    assert!(matches!(outputs.as_slice(), [Output::Abandon, Output::Ended(..)]), "{outputs:?}");
    assert_eq!(bench.last_reason(), Some(Reason::DialTimeout));
}

#[test]
fn a_welcome_that_does_not_come_within_ten_seconds_ends_the_attempt() {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    let sent = bench.mono;
    bench.due();
    assert_eq!(bench.mono.saturating_sub(sent), Duration::from_secs(10));
    assert_eq!(bench.last_reason(), Some(Reason::WelcomeTimeout));
}

#[test]
fn a_welcome_is_applied_before_the_first_heartbeat_tells_of_it() {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    let outputs = bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome()))));
    assert!(matches!(outputs.as_slice(), [Output::Apply(_)]), "no heartbeat yet: {outputs:?}");
    bench.pass(Duration::from_secs(3));
    assert_eq!(bench.input(Input::Due), []);
    let outputs = bench.input(Input::Applied);
    assert!(matches!(outputs.as_slice(), [Output::Resume, Output::Heartbeat(Beat { seq: 1, .. })]));
}

/// Sends a Welcome to a node that waits for it; what the node makes of it.
fn refused(change: impl FnOnce(&mut Welcome)) -> (Vec<Output>, Bench) {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    let mut welcome = welcome();
    change(&mut welcome);
    let outputs = bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome))));
    (outputs, bench)
}

fn assert_refused(change: impl FnOnce(&mut Welcome), reason: Reason) {
    let (outputs, bench) = refused(change);
    assert_eq!(outputs.first(), Some(&Output::RecordEpoch(7)));
    assert_eq!(outputs.get(1), Some(&Output::Close(Intent::Closing, reason)));
    assert_eq!(bench.last_reason(), Some(reason));
    assert!(bench.wait() <= Duration::from_secs(2), "redials with back-off");
}

#[test]
fn a_welcome_more_than_five_minutes_before_the_mark_is_refused_time_backwards() {
    assert_refused(
        |welcome| welcome.server_time = START.minus(Duration::from_secs(302)),
        Reason::TimeBackwards,
    );
    let (outputs, _) = refused(|welcome| welcome.server_time = START.minus(Duration::from_secs(290)));
    assert!(matches!(outputs.as_slice(), [Output::Apply(_)]), "{outputs:?}");
}

#[test]
fn a_welcome_at_or_after_the_end_of_the_certificate_is_refused_time_ahead() {
    let second = Duration::from_secs(1);
    assert_refused(|welcome| welcome.server_time = NOT_AFTER.plus(second), Reason::TimeAhead);
    assert_refused(|welcome| welcome.server_time = NOT_AFTER, Reason::TimeAhead);
    let (outputs, _) = refused(|welcome| welcome.server_time = NOT_AFTER.minus(second));
    assert!(matches!(outputs.as_slice(), [Output::Apply(_)]), "{outputs:?}");
}

#[test]
fn the_first_time_that_this_process_hears_must_lie_within_the_gateways_own_certificate() {
    let hour = Duration::from_secs(3600);
    let validity = Validity { not_before: START.minus(hour), not_after: START.plus(hour) };
    let judged = |heard, time: ServerTime| {
        let mut bench = Bench { heard, working: None, validity: Some(validity), ..Bench::new(1) };
        bench.hello_sent();
        let welcome = Welcome { server_time: time, ..welcome() };
        bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome))))
    };
    for (time, reason) in [
        (validity.not_before.minus(Duration::from_millis(1)), Reason::TimeBackwards),
        (validity.not_after, Reason::TimeAhead),
    ] {
        let outputs = judged(false, time);
        let refused = [Output::Close(Intent::Closing, reason)];
        assert!(outputs.starts_with(&refused), "nothing is kept, not even the epoch: {outputs:?}");
        let later = judged(true, time);
        assert!(
            matches!(later.as_slice(), [Output::Apply(_)]),
            "judged by TLS once time is known: {later:?}"
        );
    }
    for time in [validity.not_before, START] {
        assert!(matches!(judged(false, time).as_slice(), [Output::Apply(_)]), "{time}");
    }
}

#[test]
fn a_welcome_with_a_version_outside_the_nodes_range_is_refused() {
    assert_refused(|welcome| welcome.proto = Range::OWN.max() + 1, Reason::ProtocolVersion);
    assert_refused(|welcome| welcome.proto = 0, Reason::ProtocolVersion);
}

#[test]
fn an_epoch_below_the_last_one_is_taken_all_the_same() {
    let mut bench = Bench::new(1);
    bench.live();
    bench.input(Input::Ended(end(EndKind::Lost, None)));
    bench.live_by(Welcome { epoch: 1, ..welcome() });
    let State::Live(live) = bench.machine.state() else { panic!("not live") };
    assert_eq!(live.terms.epoch, 1);
}

#[test]
fn an_invalid_welcome_a_delivery_before_welcome_and_a_second_welcome_are_said_and_end_the_session() {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    let error = FrameError { reason: Reason::WelcomeInvalid, detail: "heartbeat interval 0".into() };
    let outputs = bench.input(Input::BadFrame(error));
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::WelcomeInvalid)));

    bench.hello_sent();
    let outputs = bench.input(Input::Frame(Inbound::Delivery(malformed())));
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::ProtocolError)));

    bench.live();
    let outputs = bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome()))));
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::ProtocolError)));
    assert!(bench.wait() > Duration::ZERO, "a protocol error ends the session, not the daemon");
}

#[test]
fn heartbeats_go_each_interval_and_count_the_commands_taken() {
    let mut bench = Bench::new(1);
    bench.live();
    bench.input(Input::Frame(Inbound::Delivery(malformed())));
    bench.input(ack(1));
    let before = bench.mono;
    let outputs = bench.due();
    assert_eq!(bench.mono.saturating_sub(before), INTERVAL);
    let beat = Beat { seq: 2, commands_received: 1, peer_proto_max: None };
    assert_eq!(outputs, [Output::Heartbeat(beat)]);
}

#[test]
fn a_malformed_cancel_is_logged_and_no_command_is_counted_for_it() {
    let mut bench = Bench::new(1);
    bench.live();
    let bad = || Input::Frame(Inbound::BadCancel("no envelope".into()));
    assert_eq!(bench.input(bad()), [Output::BadCancel("no envelope".into())]);
    bench.input(ack(1));
    let beat = Beat { seq: 2, commands_received: 0, peer_proto_max: None };
    assert_eq!(bench.due(), [Output::Heartbeat(beat)]);

    let mut early = Bench::new(1);
    early.hello_sent();
    let outputs = early.input(bad());
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::ProtocolError)));
}

#[test]
fn a_field_of_the_test_version_is_sent_only_when_that_version_was_chosen() {
    let mut bench = Bench::new(1);
    bench.live_by(Welcome { proto: 2, proto_max: 9, ..welcome() });
    bench.input(ack(1));
    let outputs = bench.due();
    assert!(matches!(outputs.as_slice(), [Output::Heartbeat(Beat { peer_proto_max: Some(9), .. })]));
}

#[test]
fn a_flood_of_frames_does_not_hold_up_a_heartbeat() {
    let mut bench = Bench::new(1);
    bench.live();
    bench.pass(INTERVAL);
    let outputs = bench.input(Input::Frame(Inbound::Delivery(malformed())));
    assert!(matches!(outputs.as_slice(), [Output::Deliver(_), Output::Heartbeat(_)]), "{outputs:?}");
}

#[test]
fn three_intervals_without_a_frame_end_the_session_half_open() {
    let mut bench = Bench::new(1);
    bench.live();
    bench.pass(Duration::from_secs(5));
    bench.input(ack(1));
    let last_frame = bench.mono;
    while matches!(bench.machine.state(), State::Live(_)) {
        bench.due();
    }
    assert_eq!(bench.mono.saturating_sub(last_frame), 3 * INTERVAL);
    assert_eq!(bench.last_reason(), Some(Reason::HalfOpen));
}

#[test]
fn any_frame_counts_as_a_sign_of_life() {
    let mut bench = Bench::new(1);
    bench.live();
    for _ in 0..20 {
        bench.pass(INTERVAL * 2);
        bench.input(Input::Frame(Inbound::Ignored("SpecSection")));
    }
    assert!(matches!(bench.machine.state(), State::Live(_)));
}

#[test]
fn an_unknown_frame_is_logged_once_a_session() {
    let mut bench = Bench::new(1);
    bench.live();
    assert_eq!(bench.input(Input::Frame(Inbound::Ignored("a"))), [Output::FrameIgnored("a")]);
    assert_eq!(bench.input(Input::Frame(Inbound::Ignored("b"))), []);
}

#[test]
fn an_ack_of_what_was_never_sent_does_nothing_and_results_are_passed_on() {
    let mut bench = Bench::new(1);
    bench.live();
    assert_eq!(bench.input(ack(99)), []);
    assert_eq!(bench.machine.attempt(), 1, "heartbeat 99 was never sent");
    let id = CommandId::new("c-1").expect("an id");
    let results = Ack { result_ids: vec![id.clone()], ..Ack::default() };
    assert_eq!(bench.input(Input::Frame(Inbound::Ack(results))), [Output::Acked(vec![id])]);
}

#[test]
fn only_the_second_acked_heartbeat_starts_the_back_off_over() {
    let mut longest = Duration::ZERO;
    let mut bench = Bench::new(1);
    for _ in 0..12 {
        bench.live();
        bench.input(ack(1));
        bench.input(Input::Ended(end(EndKind::Closed, None)));
        longest = longest.max(bench.wait());
    }
    assert_eq!(bench.machine.attempt(), 12);
    assert!(longest > Duration::from_secs(20), "a gateway that accepts and drops: {longest:?}");
    bench.held();
    bench.input(Input::Ended(end(EndKind::Closed, None)));
    assert!(bench.wait() <= Duration::from_secs(1));
}

#[test]
fn a_drain_is_left_within_its_delay_for_the_next_endpoint_without_back_off() {
    let mut bench = Bench::new(2);
    bench.held();
    let told = bench.mono;
    let drain = Inbound::Drain { max_delay: Duration::from_secs(5), reason: "draining".into() };
    assert_eq!(bench.input(Input::Frame(drain)), []);
    let outputs = bench.due();
    assert!(bench.mono.saturating_sub(told) <= Duration::from_secs(5));
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::DrainRequested)));
    assert_eq!(bench.wait(), Duration::ZERO);
    assert_eq!(dialed_to(&bench.due()), "gw2.lab.example:443");
}

#[test]
fn a_gateway_that_drains_every_session_at_once_is_not_redialed_in_a_loop() {
    let mut bench = Bench::new(1);
    let mut longest = Duration::ZERO;
    for _ in 0..12 {
        bench.live();
        bench.input(Input::Frame(Inbound::Drain { max_delay: Duration::ZERO, reason: String::new() }));
        longest = longest.max(bench.wait());
    }
    assert!(longest > Duration::from_secs(20), "{longest:?}");
}

#[test]
fn an_expired_certificate_is_not_offered_and_looked_at_again_every_minute() {
    let mut bench = Bench::new(1);
    bench.working = Some(NOT_AFTER.plus(Duration::from_secs(1)));
    let outputs = bench.due();
    assert!(matches!(outputs.as_slice(), [Output::Ended(..)]), "{outputs:?}");
    assert_eq!(bench.last_reason(), Some(Reason::IdentityExpired));
    assert_eq!(bench.wait(), Duration::from_secs(60));
    assert!(
        bench
            .machine
            .last_end()
            .expect("an end")
            .end
            .detail
            .ends_with("it joins again by itself; else like this")
    );
}

#[test]
fn a_new_identity_is_dialed_with_at_once_whatever_the_old_one_waited_for() {
    let renewed = || Input::Renewed { endpoints: endpoints(2), offered: offered(NOT_AFTER.plus(INTERVAL)) };
    let mut expired = Bench::new(1);
    expired.working = Some(NOT_AFTER.plus(Duration::from_secs(1)));
    expired.due();
    let mut condemned = Bench::new(1);
    condemned.hello_sent();
    condemned.input(Input::Ended(end(EndKind::Unauthenticated, Some(Reason::CertificateRevoked))));
    assert_eq!(condemned.wait(), Duration::from_secs(900));
    for mut bench in [expired, condemned] {
        assert_eq!(bench.input(renewed()), []);
        assert!(bench.wait() <= Duration::from_secs(1));
        assert_eq!(dialed_to(&bench.due()), "gw1.lab.example:443");
        assert_eq!(bench.machine.attempt(), 1);
    }
}

#[test]
fn a_stop_says_goodbye_when_there_is_somebody_to_say_it_to() {
    let mut bench = Bench::new(1);
    assert_eq!(bench.input(Input::Stop(Intent::Stopping)), []);
    assert!(matches!(bench.machine.state(), State::Stopped));

    let mut bench = Bench::new(1);
    bench.dialed();
    assert_eq!(bench.input(Input::Stop(Intent::Stopping)), [Output::Abandon]);

    let mut bench = Bench::new(1);
    bench.live();
    assert_eq!(bench.input(Input::Stop(Intent::Stopping)), [Output::Close(Intent::Stopping, Reason::Stop)]);
    assert_eq!(bench.machine.due(), None);
    assert_eq!(bench.input(Input::Ended(end(EndKind::Closed, None))), []);
}

#[test]
fn a_gateway_that_asks_for_calm_gets_half_as_many_keep_alives() {
    let mut bench = Bench::new(1);
    bench.live();
    bench.input(Input::Ended(end(EndKind::Calm, None)));
    let outputs = bench.due();
    assert!(matches!(outputs.as_slice(), [Output::Dial { keep_alive, .. }] if *keep_alive == KEEP_ALIVE * 2));
}

#[test]
fn a_superseded_session_says_that_another_machine_uses_the_identity() {
    let mut bench = Bench::new(1);
    bench.held();
    bench.input(Input::Ended(end(EndKind::Aborted, Some(Reason::Superseded))));
    let last = bench.machine.last_end().expect("an end");
    assert!(last.end.detail.starts_with("another machine uses this identity"), "{}", last.end.detail);
    assert!(bench.wait() <= Duration::from_secs(1), "redials with back-off");
}

#[test]
fn a_refusal_with_a_pushback_is_followed_to_the_millisecond() {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    let pushback = Some(Duration::from_millis(4321));
    bench.input(Input::Ended(LinkEnd { pushback, ..end(EndKind::Unavailable, Some(Reason::Storm)) }));
    assert_eq!(bench.wait(), Duration::from_millis(4321));
}

#[test]
fn an_identity_that_is_called_ended_keeps_the_daemon_dialing_every_quarter_of_an_hour() {
    let mut bench = Bench::new(2);
    bench.hello_sent();
    let revoked = || end(EndKind::Unauthenticated, Some(Reason::CertificateRevoked));
    bench.input(Input::Ended(revoked()));
    assert!(bench.wait() <= Duration::from_secs(1), "the other endpoint first");
    bench.hello_sent();
    bench.input(Input::Ended(revoked()));
    assert_eq!(bench.wait(), Duration::from_secs(900));
}

#[test]
fn a_journal_that_hangs_does_not_hold_a_silent_session() {
    let mut bench = Bench::new(1);
    bench.hello_sent();
    bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome()))));
    let outputs = bench.due();
    assert_eq!(outputs.first(), Some(&Output::Abandon));
    assert!(bench.wait() <= Duration::from_secs(2));
}

#[test]
fn a_refusal_of_the_version_names_the_gateway_and_what_to_upgrade() {
    for (reason, mend) in [
        (Reason::ProtocolTooOld, "too old for the gateway gw1.lab.example:443"),
        (Reason::ProtocolTooNew, "upgrade the gateway first"),
    ] {
        let mut bench = Bench::new(1);
        bench.dialed();
        bench.input(Input::Ended(end(EndKind::Refused, Some(reason))));
        let detail = &bench.machine.last_end().expect("an end").end.detail;
        assert!(detail.contains(mend) && detail.ends_with("(the peer's words)"), "{detail}");
    }
}
