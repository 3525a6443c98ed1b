//! What the operator of a host has in hand, through the real binary: audit.log, `[kinds] deny`, `bcd hold` and `bcd release`.

use std::os::unix::fs::PermissionsExt as _;

use bcd::failpoint;
use bcd::model::CommandId;
use serde_json::Value;

use crate::faults::refused_until_it_expires;
use crate::lab::{Lab, shown, until};

/// Commands need a worker's signature, as on a host.
const SIGNED: (&str, &str) = ("BCD_SIGNATURES_COMMANDS", "all");

fn audit(lab: &Lab) -> Vec<Value> {
    let text = std::fs::read_to_string(lab.path("node/audit.log")).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The lines of a command, once there is one.
fn lines_of(lab: &Lab, id: &CommandId) -> Vec<Value> {
    until("a line in audit.log", || {
        let lines: Vec<Value> = audit(lab).into_iter().filter(|line| line["id"] == id.as_str()).collect();
        (!lines.is_empty()).then_some(lines)
    })
}

fn run(lab: &Lab, arguments: &[&str]) -> (Option<i32>, String) {
    let output = lab.bcd(arguments, None).output().expect("bcd starts");
    (output.status.code(), shown(&output))
}

fn conditions(lab: &Lab) -> Vec<Value> {
    let status = until("the status", || lab.status());
    status["conditions"].as_array().expect("conditions").clone()
}

fn is_held(lab: &Lab) -> bool {
    conditions(lab).iter().any(|condition| condition["token"] == "held")
}

/// Events of the node of these types, in their order.
fn told(lab: &Lab, kinds: &[&str]) -> Vec<(String, Value)> {
    let of_kinds = lab.told().into_iter().filter(|event| kinds.contains(&event.kind.as_str()));
    of_kinds.map(|event| (event.kind, event.body)).collect()
}

#[test]
fn audit_log_says_who_signed_what_and_how_it_ended_and_outlives_the_ack() {
    let mut lab = Lab::joined();
    lab.start_node_with(None, &[SIGNED]);
    let (good, bad) = (lab.enqueue_program("good", ""), lab.enqueue_program("bad", "; exit 3"));
    assert_eq!(lab.ended(&good).state, "succeeded");
    assert_eq!(lab.ended(&bad).state, "failed");
    let line = lines_of(&lab, &good).remove(0);
    assert_eq!(
        (&line["kind"], &line["state"], &line["effect"]),
        (&"node.exec".into(), &"SUCCEEDED".into(), &"complete".into())
    );
    assert_eq!(
        (&line["argv"][0], &line["argv"][4], &line["user"]),
        (&"/bin/sh".into(), &"good".into(), &Value::Null)
    );
    assert!(line["signed_by"]["worker"].is_string() && line["signed_by"]["key"].is_string(), "{line}");
    assert!(line["issued_at"].is_string() && line["finished"].is_string(), "{line}");
    assert_eq!(lines_of(&lab, &bad)[0]["reason"], "exit-status");
    let mode = lab.path("node/audit.log").metadata().expect("a file").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600);
    until("the acks", || (lab.status()?["journal"]["unacked"] == 0).then_some(()));
    assert_eq!((lines_of(&lab, &good).len(), lines_of(&lab, &bad).len()), (1, 1));
}

#[test]
fn a_node_killed_around_an_end_has_the_line_once() {
    for step in [failpoint::RUNNING, failpoint::DONE_WRITTEN, failpoint::DONE] {
        let mut lab = Lab::joined();
        let id = lab.enqueue_program("once", "");
        lab.start_node_with(Some(step.name()), &[SIGNED]);
        lab.node().wait_killed(step.name());
        lab.start_node_with(None, &[SIGNED]);
        let view = lab.ended(&id);
        let line = lines_of(&lab, &id).remove(0);
        assert_eq!(
            line["state"].as_str().expect("a state").to_lowercase(),
            view.state,
            "{}: {line}",
            step.name()
        );
        assert!(line["signed_by"]["worker"].is_string(), "{}: {line}", step.name());
        // Whatever is still to be written is written before the line of a later command.
        let last = lab.enqueue_program("last", "");
        lab.ended(&last);
        lines_of(&lab, &last);
        assert_eq!(lines_of(&lab, &id).len(), 1, "{}", step.name());
    }
}

