//! Events: with the change they tell of, their order, their room, their end.

use serde_json::{Value, json};

use super::*;
use crate::model::{Event, EventClass, EventType, NewEvent};

const SMALL: EventLimits = EventLimits { count: 8, bytes: 1 << 20 };

impl Machine {
    fn start_with(&self, limits: EventLimits) -> Journal {
        self.locked().with_event_limits(limits).recover(Some(at(ISSUED))).expect("recovered").0
    }
}

async fn read(journal: &Journal, after: u64) -> Vec<Event> {
    let page = journal.events(after, 100_000, usize::MAX).await.expect("read");
    page.events.into_iter().map(Durable::into_inner).collect()
}

/// Types and numbers, without the daemon's own.
async fn told(journal: &Journal) -> Vec<(u64, String)> {
    let events = read(journal, 0).await.into_iter().filter(|event| !event.kind.starts_with("daemon."));
    events.map(|event| (event.seq, event.kind)).collect()
}

fn body(event: &Event) -> Value {
    serde_json::from_str(&event.body).expect("JSON")
}

async fn record(journal: &Journal, kind: EventType) {
    journal.record(NewEvent::new(kind, json!({}))).await.expect("written");
}

fn pending(journal: &Journal) -> u64 {
    journal.pending_events().borrow().count
}

/// Counts as a new process reads them.
fn on_disk(machine: &Machine) -> i64 {
    machine.sql().query_row("SELECT count(*) FROM events", [], |row| row.get(0)).expect("a count")
}

#[tokio::test]
async fn a_commands_life_is_told_in_order_with_the_changes_themselves() {
    let machine = Machine::new();
    let journal = machine.start();
    done(&journal, "c-1", ONCE).await;
    let kinds = ["command.accepted", "command.running", "command.done"];
    let expected: Vec<_> = (2..).zip(kinds.map(String::from)).collect();
    assert_eq!(told(&journal).await, expected, "behind the daemon's start");
    let events = read(&journal, 3).await;
    assert_eq!(
        body(&events[0]),
        json!({"id": "c-1", "attempt": 1, "state": "SUCCEEDED", "effect": "complete"})
    );
    assert_eq!((events[0].class, events[0].dropped), (EventClass::Transition, None));
}

#[tokio::test]
async fn an_event_is_not_there_when_its_change_was_not_written() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    let before = *journal.pending_events().borrow();
    for place in [At::Commit, At::Statement] {
        faults.fail(place, rusqlite::ffi::SQLITE_FULL);
        journal.admit(command("c-1", ONCE), context()).await.expect_err("not written");
        faults.clear();
        assert_eq!(*journal.pending_events().borrow(), before, "{place:?}");
    }
    drop(accepted(&journal, "c-1", ONCE).await);
    assert_eq!(told(&journal).await, [(before.last + 1, "command.accepted".into())], "no number is lost");
    assert_eq!(pending(&journal), before.count + 1);
}

#[tokio::test]
async fn a_start_and_a_clean_stop_are_told_and_a_crash_is_not_a_stop() {
    let machine = Machine::new();
    machine.start().close().await;
    drop(machine.start());
    let journal = machine.start();
    let kinds: Vec<_> = read(&journal, 0).await.into_iter().map(|event| event.kind).collect();
    assert_eq!(kinds, ["daemon.started", "daemon.stopped", "daemon.started", "daemon.started"]);
}

#[tokio::test]
async fn acked_events_are_forgotten_and_their_numbers_never_come_again() {
    let machine = Machine::new();
    let journal = machine.start();
    record(&journal, EventType::NodeLoad).await;
    let last = journal.pending_events().borrow().last;
    journal.events_sent(last);
    assert_eq!(journal.ack_of(&journal.id(), last), AckOf::Sent);
    journal.events_acked(journal.id(), last);
    assert_eq!(pending(&journal), 0);
    drop(journal);
    assert_eq!(on_disk(&machine), 0);
    let journal = machine.start();
    let events = read(&journal, 0).await;
    assert_eq!((events[0].seq, events[0].dropped), (last + 1, None));
}

