//! What stands in the journal of one command: one enum of states, and the values that prove them.

use std::sync::Arc;

use crate::admission::Admitted;
use crate::model::ServerTime;

/// An accepted command: known durably, nothing done yet.
#[derive(Debug)]
pub struct Accepted {
    /// What was admitted.
    pub command: Arc<Admitted>,
    /// Executions so far; the next start is one more.
    pub attempt: u32,
}

/// A command whose effect may start, or may have started.
#[derive(Debug)]
pub struct Running {
    /// What was admitted.
    pub command: Arc<Admitted>,
    /// Which execution this is, from 1.
    pub attempt: u32,
    /// When it started, by the working clock.
    pub started: Option<ServerTime>,
}