#[test]
fn a_clean_stop_leaves_no_line_waiting_in_the_journal() {
    let mut lab = Lab::joined();
    lab.start_node_with(None, &[SIGNED]);
    let id = lab.enqueue_program("last", "");
    lab.ended(&id);
    assert!(lab.node().terminate().success());
    assert_eq!(audit(&lab).iter().filter(|line| line["id"] == id.as_str()).count(), 1);
    let db = rusqlite::Connection::open(lab.path("node/journal.db")).expect("the journal");
    let waiting: i64 = db.query_row("SELECT count(*) FROM audit", [], |row| row.get(0)).expect("a count");
    assert_eq!(waiting, 0);
}

#[test]
fn while_audit_log_takes_no_lines_nothing_new_runs_and_then_every_line_is_there() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    // Nothing of bcd's: a folder of that name.
    let file = lab.path("node/audit.log");
    until("the probe's line", || (!audit(&lab).is_empty()).then_some(()));
    std::fs::rename(&file, lab.path("kept")).expect("renamed");
    std::fs::create_dir(&file).expect("a folder");
    let first = lab.enqueue_program("first", "");
    assert_eq!(lab.ended(&first).state, "succeeded");
    let detail = until("the condition", || {
        let found = conditions(&lab).into_iter().find(|condition| condition["token"] == "io-error")?;
        Some(found["detail"].to_string())
    });
    assert!(detail.contains("audit.log is not a file"), "{detail}");
    let why = refused_until_it_expires(&lab, "refused");
    assert!(why.contains("io-error"), "{why}");
    std::fs::remove_dir(&file).expect("removed");
    std::fs::rename(lab.path("kept"), &file).expect("renamed");
    let second = lab.enqueue_program("second", "");
    assert_eq!(lab.ended(&second).state, "succeeded");
    assert_eq!((lines_of(&lab, &first).len(), lines_of(&lab, &second).len()), (1, 1));
}

#[test]
fn a_kind_that_the_operator_denies_never_runs_also_where_it_was_accepted_before() {
    let mut lab = Lab::joined();
    let accepted = lab.enqueue_program("accepted", "");
    let step = failpoint::ACCEPTED.name();
    lab.start_node_with(Some(step), &[SIGNED]);
    lab.node().wait_killed(step);
    lab.start_node_with(None, &[SIGNED, ("BCD_KINDS_DENY", "node.exec")]);
    let later = lab.enqueue_program("later", "");
    for (id, name) in [(&accepted, "accepted"), (&later, "later")] {
        let view = lab.ended(id);
        assert_eq!((&*view.state, &*view.reason), ("rejected", "denied-by-operator"), "{view:?}");
        let line = lines_of(&lab, id).remove(0);
        assert_eq!((&line["state"], &line["reason"]), (&"REJECTED".into(), &"denied-by-operator".into()));
        assert_eq!((&line["argv"][4], &line["started"]), (&name.into(), &Value::Null), "{line}");
        let event = until("the event", || {
            let mut done = told(&lab, &["command.done"]).into_iter().map(|(_, body)| body);
            done.find(|body| body["id"] == id.as_str())
        });
        assert_eq!((&event["reason"], &event["effect"]), (&"denied-by-operator".into(), &"none".into()));
        assert_eq!(lab.runs(name), 0);
    }
    lab.probe();
}