#[tokio::test]
async fn an_ack_of_another_journal_or_beyond_the_last_number_forgets_nothing_more() {
    let machine = Machine::new();
    let journal = machine.start();
    assert_eq!(journal.ack_of(&journal_id("j-9"), 1), AckOf::AnotherJournal);
    journal.events_acked(journal_id("j-9"), 1);
    assert_eq!(pending(&journal), 1);
    journal.events_acked(journal.id(), u64::MAX);
    record(&journal, EventType::NodeLoad).await;
    let events = read(&journal, 0).await;
    assert_eq!(events.iter().map(|event| event.seq).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn an_ack_that_could_not_be_written_is_written_with_the_next_commit() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    faults.fail(At::Commit, rusqlite::ffi::SQLITE_FULL);
    journal.events_acked(journal.id(), 1);
    assert_eq!(pending(&journal), 1);
    faults.clear();
    record(&journal, EventType::NodeLoad).await;
    assert_eq!(read(&journal, 0).await.iter().map(|event| event.seq).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn a_full_journal_drops_the_oldest_metrics_and_the_event_behind_the_gap_names_it() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    for _ in 0..4 {
        record(&journal, EventType::NodeLoad).await;
    }
    for _ in 0..5 {
        record(&journal, EventType::SessionOpened).await;
    }
    assert_eq!(pending(&journal), SMALL.count);
    let events = read(&journal, 0).await;
    // 1 is the start, 2 to 5 were metrics.
    let seqs: Vec<_> = events.iter().map(|event| event.seq).collect();
    assert_eq!(seqs, [1, 4, 5, 6, 7, 8, 9, 10]);
    assert_eq!(events[1].dropped, Some((2, 3)));
    assert!(events[2..].iter().all(|event| event.dropped.is_none()));
}

#[tokio::test]
async fn without_a_metric_to_drop_logs_are_dropped_and_transitions_and_results_still_fit() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    let held = running(&journal, "c-1", ONCE).await;
    while pending(&journal) < SMALL.count {
        record(&journal, EventType::SessionOpened).await;
    }
    let last = journal.pending_events().borrow().last;
    record(&journal, EventType::SessionOpened).await;
    record(&journal, EventType::NodeLoad).await;
    assert_eq!(pending(&journal), SMALL.count, "both were dropped");
    journal.finish(held, success()).await.expect("the result fits");
    let events = read(&journal, last).await;
    assert_eq!(events.len(), 1, "{events:?}");
    assert_eq!((events[0].kind.as_str(), events[0].seq), ("command.done", last + 3));
    assert_eq!(events[0].dropped, Some((last + 1, last + 2)));
}

#[tokio::test]
async fn a_journal_full_of_what_is_kept_refuses_commands_busy_until_there_is_room() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    while pending(&journal) < SMALL.count {
        record(&journal, EventType::SessionOpened).await;
    }
    let full = AnswerState::Refused { reason: Reason::Busy, detail: "journal-full".into() };
    assert_eq!(state_of(deliver(&journal, "c-1", ONCE).await), full);
    journal.events_acked(journal.id(), 3);
    drop(accepted(&journal, "c-1", ONCE).await);
}

#[tokio::test]
async fn a_metric_that_can_still_be_dropped_refuses_no_command() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    while pending(&journal) < SMALL.count {
        record(&journal, EventType::NodeLoad).await;
    }
    drop(accepted(&journal, "c-1", ONCE).await);
    assert_eq!(pending(&journal), SMALL.count);
}

#[tokio::test]
async fn the_cap_on_bytes_holds_too() {
    let machine = Machine::new();
    let journal = machine.start_with(EventLimits { count: 1000, bytes: 16 << 10 });
    for n in 0..40 {
        let padding = "x".repeat(1000);
        journal
            .record(NewEvent::new(EventType::NodeLoad, json!({ "n": n, "padding": padding })))
            .await
            .expect("written");
    }
    let events = read(&journal, 0).await;
    let bodies: usize = events.iter().map(|event| event.body.len()).sum();
    assert!(bodies < 16 << 10 && events.len() > 10, "{} events of {bodies} bytes", events.len());
    assert_eq!(body(events.last().expect("the newest"))["n"], 39);
}

#[tokio::test]
async fn an_event_over_its_limit_says_so_instead() {
    let machine = Machine::new();
    let journal = machine.start();
    let padding = "x".repeat(crate::model::limits::EVENT_BYTES);
    journal.record(NewEvent::new(EventType::NodeLoad, json!({ "padding": padding }))).await.expect("written");
    let events = read(&journal, 1).await;
    assert!(body(&events[0])["too_large"].as_u64() > Some(64 << 10), "{events:?}");
}

