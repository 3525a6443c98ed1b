//! Commits: together, apart when one fails, refused when the disk does.

use std::time::Duration;

use rusqlite::ffi;
use tokio::sync::oneshot;

use super::*;

/// Where the writer takes its work from a queue.
const QUEUED: [Mode; 2] = [Mode::Thread, Mode::Pool];

/// Keeps the writer's thread in a job until the sender is used.
async fn hold(journal: &Journal) -> (std::sync::mpsc::Sender<()>, tokio::task::JoinHandle<()>) {
    let (release, held) = std::sync::mpsc::channel::<()>();
    let (tell, told) = oneshot::channel();
    let journal = journal.clone();
    let job = tokio::spawn(async move {
        let waiting = journal.submit(move |_| {
            let _ = tell.send(());
            let _ = held.recv();
            Ok(())
        });
        waiting.await.expect("held");
    });
    told.await.expect("the writer is held");
    (release, job)
}

#[tokio::test]
async fn many_submitters_share_a_commit() {
    for mode in QUEUED {
        let machine = Machine::new();
        let journal = machine.start_in(mode);
        let (release, holder) = hold(&journal).await;
        let before = journal.commits();
        let submitters: Vec<_> = (0..40)
            .map(|n| {
                let journal = journal.clone();
                tokio::spawn(async move { drop(accepted(&journal, &format!("c-{n}"), ONCE).await) })
            })
            .collect();
        // On this one-threaded runtime every submitter has handed its job over before this task goes on.
        tokio::task::yield_now().await;
        release.send(()).expect("the writer waits");
        holder.await.expect("held");
        for submitter in submitters {
            submitter.await.expect("accepted");
        }
        assert_eq!(journal.commits() - before, 1, "40 accepts that waited together");
        journal.close().await;
    }
}

#[tokio::test]
async fn two_deliveries_of_one_id_in_one_batch_see_each_other() {
    for mode in QUEUED {
        let machine = Machine::new();
        let journal = machine.start_in(mode);
        let (release, holder) = hold(&journal).await;
        let twice: Vec<_> = (0..2)
            .map(|_| {
                let journal = journal.clone();
                tokio::spawn(async move { deliver(&journal, "c-1", ONCE).await })
            })
            .collect();
        tokio::task::yield_now().await;
        release.send(()).expect("the writer waits");
        holder.await.expect("held");
        let mut answers = Vec::new();
        for delivery in twice {
            answers.push(delivery.await.expect("answered"));
        }
        assert!(matches!(answers[0], Admission::Accepted(_)), "{answers:?}");
        assert_eq!(state_of(answers.remove(1)), AnswerState::Accepted);
        journal.close().await;
    }
}

#[tokio::test]
async fn an_operation_that_fails_takes_no_neighbour_with_it() {
    for mode in QUEUED {
        let machine = Machine::new();
        let faults = Faults::default();
        let locked = Locked::open(machine.options(mode), journal_id("j-2")).expect("opened");
        let (journal, _) = locked.with_faults(faults.clone()).recover(None).expect("recovered");
        let (release, holder) = hold(&journal).await;
        let deliveries: Vec<_> = (0..3)
            .map(|n| {
                let journal = journal.clone();
                tokio::spawn(async move { journal.admit(command(&format!("c-{n}"), ONCE), context()).await })
            })
            .collect();
        tokio::task::yield_now().await;
        // The batch's savepoints: the lazy writes, then a delivery each; the second delivery fails.
        faults.fail_some(At::Statement, ffi::SQLITE_IOERR_READ, 2, 1);
        release.send(()).expect("the writer waits");
        holder.await.expect("held");
        let mut written = Vec::new();
        for delivery in deliveries {
            written.push(delivery.await.expect("answered").map_err(|error| error.why).is_ok());
        }
        assert_eq!(written, [true, false, true]);
        let known = journal.snapshot().await.expect("a snapshot").commands;
        assert_eq!(known.iter().map(|line| line.id.as_str()).collect::<Vec<_>>(), ["c-0", "c-2"]);
        journal.close().await;
    }
}

#[tokio::test]
async fn a_commit_that_fails_starts_nothing_says_why_and_resumes_when_the_cause_is_gone() {
    for (code, why) in [
        (ffi::SQLITE_FULL, Reason::Disk),
        (ffi::SQLITE_READONLY, Reason::ReadOnly),
        (ffi::SQLITE_IOERR_WRITE, Reason::IoError),
    ] {
        for at in [At::Commit, At::Statement] {
            let machine = Machine::new();
            let (journal, faults) = machine.start_faulty();
            faults.fail(at, code);
            for name in ["c-1", "c-2"] {
                let refused = journal.admit(command(name, ONCE), context()).await.expect_err("a full disk");
                assert_eq!(refused.why, why);
            }
            faults.clear();
            let before = journal.submit(|core| Ok(core.counters.owed)).await.expect("read");
            assert_eq!(before, 0, "what was rolled back is not counted");
            let first = running(&journal, "c-1", ONCE).await;
            faults.fail(at, code);
            let (first, outcome, error) = journal.finish(first, success()).await.expect_err("a full disk");
            assert_eq!((error.why, &outcome), (why, &success()));
            faults.clear();
            journal.finish(first, outcome).await.expect("the same result, later");
            drop(journal);
            assert_eq!(result(&machine.start(), "c-1").await, success());
        }
    }
}

