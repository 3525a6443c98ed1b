//! The reference gateway: what a node dials in tests, in the simulator, and where somebody has no control plane of
//! their own yet. It imports the words and the wire, never the agent, and shares no memory with one.
//!
//! Tasks: the accept loop hands TLS connections to tonic; each session is a task ([`session`]) over one bounded
//! queue to its node; one loop sweeps expired commands and flushes last-seen times; one serves the control socket;
//! one keeps the gateway's [`lease`]; one hears what other gateways of the store have written ([`neighbours`]); one has
//! the worker judge what nodes have signed ([`facts`]).
//! All durable state is the [`store`]'s, whose thread commits for everybody; what is in [`hub`] the next Hellos
//! rebuild. Order: a command is marked before it is sent, a result is stored before it is acked, per session frames
//! are handled in the order in which they came.

mod admission;
mod body;
mod command_state;
pub mod control;
mod credits;
mod facts;
mod forger;
pub mod hello;
mod house;
mod hub;
mod lease;
pub mod lies;
pub mod lines;
mod neighbours;
pub mod node_events;
pub mod peer;
mod renewals;
mod service;
mod serving;
mod session;
mod start;
mod state_dir;
mod store;
mod task;
mod tls;
mod trust;
pub mod update;
pub mod worker;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;

pub use admission::Limits;
pub use lies::Lies;
pub use serving::ServingFiles;
pub use state_dir::make_closed;
pub use store::VERIFIED;

use crate::clock::Clock;
use crate::model::limits::FRAME_BYTES;
use crate::model::{Lane, Reason};
use crate::ports::ByteStream;
use crate::wire::link::Endpoint;
use crate::wire::pb;
use crate::wire::version::Range;
use hub::{Hub, SessionEnd};
use service::Service;
use start::{Keeping, Opened};
use task::Task;
use worker::Link;

/// The control socket's name in a gateway's directory.
pub const CONTROL_SOCKET: &str = "control.sock";
/// Bounds of the heartbeat interval. A shorter one would end sessions of nodes that keep to their own bounds.
const HEARTBEAT: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// HTTP/2 PING.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// A PING's answer must come within this.
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls at once on one connection: a session, a renewal, and tunnels.
const CALLS: u32 = 64;
/// Connections between TLS and HTTP/2.
const CONNECTIONS: usize = 64;
/// A stop waits this long for connections to close.
const STOP: Duration = Duration::from_secs(3);

/// How a gateway is to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its directory; made 0700 when missing.
    pub state: PathBuf,
    /// The directory of the store, which several gateways may share; absent: its own directory.
    pub store: Option<PathBuf>,
    /// The worker of the deployment.
    pub worker: Link,
    /// Where it listens; port 0 is any free one.
    pub listen: SocketAddr,
    /// The deployment's name.
    pub trust_domain: String,
    /// What tickets name; empty: the bound address.
    pub endpoints: Vec<Endpoint>,
    /// Told to nodes; clamped to what a node clamps it to, 1 to 60 s.
    pub heartbeat_interval: Duration,
    /// Told to nodes.
    pub lane_credits: BTreeMap<Lane, u32>,
    /// The lease holds this long after a renewal; the gateways of a store have the same.
    pub lease_life: Duration,
    /// The serving certificate; absent: one of the development CA, made at each start.
    pub serving: Option<ServingFiles>,
    /// Admission.
    pub limits: Limits,
    /// Versions spoken.
    pub protocol: Range,
    /// Every session is for upgrades alone. Commands of other kinds are sent all the same: the node is to refuse them.
    pub upgrade_only: bool,
    /// What it does that an honest gateway does not.
    pub lies: Lies,
    /// Seed of everything random; absent: the system's.
    pub seed: Option<u64>,
}

impl Options {
    /// The defaults for a state directory.
    pub fn new(state: PathBuf, listen: SocketAddr, worker: Link) -> Self {
        Self {
            state,
            store: None,
            worker,
            listen,
            trust_domain: worker::TRUST_DOMAIN.into(),
            endpoints: Vec::new(),
            heartbeat_interval: Duration::from_secs(10),
            lane_credits: lane_credits(),
            lease_life: Duration::from_secs(20),
            serving: None,
            limits: Limits::default(),
            protocol: Range::OWN,
            upgrade_only: false,
            lies: Lies::default(),
            seed: None,
        }
    }
}

