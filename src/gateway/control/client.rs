//! The client of the control socket, for `bcd ctl` and the simulator.

use std::path::{Path, PathBuf};

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::{Request, Response};
use crate::gateway::CONTROL_SOCKET;

/// A connection to a gateway's control socket: one request at a time.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing listens.
    #[error("no gateway runs on {path}; start one with: bcd gateway --state {dir}", dir = dir_of(path).display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The socket is somebody else's.
    #[error("no permission to talk to the gateway on {0}; run as the user that runs it")]
    Permission(PathBuf),
    /// The gateway ended in the middle.
    #[error("the gateway on {path} ended before it answered")]
    Ended {
        /// The socket.
        path: PathBuf,
        /// Why; absent: it closed the connection in order.
        source: Option<std::io::Error>,
    },
    /// The answer is of another build.
    #[error(
        "the gateway on {path} answers in words that this build does not know; use the same bcd for both"
    )]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// What could not be read.
        source: serde_json::Error,
    },
    /// The gateway says no; why.
    #[error("{0}")]
    Refused(String),
}

fn dir_of(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}

impl Client {
    /// Connects to the gateway of a state directory.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn connect(state: &Path) -> Result<Self, ClientError> {
        let path = state.join(CONTROL_SOCKET);
        match UnixStream::connect(&path).await {
            Ok(stream) => Ok(Self { stream: BufReader::new(stream), path }),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(ClientError::Permission(path))
            }
            Err(source) => Err(ClientError::Unreachable { path, source }),
        }
    }

    /// Asks and waits for the answer. [`Response::Error`] comes as [`ClientError::Refused`].
    ///
    /// # Errors
    /// See [`ClientError`]. After an error the connection is of no use.
    pub async fn call(&mut self, request: &Request) -> Result<Response, ClientError> {
        let foreign = |path: &Path, source| ClientError::Foreign { path: path.to_owned(), source };
        let mut line = serde_json::to_vec(request).map_err(|source| foreign(&self.path, source))?;
        line.push(b'\n');
        let ended = |source| ClientError::Ended { path: self.path.clone(), source: Some(source) };
        self.stream.get_mut().write_all(&line).await.map_err(ended)?;
        line.clear();
        self.stream.read_until(b'\n', &mut line).await.map_err(ended)?;
        if line.last() != Some(&b'\n') {
            return Err(ClientError::Ended { path: self.path.clone(), source: None });
        }
        match serde_json::from_slice(&line).map_err(|source| foreign(&self.path, source))? {
            Response::Error(why) => Err(ClientError::Refused(why)),
            response => Ok(response),
        }
    }
}
