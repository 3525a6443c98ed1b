//! Sockets for what reaches beyond this process: a trait each, with its errors. The hands that fill them on a machine
//! are in [`crate::host`].

pub mod connect;
pub mod reboot;

pub use connect::{ByteStream, Connect, ConnectError};
pub use reboot::{Reboot, RebootError};
