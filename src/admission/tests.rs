//! Each row of the admission table, by name.

use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::model::NodeId;
use crate::wire::dsse::{Audience, COMMAND_TYPE, Envelope, Policy, verify_command};

const ISSUED: &str = "2026-11-29T10:00:00Z";
const NOT_AFTER: &str = "2026-11-29T11:00:00Z";

fn at(text: &str) -> ServerTime {
    ServerTime::parse(text).expect("a time")
}

fn command(kind: &str, extra: &str, args: &str) -> Verified<Command> {
    let payload = format!(
        r#"{{"trust_domain":"lab","node_id":"n-1","id":"c-1","kind":"{kind}","issued_at":"{ISSUED}",
        "not_after":"{NOT_AFTER}"{extra},"args":{args}}}"#
    );
    let envelope =
        Envelope { payload_type: COMMAND_TYPE.into(), payload: Bytes::from(payload), signatures: Vec::new() };
    let audience = Audience { trust_domain: "lab".into(), node_id: NodeId::new("n-1").expect("an id") };
    verify_command(&envelope, &audience, &Policy::None.into()).expect("verified")
}

fn exec() -> Verified<Command> {
    command("node.exec", "", r#"{"argv":["true"]}"#)
}

fn retry_safe() -> Verified<Command> {
    command("node.exec", "", r#"{"argv":["true"],"retry_safe":true}"#)
}

fn context() -> Context {
    Context {
        upgrade_only: false,
        role: Role::Host,
        denied: Arc::default(),
        now: Some(at("2026-11-29T10:30:00Z")),
        signed: Some(at(ISSUED)),
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    }
}

fn facts() -> JournalFacts {
    JournalFacts { row: None, birth: Some(at("2026-11-01T00:00:00Z")), room: true, disk: None }
}

fn with_row(state: KnownState) -> JournalFacts {
    JournalFacts { row: Some(Known { body_sha256: exec().get().body_sha256, state }), ..facts() }
}

fn done() -> Done {
    let outcome = Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "");
    Done { id: exec().get().header.id.clone(), body_sha256: exec().get().body_sha256, to_sign: true, outcome }
}

/// The token of a REFUSED, with its detail where it is a why of `busy`.
fn refused(decision: Decision) -> (Reason, Option<Reason>) {
    match decision {
        Decision::Refuse { reason, detail } => (reason, Reason::from_token(&detail)),
        other => panic!("not refused: {other:?}"),
    }
}

fn rejected(decision: Decision) -> (Terminal, Option<Reason>, Effect) {
    match decision {
        Decision::Reject(done) => (done.outcome.state, done.outcome.reason, done.outcome.effect),
        other => panic!("not rejected: {other:?}"),
    }
}

#[test]
fn a_command_that_passes_every_step_is_admitted() {
    match decide(exec(), &context(), &facts()) {
        Decision::Admit { admitted, attempt: 0 } => assert_eq!(admitted.kind(), Kind::NodeExec),
        other => panic!("{other:?}"),
    }
}

#[test]
fn step_3_a_known_id_with_other_bytes_is_refused_command_id_conflict() {
    let mut facts = with_row(KnownState::Accepted);
    facts.row.as_mut().expect("a row").body_sha256 = Digest::of(b"other");
    assert_eq!(refused(decide(exec(), &context(), &facts)).0, Reason::CommandIdConflict);
}

#[test]
fn step_3_a_known_command_is_answered_and_never_started_again() {
    let decision = |state| decide(exec(), &context(), &with_row(state));
    assert!(matches!(decision(KnownState::Accepted), Decision::IsAccepted));
    assert!(matches!(decision(KnownState::Running { attempt: 2 }), Decision::IsRunning { attempt: 2 }));
    assert!(matches!(decision(KnownState::Done(done())), Decision::Again(again) if again == done()));
}

#[test]
fn step_3_comes_before_every_later_one() {
    let hostile = Context {
        upgrade_only: true,
        now: Some(at("2027-01-01T00:00:00Z")),
        credit: false,
        stopping: true,
        ..context()
    };
    let decision = decide(exec(), &hostile, &with_row(KnownState::Done(done())));
    assert!(matches!(decision, Decision::Again(_)), "{decision:?}");
}

#[test]
fn step_3_what_an_older_incarnation_left_goes_through_admission_again() {
    let decision = |state| decide(exec(), &context(), &with_row(state));
    assert!(matches!(decision(KnownState::AcceptedBefore), Decision::Admit { attempt: 0, .. }));
    assert!(matches!(decision(KnownState::RunningBefore { attempt: 3 }), Decision::Admit { attempt: 3, .. }));
}

#[test]
fn step_3_a_later_rejection_of_a_left_run_is_failed_interrupted_effect_unknown() {
    let late = Context { signed: Some(at(NOT_AFTER)), ..context() };
    let left = |state| rejected(decide(exec(), &late, &with_row(state)));
    let interrupted = (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown);
    assert_eq!(left(KnownState::RunningBefore { attempt: 1 }), interrupted);
    let expired = (Terminal::Rejected, Some(Reason::Expired), Effect::None);
    assert_eq!(left(KnownState::AcceptedBefore), expired);
}

#[test]
fn step_4_an_upgrade_only_session_refuses_upgrade_required() {
    let context = Context { upgrade_only: true, ..context() };
    assert_eq!(refused(decide(exec(), &context, &facts())).0, Reason::UpgradeRequired);
}

#[test]
fn step_5_what_cannot_be_read_or_run_here_is_rejected() {
    let reason = |command| rejected(decide(command, &context(), &facts()));
    let expected = |reason| (Terminal::Rejected, Some(reason), Effect::None);
    let unknown_field = command("node.exec", "", r#"{"argv":["true"],"memory":1}"#);
    assert_eq!(reason(unknown_field), expected(Reason::UnsupportedField));
    assert_eq!(
        reason(command("node.exec", r#","x":1"#, r#"{"argv":["true"]}"#)),
        expected(Reason::UnsupportedField)
    );
    assert_eq!(reason(command("node.exec", "", "{}")), expected(Reason::InvalidArguments));
    assert_eq!(reason(command("disk.format", "", "{}")), expected(Reason::UnknownKind));
}

#[test]
fn step_5_a_rejections_message_is_bounded_whatever_the_body_says() {
    let long = format!(r#"{{"argv":["true"],"{}":1}}"#, "x".repeat(100_000));
    let Decision::Reject(done) = decide(command("node.exec", "", &long), &context(), &facts()) else {
        panic!("an unknown field is rejected");
    };
    assert!(done.outcome.message.len() <= crate::model::limits::TEXT_BYTES);
}

#[test]
fn step_5_a_kind_that_the_operator_denies_is_rejected_denied_by_operator() {
    let context = Context { denied: Arc::new([String::from("node.exec")].into()), ..context() };
    let (state, reason, _) = rejected(decide(exec(), &context, &facts()));
    assert_eq!((state, reason), (Terminal::Rejected, Some(Reason::DeniedByOperator)));
    assert!(matches!(decide(command("node.probe", "", "{}"), &context, &facts()), Decision::Admit { .. }));
}

#[test]
fn step_7_expired_is_refused_by_the_working_clock_and_rejected_by_signed_time_only() {
    let late = Some(at(NOT_AFTER));
    let lied_to = Context { now: late, ..context() };
    assert_eq!(refused(decide(exec(), &lied_to, &facts())).0, Reason::Expired);
    let signed = Context { now: late, signed: late, ..context() };
    let expected = (Terminal::Rejected, Some(Reason::Expired), Effect::Unknown);
    assert_eq!(rejected(decide(exec(), &signed, &facts())), expected);
    let timeless = Context { now: None, signed: None, ..context() };
    assert_eq!(refused(decide(exec(), &timeless, &facts())).0, Reason::Expired);
}

#[test]
fn step_7_issued_before_the_journals_birth_is_rejected_journal_lost_unless_retry_safe() {
    let facts = JournalFacts { birth: Some(at("2026-11-29T10:00:01Z")), ..facts() };
    let expected = (Terminal::Rejected, Some(Reason::JournalLost), Effect::Unknown);
    assert_eq!(rejected(decide(exec(), &context(), &facts)), expected);
    assert!(matches!(decide(retry_safe(), &context(), &facts), Decision::Admit { .. }));
}

#[test]
fn step_7_without_a_birth_only_retry_safe_commands_run() {
    let facts = JournalFacts { birth: None, ..facts() };
    assert_eq!(refused(decide(exec(), &context(), &facts)), (Reason::Busy, Some(Reason::NoBirth)));
    assert!(matches!(decide(retry_safe(), &context(), &facts), Decision::Admit { .. }));
}

#[test]
fn step_7_a_newer_generation_to_come_is_refused_stale_generation() {
    let needs_next = command("node.exec", r#","min_generation":1"#, r#"{"argv":["true"]}"#);
    assert_eq!(refused(decide(needs_next, &context(), &facts())).0, Reason::StaleGeneration);
}

#[test]
fn step_8_no_credit_no_room_or_stopping_is_refused_busy_with_the_why() {
    let why = |context: &Context, facts: &JournalFacts| refused(decide(exec(), context, facts));
    let busy = |why| (Reason::Busy, Some(why));
    assert_eq!(why(&Context { credit: false, ..context() }, &facts()), busy(Reason::Credits));
    assert_eq!(why(&Context { stopping: true, ..context() }, &facts()), busy(Reason::Stopping));
    // A held node has no credits either, and the hold is the why.
    assert_eq!(why(&Context { held: true, credit: false, ..context() }, &facts()), busy(Reason::Held));
    assert_eq!(why(&context(), &JournalFacts { room: false, ..facts() }), busy(Reason::JournalFull));
    for trouble in [Reason::Disk, Reason::ReadOnly, Reason::IoError] {
        assert_eq!(why(&context(), &JournalFacts { disk: Some(trouble), ..facts() }), busy(trouble));
    }
}

#[test]
fn step_8_the_cap_on_unacked_results_holds_before_a_rejected_is_written_too() {
    let full = JournalFacts { room: false, ..facts() };
    let decision = decide(command("disk.format", "", "{}"), &context(), &full);
    assert_eq!(refused(decision), (Reason::Busy, Some(Reason::JournalFull)));
}

#[test]
fn a_kind_runs_only_on_the_roles_of_its_row() {
    assert!(may_run(&[Role::Host, Role::Ramdisk], Role::Ramdisk));
    assert!(may_run(&[Role::Ramdisk], Role::Ramdisk));
    assert!(!may_run(&[Role::Ramdisk], Role::Host), "provisioning is not for an installed host");
    assert!(!may_run(&[], Role::Host));
}
