//! How a gateway reaches the worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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

#[derive(Debug, Clone)]
enum Where {
    Here(Arc<Worker>, Arc<dyn Clock>),
    At(PathBuf),
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

    /// Asks.
    pub async fn ask(&self, ask: Ask) -> Told {
        match &self.0 {
            Where::Here(worker, clock) => within(worker, clock, |worker, now| worker.answer(ask, now)).await,
            Where::At(socket) => over(socket, &ask).await,
        }
    }
}

/// Asks a worker of this process, by this process's clock.
pub(super) async fn within(
    worker: &Arc<Worker>,
    clock: &Arc<dyn Clock>,
    ask: impl FnOnce(&Worker, ServerTime) -> Told + Send + 'static,
) -> Told {
    let now = ServerTime(clock.wall_ms());
    let worker = Arc::clone(worker);
    match blocking::run(move || ask(&worker, now)).await {
        Ok(told) => told,
        Err(error) => Told::Failed(format!("the worker broke off: {error}")),
    }
}

async fn over(socket: &Path, ask: &Ask) -> Told {
    let until = Instant::now() + PATIENCE;
    let answered = async {
        let mut connection = loop {
            match Connection::open(Listener::Worker, socket.to_owned()).await {
                Ok(connection) => break connection,
                Err(ClientError::Unreachable { .. }) if Instant::now() < until => sleep(AGAIN).await,
                Err(error) => return Err(error),
            }
        };
        connection.call(ask).await
    };
    // Twice the patience: an answer may take as long as the start did.
    match timeout_at(until + PATIENCE, answered).await {
        Ok(Ok(told)) => told,
        Ok(Err(error)) => Told::Failed(chain(&error)),
        Err(_) => Told::Failed(format!("the worker on {} did not answer", socket.display())),
    }
}
