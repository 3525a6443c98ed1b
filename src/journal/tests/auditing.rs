//! Lines for audit.log: one an end, with who asked for what, whichever process tells the end.

use super::*;

impl Machine {
    /// As [`Self::start`], with lines made.
    fn audited(&self) -> Journal {
        self.locked().with_audit(true).recover(None).expect("recovered").0
    }
}

async fn lines(journal: &Journal) -> Vec<serde_json::Value> {
    let page = journal.audit_lines(0).await.expect("read");
    page.lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

#[tokio::test]
async fn an_end_makes_one_line_that_says_who_asked_for_what_and_how_it_ended() {
    let machine = Machine::new();
    let journal = machine.audited();
    let secret = r#"{"argv":["/bin/true","-x"],"env":{"TOKEN":"hunter2"},"stdin_base64":"aHVudGVyMg==","user":"root"}"#;
    done(&journal, "c-1", secret).await;
    deliver(&journal, "c-1", secret).await;
    let lines = lines(&journal).await;
    assert_eq!(lines.len(), 1, "a result that is told again is no other end: {lines:?}");
    let expected = serde_json::json!({
        "journal": "j-1", "id": "c-1", "kind": "node.exec", "signed_by": null, "issued_at": ISSUED,
        "argv": ["/bin/true", "-x"], "argv_cut": false, "user": "root", "not_after": NOT_AFTER, "accepted": NOW,
        "started": NOW, "finished": NOW, "duration_ms": 7, "attempt": 1, "state": "SUCCEEDED", "reason": null,
        "effect": "complete", "message": "",
    });
    for (field, value) in expected.as_object().expect("an object") {
        assert_eq!(&lines[0][field], value, "{field} of {}", lines[0]);
    }
    assert!(lines[0]["body_sha256"].is_string() && lines[0]["at"].is_string(), "{}", lines[0]);
    assert!(!lines[0].to_string().contains("hunter2") && !lines[0].to_string().contains("aHVudGVy"));
}

#[tokio::test]
async fn a_command_that_is_rejected_has_a_line_with_what_it_asked_for() {
    let machine = Machine::new();
    let journal = machine.audited();
    let denied = Context { denied: Arc::new(["node.exec".to_owned()].into()), ..context() };
    journal.admit(command("c-1", ONCE), denied).await.expect("written");
    let lines = lines(&journal).await;
    assert_eq!(
        (&lines[0]["reason"], &lines[0]["argv"]),
        (&"denied-by-operator".into(), &serde_json::json!(["true"]))
    );
    assert_eq!((&lines[0]["state"], &lines[0]["started"]), (&"REJECTED".into(), &serde_json::Value::Null));
}

#[tokio::test]
async fn the_next_process_knows_who_asked_for_what_it_finds_interrupted_or_unwritten() {
    let machine = Machine::new();
    let journal = machine.audited();
    done(&journal, "c-0", ONCE).await;
    running(&journal, "c-1", ONCE).await;
    drop(journal);
    let journal = machine.audited();
    let lines = lines(&journal).await;
    let told: Vec<_> = lines.iter().map(|line| (line["id"].clone(), line["reason"].clone())).collect();
    assert_eq!(told, [("c-0".into(), serde_json::Value::Null), ("c-1".into(), "interrupted".into())]);
    assert_eq!((&lines[1]["argv"], &lines[1]["issued_at"]), (&serde_json::json!(["true"]), &ISSUED.into()));
}

#[tokio::test]
async fn a_line_outlives_the_ack_and_the_tombstone_until_it_is_written() {
    let machine = Machine::new();
    let journal = machine.audited();
    done(&journal, "c-1", ONCE).await;
    journal.acked(vec![id("c-1")]);
    journal.note_time(at(MUCH_LATER), Some(at(MUCH_LATER)));
    journal.welcomed(1, at(MUCH_LATER)).await.expect("written");
    let page = journal.audit_lines(0).await.expect("read");
    assert_eq!(page.lines.len(), 1);
    journal.audited(Ok(page.last));
    assert_eq!(journal.audit_lines(0).await.expect("read").lines.len(), 0);
    done(&journal, "c-2", ONCE).await;
    let next = journal.audit_lines(page.last).await.expect("read");
    assert_eq!(next.lines.len(), 1, "numbers rise though the table was empty");
}

#[tokio::test]
async fn arguments_of_any_size_make_a_short_line_that_says_it_is_cut() {
    let machine = Machine::new();
    let journal = machine.audited();
    let long = "\u{e4}".repeat(30_000);
    done(&journal, "c-1", &serde_json::json!({ "argv": ["a", long, "b"] }).to_string()).await;
    let many = vec![""; 4000];
    let mut argv = vec!["a"];
    argv.extend(many);
    argv.extend(["z"; 95]);
    done(&journal, "c-2", &serde_json::json!({ "argv": argv }).to_string()).await;
    for line in lines(&journal).await {
        assert!(line.to_string().len() < 32 << 10, "{} bytes", line.to_string().len());
        assert_eq!(line["argv"][0], "a");
    }
    assert_eq!(lines(&journal).await[0]["argv_cut"], true);
}

#[tokio::test]
async fn trouble_with_the_file_refuses_new_commands_until_a_line_is_written() {
    let machine = Machine::new();
    let journal = machine.audited();
    done(&journal, "c-1", ONCE).await;
    journal.audited(Err(Trouble { why: Reason::ReadOnly, detail: "audit.log".into() }));
    let busy = state_of(deliver(&journal, "c-2", ONCE).await);
    assert_eq!(busy, AnswerState::Refused { reason: Reason::Busy, detail: "read-only".into() });
    // A file that others need says nothing of this one.
    journal.file_written(None);
    assert!(matches!(state_of(deliver(&journal, "c-2", ONCE).await), AnswerState::Refused { .. }));
    journal.audited(Ok(1));
    accepted(&journal, "c-2", ONCE).await;
}

#[tokio::test]
async fn what_is_quoted_of_arguments_that_cannot_be_read_stays_out_of_the_line() {
    let machine = Machine::new();
    let journal = machine.audited();
    let secrets = [
        (r#"{"argv":["true"],"env":{"DB_PIN":12345678}}"#, "12345678", "invalid-arguments"),
        (r#"{"argv":["true"],"env":"TOKEN=hunter2"}"#, "hunter2", "invalid-arguments"),
        (r#"{"argv":["true"],"TOKEN=hunter2":1}"#, "hunter2", "unsupported-field"),
    ];
    for (at, (args, secret, reason)) in secrets.into_iter().enumerate() {
        let told = ended(deliver(&journal, &format!("c-{at}"), args).await);
        assert!(told.message.contains(secret), "the control plane, which knows it, is told: {told:?}");
        let line = &lines(&journal).await[at];
        assert_eq!((&line["reason"], &line["message"]), (&reason.into(), &reason.into()));
        assert!(!line.to_string().contains(secret), "{line}");
    }
}

#[tokio::test]
async fn a_users_name_of_any_length_makes_a_short_line() {
    let machine = Machine::new();
    let journal = machine.audited();
    let user = format!("a{}", "\u{e4}".repeat(30_000));
    done(&journal, "c-1", &serde_json::json!({ "argv": ["true"], "user": user }).to_string()).await;
    let line = lines(&journal).await.remove(0);
    let cut = line["user"].as_str().expect("a name");
    assert!(cut.len() <= 256 && user.starts_with(cut) && line.to_string().len() < 2048, "{line}");
}

#[tokio::test]
async fn a_command_that_an_unaudited_process_left_running_has_who_asked_when_it_runs_again() {
    let machine = Machine::new();
    let journal = machine.start();
    running(&journal, "c-1", RETRY_SAFE).await;
    drop(journal);
    let journal = machine.audited();
    let Admission::Restarted(again) = deliver(&journal, "c-1", RETRY_SAFE).await else {
        panic!("not run again")
    };
    journal.finish(again, success()).await.expect("finished");
    let line = lines(&journal).await.remove(0);
    assert_eq!((&line["argv"], &line["issued_at"]), (&serde_json::json!(["true"]), &ISSUED.into()));
}
