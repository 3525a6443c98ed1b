//! A live session and a renewed certificate.

use super::*;

/// The certificate of the bench's first session holds so long from [`START`] on.
const LIFE: Duration = Duration::from_secs(9_000_000);

fn renewed(bench: &mut Bench) -> Vec<Output> {
    let second = Offered { certificate: Digest::of(b"second"), ..offered(NOT_AFTER.plus(LIFE)) };
    bench.input(Input::Renewed { endpoints: endpoints(1), offered: second })
}

/// Lets a held session go on until its move is dialed.
fn move_dialed(bench: &mut Bench) {
    let mut seq = 2;
    loop {
        let outputs = bench.due();
        if outputs.iter().any(|output| matches!(output, Output::Dial { .. })) {
            assert!(matches!(outputs.as_slice(), [Output::Dial { attempt: 0, .. }]), "{outputs:?}");
            return;
        }
        assert!(matches!(outputs.as_slice(), [Output::Heartbeat(_)]), "{outputs:?}");
        seq += 1;
        assert_eq!(bench.input(ack(seq)), []);
    }
}

fn held_near_its_end() -> Bench {
    let mut bench = Bench::new(1);
    // A tenth of its life is left in two minutes.
    bench.working = Some(START.plus(LIFE / 10 * 9).minus(Duration::from_secs(120)));
    bench.held();
    bench
}

#[test]
fn a_live_session_moves_before_a_tenth_of_its_certificate_is_left_and_goes_on_until_the_next_is_open() {
    let mut bench = held_near_its_end();
    let before = bench.mono;
    assert_eq!(renewed(&mut bench), []);
    move_dialed(&mut bench);
    assert!(bench.mono.saturating_sub(before) <= Duration::from_secs(120));
    assert!(matches!(bench.machine.state(), State::Live(_)), "the session lives beside the dial");
    assert_eq!(bench.input(Input::Frame(Inbound::Delivery(malformed()))), [Output::Deliver(malformed())]);
    assert_eq!(bench.input(Input::Opened(None)), []);
    assert!(matches!(bench.machine.state(), State::AwaitingWelcome { .. }));
    let mut welcome = welcome();
    // Past the first certificate's end, which is not this session's.
    welcome.server_time = NOT_AFTER.plus(Duration::from_secs(1));
    let outputs = bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome))));
    assert!(matches!(outputs.as_slice(), [Output::Apply(_)]), "{outputs:?}");
    bench.input(Input::Applied);
    assert_eq!(bench.machine.attempt(), 0, "nothing has failed");
    let State::Live(live) = bench.machine.state() else { panic!("{:?}", bench.machine.state()) };
    assert!(live.due() <= bench.mono + INTERVAL, "no further move is planned");
}

#[test]
fn the_time_of_a_move_is_left_to_chance() {
    let moved_after = |seed| {
        let mut bench = held_near_its_end();
        bench.machine.rng = StdRng::seed_from_u64(seed);
        let before = bench.mono;
        renewed(&mut bench);
        move_dialed(&mut bench);
        bench.mono.saturating_sub(before)
    };
    assert_ne!(moved_after(1), moved_after(2));
}

#[test]
fn less_than_a_tenth_left_is_moved_from_at_once() {
    let mut bench = held_near_its_end();
    bench.pass(Duration::from_secs(1));
    bench.working = Some(START.plus(LIFE / 100 * 95));
    let outputs = renewed(&mut bench);
    assert!(matches!(outputs.as_slice(), [Output::Dial { attempt: 0, .. }]), "{outputs:?}");
}

#[test]
fn a_move_that_cannot_be_dialed_leaves_the_session_and_is_tried_again() {
    let mut bench = held_near_its_end();
    renewed(&mut bench);
    move_dialed(&mut bench);
    let lost = end(EndKind::Lost, Some(Reason::DialFailed));
    assert_eq!(bench.input(Input::MoveFailed(lost.clone())), [Output::MoveFailed(lost)]);
    assert!(matches!(bench.machine.state(), State::Live(_)));
    assert!(bench.machine.last_end().is_none());
    let failed = bench.mono;
    loop {
        let outputs = bench.due();
        bench.input(ack(1));
        if let [.., Output::Dial { .. }] = outputs.as_slice() {
            break;
        }
    }
    assert!(bench.mono.saturating_sub(failed) <= Duration::from_secs(60));
    // And one that hangs is given up.
    let dialed = bench.mono;
    loop {
        let outputs = bench.due();
        bench.input(ack(1));
        if outputs.contains(&Output::AbandonMove) {
            break;
        }
    }
    assert_eq!(bench.mono.saturating_sub(dialed), DIAL_DEADLINE);
    assert!(matches!(bench.machine.state(), State::Live(_)));
}

