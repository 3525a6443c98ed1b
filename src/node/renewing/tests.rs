use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::*;
use crate::clock::TokioClock;
use crate::identity::AnswerError;
use crate::identity::tests::{Fixture, joined};
use crate::journal::{At, Faults, Locked, Mode, Options};
use crate::model::JournalId;
use crate::ports::{ByteStream, ConnectError};
use crate::session::{EndStatus, LiveStatus};
use crate::wire::link::{EndKind, LinkEnd, Validity};

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);
const NOT_BEFORE: ServerTime = ServerTime(1_790_000_000_000);
const NOT_AFTER: ServerTime = ServerTime(1_790_086_400_000);

/// No way to any gateway; counts the tries.
#[derive(Debug, Default)]
struct Nowhere(AtomicU32);

impl Connect for Nowhere {
    fn connect(&self, host: &str, _port: u16) -> BoxFuture<'static, Result<ByteStream, ConnectError>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let (host, source) = (host.to_owned(), std::io::Error::other("a test"));
        async move { Err(ConnectError::Unresolved { host, source }) }.boxed()
    }
}

struct Node {
    renewing: Renewing,
    faults: Faults,
    dials: Arc<Nowhere>,
    _session: watch::Sender<SessionStatus>,
    _identity: watch::Sender<Identity>,
    _fixture: Fixture,
}

/// A node with a certificate of a day and a journal without a birth, that starts with this mark and signed time.
fn node(mark: Option<ServerTime>, signed: Option<ServerTime>) -> Node {
    let fixture = joined();
    let faults = Faults::default();
    let options = Options::of_a_test(fixture.state(), Mode::Inline);
    let locked = Locked::open(options, JournalId::new("j-1").unwrap()).unwrap().with_faults(faults.clone());
    let (journal, _) = locked.recover(None).unwrap();
    let mut held = fixture.load().unwrap();
    held.leaf.validity = Validity { not_before: NOT_BEFORE, not_after: NOT_AFTER };
    let (identity_in_use, identity) = watch::channel(held);
    let (session_now, session) = watch::channel(SessionStatus::new(Duration::ZERO));
    let dials = Arc::new(Nowhere::default());
    let renewing = Renewing {
        state: fixture.state(),
        identity,
        trust_floor: 0,
        own_endpoints: vec![Endpoint { host: "gw1.lab.example".into(), port: 443 }],
        connect: dials.clone(),
        working: WorkingClock::new(Arc::new(TokioClock::starting_at(0)), mark, signed),
        journal,
        conditions: Conditions::new(Arc::new(TokioClock::starting_at(0))),
        session,
        incarnation: Incarnation::new("i-1").unwrap(),
        notices: mpsc::channel(1).0,
        replaced: Arc::default(),
        rng: rand::SeedableRng::seed_from_u64(7),
    };
    Node { renewing, faults, dials, _session: session_now, _identity: identity_in_use, _fixture: fixture }
}