#[test]
fn a_held_node_runs_on_what_runs_admits_nothing_across_a_restart_and_goes_on_when_it_is_released() {
    let mut lab = Lab::joined();
    lab.start_node_with(None, &[SIGNED]);
    let go = lab.path("go");
    let running =
        lab.enqueue_program("running", &format!("; while ! [ -e {} ]; do sleep 0.05; done", go.display()));
    until("the program", || (lab.runs("running") == 1).then_some(()));

    let (code, text) = run(&lab, &["hold", "--why", "disk swap"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("held: no command is admitted"), "{text}");
    let (code, text) = run(&lab, &["hold"]);
    assert!(code == Some(0) && text.contains("held before"), "{text}");
    let detail =
        conditions(&lab).into_iter().find(|condition| condition["token"] == "held").expect("a condition");
    assert!(detail["detail"].as_str().expect("words").contains("disk swap"), "{detail}");
    let (_, status) = run(&lab, &["status"]);
    assert!(status.contains("disk swap") && status.contains("bcd release"), "{status}");

    assert!(lab.node().terminate().success());
    lab.start_node_with(None, &[SIGNED]);
    until("the session", || lab.nodes().iter().all(|node| node.state == "connected").then_some(()));
    let waits = lab.enqueue_program("waits", "");
    assert!(is_held(&lab));
    std::fs::write(&go, "").expect("a file");
    assert_eq!(lab.ended(&running).state, "succeeded", "what runs goes on");
    let lanes = until("the status", || lab.status())["lanes"].clone();
    assert!(lanes.as_object().expect("lanes").values().all(|free| *free == 0), "{lanes}");
    assert_eq!(lab.runs("waits"), 0);

    let (code, text) = run(&lab, &["release"]);
    assert!(code == Some(0) && text.contains("released"), "{text}");
    assert_eq!(lab.ended(&waits).state, "succeeded");
    assert_eq!(lab.runs("waits"), 1);
    assert!(!is_held(&lab));
    let events = until("the events", || {
        let events = told(&lab, &["admission.held", "admission.released"]);
        (events.len() == 3).then_some(events)
    });
    assert!(
        events[..2].iter().all(|(kind, body)| kind == "admission.held" && body["why"] == "disk swap"),
        "{events:?}"
    );
    assert_eq!(events[2].0, "admission.released");
    let (code, text) = run(&lab, &["release"]);
    assert!(code == Some(0) && text.contains("was not held"), "{text}");
}

#[test]
fn a_hold_without_a_daemon_counts_for_the_next_one_and_one_that_cannot_be_kept_says_so() {
    let mut lab = Lab::joined();
    let (code, text) = run(&lab, &["hold"]);
    assert!(code == Some(0) && text.contains("no daemon runs"), "{text}");
    lab.start_node(None);
    until("the daemon", || lab.status());
    assert!(is_held(&lab));
    let (code, text) = run(&lab, &["release"]);
    assert!(code == Some(0) && text.contains("released: commands are admitted again"), "{text}");
    lab.probe();

    std::fs::write(lab.path("faults"), "state.create 28\n").expect("faults");
    let (code, text) = run(&lab, &["hold"]);
    assert!(code == Some(73) && text.contains("only until this daemon ends"), "{text}");
    assert!(is_held(&lab), "and in force");
    std::fs::write(lab.path("faults"), "").expect("faults");
    let (code, text) = run(&lab, &["hold"]);
    assert_eq!(code, Some(0), "{text}");
    lab.kill_node();
    lab.start_node(None);
    until("the daemon", || lab.status());
    assert!(is_held(&lab), "kept by the second try");
    assert_eq!(run(&lab, &["release"]).0, Some(0));
    lab.probe();

    let (code, _) = run(&lab, &["hold", "--why", "two\nlines"]);
    assert_eq!(code, Some(64));
    lab.kill_node();
    let nowhere = lab.path("nowhere");
    let (code, text) = run(&lab, &["hold", "--state", &nowhere.to_string_lossy()]);
    assert!(code == Some(73) && !nowhere.exists(), "{text}");
}

#[test]
fn a_hold_that_the_running_daemon_does_not_hear_of_is_kept_and_is_no_success() {
    let mut lab = Lab::joined();
    let elsewhere = lab.path("elsewhere").to_string_lossy().into_owned();
    lab.start_node_with(None, &[("BCD_RUN", &elsewhere)]);
    lab.probe();
    let file = lab.path("node/hold");
    let (code, text) = run(&lab, &["hold", "--why", "disk swap"]);
    assert!(code == Some(75) && text.contains("kept; the running daemon was not reached"), "{text}");
    assert!(file.exists() && text.contains(&format!("pid {}", lab.node().id())), "{text}");
    lab.probe();
    let (code, text) = run(&lab, &["release"]);
    assert!(
        code == Some(75) && text.contains("the hold stands; the running daemon was not reached"),
        "{text}"
    );
    assert!(file.exists());

    let (code, text) = run(&lab, &["hold", "--run", &elsewhere]);
    assert!(code == Some(0) && text.contains("held: no command is admitted"), "{text}");
    assert!(lab.node().terminate().success());
    lab.start_node(None);
    until("the daemon", || lab.status());
    assert!(conditions(&lab).iter().any(|condition| condition["detail"].to_string().contains("disk swap")));
}
