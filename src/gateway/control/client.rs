//! The client of the control socket.

use std::path::Path;

use super::{Request, Response};
use crate::gateway::CONTROL_SOCKET;
use crate::gateway::lines::{ClientError, Connection, Listener};

/// A connection to a gateway's control socket: one request at a time.
#[derive(Debug)]
pub struct Client(Connection);

impl Client {
    /// Connects to the gateway of a state directory.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn connect(state: &Path) -> Result<Self, ClientError> {
        Connection::open(Listener::Gateway, state.join(CONTROL_SOCKET)).await.map(Self)
    }

    /// Asks and waits for the answer. [`Response::Error`] comes as [`ClientError::Refused`].
    ///
    /// # Errors
    /// See [`ClientError`]. After an error the connection is of no use.
    pub async fn call(&mut self, request: &Request) -> Result<Response, ClientError> {
        match self.0.call(request).await? {
            Response::Error(why) => Err(ClientError::Refused(why)),
            response => Ok(response),
        }
    }
}