#[tokio::test]
async fn counts_are_right_after_a_restart_and_the_cap_holds_on() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    for _ in 0..20 {
        record(&journal, EventType::NodeLoad).await;
    }
    drop(journal);
    let journal = machine.start_with(SMALL);
    record(&journal, EventType::NodeLoad).await;
    assert_eq!(pending(&journal), SMALL.count);
    drop(journal);
    assert_eq!(on_disk(&machine).cast_unsigned(), SMALL.count);
}

#[tokio::test(start_paused = true)]
async fn what_a_peer_can_cause_is_told_once_a_minute_with_a_count() {
    let machine = Machine::new();
    let clock = Arc::new(crate::clock::TokioClock::starting_at(0));
    let journal = machine.locked().with_clock(clock).recover(Some(at(ISSUED))).expect("recovered").0;
    drop(accepted(&journal, "c-1", ONCE).await);
    let conflict = async || {
        let state = state_of(deliver(&journal, "c-1", OTHER_BYTES).await);
        assert!(matches!(state, AnswerState::Refused { reason: Reason::CommandIdConflict, .. }), "{state:?}");
    };
    for _ in 0..4 {
        conflict().await;
    }
    tokio::time::advance(std::time::Duration::from_secs(60)).await;
    conflict().await;
    let events = read(&journal, 2).await;
    let counts: Vec<_> = events.iter().map(|event| body(event)["count"].clone()).collect();
    assert_eq!(counts, [json!(1), json!(4)]);
    assert!(events.iter().all(|event| event.class == EventClass::Security));
    assert_eq!(body(&events[0])["id"], "c-1");
}

#[tokio::test]
async fn an_age_is_known_within_the_boot_alone() {
    let machine = Machine::new();
    let before = machine.start();
    assert!(read(&before, 0).await[0].boot_ms.is_some());
    drop(before);
    let options = Options { boot_id: BootId::new("b-2").expect("an id"), ..machine.options(Mode::Inline) };
    let locked = Locked::open(options, journal_id("j-2")).expect("opened");
    let journal = locked.recover(Some(at(ISSUED))).expect("recovered").0;
    let known: Vec<_> = read(&journal, 0).await.iter().map(|event| event.boot_ms.is_some()).collect();
    assert_eq!(known, [false, true]);
}

#[tokio::test]
async fn an_old_copy_takes_a_new_id_without_a_birth_and_keeps_rows_results_and_tombstones() {
    let machine = Machine::new();
    let journal = machine.start();
    drop(accepted(&journal, "c-1", ONCE).await);
    done(&journal, "c-2", ONCE).await;
    done(&journal, "c-3", ONCE).await;
    journal.acked(vec![id("c-3")]);
    let last = journal.pending_events().borrow().last;
    journal.events_sent(last);
    journal.events_acked(journal.id(), 3);
    assert_eq!(journal.ack_of(&journal.id(), last), AckOf::Sent);
    assert_eq!(journal.ack_of(&journal.id(), last + 1), AckOf::OldCopy);
    let owed = read(&journal, 0).await;
    journal.rename(journal_id("j-new"), last + 1).await.expect("written");
    assert_eq!((journal.id(), journal.birth()), (journal_id("j-new"), None));
    let after = read(&journal, 0).await;
    let numbers: Vec<_> = after.iter().map(|event| event.seq).collect();
    assert_eq!(numbers, (1..=owed.len() as u64 + 1).collect::<Vec<_>>(), "no gap in the new numbers");
    let same = owed.iter().zip(&after).all(|(old, new)| (&old.kind, &old.body) == (&new.kind, &new.body));
    assert!(same, "the same events in the same order");
    let told = body(after.last().expect("the word of it"));
    assert_eq!(told, json!({"former": "j-1", "acked": last + 1, "gaps": 0}));
    assert_eq!(journal.ack_of(&journal.id(), 1), AckOf::OldCopy, "nothing is sent under the new id yet");
    assert_eq!(state_of(deliver(&journal, "c-1", ONCE).await), AnswerState::Accepted);
    assert_eq!(ended(deliver(&journal, "c-2", ONCE).await).message, "");
    assert_eq!(ended(deliver(&journal, "c-3", ONCE).await).message, "already-done");
    let busy = AnswerState::Refused { reason: Reason::Busy, detail: "no-birth".into() };
    assert_eq!(state_of(deliver(&journal, "c-4", ONCE).await), busy);
    drop(journal);
    let locked = machine.locked();
    assert!(
        locked.former_id().expect("readable") == Some(journal_id("j-1")),
        "its programs bear the former id"
    );
    assert_eq!((locked.facts().journal_id, locked.facts().birth), (journal_id("j-new"), None));
}

