use std::time::Duration;

use serde_json::json;

use super::lab::{Gateway, id_of, update};
use crate::gateway::control::{Request, Response};
use crate::gateway::worker::Draft;
use crate::model::{CommandId, Lane};
use crate::wire::dsse::Envelope;
use crate::wire::pb::CommandState as Say;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;

#[tokio::test]
async fn a_command_goes_to_its_node_and_its_result_is_stored_and_acked() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    assert_eq!((id_of(&command), command.seq, command.delivery_attempt), (id.clone(), 1, 1));
    assert_eq!(command.lane_hint, "work");
    session.say(&command, Say::Accepted).await;
    session.say(&command, Say::Running).await;
    let mut result = update(&command, Say::Succeeded);
    result.output = "{\"exit_status\":0}".into();
    session.send(In::CommandUpdate(result)).await;
    assert_eq!(session.acked().await, [id.to_string()]);
    let view = gateway.show(&id).await;
    assert_eq!(
        (&*view.state, &*view.effect, &*view.output),
        ("succeeded", "complete", "{\"exit_status\":0}")
    );
    assert_eq!((view.terminal_changes, view.late_facts, view.deliveries), (1, 0, 1));
    assert!(view.accepted_ms >= view.dispatched_ms && view.ended_ms >= view.accepted_ms);
    gateway.stop().await;
}

#[tokio::test]
async fn a_command_whose_running_was_lost_is_running_once_its_nodes_hello_names_it_and_no_other_is() {
    let gateway = Gateway::start().await;
    let (machine, other) = (gateway.machine().await, gateway.machine().await);
    let (runs, lost, waits) =
        (gateway.program(&machine).await, gateway.program(&machine).await, gateway.program(&machine).await);
    let (ended, elsewhere) = (gateway.program(&machine).await, gateway.program(&other).await);
    let mut session = machine.live(&gateway).await;
    for id in [&runs, &lost, &waits, &ended] {
        let command = session.command().await;
        assert_eq!(id_of(&command), *id);
        if *id == ended {
            session.say(&command, Say::Succeeded).await;
            session.acked().await;
        } else if *id != lost {
            session.say(&command, Say::Accepted).await;
            gateway.reaches(id, "accepted").await;
        }
    }
    let mut elsewhere_session = other.live(&gateway).await;
    let command = elsewhere_session.command().await;
    elsewhere_session.say(&command, Say::Accepted).await;
    gateway.reaches(&elsewhere, "accepted").await;

    let mut hello = machine.hello();
    hello.incarnation = "i-2".into();
    hello.running_command_ids = [&runs, &lost, &ended, &elsewhere].map(ToString::to_string).into();
    let mut session = machine.live_with(&gateway, hello).await;
    let state = async |id| gateway.show(id).await.state;
    assert_eq!((state(&runs).await, state(&lost).await), ("running".to_owned(), "running".to_owned()));
    assert_eq!(gateway.show(&runs).await.attempt, 1);
    assert_eq!(state(&waits).await, "accepted", "it has not begun");
    assert_eq!(state(&ended).await, "succeeded", "a state never sinks");
    assert_eq!(state(&elsewhere).await, "accepted", "another node's");
    assert_eq!(id_of(&session.command().await), waits, "what does not run is delivered again");
    session.quiet(Duration::from_millis(100)).await;
    gateway.stop().await;
}

#[tokio::test]
async fn commands_wait_for_the_first_heartbeat() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    gateway.program(&machine).await;
    let mut session = machine.open(&gateway, machine.hello()).await.expect("opened");
    session.welcome().await;
    session.quiet(Duration::from_millis(200)).await;
    session.heartbeat().await;
    session.command().await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_lane_gets_no_more_than_its_credits_and_holds_up_no_other() {
    let gateway = Gateway::with(|options| {
        options.lane_credits.insert(Lane::Work, 2);
    });
    let gateway = gateway.await;
    let machine = gateway.machine().await;
    let mut programs = Vec::new();
    for _ in 0..4 {
        programs.push(gateway.program(&machine).await);
    }
    let probe = gateway.enqueue(&machine, "node.probe", json!({})).await;
    let mut session = machine.live(&gateway).await;
    let first = session.command().await;
    let got = [id_of(&first), id_of(&session.command().await), id_of(&session.command().await)];
    assert_eq!(got, [programs[0].clone(), programs[1].clone(), probe]);
    session.quiet(Duration::from_millis(100)).await;
    session.say(&first, Say::Succeeded).await;
    session.acked().await;
    assert_eq!(id_of(&session.command().await), programs[2]);
    session.quiet(Duration::from_millis(100)).await;
    gateway.stop().await;
}

