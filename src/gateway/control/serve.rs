//! The server of the control socket.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::net::UnixListener;
use tokio::time::Instant;

use super::{Request, Response};
use crate::gateway::body::{self, Relayed};
use crate::gateway::command_state::State;
use crate::gateway::hub::{Hub, lock};
use crate::gateway::session::chain;
use crate::gateway::store::{Cancelled, NewCommand, StoreError};
use crate::gateway::{lines, neighbours};
use crate::model::{CommandId, NodeId};
use crate::wire::dsse::Envelope;
use crate::wire::pb;
use crate::wire::status::REVOCATION_BYTES;

/// A wait is cut here; the caller asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(600);
/// A node that was told of its revocation ends its session within this; else the gateway does.
const LEAVES: Duration = Duration::from_secs(2);
/// An outage that was asked for is cut here.
const LONGEST_STOP: Duration = Duration::from_secs(60);

/// Serves the socket for ever.
pub(in crate::gateway) async fn serve(hub: Arc<Hub>, listener: UnixListener) {
    lines::serve(listener, move |request: Result<Request, String>| {
        let hub = hub.clone();
        async move {
            match request {
                Ok(request) => answer(&hub, request).await,
                Err(why) => Response::Error(why),
            }
        }
    })
    .await;
}

/// Does what is asked, or says why not.
pub(in crate::gateway) async fn answer(hub: &Hub, request: Request) -> Response {
    match carry_out(hub, request).await {
        Ok(response) => response,
        Err(error) => {
            tracing::error!(error = %chain(&error), "a control request failed");
            Response::Error(chain(&error))
        }
    }
}

async fn carry_out(hub: &Hub, request: Request) -> Result<Response, StoreError> {
    let store = &hub.store;
    Ok(match request {
        Request::Enqueue { command } => enqueue(hub, command).await?,
        Request::Cancel { id, cancellation } => cancel(hub, id, cancellation).await?,
        Request::Show { id } => Response::Command(store.command(id).await?.map(Box::new)),
        Request::Wait { id, timeout_ms } => wait(hub, &id, Duration::from_millis(timeout_ms)).await?,
        Request::List { node, limit } => Response::Commands(store.commands(node, limit).await?),
        Request::History => Response::Commands(store.history().await?),
        Request::Nodes => nodes(hub).await?,
        Request::Events { after, wait_ms } => events(hub, after, Duration::from_millis(wait_ms)).await?,
        Request::NodeEvents { node, after } => Response::NodeEvents(store.node_events(node, after).await?),
        Request::Revoke { node, revocation } => revoke(hub, &node, revocation).await?,
        Request::Unrevoke { node } => match store.unrevoke(node.clone()).await? {
            Some(_) => Response::Done,
            None => unknown_node(&node),
        },
        Request::Delete { node } => delete(hub, &node).await?,
        Request::Drain { max_delay_ms } => drain(hub, max_delay_ms),
        Request::Undrain => {
            hub.set_draining(false);
            Response::Done
        }
        Request::Worker => Response::Worker(hub.worker.directory().map(Path::to_path_buf)),
        Request::Stats => stats(hub).await?,
        Request::Reform => {
            hub.reform();
            Response::Done
        }
        Request::StopStore { ms } => {
            store.stop(Duration::from_millis(ms).min(LONGEST_STOP)).await?;
            Response::Done
        }
    })
}

async fn enqueue(hub: &Hub, envelope: Envelope) -> Result<Response, StoreError> {
    let Relayed { node_id: node, id, kind, not_after, args } = match body::read(&envelope.payload) {
        Ok(body) => body,
        Err(error) => return Ok(Response::Error(format!("not a command: {error}"))),
    };
    let (lane, retry_safe) = body::routing(&kind, &args);
    let command = NewCommand {
        id: id.clone(),
        node: node.clone(),
        kind: kind.chars().take(128).collect(),
        lane,
        retry_safe,
        envelope: envelope.into(),
        not_after,
        now: hub.now(),
    };
    Ok(match hub.store.enqueue(command).await? {
        Ok(()) => {
            if let Some(live) = hub.session(&node) {
                live.poke.notify_one();
            }
            Response::Enqueued(id)
        }
        Err(error) => Response::Error(error.to_string()),
    })
}

async fn cancel(hub: &Hub, id: CommandId, cancellation: Envelope) -> Result<Response, StoreError> {
    Ok(match hub.store.cancel(id.clone(), cancellation.into(), hub.now()).await? {
        Cancelled::Unknown => unknown(&id),
        Cancelled::Ended => Response::Done,
        Cancelled::Now(_) => {
            hub.commands_ended(&[id]);
            Response::Done
        }
        Cancelled::Tell(_) => {
            neighbours::tell_cancelled(hub, &id).await?;
            Response::Done
        }
    })
}

