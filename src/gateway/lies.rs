//! What a faulty or hostile gateway does to its nodes, on demand.

use std::time::Duration;

use crate::model::ServerTime;

/// The lies of a gateway; by default none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Lies {
    /// Its Welcomes name a time this far ahead of its own.
    pub welcome_ahead: Duration,
    /// Its Welcomes name a time this far behind its own.
    pub welcome_behind: Duration,
    /// It hangs up after each Welcome.
    pub hangs_up: bool,
    /// It delivers the latest of a node's ended commands again, in each session.
    pub replays: bool,
}

impl Lies {
    /// The time that a Welcome names when it is `now`.
    pub fn welcome_time(&self, now: ServerTime) -> ServerTime {
        now.plus(self.welcome_ahead).minus(self.welcome_behind)
    }
}