#[tokio::test]
async fn a_new_name_that_was_not_written_is_not_borne() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    faults.fail(At::Commit, rusqlite::ffi::SQLITE_FULL);
    journal.rename(journal_id("j-new"), 9).await.expect_err("not written");
    faults.clear();
    assert_eq!((journal.id(), journal.birth()), (journal_id("j-1"), Some(at(BIRTH))));
    drop(accepted(&journal, "c-1", ONCE).await);
}

#[tokio::test]
async fn an_ack_under_the_old_name_forgets_nothing_under_the_new_one() {
    let machine = Machine::new();
    let journal = machine.start();
    let old = journal.id();
    journal.rename(journal_id("j-new"), 9).await.expect("written");
    let before = pending(&journal);
    journal.events_acked(old, 1);
    assert_eq!(pending(&journal), before);
}

#[tokio::test]
async fn a_process_takes_what_its_predecessor_wrote_for_sent() {
    let machine = Machine::new();
    drop(machine.start());
    let journal = machine.start();
    assert_eq!(journal.ack_of(&journal.id(), 1), AckOf::Sent);
    assert_eq!(journal.ack_of(&journal.id(), 2), AckOf::OldCopy, "its own start is not sent yet");
}

fn back_to_the_first_schema(machine: &Machine) {
    machine
        .sql()
        .execute_batch(
            "ALTER TABLE commands DROP COLUMN asked; DROP TABLE audit;
             DROP INDEX metrics; DROP TABLE events;
             ALTER TABLE journal DROP COLUMN event_seq; ALTER TABLE journal DROP COLUMN acked_event_seq;
             ALTER TABLE journal DROP COLUMN events_dropped; ALTER TABLE journal DROP COLUMN former_id;
             PRAGMA user_version = 1",
        )
        .expect("schema 1");
}

#[tokio::test]
async fn a_journal_of_the_first_schema_can_be_looked_at_before_it_is_brought_up_to_date() {
    let machine = Machine::new();
    done(&machine.start(), "c-1", ONCE).await;
    back_to_the_first_schema(&machine);
    let snapshot = inspect::read(&machine.state()).expect("a snapshot");
    assert_eq!(
        (snapshot.schema, snapshot.counts.done, snapshot.events),
        (1, 1, inspect::EventLine::default())
    );
}

#[tokio::test]
async fn a_snapshot_counts_events() {
    let machine = Machine::new();
    let journal = machine.start_with(SMALL);
    for _ in 0..10 {
        record(&journal, EventType::NodeLoad).await;
    }
    journal.events_acked(journal.id(), 6);
    let events = journal.snapshot().await.expect("a snapshot").events;
    assert_eq!((events.unacked, events.metrics, events.last, events.acked, events.dropped), (5, 5, 11, 6, 3));
}

#[tokio::test]
async fn a_journal_of_the_first_schema_is_is_brought_up_to_date_and_keeps_what_it_holds() {
    let machine = Machine::new();
    done(&machine.start(), "c-1", ONCE).await;
    back_to_the_first_schema(&machine);
    let journal = machine.start();
    assert_eq!(journal.id(), journal_id("j-1"));
    assert_eq!(result(&journal, "c-1").await.state, Terminal::Succeeded);
    let events = read(&journal, 0).await;
    assert_eq!((events.len(), events[0].seq), (1, 1), "its first event is the start");
}

#[tokio::test]
async fn bytes_are_counted_as_bytes_so_that_what_is_acked_frees_all_that_it_took() {
    let machine = Machine::new();
    let journal = machine.start_with(EventLimits { count: 1000, bytes: 16 << 10 });
    for n in 1..=50 {
        let event = NewEvent::new(EventType::SessionOpened, json!({ "gateway": "ß€".repeat(400) }));
        journal.record(event).await.expect("written");
        assert_eq!(pending(&journal), if n == 1 { 2 } else { 1 }, "event {n} was dropped");
        let last = journal.pending_events().borrow().last;
        journal.events_acked(journal.id(), last);
    }
}
