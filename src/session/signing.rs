//! Results whose kind asks that the node signs them: signed when they are sent, by the key of the certificate in use then,
//! so that one which is said again after a renewal is signed anew. A key may take its time: off the runtime's thread.

use super::outbox::result_frame;
use crate::blocking;
use crate::journal::Durable;
use crate::model::{Done, ServerTime};
use crate::wire::dsse::SignError;
use crate::wire::pb;
use crate::wire::report::Signer;

/// The frame of a result, signed. One that cannot be signed now is given back; it is never said unsigned.
pub(super) async fn sign(
    signer: Signer,
    done: Durable<Done>,
    now: ServerTime,
) -> Result<pb::CommandUpdate, Durable<Done>> {
    let mut update = result_frame(&done);
    let signed = blocking::run(move || signer.sign_result(&mut update, now).map(|()| update)).await;
    match signed {
        Ok(Ok(update)) => return Ok(update),
        Ok(Err(error)) => waits(&done, &error),
        Err(error) => waits(&done, &error),
    }
    Err(done)
}

fn waits(done: &Done, error: &(dyn std::error::Error + 'static)) {
    tracing::error!(id = %done.id, error, "a result waits: the key of the node certificate cannot sign it");
}

/// The frames of results for Hello, signed where that is asked.
///
/// # Errors
/// The key cannot sign.
pub(super) async fn sign_all(
    signer: Signer,
    results: &[Durable<Done>],
    now: ServerTime,
) -> Result<Vec<pb::CommandUpdate>, SignError> {
    let to_sign: Vec<bool> = results.iter().map(|done| done.to_sign).collect();
    let mut updates: Vec<_> = results.iter().map(result_frame).collect();
    if !to_sign.contains(&true) {
        return Ok(updates);
    }
    blocking::run_or_unwind(move || {
        for (update, _) in updates.iter_mut().zip(to_sign).filter(|(_, to_sign)| *to_sign) {
            signer.sign_result(update, now)?;
        }
        Ok(updates)
    })
    .await
}
