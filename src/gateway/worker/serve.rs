//! The worker's process: its directory, and the two sockets in it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::net::UnixListener;

use super::link::within;
use super::{Ask, Options, Order, Told, Worker, WorkerError};
use crate::blocking;
use crate::clock::Clock;
use crate::gateway::lines;
use crate::gateway::state_dir::StateError;
use crate::gateway::task::Task;
use crate::model::ServerTime;

/// What gateways ask comes in here.
pub const RELAY_SOCKET: &str = "relay.sock";
/// What the operator orders comes in here.
pub const OPERATOR_SOCKET: &str = "operator.sock";
/// Between two looks at a directory that another worker has.
const STAND_BY: Duration = Duration::from_millis(50);

/// Why a worker does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Its directory, and what lies in it.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A socket.
    #[error("cannot listen on the worker's socket {0} (its path may have at most 107 bytes)")]
    Socket(PathBuf, #[source] std::io::Error),
}

/// Runs a worker until `stop` resolves. While another one serves the directory it stands by.
///
/// # Errors
/// See [`ServeError`].
pub async fn run(
    options: Options,
    clock: Arc<dyn Clock>,
    ready: impl FnOnce(&Path),
    stop: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let mut stop = std::pin::pin!(stop);
    let worker = tokio::select! {
        biased;
        () = &mut stop => return Ok(()),
        worker = open(&options, &clock) => Arc::new(worker?),
    };
    let listen = |name: &str| {
        worker.held.socket(name).map_err(|error| ServeError::Socket(options.state.join(name), error))
    };
    let (relay, operator) = (listen(RELAY_SOCKET)?, listen(OPERATOR_SOCKET)?);
    let relaying = Task::spawn(hear::<Ask>(relay, (worker.clone(), clock.clone()), Worker::answer));
    let ordering = Task::spawn(hear::<Order>(operator, (worker, clock), Worker::obey));
    ready(&options.state);
    stop.await;
    drop((relaying, ordering));
    Ok(())
}

/// Answers what comes in on one of the sockets.
async fn hear<Q: DeserializeOwned + Send + 'static>(
    listener: UnixListener,
    (worker, clock): (Arc<Worker>, Arc<dyn Clock>),
    answer: fn(&Worker, Q, ServerTime) -> Told,
) {
    lines::serve(listener, move |asked: Result<Q, String>| {
        let (worker, clock) = (Arc::clone(&worker), Arc::clone(&clock));
        async move {
            match asked {
                Ok(asked) => within(&worker, &clock, asked, answer).await,
                Err(why) => Told::Failed(why),
            }
        }
    })
    .await;
}

/// Opens the worker, when whoever has its directory lets it go.
async fn open(options: &Options, clock: &Arc<dyn Clock>) -> Result<Worker, WorkerError> {
    let mut told = false;
    loop {
        let (options, now) = (options.clone(), ServerTime(clock.wall_ms()));
        let dir = options.state.clone();
        match blocking::run_or_unwind(move || Worker::open(&options, now)).await {
            Err(WorkerError::Directory(StateError::Held(_))) => {
                if !std::mem::replace(&mut told, true) {
                    tracing::info!(dir = %dir.display(), "another worker serves the directory; standing by");
                }
                tokio::time::sleep(STAND_BY).await;
            }
            opened => return opened,
        }
    }
}
