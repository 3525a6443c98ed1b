//! Opening a byte stream to a gateway.

use std::fmt::Debug;
use std::io;

use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};

/// What TLS runs over: bytes both ways, in order.
pub trait Bytes: AsyncRead + AsyncWrite + Send + Unpin + Debug {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + Debug> Bytes for T {}

/// A stream of any make.
pub type ByteStream = Box<dyn Bytes>;

/// Whoever can reach a gateway.
pub trait Connect: Send + Sync + Debug {
    /// Opens a stream to a host, by name or address (an IPv6 one without brackets). The caller sets the deadline;
    /// dropping the future gives the attempt up.
    fn connect(&self, host: &str, port: u16) -> BoxFuture<'static, Result<ByteStream, ConnectError>>;
}

/// Why there is no stream.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nobody knows the name.
    #[error("the name {host} cannot be resolved")]
    Unresolved {
        /// Which.
        host: String,
        /// Why.
        source: io::Error,
    },
    /// No address of it answers.
    #[error("cannot connect to {host} port {port}")]
    Unreachable {
        /// The host as it was given.
        host: String,
        /// TCP port.
        port: u16,
        /// What the last address tried said.
        source: io::Error,
    },
}
