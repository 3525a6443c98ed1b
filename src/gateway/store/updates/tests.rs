use super::*;
use crate::gateway::store::tests::{BODY, Bench};
use crate::gateway::update::Claimed;
use crate::gateway::worker::Judged;
use crate::model::Digest;

async fn say(bench: &Bench, epoch: u64, said: Said) -> Effects {
    let update = Update { id: Some(bench.id.clone()), body_sha256: Digest::of(BODY), said, fact: None };
    bench.store.updates(bench.node.clone(), epoch, vec![update], bench.now()).await.expect("stored")
}

async fn state(bench: &Bench) -> String {
    let read = |db: &Connection| db.query_row("SELECT state FROM commands", [], |row| row.get(0));
    bench.store.run(read).await.expect("a command")
}

fn busy(why: Reason) -> Said {
    Said::Refused { reason: "busy".into(), detail: why.token().into(), busy: Some(why) }
}

fn succeeded() -> Said {
    Said::Ended(End {
        state: State::Succeeded,
        reason: String::new(),
        message: String::new(),
        effect: "complete",
        attempt: 1,
        output: "{}".into(),
    })
}

#[tokio::test]
async fn passing_answers_of_an_older_epoch_are_ignored() {
    let bench = Bench::new().await;
    let older = bench.welcomed("i-1").await;
    bench.dispatch(older).await;
    let newer = bench.welcomed("i-1").await;
    for said in [busy(Reason::Disk), Said::Accepted, Said::Running { attempt: 1 }] {
        assert_eq!(say(&bench, older, said.clone()).await.applied, [Applied::Nothing], "{said:?}");
        assert_eq!(state(&bench).await, "dispatched", "{said:?}");
    }
    assert_eq!(say(&bench, newer, Said::Accepted).await.applied, [Applied::Progress]);
    assert_eq!(state(&bench).await, "accepted");
}

#[tokio::test]
async fn a_result_of_an_older_epoch_is_stored_and_acked() {
    let bench = Bench::new().await;
    let older = bench.welcomed("i-1").await;
    bench.dispatch(older).await;
    bench.welcomed("i-1").await;
    let effects = say(&bench, older, succeeded()).await;
    assert_eq!((effects.acks(), effects.ended()), (vec![bench.id.clone()], vec![bench.id.clone()]));
    assert_eq!(state(&bench).await, "succeeded");
}

#[tokio::test]
async fn only_a_node_without_credit_is_told_apart_from_other_refusals() {
    for (why, exhausted) in [(Reason::Credits, true), (Reason::JournalFull, false)] {
        let bench = Bench::new().await;
        let epoch = bench.welcomed("i-1").await;
        bench.dispatch(epoch).await;
        assert_eq!(say(&bench, epoch, busy(why)).await.applied, [Applied::BackOff(Lane::Work, exhausted)]);
        assert_eq!(state(&bench).await, "pending");
    }
}

#[test]
fn a_refused_commands_wait_doubles_from_one_second_to_thirty() {
    let waits = std::iter::successors(Some(next_backoff(0)), |wait| Some(next_backoff(*wait)));
    let waits: Vec<i64> = waits.take(8).collect();
    assert_eq!(waits, [1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000, 30_000]);
    assert_eq!(next_backoff(i64::MAX), LONGEST_BACKOFF_MS);
}

/// Says the result, and has what it leaves for the worker judged so; how much that was.
async fn said_and_judged(bench: &Bench, epoch: u64, said: Said, refused: Option<Reason>) -> usize {
    let fact = Some(Claimed { update: bytes::Bytes::from_static(b"a claim"), signed: true });
    let update = Update { id: Some(bench.id.clone()), body_sha256: Digest::of(BODY), said, fact };
    bench.store.updates(bench.node.clone(), epoch, vec![update], bench.now()).await.expect("stored");
    let waiting = bench.store.facts_to_judge().await.expect("read");
    let judged = |number| (number, Judged { refused, message: String::new() });
    bench.store.judged(waiting.iter().map(|one| judged(one.number)).collect()).await.expect("stored");
    waiting.len()
}

async fn one<T: rusqlite::types::FromSql + Send + 'static>(bench: &Bench, sql: &'static str) -> T {
    bench.store.run(move |db| db.query_row(sql, [], |row| row.get(0))).await.expect("a row")
}

const VERDICT: &str = "SELECT verdict FROM commands";
const REFUSALS: &str = "SELECT count(*) FROM events WHERE kind = 'security.result.refused'";

#[tokio::test]
async fn a_result_that_was_refused_is_judged_again_when_it_is_said_again_until_it_holds() {
    let bench = Bench::new().await;
    let epoch = bench.welcomed("i-1").await;
    bench.dispatch(epoch).await;
    let refused = Some(Reason::SignatureInvalid);
    for _ in 0..3 {
        assert_eq!(said_and_judged(&bench, epoch, succeeded(), refused).await, 1);
        assert_eq!(one::<String>(&bench, VERDICT).await, "signature-invalid");
    }
    assert_eq!(one::<i64>(&bench, REFUSALS).await, 1, "told once");
    assert_eq!(said_and_judged(&bench, epoch, succeeded(), None).await, 1);
    assert_eq!(one::<String>(&bench, VERDICT).await, "verified");
    assert_eq!(said_and_judged(&bench, epoch, succeeded(), refused).await, 0, "what holds is asked no more");
    assert_eq!(one::<String>(&bench, VERDICT).await, "verified");
}

#[tokio::test]
async fn another_end_than_the_one_that_was_refused_does_not_heal_it() {
    let bench = Bench::new().await;
    let epoch = bench.welcomed("i-1").await;
    bench.dispatch(epoch).await;
    said_and_judged(&bench, epoch, succeeded(), Some(Reason::ResultAltered)).await;
    let Said::Ended(end) = succeeded() else { panic!("an end") };
    let failed = Said::Ended(End { state: State::Failed, ..end });
    said_and_judged(&bench, epoch, failed, None).await;
    assert_eq!(one::<String>(&bench, VERDICT).await, "result-altered");
}

#[tokio::test]
async fn a_result_of_a_node_that_was_deleted_meanwhile_is_no_security_event() {
    let bench = Bench::new().await;
    let epoch = bench.welcomed("i-1").await;
    bench.dispatch(epoch).await;
    said_and_judged(&bench, epoch, succeeded(), Some(Reason::UnknownNode)).await;
    assert_eq!(one::<String>(&bench, VERDICT).await, "unknown-node");
    assert_eq!(one::<i64>(&bench, REFUSALS).await, 0);
}
