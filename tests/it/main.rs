//! Tests that need several parts, or the binary. One program: each further one would be linked for itself.

#![allow(clippy::unwrap_used, reason = "clippy exempts test functions, and not their helpers")]

mod away;
mod backlog;
mod bench;
mod borders;
mod cli;
mod crash;
mod dependencies;
mod docs;
mod enrolment;
mod faults;
mod gateways;
mod hostile;
mod lab;
mod lies;
mod mutants;
mod reboot;
mod rejoin;
mod renewal;
mod session;
mod sim;
mod source;
mod unit;
mod versions;
mod veto;
mod worker;
