//! `bcd`, the node agent. The modules stand in the order of a command's path; docs/architecture.md tells it.
//!
//! ```text
//! frame in → Verified<Command> → Admitted → Durable<Accepted> → Durable<Running> → effect → Durable<Done> → frame out
//! ```

pub mod model;

pub mod blocking;
pub mod clock;
pub mod failpoint;
pub mod mutant;
pub mod ports;
pub mod write_fault;

pub mod wire;

pub mod cli;
pub mod config;
pub mod log;
pub mod node;
pub mod state_dir;
pub mod status;
pub mod systemd;
pub mod waits;

pub mod session;

pub mod admission;

pub mod journal;

pub mod host;

pub mod exec;

pub mod upkeep;

pub mod identity;

pub mod bench;

#[cfg(feature = "fakehw")]
pub mod gateway;

#[cfg(feature = "fakehw")]
pub mod sim;