/// Credits of a node, where none are asked for.
pub fn lane_credits() -> BTreeMap<Lane, u32> {
    BTreeMap::from([(Lane::Control, 8), (Lane::Work, 16), (Lane::Bulk, 2)])
}

/// Options with what only a running gateway knows.
struct Settings {
    gateway_id: String,
    trust_domain: String,
    heartbeat_interval: Duration,
    lane_credits: BTreeMap<Lane, u32>,
    lease_life: Duration,
    limits: Limits,
    protocol: Range,
    upgrade_only: bool,
    lies: Lies,
}

/// Why a gateway does not run, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The state directory cannot be used.
    #[error(transparent)]
    State(#[from] state_dir::StateError),
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] store::OpenError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] store::StoreError),
    /// The worker gave no certificate to serve with.
    #[error("the worker gives no certificate to serve with: {0}")]
    Unserved(String),
    /// The serving certificate cannot be used.
    #[error(transparent)]
    Serving(#[from] serving::ServingError),
    /// TLS cannot be set up.
    #[error(transparent)]
    Tls(#[from] tls::TlsError),
    /// The address cannot be listened on.
    #[error("cannot listen on {0}; name a free address with --listen")]
    Listen(SocketAddr, #[source] std::io::Error),
    /// The control socket cannot be made.
    #[error("cannot listen on the control socket {0} (its path may have at most 107 bytes)")]
    Control(PathBuf, #[source] std::io::Error),
    /// A gateway that is to forge has no keys to forge with.
    #[error(transparent)]
    Forger(#[from] forger::ForgerError),
    /// Another process has this gateway's id.
    #[error(
        "another process has taken the lease of gateway {0}; a directory of a gateway must not be copied"
    )]
    Replaced(Arc<str>),
    /// The server ended by itself.
    #[error("the gateway's server failed")]
    Serve(#[from] tonic::transport::Error),
}

impl GatewayError {
    /// Whether the store is of a newer release.
    pub fn is_newer_store(&self) -> bool {
        matches!(self, Self::Open(store::OpenError::Newer { .. }))
    }
}

/// A running gateway, as its starter sees it.
#[derive(Debug, Clone)]
pub struct Ready {
    /// The bound address.
    pub address: SocketAddr,
    /// The control socket.
    pub control: PathBuf,
}

/// Runs a gateway until `stop` resolves.
///
/// # Errors
/// See [`GatewayError`].
pub async fn run(
    options: Options,
    clock: Arc<dyn Clock>,
    ready: impl FnOnce(Ready),
    stop: impl Future<Output = ()>,
) -> Result<(), GatewayError> {
    let Opened { held, store } = start::open(&options, &clock, store::Mode::Thread).await?;
    let listener = TcpListener::bind(options.listen).await;
    let listener = listener.map_err(|error| GatewayError::Listen(options.listen, error))?;
    let address = listener.local_addr().map_err(|error| GatewayError::Listen(options.listen, error))?;
    let control_path = options.state.join(CONTROL_SOCKET);
    let control =
        held.socket(CONTROL_SOCKET).map_err(|error| GatewayError::Control(control_path.clone(), error))?;
    let (hub, keeping) = start::prepare(options, address, store, clock).await?;
    ready(Ready { address, control: control_path });
    let controlling = control::serve(hub.clone(), control);
    let result = serve(hub, listener, controlling, keeping, stop).await;
    drop(held);
    result
}

/// Runs a gateway for ever in this very thread: connections come from a channel, the store writes inline, and there is
/// no socket. Dropping the future ends it as a kill would, but for what goes on in connections: those are the caller's
/// to cut.
///
/// # Errors
/// See [`GatewayError`].
pub async fn run_in_memory(
    options: Options,
    clock: Arc<dyn Clock>,
    connections: mpsc::Receiver<ByteStream>,
    ready: impl FnOnce(Local),
) -> Result<(), GatewayError> {
    let Opened { held, store } = start::open(&options, &clock, store::Mode::Inline).await?;
    let address = options.listen;
    let (hub, keeping) = start::prepare(options, address, store, clock).await?;
    ready(Local(hub.clone()));
    let result = serve(hub, connections, std::future::pending(), keeping, std::future::pending()).await;
    drop(held);
    result
}

/// A gateway in this process, asked without its control socket.
#[derive(Clone)]
pub struct Local(Arc<Hub>);

impl std::fmt::Debug for Local {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Local").finish_non_exhaustive()
    }
}

impl Local {
    /// Asks as over the control socket.
    pub async fn ask(&self, request: control::Request) -> control::Response {
        control::answer(&self.0, request).await
    }

    /// Nothing is written any more: a killed gateway's sessions end without a trace of it.
    pub fn close_store(&self) {
        if let Some(inline) = self.0.store.inline() {
            inline.close();
        }
    }

    /// Its store does nothing for so long.
    pub fn hold_store(&self, time: Duration) {
        if let Some(inline) = self.0.store.inline() {
            inline.hold(time);
        }
    }
}

async fn serve(
    hub: Arc<Hub>,
    listener: impl tls::Listener,
    controlling: impl Future<Output = ()> + Send + 'static,
    keeping: Keeping,
    stop: impl Future<Output = ()>,
) -> Result<(), GatewayError> {
    let (connections, incoming) = mpsc::channel(CONNECTIONS);
    let accepting = Task::spawn(tls::accept(listener, hub.tls.clone(), connections));
    let controlling = Task::spawn(controlling);
    let housekeeping = Task::spawn(house::keep(hub.clone()));
    let trusting = Task::spawn(trust::follow(hub.clone()));
    let judging = Task::spawn(facts::keep(hub.clone()));
    let listening = Task::spawn(neighbours::listen(hub.clone(), keeping.last_notice));
    let reloading = Task::spawn(async move {
        match keeping.serving {
            Some((serving, files)) => serving::reload(serving, files).await,
            None => std::future::pending().await,
        }
    });
    let mut leasing = Task::spawn(lease::keep(hub.clone(), keeping.grant));
    let service = Service(hub.clone());
    let node = pb::node_server::NodeServer::new(service.clone()).max_decoding_message_size(FRAME_BYTES);
    let enrollment =
        pb::enrollment_server::EnrollmentServer::new(service).max_decoding_message_size(FRAME_BYTES);
    let (close, closed) = oneshot::channel::<()>();
    let mut server = Task::spawn(
        tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(KEEP_ALIVE))
            .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
            .max_concurrent_streams(CALLS)
            .add_service(node)
            .add_service(enrollment)
            .serve_with_incoming_shutdown(ReceiverStream::new(incoming), async {
                let _ = closed.await;
            }),
    );

    let failed = {
        let store = hub.store.clone();
        async move { store.failed().await }
    };
    let mut result = Ok(());
    tokio::select! {
        biased;
        () = stop => {}
        () = failed => result = Err(store::StoreError::Closed.into()),
        _ = &mut leasing => result = Err(GatewayError::Replaced(hub.store.gateway().clone())),
        ended = &mut server => result = ended.unwrap_or(Ok(())).map_err(GatewayError::from),
    }
    drop((accepting, controlling, housekeeping, trusting, judging, listening, reloading));
    hub.set_draining(true);
    for (_, live) in hub.sessions() {
        live.end(SessionEnd::told(Code::Unavailable, Reason::Draining, "the gateway is stopping"));
    }
    let _ = close.send(());
    if !server.is_finished() {
        let _ = tokio::time::timeout(STOP, &mut server).await;
    }
    drop(server);
    drop(leasing);
    // A store that others hold must not hold up the end; the lease then runs out by itself.
    if tokio::time::timeout(STOP, house::leave(&hub)).await.is_err() {
        tracing::warn!("the store could not be told of the gateway's stop");
    }
    result
}
