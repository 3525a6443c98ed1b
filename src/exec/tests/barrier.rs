//! What a barrier answers.

use super::*;

fn barrier(command: &str) -> Value {
    body(command, "inventory.barrier", json!({"barrier_id": "b-7"}))
}

fn answer(outcome: &Outcome) -> Value {
    serde_json::from_slice(&outcome.output).expect("JSON")
}

/// The result of the barrier, whatever others say before it.
async fn barrier_result(bench: &mut Bench) -> Outcome {
    loop {
        let outcome = bench.result().await;
        if String::from_utf8_lossy(&outcome.output).contains("barrier_id") {
            return outcome;
        }
    }
}

#[tokio::test]
async fn a_barrier_on_an_empty_host_says_empty_and_known_and_does_not_list_itself() {
    let mut bench = Bench::new();
    bench.deliver_as(17, &barrier("c-1")).await;
    let outcome = barrier_result(&mut bench).await;
    assert_eq!(ending(&outcome), (Terminal::Succeeded, None, Effect::Complete));
    let answer = answer(&outcome);
    assert_eq!(
        (&answer["barrier_id"], &answer["known"], &answer["highest_seq"]),
        (&json!("b-7"), &json!(true), &json!(17))
    );
    for list in ["assignments", "instances", "processes", "commands"] {
        assert_eq!(answer[list], json!({"known": true, "items": [], "left_out": 0}), "{list}");
    }
}

#[tokio::test]
async fn a_barrier_names_what_runs_and_the_processes_of_it() {
    let mut bench = Bench::new();
    bench.deliver_as(3, &bench.exec("c-1", "sleep 60")).await;
    bench.effect_has_started().await;
    bench.deliver_as(4, &barrier("c-2")).await;
    let answer = answer(&barrier_result(&mut bench).await);
    let running = json!({"id": "c-1", "kind": "node.exec", "state": "RUNNING", "attempt": 1});
    assert_eq!(answer["commands"]["items"], json!([running]));
    assert_eq!(answer["highest_seq"], 4);
    let processes = answer["processes"]["items"].as_array().expect("a list");
    assert!(
        !processes.is_empty() && processes.iter().all(|process| process["command_id"] == "c-1"),
        "{answer}"
    );
    bench.cancel("c-1").await;
    assert_eq!(bench.result().await.state, Terminal::Cancelled);
}

#[tokio::test]
async fn a_barrier_sees_every_command_that_came_before_it() {
    let mut bench = Bench::new();
    // One after the other into the queue, so that all are handled side by side.
    for n in 0..2 {
        bench.deliver_as(n, &bench.exec(&format!("c-{n}"), "sleep 60")).await;
    }
    bench.deliver_as(9, &barrier("c-9")).await;
    let answer = answer(&barrier_result(&mut bench).await);
    let items = answer["commands"]["items"].as_array().expect("a list");
    let ids: Vec<&str> = items.iter().filter_map(|item| item["id"].as_str()).collect();
    assert_eq!(ids, ["c-0", "c-1"], "{answer}");
    for id in ids {
        bench.cancel(id).await;
        assert_eq!(bench.result().await.state, Terminal::Cancelled);
    }
}

#[tokio::test]
async fn a_barrier_that_cannot_look_fails_as_unknown_and_not_as_empty() {
    let mut bench = Bench::new();
    let begun = bench.dir.path().join("begun");
    std::fs::remove_dir_all(&begun).expect("the directory of the records");
    std::fs::write(&begun, "").expect("a file in its place");
    bench.deliver(&barrier("c-1")).await;
    let outcome = barrier_result(&mut bench).await;
    assert_eq!(ending(&outcome), (Terminal::Failed, Some(Reason::InventoryUnknown), Effect::None));
    let answer = answer(&outcome);
    assert_eq!((&answer["known"], &answer["processes"]["known"]), (&json!(false), &json!(false)));
    assert!(answer["processes"]["items"].is_null(), "{answer}");
    assert_eq!(answer["commands"]["known"], true);
}
