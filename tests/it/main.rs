//! Tests that need several parts, or the binary. One program: each further one would be linked for itself.

mod borders;
mod cli;
mod crash;
mod dependencies;
mod docs;
mod lab;
mod session;
mod sim;
mod source;
