//! audit.log by what its reader finds.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::*;
use crate::admission::Context;
use crate::blocking::inline::Inline;
use crate::journal::{Locked, Mode, Options};
use crate::model::{JournalId, NodeId, Role, ServerTime};
use crate::wire::dsse::{Audience, COMMAND_TYPE, Envelope, Policy, verify_command};
use crate::write_fault::{self, Point};

const SMALL: Retention = Retention { file_bytes: 100, files: 2 };

fn log(state: &Path, retention: Retention) -> AuditLog {
    AuditLog { state: state.join("state"), retention }
}

fn lines(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| format!("{{\"id\":\"{name}\"}}")).collect()
}

fn text(log: &AuditLog, name: &str) -> String {
    std::fs::read_to_string(log.state.join(name)).unwrap_or_default()
}

#[test]
fn lines_are_added_to_a_private_file() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    log.append(&lines(&["a"])).unwrap();
    log.append(&lines(&["b", "c"])).unwrap();
    assert_eq!(text(&log, "audit.log"), "{\"id\":\"a\"}\n{\"id\":\"b\"}\n{\"id\":\"c\"}\n");
    assert_eq!(log.state.join("audit.log").metadata().unwrap().mode() & 0o7777, 0o600);
}

#[test]
fn a_full_file_is_put_aside_and_only_as_many_stay_as_the_operator_says() {
    let temp = tempfile::tempdir().unwrap();
    let wide = |name: &str| vec![format!("{name}{}", "x".repeat(59))];
    let three = log(temp.path(), Retention { files: 3, ..SMALL });
    for name in ["1", "2", "3", "4", "5"] {
        three.append(&wide(name)).unwrap();
    }
    let first = |log: &AuditLog, file: &str| text(log, file).chars().next();
    let there = |log: &AuditLog| {
        ["audit.log", "audit.log.1", "audit.log.2", "audit.log.3"].map(|file| first(log, file))
    };
    assert_eq!(there(&three), [Some('5'), Some('4'), Some('3'), Some('2')]);
    assert!(!three.state.join("audit.log.4").exists());
    // Fewer from now on.
    let two = log(temp.path(), SMALL);
    two.prune().unwrap();
    two.append(&wide("6")).unwrap();
    assert_eq!(there(&two), [Some('6'), Some('5'), Some('4'), None]);
}

#[test]
fn files_move_up_to_the_first_number_that_is_free_and_what_is_not_ours_stays() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention { files: 3, ..SMALL });
    log.append(&["0".repeat(60)]).unwrap();
    let theirs = ["audit.log.20261130", "audit.log.1001", "audit.log.03", "audit.log.+4", "audit.log.gz"];
    for name in ["audit.log.1", "audit.log.3", "audit.log.4"].iter().chain(&theirs) {
        std::fs::write(log.state.join(name), name).unwrap();
    }
    log.append(&["n".repeat(60)]).unwrap();
    log.prune().unwrap();
    let moved = ["audit.log.2", "audit.log.3"].map(|name| text(&log, name));
    assert_eq!(moved, ["audit.log.1", "audit.log.3"]);
    assert!(text(&log, "audit.log.1").starts_with('0') && text(&log, "audit.log").starts_with('n'));
    assert!(!log.state.join("audit.log.4").exists(), "more than are kept");
    for name in theirs {
        assert_eq!(text(&log, name), name);
    }
}

#[test]
fn a_page_that_is_larger_than_a_file_fills_several_none_of_which_is_too_large() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention { file_bytes: 24, files: 3 });
    let names = ["a", "b", "c", "d", "e"];
    log.append(&lines(&names)).unwrap();
    let files = ["audit.log.2", "audit.log.1", "audit.log"].map(|name| text(&log, name));
    assert!(files.iter().all(|file| !file.is_empty() && file.len() <= 24), "{files:?}");
    assert_eq!(files.concat(), lines(&names).iter().map(|line| format!("{line}\n")).collect::<String>());
    assert_eq!(log.tail().unwrap(), lines(&names).into_iter().collect());
}

