//! One session a node: a pure state machine, and the one driver that performs what it says.

pub mod outbox;
pub mod working_clock;

pub use working_clock::WorkingClock;
