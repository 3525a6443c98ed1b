//! One agent: its files, its chance, its join and its start, through the code of `bcd join` and `bcd node`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;

use super::seed;
use crate::clock::Clock;
use crate::model::NodeId;

/// An agent that is not running.
#[derive(Debug, Clone)]
pub struct Agent {
    /// Its number.
    pub index: usize,
    state: PathBuf,
    seed: u64,
}

/// Why an agent cannot join or start.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// Its task died.
    #[error("an agent's task died: {0}")]
    Panicked(String),
}

impl Agent {
    /// The agent of this number below `work`.
    pub fn new(work: &Path, seed: u64, index: usize) -> Self {
        Self { index, state: work.join("nodes").join(index.to_string()), seed }
    }
}

/// Placeholder.
pub struct Node;
impl Node {
    /// Placeholder.
    pub async fn run(self, _stop: tokio::sync::watch::Receiver<bool>) -> crate::model::Exit {
        todo!()
    }
}
impl Agent {
    /// Its own chance.
    pub fn stream(&self) -> StdRng {
        seed::stream(self.seed, "agent", u64::try_from(self.index).unwrap_or(u64::MAX))
    }

    /// Placeholder.
    pub async fn join(&self, _ticket: &str) -> Result<NodeId, AgentError> {
        todo!()
    }
    /// Placeholder.
    pub async fn build(&self, _rng: &mut StdRng, _clock: &Arc<dyn Clock>) -> Result<Node, AgentError> {
        todo!()
    }
}
