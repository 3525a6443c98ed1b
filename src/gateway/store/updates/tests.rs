use super::*;
use crate::gateway::store::tests::{BODY, Bench};
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
