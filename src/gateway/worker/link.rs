//! The way to the worker: of a gateway, and beneath it the one that the operator takes too.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, sleep, timeout_at};

use super::serve::RELAY_SOCKET;
use super::{Ask, Told, Worker};
use crate::blocking;
use crate::clock::Clock;
use crate::gateway::lines::{ClientError, Connection, Listener};
use crate::gateway::session::chain;
use crate::model::ServerTime;

/// A worker that does not run is waited for so long: it starts beside its gateway, or starts again.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks for it.
const AGAIN: Duration = Duration::from_millis(20);

/// A gateway's way to the worker of its deployment.
#[derive(Debug, Clone)]
pub struct Link(Where);

/// Where the worker is.
#[derive(Debug, Clone)]
pub(super) enum Where {
    /// Within this process, by its clock.
    Here(Arc<Worker>, Arc<dyn Clock>),
    /// Behind this socket.
    At(PathBuf),
}

impl Where {
    /// Asks; `answer` is what a worker of this process does.
    pub(super) async fn ask<Q: Serialize + Send + 'static>(
        &self,
        ask: Q,
        answer: fn(&Worker, Q, ServerTime) -> Told,
    ) -> Result<Told, ClientError> {
        match self {
            Self::Here(worker, clock) => Ok(within(worker, clock, ask, answer).await),
            Self::At(socket) => over(socket, &ask).await,
        }
    }
}

impl Link {
    /// To a worker within this process.
    pub fn here(worker: Arc<Worker>, clock: Arc<dyn Clock>) -> Self {
        Self(Where::Here(worker, clock))
    }

    /// To the process that serves that directory.
    pub fn at(worker: &Path) -> Self {
        Self(Where::At(worker.join(RELAY_SOCKET)))
    }

    /// The directory of a worker that is a process of its own.
    pub fn directory(&self) -> Option<&Path> {
        match &self.0 {
            Where::Here(..) => None,
            Where::At(socket) => socket.parent(),
        }
    }

    /// Asks.
    pub async fn ask(&self, ask: Ask) -> Told {
        self.0.ask(ask, Worker::answer).await.unwrap_or_else(|error| Told::Failed(chain(&error)))
    }
}

/// Asks a worker of this process, by this process's clock.
pub(super) async fn within<Q: Send + 'static>(
    worker: &Arc<Worker>,
    clock: &Arc<dyn Clock>,
    ask: Q,
    answer: fn(&Worker, Q, ServerTime) -> Told,
) -> Told {
    let now = ServerTime(clock.wall_ms());
    let worker = Arc::clone(worker);
    match blocking::run(move || answer(&worker, ask, now)).await {
        Ok(told) => told,
        Err(error) => Told::Failed(format!("the worker broke off: {error}")),
    }
}

/// Asks the worker that listens on a socket. One that is not there, or ends before it answers, is waited for and asked
/// again: whatever it is asked may be asked twice.
async fn over(socket: &Path, ask: &impl Serialize) -> Result<Told, ClientError> {
    let until = Instant::now() + PATIENCE;
    let answered = async {
        loop {
            let asked =
                async { Connection::open(Listener::Worker, socket.to_owned()).await?.call(ask).await };
            match asked.await {
                Err(ClientError::Unreachable { .. } | ClientError::Ended { .. })
                    if Instant::now() < until =>
                {
                    sleep(AGAIN).await;
                }
                answered => return answered,
            }
        }
    };
    // Twice the patience: an answer may take as long as the start did.
    timeout_at(until + PATIENCE, answered).await.unwrap_or_else(|_| {
        let source = Some(std::io::ErrorKind::TimedOut.into());
        Err(ClientError::Ended { who: Listener::Worker, path: socket.to_owned(), source })
    })
}
