//! Deliveries: new, doubled, conflicting, left by an older process, replayed.

use super::*;

#[tokio::test]
async fn a_new_command_is_accepted_run_and_done() {
    let machine = Machine::new();
    let journal = machine.start();
    let done = done(&journal, "c-1", ONCE).await;
    assert_eq!(done.outcome, success());
    assert_eq!(result(&journal, "c-1").await, success());
}

#[tokio::test]
async fn a_second_delivery_of_an_accepted_command_is_answered_accepted() {
    let machine = Machine::new();
    let journal = machine.start();
    let _first = accepted(&journal, "c-1", ONCE).await;
    assert_eq!(state_of(deliver(&journal, "c-1", ONCE).await), AnswerState::Accepted);
}

#[tokio::test]
async fn a_second_delivery_of_a_running_command_is_answered_running() {
    let machine = Machine::new();
    let journal = machine.start();
    let _first = running(&journal, "c-1", RETRY_SAFE).await;
    assert_eq!(state_of(deliver(&journal, "c-1", RETRY_SAFE).await), AnswerState::Running { attempt: 1 });
}

#[tokio::test]
async fn a_second_delivery_of_a_done_command_gets_its_result_with_output() {
    let machine = Machine::new();
    let journal = machine.start();
    done(&journal, "c-1", ONCE).await;
    assert_eq!(ended(deliver(&journal, "c-1", ONCE).await), success());
}

#[tokio::test]
async fn other_bytes_under_a_known_id_are_refused_in_every_state() {
    let machine = Machine::new();
    let journal = machine.start();
    let conflict = |admission| match state_of(admission) {
        AnswerState::Refused { reason, .. } => assert_eq!(reason, Reason::CommandIdConflict),
        other => panic!("not refused: {other:?}"),
    };
    let first = accepted(&journal, "c-1", ONCE).await;
    conflict(deliver(&journal, "c-1", OTHER_BYTES).await);
    let first = journal.start(first, None).await.expect("started");
    conflict(deliver(&journal, "c-1", OTHER_BYTES).await);
    journal.finish(first, success()).await.expect("finished");
    conflict(deliver(&journal, "c-1", OTHER_BYTES).await);
    journal.acked(vec![id("c-1")]);
    conflict(deliver(&journal, "c-1", OTHER_BYTES).await);
}

#[tokio::test]
async fn a_replay_after_the_ack_is_answered_already_done_without_output_and_starts_nothing() {
    let machine = Machine::new();
    let journal = machine.start();
    done(&journal, "c-1", ONCE).await;
    journal.acked(vec![id("c-1")]);
    let journal = {
        drop(journal);
        machine.start()
    };
    let replayed = ended(deliver(&journal, "c-1", ONCE).await);
    let expected = Outcome { message: "already-done".into(), output: Vec::new(), ..success() };
    assert_eq!(replayed, expected);
}

#[tokio::test]
async fn an_accepted_command_of_an_older_process_is_started_by_a_redelivery() {
    let machine = Machine::new();
    drop(accepted(&machine.start(), "c-1", ONCE).await);
    let journal = machine.start();
    let again = accepted(&journal, "c-1", ONCE).await;
    let running = journal.start(again, Some(at(NOW))).await.expect("started");
    assert_eq!(running.attempt, 1);
}

#[tokio::test]
async fn a_retry_safe_run_of_an_older_process_is_run_again_in_one_write_with_its_attempt_raised() {
    let machine = Machine::new();
    drop(running(&machine.start(), "c-1", RETRY_SAFE).await);
    let journal = machine.start();
    let before = journal.commits();
    let again = match deliver(&journal, "c-1", RETRY_SAFE).await {
        Admission::Restarted(running) => running,
        other => panic!("not restarted: {other:?}"),
    };
    assert_eq!((again.attempt, journal.commits() - before), (2, 1));
    assert_eq!(state_of(deliver(&journal, "c-1", RETRY_SAFE).await), AnswerState::Running { attempt: 2 });
    let outcome = Outcome { attempt: 2, ..success() };
    assert_eq!(journal.finish(again, outcome.clone()).await.expect("finished").outcome, outcome);
}

