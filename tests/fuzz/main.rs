//! Hostile bytes: what a peer sends is mutated, and each parser is held to properties, not only to its life. Entries lie in
//! `tests/corpora`; docs/decisions/0096-hostile-bytes.md says how and why.
//!
//! A program of its own: its allocator counts.

#![allow(clippy::unwrap_used, reason = "clippy exempts test functions, and not their helpers")]

mod bodies;
mod certificates;
mod corpora;
mod envelopes;
mod frames;
mod grammar;
mod harness;
mod local;
mod memory;
mod mutate;
mod tickets;

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

/// When the corpora's certificates hold.
pub const NOW: bcd::model::ServerTime = bcd::model::ServerTime(1_790_000_000_000);