#[test]
fn half_a_line_that_a_crash_left_is_cut_off_and_never_runs_into_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    log.append(&lines(&["a"])).unwrap();
    let torn = text(&log, "audit.log") + "{\"id\":\"b";
    std::fs::write(log.state.join("audit.log"), torn).unwrap();
    log.append(&lines(&["b"])).unwrap();
    assert_eq!(text(&log, "audit.log"), "{\"id\":\"a\"}\n{\"id\":\"b\"}\n");
}

#[test]
fn a_write_that_fails_leaves_no_line_and_the_next_one_each_once() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), SMALL);
    log.append(&lines(&["a"])).unwrap();
    for point in Point::AUDIT {
        let before = text(&log, "audit.log");
        let wide = vec!["y".repeat(90)];
        let fault = write_fault::arm(&log.state, point, 28);
        let error = log.append(&wide).unwrap_err();
        assert_eq!(error.errno(), Some(28), "{point:?}: {error}");
        drop(fault);
        let shown = text(&log, "audit.log");
        // What a sync took back had been put aside before.
        assert!(shown == before || shown.is_empty(), "{point:?}: {shown:?}");
        log.append(&wide).unwrap();
        assert_eq!(text(&log, "audit.log"), format!("{}\n", wide[0]), "{point:?}");
    }
}

#[test]
fn a_link_or_a_file_open_to_others_is_not_written_to() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    log.append(&lines(&["a"])).unwrap();
    let (file, theirs) = (log.state.join("audit.log"), temp.path().join("theirs"));
    std::fs::write(&theirs, "theirs").unwrap();
    std::fs::remove_file(&file).unwrap();
    symlink(&theirs, &file).unwrap();
    let error = log.append(&lines(&["b"])).unwrap_err();
    assert!(error.to_string().contains("audit.log is not a file"), "{error}");
    assert_eq!(std::fs::read_to_string(&theirs).unwrap(), "theirs");
}

#[test]
fn the_tail_reaches_into_the_file_before() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention { file_bytes: 20, files: 2 });
    for name in ["a", "b"] {
        log.append(&lines(&[name])).unwrap();
    }
    assert_eq!(log.tail().unwrap(), lines(&["a", "b"]).into_iter().collect());
}

/// A journal whose ends make lines, in the log's state directory.
fn journal(log: &AuditLog) -> Journal {
    std::fs::create_dir(&log.state).expect("a directory");
    std::fs::set_permissions(&log.state, std::os::unix::fs::PermissionsExt::from_mode(0o700))
        .expect("a mode");
    let options = Options::of_a_test(log.state.clone(), Mode::Inline);
    let locked = Locked::open(options, JournalId::new("j-1").expect("an id")).expect("opened");
    locked.with_audit(true).recover(None).expect("recovered").0
}

/// A command that is rejected at once.
async fn reject(journal: &Journal, id: &str) {
    let payload = format!(
        r#"{{"trust_domain":"lab","node_id":"n-1","id":"{id}","kind":"no.such-kind","issued_at":"2026-11-29T10:00:00Z",
        "not_after":"2026-11-29T11:00:00Z","args":{{}}}}"#
    );
    let envelope =
        Envelope { payload_type: COMMAND_TYPE.into(), payload: payload.into(), signatures: Vec::new() };
    let audience = Audience { trust_domain: "lab".into(), node_id: NodeId::new("n-1").expect("an id") };
    let command = verify_command(&envelope, &audience, &Policy::None.into()).expect("verified");
    let context = Context {
        upgrade_only: false,
        role: Role::Host,
        denied: Arc::default(),
        now: ServerTime::parse("2026-11-29T10:30:00Z"),
        signed: None,
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    };
    journal.admit(command, context).await.expect("written");
}

/// What writes the file, until the sender is dropped.
fn auditing(journal: &Journal, log: &AuditLog) -> (oneshot::Sender<()>, JoinHandle<()>) {
    let (end, ends) = oneshot::channel();
    (end, tokio::spawn(Audit { journal: journal.clone(), log: log.clone() }.run(ends)))
}

/// How many lines the journal has yet to see written.
async fn waiting(journal: &Journal) -> usize {
    journal.audit_lines(0).await.expect("read").lines.len()
}

fn ids(log: &AuditLog) -> Vec<String> {
    let id = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
        line["id"].as_str().expect("an id").to_owned()
    };
    text(log, "audit.log").lines().map(id).collect()
}