#[tokio::test]
async fn a_terminal_refusal_of_a_left_run_is_its_end_interrupted() {
    let machine = Machine::new();
    drop(running(&machine.start(), "c-1", RETRY_SAFE).await);
    let journal = machine.start();
    let denied = Context { denied: Arc::new(["node.exec".to_owned()].into()), ..context() };
    let admission = journal.admit(command("c-1", RETRY_SAFE), denied).await.expect("written");
    let outcome = ended(admission);
    assert_eq!(
        (outcome.state, outcome.reason, outcome.started),
        (Terminal::Failed, Some(Reason::Interrupted), Some(at(NOW)))
    );
    assert_eq!(result(&journal, "c-1").await, outcome);
}

#[tokio::test]
async fn a_rejected_command_is_done_durably_and_a_redelivery_gets_the_same_answer() {
    let machine = Machine::new();
    let journal = machine.start();
    let unknown = || kind_of_command("c-1", &"disk.wipe".repeat(200), "{}");
    let first = ended(journal.admit(unknown(), context()).await.expect("written"));
    assert_eq!((first.state, first.reason), (Terminal::Rejected, Some(Reason::UnknownKind)));
    drop(journal);
    let journal = machine.start();
    assert_eq!(ended(journal.admit(unknown(), context()).await.expect("written")), first);
}

#[tokio::test]
async fn a_refused_command_leaves_no_trace_and_costs_no_commit() {
    let machine = Machine::new();
    let journal = machine.start();
    let before = journal.commits();
    let full = Context { credit: false, ..context() };
    let refused = state_of(journal.admit(command("c-1", ONCE), full).await.expect("answered"));
    assert!(matches!(refused, AnswerState::Refused { reason: Reason::Busy, .. }), "{refused:?}");
    assert_eq!(journal.commits(), before);
    assert_eq!(journal.snapshot().await.expect("a snapshot").commands, Vec::new());
}

#[tokio::test]
async fn a_cancelled_command_that_was_never_started_is_done() {
    let machine = Machine::new();
    let journal = machine.start();
    let first = accepted(&journal, "c-1", ONCE).await;
    let outcome = Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "");
    journal.finish_accepted(first, outcome.clone()).await.expect("finished");
    assert_eq!(ended(deliver(&journal, "c-1", ONCE).await), outcome);
}

#[tokio::test]
async fn a_journal_without_birth_admits_only_what_may_run_twice() {
    let machine = Machine::bare();
    let journal = machine.start();
    let refused = state_of(deliver(&journal, "c-1", ONCE).await);
    let no_birth = AnswerState::Refused { reason: Reason::Busy, detail: "no-birth".into() };
    assert_eq!(refused, no_birth);
    accepted(&journal, "c-2", RETRY_SAFE).await;
}

#[tokio::test]
async fn a_journal_full_of_owed_results_has_no_room_for_a_new_command_but_for_a_known_one() {
    let machine = Machine::new();
    let journal = machine.start();
    let owed = crate::model::limits::UNACKED_RESULTS;
    done(&journal, "c-first", ONCE).await;
    drop(journal);
    machine
        .sql()
        .execute(
            "WITH RECURSIVE n(i) AS (SELECT 2 UNION ALL SELECT i + 1 FROM n WHERE i < ?)
             INSERT INTO commands SELECT 'c-' || i, body_sha256, kind, retry_safe, not_after_ms, state, attempt,
                incarnation, boot_id, accepted_ms, started_ms, outcome, i, asked FROM commands, n",
            [i64::try_from(owed).expect("a count")],
        )
        .expect("rows");
    let journal = machine.start();
    let refused = state_of(deliver(&journal, "c-new", ONCE).await);
    assert_eq!(refused, AnswerState::Refused { reason: Reason::Busy, detail: "journal-full".into() });
    assert_eq!(ended(deliver(&journal, "c-first", ONCE).await), success());
    journal.acked(vec![id("c-first")]);
    accepted(&journal, "c-new", ONCE).await;
}
