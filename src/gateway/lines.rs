//! One JSON request a line, one JSON answer a line, over a Unix socket that its directory closes to others: how people
//! talk to a gateway and to a worker, and a gateway to its worker.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;

/// A request line, bytes, at most: a command's body with room for its escapes.
pub const LINE: u64 = 4 << 20;
/// Connections at once.
const CONNECTIONS: usize = 256;
/// After an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Who listens on a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// `bcd gateway`.
    Gateway,
    /// `bcd worker`.
    Worker,
}

impl std::fmt::Display for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gateway => "gateway",
            Self::Worker => "worker",
        })
    }
}

/// Why a request was not answered.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nothing listens.
    #[error("no {who} runs on {path}; {mend}", mend = mend(*who, path))]
    Unreachable {
        /// Who should.
        who: Listener,
        /// The socket.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The socket is somebody else's.
    #[error("no permission to talk to the {who} on {path}; run as the user that runs it")]
    Permission {
        /// Who listens.
        who: Listener,
        /// The socket.
        path: PathBuf,
    },
    /// It ended in the middle.
    #[error("the {who} on {path} ended before it answered")]
    Ended {
        /// Who did.
        who: Listener,
        /// The socket.
        path: PathBuf,
        /// Why; absent: it closed the connection in order.
        source: Option<std::io::Error>,
    },
    /// The answer is of another build.
    #[error("the {who} on {path} answers in words that this build does not know; use the same bcd for both")]
    Foreign {
        /// Who answers.
        who: Listener,
        /// The socket.
        path: PathBuf,
        /// What could not be read.
        source: serde_json::Error,
    },
    /// The answer is one to another question.
    #[error("the {0} answered another question; use the same bcd for both")]
    Otherwise(Listener),
    /// It says no; why.
    #[error("{0}")]
    Refused(String),
}

fn mend(who: Listener, path: &Path) -> String {
    match who {
        Listener::Gateway => {
            format!("start one with: bcd gateway --state {}", path.parent().unwrap_or(path).display())
        }
        // A new one would make new keys, which no node knows.
        Listener::Worker => "it is started with its gateway; one that runs apart is named by --worker".into(),
    }
}

/// A connection: one request at a time.
#[derive(Debug)]
pub struct Connection {
    who: Listener,
    stream: BufReader<UnixStream>,
    path: PathBuf,
}

impl Connection {
    /// Connects.
    ///
    /// # Errors
    /// Nobody listens, or not for this user.
    pub async fn open(who: Listener, path: PathBuf) -> Result<Self, ClientError> {
        match UnixStream::connect(&path).await {
            Ok(stream) => Ok(Self { who, stream: BufReader::new(stream), path }),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Err(ClientError::Permission { who, path })
            }
            Err(source) => Err(ClientError::Unreachable { who, path, source }),
        }
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// See [`ClientError`]. After an error the connection is of no use.
    pub async fn call<A: DeserializeOwned>(&mut self, request: &impl Serialize) -> Result<A, ClientError> {
        let who = self.who;
        let foreign = |path: &Path, source| ClientError::Foreign { who, path: path.to_owned(), source };
        let mut line = serde_json::to_vec(request).map_err(|source| foreign(&self.path, source))?;
        line.push(b'\n');
        let ended = |source| ClientError::Ended { who, path: self.path.clone(), source: Some(source) };
        self.stream.get_mut().write_all(&line).await.map_err(ended)?;
        line.clear();
        self.stream.read_until(b'\n', &mut line).await.map_err(ended)?;
        if line.last() != Some(&b'\n') {
            return Err(ClientError::Ended { who, path: self.path.clone(), source: None });
        }
        serde_json::from_slice(&line).map_err(|source| foreign(&self.path, source))
    }
}

/// Serves a socket for ever: a connection is a task and asks one thing at a time. `answer` is given each request, or
/// why a line is none.
pub async fn serve<Q, A, F, Answered>(listener: UnixListener, answer: F)
where
    Q: DeserializeOwned + Send + 'static,
    A: Serialize + Send + 'static,
    F: Fn(Result<Q, String>) -> Answered + Clone + Send + Sync + 'static,
    Answered: Future<Output = A> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let answer = answer.clone();
                tokio::spawn(async move {
                    if let Err(error) = connection(stream, answer).await {
                        tracing::debug!(%error, "a connection on a local socket broke");
                    }
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection on a local socket");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn connection<Q, A, F, Answered>(stream: UnixStream, answer: F) -> std::io::Result<()>
where
    Q: DeserializeOwned,
    A: Serialize,
    F: Fn(Result<Q, String>) -> Answered,
    Answered: Future<Output = A>,
{
    let (read, mut write) = stream.into_split();
    let mut read = BufReader::new(read);
    let mut line = Vec::new();
    loop {
        line.clear();
        (&mut read).take(LINE).read_until(b'\n', &mut line).await?;
        if line.is_empty() {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let request = match whole {
            true => serde_json::from_slice(&line).map_err(|error| format!("not a request: {error}")),
            false => Err(format!("a request may have at most {LINE} bytes")),
        };
        let mut out = serde_json::to_vec(&answer(request).await).unwrap_or_default();
        out.push(b'\n');
        write.write_all(&out).await?;
        if !whole {
            return Ok(());
        }
    }
}