#[tokio::test]
async fn a_database_that_is_really_full_answers_disk_and_goes_on_when_there_is_room() {
    let machine = Machine::new();
    let journal = machine.start();
    let first = running(&journal, "c-1", ONCE).await;
    let max_pages = async |pages: i64| {
        let set = journal.submit(move |core| {
            core.conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get::<_, i64>(0))
        });
        set.await.expect("set")
    };
    max_pages(1).await;
    let large = Outcome { output: vec![b'x'; 100_000], ..success() };
    let (first, large, error) = journal.finish(first, large).await.expect_err("no room");
    assert_eq!(error.why, Reason::Disk);
    assert_eq!(state_of(deliver(&journal, "c-1", ONCE).await), AnswerState::Running { attempt: 1 });
    max_pages(1_000_000).await;
    assert_eq!(journal.finish(first, large.clone()).await.expect("finished").outcome, large);
    drop(journal);
    assert_eq!(result(&machine.start(), "c-1").await, large);
}

#[tokio::test]
async fn a_running_that_cannot_be_written_gives_the_command_back() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    let first = accepted(&journal, "c-1", ONCE).await;
    faults.fail(At::Commit, ffi::SQLITE_FULL);
    let (first, error) = journal.start(first, None).await.expect_err("a full disk");
    assert_eq!(error.why, Reason::Disk);
    faults.clear();
    assert_eq!(journal.start(first, None).await.expect("started").attempt, 1);
}

#[tokio::test]
async fn a_failed_sync_is_never_retried_as_if_it_had_worked() {
    for code in [ffi::SQLITE_IOERR_FSYNC, ffi::SQLITE_IOERR_DIR_FSYNC] {
        let machine = Machine::new();
        let (journal, faults) = machine.start_faulty();
        let kept = accepted(&journal, "c-1", ONCE).await;
        assert!(tokio::time::timeout(Duration::ZERO, journal.failed()).await.is_err());
        faults.fail_some(At::Commit, code, 0, 1);
        let failed = journal.admit(command("c-2", ONCE), context()).await.expect_err("a failed sync");
        assert_eq!(failed.why, Reason::IoError);
        journal.failed().await;
        let (_, later) = journal.start(kept, None).await.expect_err("poisoned");
        assert_eq!(later.why, Reason::IoError);
        journal.close().await;
        assert_eq!(machine.start_at(ISSUED).1.waiting, [id("c-1")], "what was synced before is there");
    }
}