#[test]
fn a_session_that_ends_before_its_move_redials_with_the_new_certificate() {
    let mut bench = held_near_its_end();
    renewed(&mut bench);
    let outputs = bench.input(Input::Ended(end(EndKind::Lost, None)));
    assert_eq!(outputs.first(), Some(&Output::Abandon));
    bench.working = Some(NOT_AFTER.plus(Duration::from_secs(1)));
    assert_eq!(
        dialed_to(&bench.due()),
        "gw1.lab.example:443",
        "the first certificate has run out, not the second"
    );
}

#[test]
fn another_bundle_with_the_same_certificate_moves_nothing_and_gives_the_next_dial_its_gateways() {
    let mut bench = held_near_its_end();
    let elsewhere = vec![Endpoint { host: "gw9.lab.example".into(), port: 443 }];
    assert_eq!(bench.input(Input::Renewed { endpoints: elsewhere, offered: offered(NOT_AFTER) }), []);
    for _ in 0..30 {
        let outputs = bench.due();
        bench.input(ack(1));
        assert!(matches!(outputs.as_slice(), [Output::Heartbeat(_)]), "{outputs:?}");
    }
    bench.input(Input::Ended(end(EndKind::Lost, None)));
    assert_eq!(dialed_to(&bench.due()), "gw9.lab.example:443");
}

#[test]
fn a_certificate_that_comes_while_a_session_opens_is_moved_to_once_it_is_open() {
    let mut bench = Bench::new(1);
    bench.working = Some(START.plus(LIFE / 100 * 95));
    bench.hello_sent();
    assert_eq!(renewed(&mut bench), []);
    let mut welcome = welcome();
    welcome.server_time = bench.working.unwrap();
    bench.input(Input::Frame(Inbound::Welcome(Box::new(welcome))));
    let outputs = bench.input(Input::Applied);
    assert!(matches!(outputs.as_slice(), [Output::Resume, Output::Dial { .. }]), "{outputs:?}");
}

#[test]
fn a_revoked_certificate_ends_its_session_and_is_not_offered_again_until_another_comes() {
    let mut bench = Bench::new(1);
    bench.held();
    let revoked = Offered { revoked: true, ..offered(NOT_AFTER) };
    let outputs = bench.input(Input::Renewed { endpoints: endpoints(1), offered: revoked });
    assert_eq!(outputs.first(), Some(&Output::Close(Intent::Closing, Reason::CertificateRevoked)));
    for _ in 0..3 {
        let outputs = bench.due();
        assert!(matches!(outputs.as_slice(), [Output::Ended(..)]), "{outputs:?}");
        assert_eq!(bench.last_reason(), Some(Reason::CertificateRevoked));
        assert!(bench.machine.last_end().unwrap().end.detail.contains("join again: like this"));
    }
    renewed(&mut bench);
    assert_eq!(dialed_to(&bench.due()), "gw1.lab.example:443");
}

#[test]
fn a_document_of_the_join_service_is_handed_on_and_one_that_cannot_be_read_costs_no_session() {
    let mut bench = Bench::new(1);
    bench.held();
    let envelope = crate::wire::dsse::Envelope {
        payload_type: "t".into(),
        payload: Bytes::new(),
        signatures: Vec::new(),
    };
    let notice = Notice::TrustBundle(envelope);
    assert_eq!(bench.input(Input::Frame(Inbound::Notice(notice.clone()))), [Output::Notice(notice)]);
    let bad = || "a TrustBundle has no document".to_owned();
    assert_eq!(bench.input(Input::Frame(Inbound::BadNotice(bad()))), [Output::BadNotice(bad())]);
    assert!(matches!(bench.machine.state(), State::Live(_)));
}

#[test]
fn an_unsigned_revocation_ends_the_session_and_the_node_tries_the_other_endpoints_then_every_quarter_of_an_hour()
 {
    use crate::wire::pb;
    let notice = |envelope| {
        let frame = pb::gateway_frame::Frame::RevocationNotice(pb::RevocationNotice { envelope });
        Input::Frame(Inbound::try_from(pb::GatewayFrame { frame: Some(frame) }).unwrap())
    };
    for envelope in [None, Some(pb::Envelope::default())] {
        let mut bench = Bench::new(2);
        for wait in [Duration::from_secs(1), Duration::from_secs(900)] {
            bench.live();
            let outputs = bench.input(notice(envelope.clone()));
            let close = Output::Close(Intent::Closing, Reason::CertificateRevoked);
            assert!(
                matches!(outputs.as_slice(), [first, Output::Ended(_, Reaction::Condemned)] if *first == close),
                "{outputs:?}"
            );
            assert!(bench.wait() <= wait && (wait.as_secs() == 1 || bench.wait() == wait));
        }
    }
}
