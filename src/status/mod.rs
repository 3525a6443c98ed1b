//! What the daemon says of itself to somebody on the same machine: a Unix socket, since bcd never listens on the
//! network.

pub mod report;
pub mod socket;

pub use report::Report;