#[tokio::test]
async fn what_was_in_flight_is_delivered_again_in_order_unless_the_node_has_it() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(gateway.program(&machine).await);
    }
    let mut session = machine.live(&gateway).await;
    let mut commands = Vec::new();
    for _ in 0..4 {
        commands.push(session.command().await);
    }
    session.say(&commands[1], Say::Accepted).await;
    gateway.reaches(&ids[1], "accepted").await;
    drop(session);

    let mut hello = machine.hello();
    hello.running_command_ids = vec![ids[0].to_string()];
    hello.done_results = vec![update(&commands[3], Say::Succeeded)];
    let mut session = machine.live_with(&gateway, hello).await;
    assert_eq!(session.acked().await, [ids[3].to_string()]);
    let again = [session.command().await, session.command().await];
    assert_eq!([id_of(&again[0]), id_of(&again[1])], [ids[1].clone(), ids[2].clone()]);
    assert!(again.iter().all(|command| command.delivery_attempt == 2));
    session.quiet(Duration::from_millis(100)).await;
    assert_eq!(gateway.show(&ids[1]).await.state, "accepted", "a replay lowers nothing");
    gateway.stop().await;
}

#[tokio::test]
async fn a_refused_command_comes_back_after_a_second_and_keeps_its_why() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.refuse(&command, "busy", "journal-full").await;
    let view = gateway.reaches(&id, "pending").await;
    assert_eq!(view.message, "busy: journal-full");
    session.quiet(Duration::from_millis(700)).await;
    let again = session.command().await;
    assert_eq!((id_of(&again), again.delivery_attempt), (id.clone(), 2));
    session.say(&again, Say::Accepted).await;
    gateway.reaches(&id, "accepted").await;
    session.refuse(&again, "busy", "disk").await;
    session.heartbeat().await;
    session.quiet(Duration::from_millis(100)).await;
    assert_eq!(gateway.show(&id).await.state, "accepted", "a refusal never lowers a stored state");
    gateway.stop().await;
}

#[tokio::test]
async fn what_a_restarted_node_left_behind_and_refuses_is_delivered_again_until_it_takes_it_up() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.say(&command, Say::Accepted).await;
    gateway.reaches(&id, "accepted").await;
    drop(session);
    let mut session = machine.live(&gateway).await;
    let replay = session.command().await;
    session.refuse(&replay, "busy", "disk").await;
    let again = session.command().await;
    assert_eq!((id_of(&again), again.delivery_attempt), (id.clone(), 3));
    assert_eq!(gateway.show(&id).await.state, "accepted");
    session.say(&again, Say::Succeeded).await;
    gateway.reaches(&id, "succeeded").await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_cancelled_command_that_an_earlier_delivery_may_have_started_is_ended_by_its_node_alone() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    session.command().await;
    // The answers to the first delivery are lost with the link; the second one finds the node's disk failing.
    drop(session);
    let mut session = machine.live(&gateway).await;
    let replay = session.command().await;
    session.refuse(&replay, "busy", "io-error").await;
    gateway.reaches(&id, "pending").await;
    gateway.cancel(&id).await.expect("taken");
    assert_eq!(gateway.show(&id).await.state, "pending", "only the node knows whether it runs");
    let mut told = false;
    while !told {
        told = matches!(session.next().await.expect("a frame"), Out::Cancel(_));
    }
    session.say(&replay, Say::Cancelled).await;
    assert_eq!(gateway.reaches(&id, "cancelled").await.terminal_changes, 1);
    gateway.stop().await;
}

#[tokio::test]
async fn a_command_that_is_not_accepted_in_time_expires_with_the_last_why() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let argv = json!({"argv": ["/bin/true"]});
    let refused = gateway.enqueue_for(&machine, "node.exec", argv.clone(), 1).await;
    let accepted = gateway.enqueue_for(&machine, "node.exec", argv, 1).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.refuse(&command, "busy", "read-only").await;
    let other = session.command().await;
    session.say(&other, Say::Accepted).await;
    let view = gateway.reaches(&refused, "expired").await;
    assert_eq!((&*view.reason, &*view.message), ("expired", "busy: read-only"));
    assert_eq!(gateway.show(&accepted).await.state, "accepted", "an accepted command never expires");

    session.say(&command, Say::Succeeded).await;
    assert_eq!(session.acked().await, [refused.to_string()]);
    let view = gateway.show(&refused).await;
    assert_eq!((&*view.state, view.late_facts, view.terminal_changes), ("expired", 1, 1));
    gateway.stop().await;
}