fn unknown(id: &CommandId) -> Response {
    Response::Error(format!("no command {id} is known here"))
}

/// Between two looks at a command that somebody waits for.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The same where the command may end at another gateway, which wakes nobody here.
const LOOK_AGAIN_SHARED: Duration = Duration::from_millis(100);

async fn wait(hub: &Hub, id: &CommandId, timeout: Duration) -> Result<Response, StoreError> {
    let until = Instant::now() + timeout.min(LONGEST_WAIT);
    loop {
        let end = hub.command_end(id);
        let view = hub.store.command(id.clone()).await?;
        let over =
            view.as_ref().is_none_or(|view| State::from_name(&view.state).is_none_or(State::is_terminal));
        if over || Instant::now() >= until {
            return Ok(Response::Command(view.map(Box::new)));
        }
        // A session that is cut off between its commit and this wake-up wakes nobody, so the store is asked again.
        let look_again = if hub.store.is_shared() { LOOK_AGAIN_SHARED } else { LOOK_AGAIN };
        let _ = tokio::time::timeout_at(until.min(Instant::now() + look_again), end).await;
    }
}

async fn nodes(hub: &Hub) -> Result<Response, StoreError> {
    let mut nodes = hub.store.nodes(hub.now()).await?;
    for view in &mut nodes {
        if let Some(live) = hub.session(&view.node) {
            view.last_seen_age_ms = u64::try_from(live.silent_for().as_millis()).unwrap_or(u64::MAX);
            view.free_credits = lock(&live.free_credits).clone();
        }
    }
    Ok(Response::Nodes(nodes))
}

async fn events(hub: &Hub, after: u64, wait: Duration) -> Result<Response, StoreError> {
    let until = Instant::now() + wait.min(LONGEST_WAIT);
    loop {
        let mut next = std::pin::pin!(hub.next_event());
        next.as_mut().enable();
        let events = hub.store.events(after).await?;
        if !events.is_empty() || tokio::time::timeout_at(until, next).await.is_err() {
            return Ok(Response::Events(events));
        }
    }
}

async fn revoke(hub: &Hub, node: &NodeId, revocation: Option<Envelope>) -> Result<Response, StoreError> {
    let signed: Option<Bytes> =
        revocation.clone().map(|envelope| pb::Envelope::from(envelope).encode_to_vec().into());
    let too_long = signed.as_ref().is_some_and(|signed| signed.len() > REVOCATION_BYTES);
    let here = hub.session(node).is_some();
    // Before the session is ended; a node that is not connected here hears it with its next refusal.
    if let Some((envelope, live)) = revocation.zip(hub.session(node)) {
        let notice = pb::RevocationNotice { envelope: Some(envelope.into()) };
        let frame = Some(pb::gateway_frame::Frame::RevocationNotice(notice));
        let _ = live.orders.send(pb::GatewayFrame { frame }).await;
        let left = tokio::time::timeout(LEAVES, live.orders.closed()).await;
        tracing::info!(%node, left = left.is_ok(), "the node was told that its certificate is revoked");
    }
    let Some(count) = hub.store.revoke(node.clone(), signed).await? else { return Ok(unknown_node(node)) };
    tracing::info!(%node, count, "certificates were revoked");
    neighbours::look_at(hub, node).await?;
    Ok(match too_long && !here {
        true => Response::Error(format!(
            "the certificates of {node} are revoked here, but it has no session at this gateway, and what was signed of it is \
             too long for a refusal: nobody has told it that this is for good. Ask the gateway that has it (bcd ctl nodes), or \
             let its certificates run out"
        )),
        false => Response::Done,
    })
}

async fn delete(hub: &Hub, node: &NodeId) -> Result<Response, StoreError> {
    let Some(ended) = hub.store.delete(node.clone()).await? else { return Ok(unknown_node(node)) };
    hub.commands_ended(&ended);
    neighbours::look_at(hub, node).await?;
    Ok(Response::Done)
}

fn unknown_node(node: &NodeId) -> Response {
    Response::Error(format!("no node {node} has joined this gateway; list them with: bcd ctl nodes"))
}

fn drain(hub: &Hub, max_delay_ms: u32) -> Response {
    hub.set_draining(true);
    for (node, live) in hub.sessions() {
        let drain = pb::Drain { max_delay_ms: max_delay_ms.min(60_000), reason: "drain".into() };
        let frame = pb::GatewayFrame { frame: Some(pb::gateway_frame::Frame::Drain(drain)) };
        if live.orders.try_send(frame).is_err() {
            tracing::warn!(%node, "a drain could not be told");
        }
    }
    Response::Done
}

async fn stats(hub: &Hub) -> Result<Response, StoreError> {
    let refused = hub.take_refused();
    if !refused.is_empty() {
        hub.store.count_refusals(refused).await?;
    }
    Ok(Response::Stats(hub.store.stats().await?))
}