impl Node {
    fn reason(&mut self) -> Result<Why, Duration> {
        let planned = self.renewing.plan(None);
        self.renewing.reason(&planned, &Doubt::default())
    }
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_only_a_welcome_says_has_run_out_is_still_offered_for_a_new_one() {
    for late in [Duration::ZERO, SECOND] {
        let mut node = node(None, Some(NOT_BEFORE));
        node.renewing.working.welcome(NOT_AFTER.minus(late));
        tokio::time::advance(SECOND).await;
        assert_eq!(node.reason(), Ok(Why::RunOut), "{late:?} before its end");
    }
    let mut restarted = node(Some(NOT_AFTER), Some(NOT_BEFORE));
    assert_eq!(restarted.reason(), Ok(Why::RunOut), "the mark outlives the process that was lied to");
    let mut over = node(None, Some(NOT_AFTER.minus(SECOND)));
    tokio::time::advance(SECOND).await;
    assert_eq!(over.reason(), Ok(Why::Expired), "signed time says so too: it is not offered");
}

#[tokio::test(start_paused = true)]
async fn a_certificate_that_seems_to_have_run_out_is_offered_with_growing_waits() {
    for signed in [NOT_BEFORE, NOT_AFTER] {
        let Node { renewing, dials, _session, _identity, _fixture, .. } = node(Some(NOT_AFTER), Some(signed));
        assert!(tokio::time::timeout(HOUR, renewing.run()).await.is_err());
        let dialed = dials.0.load(Ordering::Relaxed);
        assert!((5..=14).contains(&dialed), "{dialed} in an hour");
    }
}

#[tokio::test(start_paused = true)]
async fn the_word_of_a_gateway_that_the_certificate_has_run_out_is_looked_into_once_in_ten_minutes() {
    let mut doubt = Doubt::default();
    let mut word = |at_boot_ms, reason| {
        let end = EndStatus {
            kind: EndKind::Unauthenticated,
            reason: Some(reason),
            detail: String::new(),
            at_boot_ms,
        };
        doubt.look(&SessionStatus { last_end: Some(end), ..SessionStatus::new(Duration::ZERO) });
        let why = doubt.stands(Duration::from_millis(at_boot_ms));
        if why.is_some() {
            // It was asked, and the certificate was renewed.
            doubt.asked = Some(Duration::from_millis(at_boot_ms));
        }
        why
    };
    assert_eq!(word(1_000, Reason::CertificateRevoked), None);
    assert_eq!(word(2_000, Reason::CertificateExpired), Some(Why::RunOut));
    assert_eq!(word(60_000, Reason::CertificateExpired), None);
    assert_eq!(word(603_000, Reason::CertificateExpired), Some(Why::RunOut));
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_takes_no_birth_is_asked_again_and_the_gateway_is_not() {
    let mut node = node(None, None);
    node.renewing.working.answered(NOT_BEFORE);
    assert_eq!(node.reason(), Ok(Why::Birth), "nothing is known of an answer");
    node.faults.fail(At::Commit, rusqlite::ffi::SQLITE_FULL);
    let mut unrecorded = node.renewing.record(NOT_BEFORE).await;
    let (mut planned, mut doubt) = (node.renewing.plan(None), Doubt::default());
    let due = node.renewing.due(&mut planned, &mut doubt, &mut unrecorded);
    assert!(tokio::time::timeout(HOUR, due).await.is_err(), "no renewal is due");
    assert_eq!(node.renewing.journal.birth(), None);
    node.faults.clear();
    let due = node.renewing.due(&mut planned, &mut doubt, &mut unrecorded);
    assert!(tokio::time::timeout(HOUR / 4, due).await.is_err(), "no renewal is due");
    let birth = node.renewing.journal.birth().expect("the journal has taken it");
    assert!(birth.since(NOT_BEFORE) >= HOUR, "the time is that of now: {birth}");
    assert!(unrecorded.is_none());
}

fn ended(at_boot_ms: u64, reason: Reason) -> EndStatus {
    EndStatus { kind: EndKind::Unauthenticated, reason: Some(reason), detail: String::new(), at_boot_ms }
}

fn live() -> Option<LiveStatus> {
    Some(LiveStatus {
        session_id: "s-1".into(),
        gateway_id: "g-1".into(),
        epoch: 1,
        proto: 1,
        heartbeat_interval_ms: 1_000,
        acked_boot_ms: None,
    })
}

#[test]
fn an_end_that_is_seen_together_with_the_session_after_it_raises_no_doubt() {
    for reason in [Reason::CertificateExpired, Reason::TimeBackwards] {
        let mut doubt = Doubt { in_a_row: 1, ..Doubt::default() };
        let session = SessionStatus {
            live: live(),
            last_end: Some(ended(1_000, reason)),
            ..SessionStatus::new(Duration::ZERO)
        };
        doubt.look(&session);
        assert_eq!((doubt.in_a_row, doubt.run_out), (0, false), "{reason}");
        doubt.look(&SessionStatus { live: None, ..session });
        assert_eq!(doubt.stands(SECOND), None, "{reason}: it was counted, and settled");
    }
}

#[test]
fn a_rejoin_that_is_refused_since_the_certificate_holds_is_followed_by_its_renewal() {
    let valid = Some(Reason::CertificateValid);
    for why in [Why::Expired, Why::RunOut] {
        assert_eq!(Way::Rejoin.instead(why, valid), Some(Way::Renew), "{why:?}");
    }
    let expired = Some(Reason::CertificateExpired);
    assert_eq!(Way::Renew.instead(Why::RunOut, expired), Some(Way::Rejoin));
    for why in [Why::Life, Why::Birth, Why::Doubt, Why::Expired] {
        assert_eq!(Way::Renew.instead(why, expired), None, "{why:?}");
    }
    assert_eq!(Way::Rejoin.instead(Why::Expired, Some(Reason::CertificateRevoked)), None);
}

#[tokio::test]
async fn a_revocation_that_any_gateway_hands_on_is_judged_and_only_an_answer_that_does_not_hold_is_an_event()
{
    let fixture = joined();
    let (notices, mut told_of) = mpsc::channel(1);
    let endpoint = Endpoint { host: "gw1.lab.example".into(), port: 443 };
    let mut end = LinkEnd::local(EndKind::Unauthenticated, Reason::CertificateRevoked, "no");
    end.revocation = Some(Box::new(fixture.revocation("n-1", &["4b"])));
    let mut refused = RenewError::Ended { endpoint: endpoint.clone(), source: end };
    assert_eq!(told(&mut refused, &notices), None);
    assert!(matches!(told_of.try_recv(), Ok(Notice::Revocation(_))));
    let source = AnswerError::Changed("site");
    let event = told(&mut RenewError::Answer { endpoint, source }, &notices);
    assert!(event.is_some_and(|detail| detail.contains("gw1.lab.example")));
    assert!(told_of.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_retired_key_that_a_killed_renewal_left_goes_with_the_first_session_and_is_never_offered_as_new() {
    let mut node = node(None, None);
    let held = node.renewing.identity.borrow().clone();
    let left = rejoin::offer(&node.renewing.state, &held).unwrap();
    drop(left);
    let keys = || std::fs::read_dir(node._fixture.state().join("keys")).unwrap().count();
    let before = keys();
    let (mut planned, mut doubt, mut none) = (node.renewing.plan(None), Doubt::default(), None);
    let due = node.renewing.due(&mut planned, &mut doubt, &mut none);
    assert!(tokio::time::timeout(SECOND, due).await.is_err());
    assert_eq!(keys(), before, "no gateway has welcomed the key in use yet: it may be a re-join's");
    node._session.send_modify(|session| session.live = live());
    let due = node.renewing.due(&mut planned, &mut doubt, &mut none);
    assert!(tokio::time::timeout(SECOND, due).await.is_err());
    assert_eq!(keys(), before - 1);
}
