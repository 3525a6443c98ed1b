//! Restarting the machine.

use std::fmt::Debug;

use futures_util::future::BoxFuture;

/// Whoever can restart the machine.
pub trait Reboot: Send + Sync + Debug {
    /// Asks for it. Ok: the machine goes down soon, and this process with it; nothing is said of when.
    fn reboot(&self) -> BoxFuture<'static, Result<(), RebootError>>;
}

/// Why the machine does not go down, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RebootError {
    /// It was not asked for: nothing happens.
    #[error("the reboot was refused: {0}")]
    Refused(String),
    /// It may have been asked for.
    #[error("nobody knows whether the machine will restart: {0}")]
    Unanswered(String),
}
