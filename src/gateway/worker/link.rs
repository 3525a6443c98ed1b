//! How a gateway reaches the worker.

use std::sync::Arc;

use super::{Ask, Told, Worker};
use crate::blocking;
use crate::clock::Clock;

/// A gateway's way to the worker of its deployment.
#[derive(Debug, Clone)]
pub struct Link {
    worker: Arc<Worker>,
    clock: Arc<dyn Clock>,
}

impl Link {
    /// To a worker within this process.
    pub fn here(worker: Arc<Worker>, clock: Arc<dyn Clock>) -> Self {
        Self { worker, clock }
    }

    /// Asks.
    pub async fn ask(&self, ask: Ask) -> Told {
        let now = crate::model::ServerTime(self.clock.wall_ms());
        let worker = Arc::clone(&self.worker);
        match blocking::run(move || worker.answer(ask, now)).await {
            Ok(told) => told,
            Err(error) => Told::Failed(format!("the worker broke off: {error}")),
        }
    }
}
