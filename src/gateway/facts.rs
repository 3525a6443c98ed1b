//! Hands results that their nodes have signed to the worker, which judges them: the gateway has no key that could, and its
//! own word is not asked for. A result is stored and acked before; it waits in the store until it is judged.

use std::sync::Arc;
use std::time::Duration;

use super::hub::Hub;
use super::session::chain;
use super::store::StoreError;
use super::worker::{Ask, Claim, Told};
use crate::wire::der::Der;

/// What another gateway has left behind is looked for this often.
const LOOK: Duration = Duration::from_secs(5);
/// A store or a worker that did not do its part is asked again after this.
const AGAIN: Duration = Duration::from_secs(1);

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
        let wait = match judge(&hub).await {
            Ok(()) => LOOK,
            Err(error) => {
                tracing::warn!(error = %chain(&error), "results wait for their judgement");
                AGAIN
            }
        };
        // A result that came meanwhile has left its word.
        let _ = tokio::time::timeout(wait, hub.results.notified()).await;
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
