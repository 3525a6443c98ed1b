use std::cell::RefCell;
use std::collections::VecDeque;

use rand::SeedableRng as _;

use super::*;

fn end(kind: EndKind, reason: Option<Reason>, pushback_ms: Option<u64>) -> LinkEnd {
    LinkEnd {
        kind,
        reason,
        pushback: pushback_ms.map(Duration::from_millis),
        revocation: None,
        detail: "its words".into(),
    }
}

fn endpoints(count: u16) -> Vec<Endpoint> {
    (1..=count).map(|n| format!("gw{n}:443").parse().unwrap()).collect()
}

/// Asks two gateways, which end each attempt as scripted and answer after that; who was asked, and after how long.
async fn run(
    patience: Option<u64>,
    script: Vec<LinkEnd>,
) -> (Result<Endpoint, JoinError>, Vec<(String, Duration)>) {
    let start = Instant::now();
    let asked = RefCell::new(Vec::new());
    let script = RefCell::new(VecDeque::from(script));
    let result = ask(
        &endpoints(2),
        patience.map(Duration::from_secs),
        &mut StdRng::seed_from_u64(1),
        async |endpoint: &Endpoint| {
            asked.borrow_mut().push((endpoint.host.clone(), start.elapsed()));
            script.borrow_mut().pop_front().map_or_else(|| Ok(()), Err)
        },
        |_| {},
    )
    .await;
    (result.map(|(endpoint, _)| endpoint), asked.into_inner())
}

#[tokio::test(start_paused = true)]
async fn the_endpoints_are_asked_in_turn_until_one_answers() {
    let lost = || end(EndKind::Lost, Some(Reason::DialFailed), None);
    let (result, asked) = run(None, vec![lost(), lost()]).await;
    assert_eq!(result.unwrap().host, "gw1");
    assert_eq!(asked.iter().map(|(host, _)| host.as_str()).collect::<Vec<_>>(), ["gw1", "gw2", "gw1"]);
}

#[tokio::test(start_paused = true)]
async fn a_pushback_is_waited_exactly() {
    let (result, asked) = run(None, vec![end(EndKind::Unavailable, Some(Reason::Storm), Some(7_500))]).await;
    assert!(result.is_ok());
    assert_eq!(asked[1].1, Duration::from_millis(7_500));
}

#[tokio::test(start_paused = true)]
async fn a_pushback_past_the_patience_ends_the_join_as_busy_and_says_when_to_come_back() {
    let (result, _) = run(Some(5), vec![end(EndKind::Unavailable, Some(Reason::Full), Some(60_000))]).await;
    let error = result.unwrap_err();
    assert_eq!(error.exit(), Exit::TryLater);
    assert!(error.to_string().contains("in 60 s"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn nothing_listening_ends_the_join_after_its_patience() {
    let start = Instant::now();
    let lost = vec![end(EndKind::Lost, Some(Reason::DialFailed), None); 1000];
    let (result, asked) = run(Some(120), lost).await;
    let error = result.unwrap_err();
    assert_eq!(error.exit(), Exit::NoGateway, "{error}");
    assert!(start.elapsed() <= Duration::from_secs(120));
    assert!(asked.len() > 3);
}

#[tokio::test(start_paused = true)]
async fn another_gateways_ticket_is_said_once_every_endpoint_has_shown_a_foreign_certificate() {
    let foreign = || end(EndKind::ServerUntrusted, None, None);
    let (result, asked) = run(None, vec![foreign(), foreign()]).await;
    let error = result.unwrap_err();
    assert_eq!(error.exit(), Exit::BadInput);
    assert!(matches!(error, JoinError::AnotherGateway { .. }));
    assert_eq!(asked.len(), 2);
    let lost = end(EndKind::Lost, None, None);
    let (result, _) = run(None, vec![foreign(), lost, foreign()]).await;
    assert!(result.is_ok(), "the other one may only be down");
}

#[tokio::test(start_paused = true)]
async fn each_refusal_for_good_has_its_own_sentence_and_code() {
    for (reason, exit, words) in [
        (Reason::TicketInvalid, Exit::BadInput, "does not know this ticket's token"),
        (Reason::TicketExpired, Exit::BadInput, "the ticket has run out"),
        (Reason::TicketUsed, Exit::BadInput, "has been used up"),
        (Reason::ProtocolTooOld, Exit::Failed, "install a newer bcd"),
        (Reason::ProtocolTooNew, Exit::Failed, "upgrade the gateway"),
        (Reason::JoinInvalid, Exit::Failed, "its words (join-invalid)"),
    ] {
        let (result, asked) = run(None, vec![end(EndKind::Refused, Some(reason), None)]).await;
        let error = result.unwrap_err();
        assert_eq!((error.exit(), asked.len()), (exit, 1), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_without_an_answer_is_given_up() {
    let start = Instant::now();
    let result = ask(
        &endpoints(1),
        Some(Duration::from_secs(30)),
        &mut StdRng::seed_from_u64(1),
        async |_: &Endpoint| std::future::pending::<Result<(), LinkEnd>>().await,
        |_| {},
    )
    .await;
    assert_eq!(result.map(|_| ()).unwrap_err().exit(), Exit::NoGateway);
    assert!(start.elapsed() <= Duration::from_secs(31));
}

#[test]
fn a_join_that_was_killed_goes_on_with_its_key_and_another_ticket_starts_anew() {
    let temp = tempfile::tempdir().unwrap();
    let state = temp.path().join("state");
    let key = |token: &[u8]| match prepare(&state, Digest::of(token)).unwrap() {
        Prepared::Key(pledge) => pledge.key.spki(),
        Prepared::Done(_) => panic!("there is no identity"),
    };
    let first = key(b"token");
    assert_eq!(key(b"token"), first);
    assert_ne!(key(b"another"), first);
}

#[test]
fn two_joins_at_once_do_not_mix() {
    let temp = tempfile::tempdir().unwrap();
    let state = temp.path().join("state");
    let first = prepare(&state, Digest::of(b"token")).unwrap();
    let second = prepare(&state, Digest::of(b"token")).map(|_| ()).unwrap_err();
    assert_eq!(second.exit(), Exit::TryLater, "{second}");
    drop(first);
    assert!(prepare(&state, Digest::of(b"token")).is_ok());
}
