//! Results whose kind asks that the node signs them: signed when they are sent, by the key of the certificate in use then,
//! so that one which is said again after a renewal is signed anew. A key may take its time, or never answer: off the
//! runtime's thread, and with a deadline.

use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;

use super::outbox::result_frame;
use crate::blocking;
use crate::journal::Durable;
use crate::model::{Done, ServerTime};
use crate::wire::dsse::SignError;
use crate::wire::pb;
use crate::wire::report::Signer;

/// Longer than any key takes that works: others go on without one that does not.
const DEADLINE: Duration = Duration::from_secs(5);

/// A result that could not be signed now; it is never said unsigned.
pub(super) struct Unsigned {
    pub done: Durable<Done>,
    /// Ends when the key has answered after all; absent: it has.
    pub hangs: Option<BoxFuture<'static, ()>>,
}

/// Why a key has not signed.
#[derive(Debug, thiserror::Error)]
pub(super) enum KeyTrouble {
    #[error(transparent)]
    Sign(#[from] SignError),
    #[error("it has not answered for {} s", DEADLINE.as_secs())]
    Hangs,
    #[error(transparent)]
    Ended(#[from] tokio::task::JoinError),
}

/// The frame of a result, signed.
pub(super) async fn sign(
    signer: Signer,
    done: Durable<Done>,
    now: ServerTime,
) -> Result<pb::CommandUpdate, Unsigned> {
    let mut update = result_frame(&done);
    let mut signing = work(move || signer.sign_result(&mut update, now).map(|()| update));
    let (error, hangs) = match within(&mut signing).await {
        Ok(update) => return Ok(update),
        Err(KeyTrouble::Hangs) => (KeyTrouble::Hangs, Some(signing.map(drop).boxed())),
        Err(error) => (error, None),
    };
    let error: &(dyn std::error::Error + 'static) = &error;
    tracing::error!(id = %done.id, error, "a result waits: the key of the node certificate cannot sign it");
    Err(Unsigned { done, hangs })
}

/// The frames of results for Hello, signed where that is asked.
///
/// # Errors
/// The key cannot sign.
pub(super) async fn sign_all(
    signer: Signer,
    results: &[Durable<Done>],
    now: ServerTime,
) -> Result<Vec<pb::CommandUpdate>, KeyTrouble> {
    let to_sign: Vec<bool> = results.iter().map(|done| done.to_sign).collect();
    let mut updates: Vec<_> = results.iter().map(result_frame).collect();
    if !to_sign.contains(&true) {
        return Ok(updates);
    }
    let mut signing = work(move || {
        for (update, _) in updates.iter_mut().zip(to_sign).filter(|(_, to_sign)| *to_sign) {
            signer.sign_result(update, now)?;
        }
        Ok(updates)
    });
    within(&mut signing).await
}

type Work<T> = BoxFuture<'static, Result<T, KeyTrouble>>;

fn work<T: Send + 'static>(sign: impl FnOnce() -> Result<T, SignError> + Send + 'static) -> Work<T> {
    async { Ok(blocking::run(sign).await??) }.boxed()
}

async fn within<T>(signing: &mut Work<T>) -> Result<T, KeyTrouble> {
    tokio::time::timeout(DEADLINE, signing).await.unwrap_or(Err(KeyTrouble::Hangs))
}