#[tokio::test]
async fn a_result_about_other_bytes_changes_nothing_and_is_acked_so_that_its_node_owes_it_no_more() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    let mut other = update(&command, Say::Succeeded);
    other.body_sha256 = vec![0; 32].into();
    for _ in 0..2 {
        session.send(In::CommandUpdate(other.clone())).await;
        assert_eq!(session.acked().await, [id.to_string()]);
    }
    let view = gateway.show(&id).await;
    assert_eq!((&*view.state, view.late_facts), ("dispatched", 0));
    let events = gateway.events("node.report-failed").await;
    assert_eq!(events.len(), 1, "told once");
    assert_eq!(events[0].detail["reason"], "command-id-conflict");
    gateway.stop().await;
}

#[tokio::test]
async fn a_result_about_another_nodes_command_changes_nothing_and_is_acked() {
    let gateway = Gateway::start().await;
    let (machine, liar) = (gateway.machine().await, gateway.machine().await);
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    let mut other = liar.live(&gateway).await;
    other.say(&command, Say::Accepted).await;
    other.say(&command, Say::Succeeded).await;
    assert_eq!(other.acked().await, [id.to_string()]);
    let view = gateway.show(&id).await;
    assert_eq!((&*view.state, view.late_facts), ("dispatched", 0));
    let events = gateway.events("node.report-failed").await;
    assert_eq!((&*events[0].node, &events[0].detail["reason"]), (&*liar.node, &"wrong-node".into()));
    session.say(&command, Say::Succeeded).await;
    gateway.reaches(&id, "succeeded").await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_new_journal_fails_what_may_not_run_twice_and_nobody_holds() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut ids = Vec::new();
    for retry_safe in [false, true, false] {
        let args = json!({"argv": ["/bin/true"], "retry_safe": retry_safe});
        ids.push(gateway.enqueue(&machine, "node.exec", args).await);
    }
    let mut session = machine.live(&gateway).await;
    for _ in 0..3 {
        session.command().await;
    }
    drop(session);
    let mut hello = machine.hello();
    hello.journal_id = "j-2".into();
    hello.running_command_ids = vec![ids[2].to_string()];
    let mut session = machine.open(&gateway, hello.clone()).await.expect("opened");
    session.welcome().await;
    assert_eq!(gateway.show(&ids[0]).await.state, "dispatched", "the verdict waits for the heartbeat");
    // A session that ends before its first heartbeat takes the verdict with it to the next.
    drop(session);
    let mut session = machine.live_with(&gateway, hello).await;
    assert_eq!(id_of(&session.command().await), ids[1]);
    let lost = gateway.show(&ids[0]).await;
    assert_eq!((&*lost.state, &*lost.reason, &*lost.effect), ("failed", "journal-lost", "unknown"));
    assert_eq!(gateway.show(&ids[2]).await.state, "running", "as its Hello has said");
    gateway.stop().await;
}

