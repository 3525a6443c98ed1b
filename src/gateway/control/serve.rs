//! The server of the control socket. A connection is a task and asks one thing at a time.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::{Request, Response};
use crate::gateway::body::{self, CommandBody};
use crate::gateway::command_state::State;
use crate::gateway::hub::{Hub, lock};
use crate::gateway::neighbours;
use crate::gateway::session::chain;
use crate::gateway::store::{Cancelled, NewCommand, StoreError};
use crate::gateway::worker::{Ask, Told};
use crate::model::{CommandId, NodeId};
use crate::wire::pb;

/// A request line, bytes, at most: a command's body with room for its escapes.
const LINE: u64 = 4 << 20;
/// A command or ticket lives at most this long, ten years: its end must be a time that can be written.
const LONGEST_LIFE_S: u64 = 10 * 365 * 24 * 3600;
/// Connections at once.
const CONNECTIONS: usize = 256;
/// After an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// A wait is cut here; the caller asks again.
const LONGEST_WAIT: Duration = Duration::from_secs(600);

/// A node that was told of its revocation ends its session within this; else the gateway does.
const LEAVES: Duration = Duration::from_secs(2);

/// An outage that was asked for is cut here.
const LONGEST_STOP: Duration = Duration::from_secs(60);

/// Serves the socket for ever.
pub(in crate::gateway) async fn serve(hub: Arc<Hub>, listener: UnixListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let hub = hub.clone();
                tokio::spawn(async move {
                    if let Err(error) = connection(&hub, stream).await {
                        tracing::debug!(%error, "a control connection broke");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a control connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection(hub: &Hub, stream: UnixStream) -> std::io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        (&mut read).take(LINE).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let response = if whole { answer_line(hub, &line).await } else { too_long() };
        let mut out = serde_json::to_vec(&response).unwrap_or_default();
        out.push(b'\n');
        write.write_all(&out).await?;
        if !whole {
            return Ok(());
        }
    }
}

fn too_long() -> Response {
    Response::Error(format!("a request may have at most {LINE} bytes"))
}

async fn answer_line(hub: &Hub, line: &[u8]) -> Response {
    match serde_json::from_slice(line) {
        Ok(request) => answer(hub, request).await,
        Err(error) => Response::Error(format!("not a request: {error}")),
    }
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
        Request::Enqueue { node, kind, args, ttl_s, id } => {
            enqueue(hub, node, &kind, &args, ttl_s, id).await?
        }
        Request::Cancel { id } => cancel(hub, id).await?,
        Request::Show { id } => Response::Command(store.command(id).await?.map(Box::new)),
        Request::Wait { id, timeout_ms } => wait(hub, &id, Duration::from_millis(timeout_ms)).await?,
        Request::List { node, limit } => Response::Commands(store.commands(node, limit).await?),
        Request::History => Response::Commands(store.history().await?),
        Request::Nodes => nodes(hub).await?,
        Request::Events { after, wait_ms } => events(hub, after, Duration::from_millis(wait_ms)).await?,
        Request::NodeEvents { node, after } => Response::NodeEvents(store.node_events(node, after).await?),
        Request::Ticket { uses, ttl_s, site } => ticket(hub, uses, ttl_s, site).await?,
        Request::Revoke { node, for_good } => revoke(hub, &node, for_good).await?,
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
        Request::Stats => stats(hub).await?,
        Request::StopStore { ms } => {
            store.stop(Duration::from_millis(ms).min(LONGEST_STOP)).await?;
            Response::Done
        }
    })
}

