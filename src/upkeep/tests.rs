//! Upkeep in virtual time, over a journal without a thread.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::*;
use crate::blocking::inline::Inline;
use crate::clock::TokioClock;
use crate::exec::Lanes;
use crate::identity::tests::{Fixture, joined};
use crate::journal::{At, Failed, Faults, Limits, Locked, Mode, Options};
use crate::model::{EventType, JournalId, NewEvent, Reason};

/// SQLite's SQLITE_IOERR_WRITE.
const IOERR_WRITE: i32 = 778;

struct Kept {
    fixture: Fixture,
    journal: Journal,
    faults: Faults,
    conditions: Conditions,
    session: watch::Sender<SessionStatus>,
    _identity: watch::Sender<Identity>,
    task: JoinHandle<()>,
    _inline: Inline,
}

impl Kept {
    /// Upkeep that has looked once.
    async fn start() -> Self {
        Self::start_within(Limits::NONE).await
    }

    async fn start_within(limits: Limits) -> Self {
        let inline = Inline::here();
        let fixture = joined();
        let state = fixture.state();
        let identity = Identity::load(&state).expect("an identity");
        let options = Options::of_a_test(state.clone(), Mode::Inline);
        let faults = Faults::default();
        let locked = Locked::open(options, JournalId::new("j-1").expect("an id")).expect("opened");
        let (journal, _) =
            locked.with_faults(faults.clone()).with_limits(limits).recover(None).expect("recovered");
        let clock = Arc::new(TokioClock::starting_at(0));
        let conditions = Conditions::new(Arc::clone(&clock) as _);
        let (session, status) = watch::channel(SessionStatus::new(Duration::ZERO));
        let (say_identity, identity) = watch::channel(identity);
        let hold = Hold::new(state.clone(), Arc::clone(&clock) as _, Lanes::default(), journal.clone(), None);
        let upkeep = Upkeep {
            state,
            hold,
            journal: journal.clone(),
            working: WorkingClock::new(clock, None, None),
            session: status,
            identity,
            conditions: conditions.clone(),
            floors: Floors::default(),
        };
        let task = tokio::spawn(upkeep.run());
        sleep(Duration::from_millis(1)).await;
        Self { fixture, journal, faults, conditions, session, _identity: say_identity, task, _inline: inline }
    }

    /// The conditions of a disk.
    fn of_the_disk(&self) -> Vec<Reason> {
        let disk = [Reason::Disk, Reason::ReadOnly, Reason::IoError];
        let standing = self.conditions.all().into_iter().map(|condition| condition.token);
        standing.filter(|token| disk.contains(token)).collect()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_is_taken_away_is_put_back_within_a_minute_though_nothing_is_written() {
    let kept = Kept::start().await;
    let db = kept.fixture.state().join("journal.db");
    std::fs::remove_file(&db).unwrap();
    let failed = timeout(Duration::from_secs(60), kept.journal.failed()).await;
    assert_eq!(failed, Ok(Failed::Displaced { rescued: true }));
    assert!(db.exists());
}

#[tokio::test(start_paused = true)]
async fn heartbeats_ask_nothing_of_the_journal_and_a_fault_ends_soon_after_its_cause() {
    let kept = Kept::start().await;
    // From here on whatever the journal is asked for stands as trouble.
    kept.faults.fail(At::Commit, IOERR_WRITE);
    for _ in 0..54 {
        kept.session.send_replace(SessionStatus::new(Duration::ZERO));
        sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(kept.of_the_disk(), [], "nobody has asked");
    sleep(Duration::from_secs(1)).await;
    assert_eq!(kept.of_the_disk(), [Reason::IoError], "the look of every 55 s has");
    sleep(Duration::from_secs(10)).await;
    assert_eq!(kept.of_the_disk(), [Reason::IoError]);
    kept.faults.clear();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(kept.of_the_disk(), []);
}

#[tokio::test(start_paused = true)]
async fn a_file_that_could_not_be_written_stands_at_once_and_until_one_can_be() {
    let kept = Kept::start().await;
    let trouble = Trouble { why: Reason::ReadOnly, detail: "read-only".into() };
    kept.journal.file_written(Some(trouble));
    sleep(Duration::from_millis(1)).await;
    assert_eq!(kept.of_the_disk(), [Reason::ReadOnly]);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(kept.of_the_disk(), []);
}

#[tokio::test(start_paused = true)]
async fn files_are_counted_within_a_minute_or_so_of_a_commands_step_and_not_while_nothing_happens() {
    // What running commands need, and a little more.
    let kept = Kept::start_within(Limits { state_bytes: 10 << 20, reserve_bytes: 0 }).await;
    assert_eq!(kept.of_the_disk(), []);
    std::fs::write(kept.fixture.state().join("much"), vec![1; 4 << 20]).unwrap();
    sleep(Duration::from_secs(600)).await;
    assert_eq!(kept.of_the_disk(), []);
    kept.journal.record(NewEvent::new(EventType::NodeLoad, serde_json::json!({}))).await.unwrap();
    sleep(Duration::from_secs(60)).await;
    assert_eq!(kept.of_the_disk(), [Reason::Disk]);
}