#[tokio::test]
async fn a_cancellation_ends_what_waits_here_and_is_told_to_the_node_that_has_it() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let waiting = gateway.program(&machine).await;
    gateway.cancel(&waiting).await.expect("taken");
    assert_eq!(gateway.show(&waiting).await.state, "cancelled");

    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    assert_eq!(id_of(&command), id, "the cancelled one is not delivered");
    session.say(&command, Say::Accepted).await;
    gateway.reaches(&id, "accepted").await;
    gateway.cancel(&id).await.expect("taken");
    let cancel = loop {
        match session.next().await.expect("a frame") {
            Out::Cancel(cancel) => break cancel,
            Out::Ack(_) => {}
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(cancel.command_id, id.to_string());
    let body = cancel.envelope.expect("an envelope").payload;
    let body: crate::wire::dsse::CancelBody = crate::model::strict::parse(&body).expect("a body");
    assert_eq!((body.command_id, body.node_id), (id.clone(), machine.id()));
    drop(session);

    let mut session = machine.live(&gateway).await;
    session.command().await;
    assert!(matches!(session.next().await.expect("a frame"), Out::Cancel(_)), "told again after a reconnect");
    session.say(&command, Say::Cancelled).await;
    gateway.reaches(&id, "cancelled").await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_killed_gateway_knows_afterwards_what_it_had_acked_and_marked() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let (done, marked) = (gateway.program(&machine).await, gateway.program(&machine).await);
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.command().await;
    session.say(&command, Say::Succeeded).await;
    assert_eq!(session.acked().await, [done.to_string()]);
    let waiting = gateway.enqueue(&machine, "node.probe", json!({})).await;
    session.command().await;

    let reborn = Gateway::on(gateway.killed(), |_| {}).await;
    assert_eq!(reborn.show(&done).await.state, "succeeded");
    assert_eq!(reborn.show(&marked).await.state, "dispatched");
    let mut again = machine.live(&reborn).await;
    assert_eq!(id_of(&again.command().await), marked);
    assert_eq!(id_of(&again.command().await), waiting);
    // The node did not see the ack: its result comes again and changes nothing.
    again.say(&command, Say::Succeeded).await;
    assert_eq!(again.acked().await, [done.to_string()]);
    assert_eq!(reborn.show(&done).await.terminal_changes, 1);
    reborn.stop().await;
    gateway.stop().await;
}

#[tokio::test]
async fn a_wait_ends_with_the_command() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    let mut result = update(&command, Say::Failed);
    result.reason = "exit-status".into();
    let wait = gateway.ask(Request::Wait { id: id.clone(), timeout_ms: 9_000 });
    let (answer, ()) = tokio::join!(wait, async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        session.send(In::CommandUpdate(result)).await;
    });
    let Response::Command(Some(view)) = answer else { panic!("no command") };
    assert_eq!((&*view.state, &*view.reason), ("failed", "exit-status"));
    gateway.stop().await;
}

#[tokio::test]
async fn a_request_that_cannot_be_honoured_is_answered_with_why() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let mut operator = gateway.operator().await;
    let args = serde_json::value::to_raw_value(&json!({})).expect("json");
    let node = crate::model::NodeId::new("n-none").expect("an id");
    let draft = Draft { node, kind: "node.probe".into(), args, ttl_s: 9, id: None };
    let why = operator.enqueue(draft).await.expect_err("refused").to_string();
    assert!(why.contains("n-none"), "{why}");
    let big = json!({"argv": ["x".repeat(crate::model::limits::COMMAND_BODY_BYTES)]});
    let args = serde_json::value::to_raw_value(&big).expect("json");
    let draft = Draft { node: machine.id(), kind: "node.exec".into(), args, ttl_s: 9, id: None };
    assert!(operator.enqueue(draft).await.expect_err("refused").to_string().contains("bytes"));
    let why =
        gateway.cancel(&CommandId::new("c-none").expect("an id")).await.expect_err("refused").to_string();
    assert!(why.contains("c-none"), "{why}");
    let none = Envelope { payload_type: String::new(), payload: "{}".into(), signatures: Vec::new() };
    let Response::Error(why) = gateway.ask_or_refused(Request::Enqueue { command: none }).await else {
        panic!("no command was enqueued")
    };
    assert!(why.contains("not a command"), "{why}");
    gateway.stop().await;
}

/// A node that had accepted a reboot, and what a Hello with another boot and perhaps another journal makes of it.
async fn after_another_boot(journal: &str) -> (String, String) {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.enqueue(&machine, "node.reboot", json!({})).await;
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.say(&command, Say::Accepted).await;
    gateway.reaches(&id, "accepted").await;
    let mut hello = machine.hello();
    (hello.boot_id, hello.journal_id, hello.incarnation) = ("b-2".into(), journal.into(), "i-2".into());
    let mut session = machine.open(&gateway, hello).await.expect("opened");
    session.welcome().await;
    let view = gateway.show(&id).await;
    gateway.stop().await;
    (view.state, view.reason)
}

#[tokio::test]
async fn an_accepted_reboot_is_completed_by_a_new_boot_only_where_no_journal_could_tell() {
    assert_eq!(after_another_boot("j-2").await, ("succeeded".into(), "rebooted".into()));
    assert_eq!(
        after_another_boot("j-1").await,
        ("accepted".into(), String::new()),
        "the node's result decides"
    );
}
