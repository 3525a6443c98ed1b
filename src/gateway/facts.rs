//! Hands results that their nodes have signed to the worker, which judges them: the gateway has no key that could, and its
//! own word is not asked for. A result is stored and acked before; it waits in the store until it is judged.

use std::sync::Arc;
use std::time::Duration;

use super::hub::Hub;
use super::lines::LINE;
use super::session::chain;
use super::store::{StoreError, Waiting};
use super::worker::{Ask, Claim, Judged, Told};
use crate::model::Reason;
use crate::wire::der::Der;

/// What another gateway has left behind is looked for this often.
const LOOK: Duration = Duration::from_secs(5);
/// A store or a worker that did not do its part is asked again after this.
const AGAIN: Duration = Duration::from_secs(1);
/// A claim that has more bytes fits no line to the worker, where base64 makes it a third longer. This build stores none.
const HANDED_OVER: usize = 2 << 20;
const _: () = assert!(HANDED_OVER as u64 * 4 / 3 + 4096 < LINE);

/// Why results still wait.
#[derive(Debug, thiserror::Error)]
pub enum JudgeError {
    /// The store.
    #[error("the store does not give or take results")]
    Store(#[from] StoreError),
    /// The worker.
    #[error("the worker does not judge results: {0}")]
    Worker(String),
}

/// Has results judged for ever.
pub async fn keep(hub: Arc<Hub>) {
    loop {
        match judge(&hub).await {
            // A result that came meanwhile has left its word.
            Ok(()) => drop(tokio::time::timeout(LOOK, hub.results.notified()).await),
            Err(error) => {
                tracing::warn!(error = %chain(&error), "results wait for their judgement");
                // Whatever comes meanwhile: a worker in trouble is not asked at the pace of its nodes.
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}

/// Has everything judged that waits.
///
/// # Errors
/// See [`JudgeError`].
pub async fn judge(hub: &Hub) -> Result<(), JudgeError> {
    loop {
        let waiting = hub.store.facts_to_judge().await?;
        if waiting.is_empty() {
            return Ok(());
        }
        let (waiting, too_long): (Vec<_>, Vec<_>) =
            waiting.into_iter().partition(|one| one.claim.len() <= HANDED_OVER);
        let refuse = |one: Waiting| {
            let message = "it is too long to be handed to the worker".to_owned();
            (one.number, Judged { refused: Some(Reason::Invalid), message })
        };
        if !too_long.is_empty() {
            hub.store.judged(too_long.into_iter().map(refuse).collect()).await?;
            hub.event_added();
        }
        if waiting.is_empty() {
            continue;
        }
        let claims =
            waiting.iter().map(|one| Claim { node: one.node.clone(), update: Der(one.claim.clone()) });
        let judged = match hub.worker.ask(Ask::Facts(claims.collect())).await {
            Told::Judged(judged) if judged.len() == waiting.len() => judged,
            Told::Failed(why) => return Err(JudgeError::Worker(why)),
            _ => {
                return Err(JudgeError::Worker(
                    "it answers another question; use the same bcd for both".into(),
                ));
            }
        };
        let refused = judged.iter().any(|judged| judged.refused.is_some());
        let numbers = waiting.into_iter().map(|one| one.number);
        hub.store.judged(numbers.zip(judged).collect()).await?;
        if refused {
            hub.event_added();
        }
    }
}