#[tokio::test(start_paused = true)]
async fn a_line_that_a_crash_left_in_both_places_is_in_the_file_once() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let journal = journal(&log);
    reject(&journal, "c-1").await;
    reject(&journal, "c-2").await;
    // A process that died before the journal forgot what it had written.
    let left = journal.audit_lines(0).await.unwrap();
    log.append(&left.lines[..1]).unwrap();
    let (_end, task) = auditing(&journal, &log);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(ids(&log), ["c-1", "c-2"]);
    assert_eq!(journal.audit_lines(0).await.unwrap().lines, Vec::<String>::new(), "forgotten");
    reject(&journal, "c-3").await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(ids(&log), ["c-1", "c-2", "c-3"]);
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn while_the_file_takes_no_lines_trouble_stands_and_no_line_is_lost() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let journal = journal(&log);
    let fault = write_fault::arm(&log.state, Point::AuditSync, 28);
    let (_end, task) = auditing(&journal, &log);
    reject(&journal, "c-1").await;
    sleep(Duration::from_secs(30)).await;
    let troubles = journal.troubles();
    assert!(
        troubles.iter().any(|trouble| trouble.why == Reason::Disk && trouble.detail.contains("audit.log")),
        "{troubles:?}"
    );
    assert_eq!(ids(&log), Vec::<String>::new());
    drop(fault);
    sleep(Duration::from_secs(6)).await;
    assert_eq!((ids(&log), journal.troubles()), (vec!["c-1".to_owned()], Vec::new()));
    task.abort();
}

#[tokio::test(start_paused = true)]
async fn lines_that_a_killed_process_left_in_memory_are_forgotten_when_they_and_their_name_are_synced() {
    let _inline = Inline::here();
    for point in [Point::AuditSync, Point::StateDirSync] {
        let temp = tempfile::tempdir().unwrap();
        let log = log(temp.path(), Retention::default());
        let journal = journal(&log);
        reject(&journal, "c-1").await;
        let left = journal.audit_lines(0).await.unwrap();
        let fault = write_fault::arm(&log.state, point, 5);
        // In the file, and not yet known to be on the disk.
        log.append(&left.lines).unwrap_err();
        let file = log.state.join("audit.log");
        std::fs::write(file, format!("{}\n", left.lines[0])).unwrap();
        let (_end, task) = auditing(&journal, &log);
        sleep(Duration::from_secs(30)).await;
        assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 1), "{point:?}");
        assert_eq!(journal.troubles().len(), 1, "{point:?}");
        drop(fault);
        sleep(Duration::from_secs(6)).await;
        assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 0), "{point:?}");
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn lines_of_a_tail_whose_sync_failed_are_written_anew_and_there_once_though_the_next_sync_passes() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let journal = journal(&log);
    log.append(&lines(&["before"])).unwrap();
    for id in ["c-1", "c-2"] {
        reject(&journal, id).await;
    }
    let left = journal.audit_lines(0).await.unwrap();
    log.append(&left.lines).unwrap();
    let fault = write_fault::arm(&log.state, Point::AuditSync, 5);
    let (end, task) = auditing(&journal, &log);
    sleep(Duration::from_secs(30)).await;
    assert_eq!((ids(&log), waiting(&journal).await), (["before", "c-1", "c-2"].map(String::from).into(), 2));
    drop(fault);
    // The sync passes, and says nothing of what the one before has lost: only a write of its own counts.
    let fault = write_fault::arm(&log.state, Point::AuditWrite, 5);
    sleep(Duration::from_secs(30)).await;
    assert_eq!((ids(&log), waiting(&journal).await), (vec!["before".to_owned()], 2));
    drop(fault);
    sleep(Duration::from_secs(6)).await;
    assert_eq!((ids(&log), waiting(&journal).await), (["before", "c-1", "c-2"].map(String::from).into(), 0));
    drop(end);
    task.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_line_whose_own_sync_failed_and_that_stayed_in_the_file_is_written_anew() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let journal = journal(&log);
    let (_end, task) = auditing(&journal, &log);
    let fault = write_fault::arm(&log.state, Point::AuditSync, 5);
    reject(&journal, "c-1").await;
    while journal.troubles().is_empty() {
        sleep(Duration::from_millis(1)).await;
    }
    // As if it could not be taken back either.
    let left = journal.audit_lines(0).await.unwrap();
    std::fs::write(log.state.join("audit.log"), format!("{}\n", left.lines[0])).unwrap();
    drop(fault);
    let fault = write_fault::arm(&log.state, Point::AuditWrite, 5);
    sleep(Duration::from_secs(30)).await;
    assert_eq!((ids(&log), waiting(&journal).await), (Vec::new(), 1), "that it stands there says nothing");
    drop(fault);
    sleep(Duration::from_secs(6)).await;
    assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 0));
    task.abort();
}

