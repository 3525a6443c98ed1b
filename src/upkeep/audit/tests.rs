//! audit.log by what its reader finds.

use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

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
    two.append(&wide("6")).unwrap();
    assert_eq!(there(&two), [Some('6'), Some('5'), Some('4'), None]);
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
    let task = tokio::spawn(Audit { journal: journal.clone(), log: log.clone() }.run());
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
    let task = tokio::spawn(Audit { journal: journal.clone(), log: log.clone() }.run());
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
