//! Tests that need several parts or the binary.

mod session;