#[tokio::test]
async fn an_ack_is_written_within_a_second_or_two_without_another_commit() {
    for mode in QUEUED {
        let machine = Machine::new();
        let journal = machine.start_in(mode);
        done(&journal, "c-1", ONCE).await;
        let before = journal.commits();
        journal.acked(vec![id("c-1"), id("c-unknown")]);
        for _ in 0..100 {
            if journal.commits() > before {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert_eq!(journal.commits() - before, 1);
        assert_eq!(journal.snapshot().await.expect("a snapshot").counts.tombstones, 1);
        journal.close().await;
    }
}

#[tokio::test]
async fn an_ack_that_could_not_be_written_is_written_later() {
    let machine = Machine::new();
    let (journal, faults) = machine.start_faulty();
    done(&journal, "c-1", ONCE).await;
    faults.fail(At::Commit, ffi::SQLITE_FULL);
    journal.acked(vec![id("c-1")]);
    faults.clear();
    let owed = || async { journal.unacked(None, usize::MAX).await.expect("read").results.len() };
    assert_eq!(owed().await, 1, "it fails nobody who only reads");
    journal.look(true).await.expect("the disk takes writes again");
    assert_eq!(owed().await, 0, "the ack rode on this commit");
}

#[tokio::test]
async fn the_time_mark_and_the_epoch_survive_and_neither_clock_goes_back() {
    let machine = Machine::new();
    let journal = machine.start();
    journal.welcomed(7, at(NOW)).await.expect("written");
    assert_eq!(journal.last_epoch(), 7);
    journal.note_time(at(LATER), Some(at(NOW)));
    journal.close().await;
    let journal = machine.start();
    assert_eq!(journal.last_epoch(), 7);
    journal.welcomed(8, at(NOW)).await.expect("written");
    drop(journal);
    let facts = machine.locked().facts();
    assert_eq!((facts.mark, facts.signed, facts.last_epoch), (Some(at(LATER)), Some(at(NOW)), 8));
}

#[tokio::test]
async fn unacked_results_come_in_pages_oldest_first_until_they_are_acked() {
    let machine = Machine::new();
    let journal = machine.start();
    for n in 0..5 {
        done(&journal, &format!("c-{n}"), ONCE).await;
    }
    journal.acked(vec![id("c-1")]);
    drop(journal);
    let journal = machine.start();
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        // Room for two: each is its output and what stands beside it.
        let page = journal.unacked(after, 1100).await.expect("read");
        assert!((1..=2).contains(&page.results.len()), "{page:?}");
        seen.extend(page.results.iter().map(|done| done.id.to_string()));
        match page.next {
            Some(next) => after = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, ["c-0", "c-2", "c-3", "c-4"]);
    let one = journal.unacked(None, 0).await.expect("read");
    assert_eq!((one.results.len(), one.next.is_some()), (1, true), "at least one, whatever its size");
}

#[tokio::test]
async fn after_closing_every_call_is_answered_stopping_and_the_lock_is_free() {
    for mode in [Mode::Thread, Mode::Pool, Mode::Inline] {
        let machine = Machine::new();
        let locked = Locked::open(machine.options(mode), journal_id("j-2")).expect("opened");
        let (journal, _) = locked.recover(None).expect("recovered");
        done(&journal, "c-1", ONCE).await;
        journal.acked(vec![id("c-1")]);
        journal.close().await;
        journal.close().await;
        let error = journal.admit(command("c-2", ONCE), context()).await.expect_err("closed");
        assert_eq!(error.why, Reason::Stopping);
        let next = machine.start();
        assert_eq!(next.snapshot().await.expect("a snapshot").counts.tombstones, 1, "{mode:?}");
    }
}

#[tokio::test]
async fn a_submitter_that_goes_away_leaves_a_written_command() {
    for mode in QUEUED {
        let machine = Machine::new();
        let journal = machine.start_in(mode);
        let (release, holder) = hold(&journal).await;
        let other = journal.clone();
        let gone = tokio::spawn(async move { deliver(&other, "c-1", ONCE).await });
        tokio::task::yield_now().await;
        gone.abort();
        release.send(()).expect("the writer waits");
        holder.await.expect("held");
        assert_eq!(state_of(deliver(&journal, "c-1", ONCE).await), AnswerState::Accepted);
        journal.close().await;
    }
}

#[tokio::test]
async fn a_panic_in_the_writer_ends_it_and_says_so() {
    for mode in QUEUED {
        let machine = Machine::new();
        let journal = machine.start_in(mode);
        let (tell, told) = oneshot::channel::<()>();
        let error = journal
            .submit(move |_| -> rusqlite::Result<()> {
                drop(tell);
                panic!("asked for by the test")
            })
            .await
            .expect_err("no answer");
        assert!(told.await.is_err());
        assert_eq!(error.why, Reason::IoError);
        journal.failed().await;
    }
}

#[test]
fn journals_at_rest_need_no_thread_and_the_end_of_their_handles_frees_them() {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().max_blocking_threads(1).build().expect("a runtime");
    let machines: Vec<_> = (0..5).map(|_| Machine::new()).collect();
    let work = async {
        let journals: Vec<_> = machines.iter().map(|machine| machine.start_in(Mode::Pool)).collect();
        for journal in &journals {
            done(journal, "c-1", ONCE).await;
            journal.acked(vec![id("c-1")]);
        }
        // The acks wait a second for another commit; each wakes its writer, and no writer has the thread meanwhile.
        for journal in &journals {
            while journal.vitals().owed > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        drop(journals);
        for machine in &machines {
            while Locked::open(machine.options(Mode::Inline), journal_id("j-2")).is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    runtime.block_on(async { tokio::time::timeout(Duration::from_secs(20), work).await.expect("in time") });
}

#[test]
fn a_journal_that_outlives_its_runtime_is_closed_with_it_and_says_so() {
    let machine = Machine::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let first = runtime();
    let journal = first.block_on(async {
        let journal = machine.start_in(Mode::Pool);
        accepted(&journal, "c-1", ONCE).await;
        journal
    });
    drop(first);
    let later = runtime().block_on(journal.admit(command("c-2", ONCE), context()));
    assert_eq!(later.expect_err("nobody writes it").why, Reason::Stopping);
    assert_eq!(machine.start_at(ISSUED).1.waiting, [id("c-1")]);
}
