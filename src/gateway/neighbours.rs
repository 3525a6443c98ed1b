//! The other gateways of the store: what they have written for this one to act on.

use std::sync::Arc;
use std::time::Duration;

use super::hub::{Hub, SessionEnd};
use super::session::{cancel_frame, chain};
use super::store::{Heard, Notice, Standing, StoreError};
use crate::model::{CommandId, NodeId};
use crate::wire::pb;

/// Between two looks where other gateways are known: what a command for a node elsewhere waits at most.
const NEAR: Duration = Duration::from_millis(50);
/// Between two looks where none is.
const ALONE: Duration = Duration::from_secs(1);

/// Listens for ever, from behind a notice.
pub async fn listen(hub: Arc<Hub>, last: u64) {
    let mut heard = Heard { last, ..Heard::default() };
    loop {
        tokio::time::sleep(if hub.store.is_shared() { NEAR } else { ALONE }).await;
        match hub.store.notices(heard.last).await {
            Ok(now) => {
                if now.last_event != heard.last_event {
                    hub.event_added();
                }
                for notice in &now.notices {
                    if let Err(error) = act(&hub, notice).await {
                        tracing::error!(error = %chain(&error), ?notice, "a notice was not acted on");
                    }
                }
                heard = now;
            }
            Err(error) => tracing::error!(error = %chain(&error), "the other gateways were not heard"),
        }
    }
}

async fn act(hub: &Hub, notice: &Notice) -> Result<(), StoreError> {
    match notice {
        Notice::Work(node) => {
            if let Some(live) = hub.session(node) {
                live.poke.notify_one();
            }
            Ok(())
        }
        Notice::Cancelled(id) => tell_cancelled(hub, id).await,
        Notice::Session(node) => look_at(hub, node).await,
    }
}

/// Tells a command's node, if its session is here, that the command was cancelled.
///
/// # Errors
/// See [`StoreError`].
pub async fn tell_cancelled(hub: &Hub, id: &CommandId) -> Result<(), StoreError> {
    let Some((node, cancellation)) = hub.store.cancellation(id.clone()).await? else { return Ok(()) };
    if let Some(live) = hub.session(&node) {
        let frame = pb::gateway_frame::Frame::Cancel(cancel_frame(id, cancellation));
        // A session that cannot take it sends it again after its next first heartbeat.
        let _ = live.orders.try_send(pb::GatewayFrame { frame: Some(frame) });
    }
    Ok(())
}

/// Ends a node's session, if it is here and has no right to be any more.
///
/// # Errors
/// See [`StoreError`].
pub async fn look_at(hub: &Hub, node: &NodeId) -> Result<(), StoreError> {
    let Some(live) = hub.session(node) else { return Ok(()) };
    match hub.store.standing(node.clone(), live.epoch, live.serial.clone()).await? {
        Standing::Newest => {}
        Standing::Superseded => live.end(SessionEnd::superseded()),
        Standing::Revoked(reason) => {
            let signed = hub.store.signed_revocation(node.clone()).await?;
            live.end(SessionEnd::revoked(reason).with_revocation(signed));
        }
        Standing::Unknown => live.end(SessionEnd::unknown_node()),
    }
    Ok(())
}
