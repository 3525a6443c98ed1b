//! A reboot: what is waited for, what is durable when, and that it happens once.

use super::*;

fn reboot(command: &str, args: Value) -> Value {
    body(command, "node.reboot", args)
}

impl Bench {
    fn asked(&self) -> usize {
        self.reboots.asked.load(Ordering::SeqCst)
    }

    async fn reboot_is_asked(&self) {
        for _ in 0..500 {
            if self.asked() > 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("nobody asked for the reboot");
    }
}

#[tokio::test]
async fn a_reboot_is_running_and_begun_before_it_is_asked_for_and_its_success_is_the_new_boot() {
    let mut bench = Bench::new();
    let command = reboot("c-1", json!({}));
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    assert_eq!(bench.answer().await, Said::Running(1));
    bench.reboot_is_asked().await;
    assert!(bench.dir.path().join("begun").join("c-1.json").exists());
    assert!(bench.lanes.is_rebooting(), "a Goodbye says so");
    bench.deliver(&probe("c-2")).await;
    assert_eq!(
        bench.answer().await,
        Said::Refused(Reason::Busy, "credits".into()),
        "nothing starts any more"
    );
    let dir = bench.crash().await;

    let mut bench = Bench::over_in(dir, "i-2", "b-2");
    bench.deliver(&command).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Succeeded, Some(Reason::Rebooted), Effect::Complete));
    assert_eq!((outcome.attempt, bench.asked()), (1, 0));
}

#[tokio::test]
async fn a_daemon_that_dies_between_running_and_the_reboot_never_asks_for_it_again() {
    for begun in [false, true] {
        let mut bench = Bench::new();
        // The begun record cannot be made: the daemon dies before the reboot is asked for.
        let records = bench.dir.path().join("begun");
        let away = bench.dir.path().join("away");
        std::fs::rename(&records, &away).expect("the directory of the records");
        std::fs::write(&records, "").expect("a file in its place");
        let command = reboot("c-1", json!({}));
        bench.deliver(&command).await;
        assert_eq!(bench.answer().await, Said::Accepted);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(bench.asked(), 0, "no effect before the record is durable");
        let dir = bench.crash().await;
        std::fs::remove_file(&records).expect("the file");
        std::fs::rename(&away, &records).expect("the directory back");
        if begun {
            let record = json!({"id": "c-1", "body_sha256": Digest::of(command.to_string().as_bytes()),
                "kind": "node.reboot", "attempt": 1, "journal_id": "j-1", "not_after": NOT_AFTER,
                "started": null, "boot_id": "b-1"});
            std::fs::write(records.join("c-1.json"), record.to_string()).expect("a record");
        }

        let mut bench = Bench::over_in(dir, "i-2", "b-1");
        for _ in 0..2 {
            bench.deliver(&command).await;
            let outcome = bench.result().await;
            assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::Interrupted), Effect::Unknown));
        }
        assert_eq!(bench.asked(), 0);
    }
}

#[tokio::test]
async fn a_reboot_that_is_delivered_twice_is_asked_for_once() {
    let mut bench = Bench::new();
    let command = reboot("c-1", json!({}));
    for _ in 0..5 {
        bench.deliver(&command).await;
    }
    bench.reboot_is_asked().await;
    bench.deliver(&command).await;
    while !matches!(bench.answer().await, Said::Running(1)) {}
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(bench.asked(), 1);
}

#[tokio::test]
async fn an_accepted_reboot_holds_no_credit_and_a_cancellation_ends_it_while_it_waits() {
    let mut bench = Bench::new();
    bench.deliver(&reboot("c-1", json!({"delay_s": 600}))).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(bench.lanes.free()[&Lane::Control], 2);
    bench.cancel("c-1").await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Cancelled, Some(Reason::Cancelled), Effect::None));
    assert_eq!(bench.asked(), 0);
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded, "the node goes on");
}

#[tokio::test]
async fn a_daemon_that_dies_while_a_reboot_waits_has_not_begun_it() {
    let mut bench = Bench::new();
    let command = reboot("c-1", json!({"delay_s": 600}));
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Accepted);
    let dir = bench.crash().await;
    // Another boot, but not by this command.
    let mut bench = Bench::over_in(dir, "i-2", "b-2");
    bench.deliver(&command).await;
    assert_eq!(bench.answer().await, Said::Accepted, "it waits again");
    bench.cancel("c-1").await;
    assert_eq!(bench.result().await.state, Terminal::Cancelled);
}

#[tokio::test]
async fn a_drain_takes_no_more_work_and_waits_for_what_runs() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "sleep 0.5")).await;
    bench.effect_has_started().await;
    bench.deliver(&reboot("c-2", json!({"drain_s": 60}))).await;
    for _ in 0..100 {
        if bench.lanes.free()[&Lane::Work] == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    bench.deliver(&bench.exec("c-3", "")).await;
    let mut refused = false;
    loop {
        match bench.answer().await {
            Said::Refused(reason, detail) => refused = (reason, detail.as_str()) == (Reason::Busy, "credits"),
            Said::Done(outcome) => break assert_eq!(outcome.state, Terminal::Succeeded),
            Said::Accepted | Said::Running(_) => assert_eq!(bench.asked(), 0),
        }
    }
    assert!(refused, "no work is taken while the node drains");
    bench.reboot_is_asked().await;
    assert_eq!(bench.effects(), 1);
}

#[tokio::test]
async fn a_drain_ends_after_its_time_whatever_runs() {
    let mut bench = Bench::new();
    bench.deliver(&bench.exec("c-1", "sleep 60")).await;
    bench.effect_has_started().await;
    bench.deliver(&reboot("c-2", json!({"drain_s": 0}))).await;
    bench.reboot_is_asked().await;
    bench.cancel("c-1").await;
    assert_eq!(bench.result().await.state, Terminal::Cancelled);
}

#[tokio::test]
async fn a_reboot_that_is_refused_fails_without_an_effect_and_the_node_goes_on() {
    let mut bench = Bench::new();
    bench.reboots.refuses.store(true, Ordering::SeqCst);
    bench.deliver(&reboot("c-1", json!({}))).await;
    let outcome = bench.result().await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::CouldNotStart), Effect::None));
    assert!(outcome.message.contains("not today"), "{}", outcome.message);
    assert!(!bench.lanes.is_rebooting());
    bench.deliver(&probe("c-2")).await;
    assert_eq!(bench.result().await.state, Terminal::Succeeded);
}

#[tokio::test]
async fn a_started_reboot_is_not_cancelled() {
    let mut bench = Bench::new();
    bench.deliver(&reboot("c-1", json!({}))).await;
    bench.reboot_is_asked().await;
    bench.cancel("c-1").await;
    assert_eq!(bench.answer().await, Said::Accepted);
    assert_eq!(bench.answer().await, Said::Running(1));
    let nothing = timeout(Duration::from_millis(200), bench.answer()).await;
    assert!(nothing.is_err(), "{nothing:?}");
}