#[test]
fn half_a_line_at_the_end_keeps_no_line_before_it_from_being_cut() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let all = lines(&["a", "b", "c"]);
    log.append(&all).unwrap();
    let file = log.state.join("audit.log");
    let torn = format!("{}{}", std::fs::read_to_string(&file).unwrap(), &all[2][..all[2].len() / 2]);
    std::fs::write(&file, torn).unwrap();
    log.cut(&all[1..].iter().cloned().collect()).unwrap();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{}\n", all[0]));
}

#[test]
fn only_the_last_lines_are_cut_and_only_those_that_wait() {
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention { file_bytes: 24, files: 3 });
    let all = lines(&["a", "b", "c", "d"]);
    log.append(&all).unwrap();
    let waiting = [&all[0], &all[2], &all[3]].map(String::clone).into_iter().collect();
    log.cut(&waiting).unwrap();
    assert_eq!(
        log.tail().unwrap(),
        lines(&["a", "b"]).into_iter().collect(),
        "across files, up to the first other"
    );
    log.append(&all[2..]).unwrap();
    assert_eq!(log.tail().unwrap(), all.into_iter().collect());
}

#[tokio::test(start_paused = true)]
async fn a_new_files_lines_are_forgotten_only_when_its_name_is_on_the_disk() {
    let _inline = Inline::here();
    for rotated in [false, true] {
        let temp = tempfile::tempdir().unwrap();
        let log = log(temp.path(), SMALL);
        let journal = journal(&log);
        if rotated {
            log.append(&lines(&["old"])).unwrap();
        }
        let fault = write_fault::arm(&log.state, Point::StateDirSync, 5);
        let (_end, task) = auditing(&journal, &log);
        reject(&journal, "c-1").await;
        sleep(Duration::from_secs(60)).await;
        assert_eq!(waiting(&journal).await, 1, "rotated: {rotated}");
        drop(fault);
        sleep(Duration::from_secs(6)).await;
        assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 0), "rotated: {rotated}");
        assert_eq!(text(&log, "audit.log.1").contains("old"), rotated);
        task.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn what_waits_at_the_end_is_written_before_it_returns_and_stays_in_the_journal_where_it_cannot_be() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention::default());
    let journal = journal(&log);
    let (end, task) = auditing(&journal, &log);
    reject(&journal, "c-1").await;
    drop(end);
    task.await.unwrap();
    assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 0));
    let fault = write_fault::arm(&log.state, Point::AuditWrite, 28);
    let (end, task) = auditing(&journal, &log);
    reject(&journal, "c-2").await;
    drop(end);
    task.await.unwrap();
    assert_eq!((ids(&log), waiting(&journal).await), (vec!["c-1".to_owned()], 1));
    drop(fault);
}

#[tokio::test(start_paused = true)]
async fn fewer_files_than_once_were_kept_are_kept_from_the_start_on() {
    let _inline = Inline::here();
    let temp = tempfile::tempdir().unwrap();
    let log = log(temp.path(), Retention { files: 1, ..Retention::default() });
    let journal = journal(&log);
    for name in ["audit.log.1", "audit.log.2", "audit.log.7"] {
        std::fs::write(log.state.join(name), name).unwrap();
    }
    let (_end, task) = auditing(&journal, &log);
    sleep(Duration::from_secs(1)).await;
    let there = ["audit.log.1", "audit.log.2", "audit.log.7"].map(|name| log.state.join(name).exists());
    assert_eq!(there, [true, false, false]);
    task.abort();
}