async fn enqueue(
    hub: &Hub,
    node: NodeId,
    kind: &str,
    args: &RawValue,
    ttl_s: u64,
    id: Option<CommandId>,
) -> Result<Response, StoreError> {
    if ttl_s > LONGEST_LIFE_S {
        return Ok(too_long_lived());
    }
    let id = id.unwrap_or_else(|| hub.with_rng(CommandId::random));
    let now = hub.now();
    let not_after = now.plus(Duration::from_secs(ttl_s));
    let body = CommandBody {
        trust_domain: &hub.settings.trust_domain,
        node_id: &node,
        id: &id,
        kind,
        issued_at: now,
        not_after,
        min_generation: 0,
        args,
    };
    let envelope = match hub.worker.ask(Ask::Command(body::text(&body))).await {
        Told::Signed(envelope) => envelope.into(),
        other => return Ok(unsigned(&other)),
    };
    let (lane, retry_safe) = body::routing(kind, args);
    let command = NewCommand {
        id: id.clone(),
        node: node.clone(),
        kind: kind.chars().take(128).collect(),
        lane,
        retry_safe,
        envelope,
        not_after,
        now,
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

fn too_long_lived() -> Response {
    Response::Error(format!("a life may have at most {LONGEST_LIFE_S} seconds"))
}

async fn cancel(hub: &Hub, id: CommandId) -> Result<Response, StoreError> {
    let Some(view) = hub.store.command(id.clone()).await? else { return Ok(unknown(&id)) };
    let cancellation = match hub.worker.ask(Ask::Cancel { node: view.node, id: id.clone() }).await {
        Told::Signed(envelope) => envelope.into(),
        other => return Ok(unsigned(&other)),
    };
    Ok(match hub.store.cancel(id.clone(), cancellation, hub.now()).await? {
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

/// The worker's word where a signature was asked for.
fn unsigned(told: &Told) -> Response {
    match told {
        Told::Failed(why) | Told::Refused { message: why, .. } => Response::Error(why.clone()),
        _ => Response::Error("the worker answered something else".into()),
    }
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

async fn ticket(hub: &Hub, uses: u32, ttl_s: u64, site: String) -> Result<Response, StoreError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if site.is_empty() || site.len() > 64 || !site.bytes().all(plain) {
        return Ok(Response::Error(format!("not a site: {site:?} (1 to 64 of A-Z a-z 0-9 . _ -)")));
    }
    if uses == 0 {
        return Ok(Response::Error("a ticket needs at least one use".into()));
    }
    if ttl_s > LONGEST_LIFE_S {
        return Ok(too_long_lived());
    }
    let expires_at = hub.now().plus(Duration::from_secs(ttl_s));
    let ask = Ask::Ticket { uses, expires_at, site, endpoints: every_endpoint(hub).await? };
    Ok(match hub.worker.ask(ask).await {
        Told::Ticket(line) => Response::Ticket(line),
        other => unsigned(&other),
    })
}

/// Where this gateway and its neighbours are, its own first.
async fn every_endpoint(hub: &Hub) -> Result<Vec<String>, StoreError> {
    let mut endpoints = hub.settings.endpoints.clone();
    for other in hub.store.gateways().await?.into_values().flatten() {
        if !endpoints.contains(&other) {
            endpoints.push(other);
        }
    }
    Ok(endpoints)
}

async fn revoke(hub: &Hub, node: &NodeId, for_good: bool) -> Result<Response, StoreError> {
    if for_good {
        let serials = hub.store.serials(node.clone()).await?;
        let notice = match hub.worker.ask(Ask::Revoke { node: node.clone(), serials }).await {
            Told::Signed(envelope) => pb::RevocationNotice { envelope: Some(envelope.into()) },
            other => return Ok(unsigned(&other)),
        };
        // Before the session is ended: a node that is not connected here hears the gateway's word alone.
        if let Some(live) = hub.session(node) {
            let frame = Some(pb::gateway_frame::Frame::RevocationNotice(notice));
            let _ = live.orders.send(pb::GatewayFrame { frame }).await;
            let left = tokio::time::timeout(LEAVES, live.orders.closed()).await;
            tracing::info!(%node, left = left.is_ok(), "the node was told that its certificate is revoked");
        }
    }
    let Some(count) = hub.store.revoke(node.clone()).await? else { return Ok(unknown_node(node)) };
    tracing::info!(%node, count, "certificates were revoked");
    neighbours::look_at(hub, node).await?;
    Ok(Response::Done)
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
