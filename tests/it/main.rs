//! Tests that need several parts, or the binary. One program: each further one would be linked for itself.

mod cli;
mod session;
