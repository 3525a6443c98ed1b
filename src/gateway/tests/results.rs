//! What becomes of results that their nodes sign, behind the ack.

use std::time::Duration;

use super::lab::{Gateway, within};
use crate::model::CommandId;
use crate::wire::pb::CommandState as Say;

async fn verdict(gateway: &Gateway, id: &CommandId) -> String {
    let judged = async {
        loop {
            let verdict = gateway.show(id).await.verdict;
            if !verdict.is_empty() {
                return verdict;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("the verdict", judged).await
}

#[tokio::test]
async fn a_claim_that_fits_no_line_to_the_worker_is_refused_and_those_behind_it_are_judged() {
    let gateway = Gateway::start().await;
    let machine = gateway.machine().await;
    let id = gateway.program(&machine).await;
    let db = rusqlite::Connection::open(gateway.dir.path().join("gw/gateway.db")).expect("the store");
    // As an earlier build has left it.
    db.execute(
        "INSERT INTO facts (node_id, command_id, ended, claim) VALUES (?, 'c-old', 0, zeroblob(?))",
        rusqlite::params![machine.id().as_str(), 3 << 20],
    )
    .expect("a claim");
    let mut session = machine.live(&gateway).await;
    let command = session.command().await;
    session.say(&command, Say::Succeeded).await;
    assert_eq!(session.acked().await, [id.to_string()]);
    assert_eq!(verdict(&gateway, &id).await, "signature-required", "this node signs nothing");
    let refused = gateway.events("security.result.refused").await;
    let of = |id: &str| {
        refused.iter().find(|event| event.detail["commandId"] == *id).expect("refused").detail.clone()
    };
    assert_eq!(of("c-old")["reason"], "invalid");
    assert!(of("c-old")["detail"].as_str().is_some_and(|detail| detail.contains("too long")), "{refused:?}");
    gateway.stop().await;
}
