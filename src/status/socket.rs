//! The status socket's two ends: one word in, one JSON document out, then the connection is closed.

use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::future::BoxFuture;
use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr};
use rustix::fs::Mode;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;

use crate::journal::export::Cursor;
use crate::model::Exit;
use crate::state_dir::{self, StateError};
use crate::upkeep::hold::WHY_BYTES;

/// The socket's name in the run directory.
pub const NAME: &str = "bcd.sock";
/// A request is a word, perhaps with a cursor that names a command.
const REQUEST_BYTES: u64 = 256;
/// A journal at its cap of 10,000 unacked results has an answer of a few MiB.
const ANSWER_BYTES: u64 = 64 << 20;
/// One question, from connect to close.
const PATIENCE: Duration = Duration::from_secs(5);
/// Questions answered at once; more wait in the listen queue.
const AT_ONCE: usize = 16;

/// What may be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Question {
    /// How the daemon is.
    Status,
    /// What stands in the journal.
    Journal,
    /// A page of everything in it: a line `{"next": cursor or null}`, then its lines.
    Export(Cursor),
    /// Whether it is sound.
    Check,
    /// To admit nothing from now on, for this why: a line of at most [`crate::upkeep::hold::WHY_BYTES`]. [`Changed`].
    Hold(String),
    /// To admit again. [`Changed`].
    Release,
}

/// The answer to a hold or a release.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Changed {
    /// Done; whether the node was held before.
    Before(bool),
    /// The daemon waits for its disk and has nothing to hold yet: the file alone counts.
    Waiting,
    /// Why it is not done, or not kept.
    Error(String),
}

impl Question {
    /// As it is asked.
    pub fn line(&self) -> String {
        match self {
            Self::Status => "status\n".into(),
            Self::Journal => "journal\n".into(),
            Self::Export(cursor) => format!("export {cursor}\n"),
            Self::Check => "check\n".into(),
            Self::Hold(why) => format!("hold {why}\n"),
            Self::Release => "release\n".into(),
        }
    }

    /// Reads what was asked; None for what is no question.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let line = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
        match line.split_once(' ') {
            None if line == "status" => Some(Self::Status),
            None if line == "journal" => Some(Self::Journal),
            None if line == "check" => Some(Self::Check),
            None if line == "release" => Some(Self::Release),
            Some(("hold", why)) if why.len() <= WHY_BYTES && !why.contains('\n') => {
                Some(Self::Hold(why.to_owned()))
            }
            Some(("export", cursor)) => cursor.parse().ok().map(Self::Export),
            _ => None,
        }
    }
}

/// Why there is no status socket.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Its directory.
    #[error(transparent)]
    Directory(#[from] StateError),
    /// Another daemon answers there.
    #[error("another bcd answers at {}; give this one a run directory of its own (--run DIR)", .0.display())]
    Taken(PathBuf),
    /// The system refused.
    #[error("cannot make the status socket {}", .path.display())]
    System {
        /// Where.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// A bound socket; removed when it is dropped.
#[derive(Debug)]
pub struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Socket {
    /// Binds the socket of a run directory, 0600: the daemon's user and root may ask. Needs a runtime.
    ///
    /// # Errors
    /// See [`BindError`].
    pub fn bind(run: &Path) -> Result<Self, BindError> {
        // Others may enter: later the directory holds files that workloads read.
        state_dir::make(run, Mode::from_raw_mode(0o755))?;
        let path = run.join(NAME);
        if BlockingStream::connect(&path).is_ok() {
            return Err(BindError::Taken(path));
        }
        let listener = listen(&path);
        listener
            .map(|listener| Self { listener, path: path.clone() })
            .map_err(|source| BindError::System { path, source })
    }

    /// Answers for ever. Dropping the future ends every conversation.
    pub async fn serve(
        self,
        answer: impl Fn(Question) -> BoxFuture<'static, Vec<u8>> + Clone + Send + Sync + 'static,
    ) {
        let mut conversations = JoinSet::new();
        loop {
            tokio::select! {
                biased;
                Some(_) = conversations.join_next() => {}
                accepted = self.listener.accept(), if conversations.len() < AT_ONCE => match accepted {
                    Ok((stream, _)) => {
                        conversations.spawn(converse(stream, answer.clone()));
                    }
                    // Out of descriptors, mostly: the others are worth more than an answer here.
                    Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
                },
            }
        }
    }
}

/// Listens at `path` with the mode in place before the first connection: between bind and listen nobody gets in.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = nix::sys::socket::socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    nix::sys::socket::bind(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    nix::sys::socket::listen(&socket, Backlog::new(32)?)?;
    UnixListener::from_std(socket.into())
}

async fn converse(mut stream: UnixStream, answer: impl Fn(Question) -> BoxFuture<'static, Vec<u8>>) {
    let talk = async {
        let mut word = Vec::new();
        (&mut stream).take(REQUEST_BYTES).read_to_end(&mut word).await?;
        if let Some(question) = Question::parse(&word) {
            stream.write_all(&answer(question).await).await?;
        }
        stream.shutdown().await
    };
    // Whoever asked and went away is not the daemon's concern.
    let _ = tokio::time::timeout(PATIENCE, talk).await;
}

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    /// Nobody listens.
    #[error("no bcd daemon answers at {}; start it (systemctl start bcd, or bcd node), or name its run directory (--run DIR)", .0.display())]
    NoDaemon(PathBuf),
    /// Not for this user.
    #[error("{} is for the daemon's user and root alone; ask again with sudo", .0.display())]
    Permission(PathBuf),
    /// The conversation broke.
    #[error("the daemon at {} did not answer", .path.display())]
    Broken {
        /// Where.
        path: PathBuf,
        /// How.
        source: std::io::Error,
    },
}

impl AskError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::NoDaemon(_) | Self::Broken { .. } => Exit::Unknown,
            Self::Permission(_) => Exit::Permission,
        }
    }
}

/// Asks the daemon of a run directory. Blocks, for a few seconds at most.
///
/// # Errors
/// See [`AskError`].
pub fn ask(run: &Path, question: &Question) -> Result<Vec<u8>, AskError> {
    use std::io::ErrorKind;
    let path = run.join(NAME);
    let mut stream = BlockingStream::connect(&path).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => AskError::NoDaemon(path.clone()),
        ErrorKind::PermissionDenied => AskError::Permission(path.clone()),
        _ => AskError::Broken { path: path.clone(), source: error },
    })?;
    let mut talk = || {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.write_all(question.line().as_bytes())?;
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut answer = Vec::new();
        (&mut stream).take(ANSWER_BYTES).read_to_end(&mut answer)?;
        if answer.is_empty() { Err(ErrorKind::UnexpectedEof.into()) } else { Ok(answer) }
    };
    talk().map_err(|source| AskError::Broken { path, source })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn asked(run: PathBuf, question: Question) -> Result<Vec<u8>, AskError> {
        tokio::task::spawn_blocking(move || ask(&run, &question)).await.unwrap()
    }

    #[test]
    fn a_hold_comes_with_its_why_and_a_line_too_long_or_of_no_sense_asks_nothing() {
        let parsed = |line: &str| Question::parse(line.as_bytes());
        for question in [Question::Hold(String::new()), Question::Hold("a b".into()), Question::Release] {
            assert_eq!(parsed(&question.line()), Some(question));
        }
        let long = "x".repeat(WHY_BYTES);
        assert_eq!(parsed(&format!("hold {long}\n")), Some(Question::Hold(long.clone())));
        for line in [format!("hold {long}x\n"), "hold\n".into(), "hold a\nb\n".into(), "release it\n".into()]
        {
            assert_eq!(parsed(&line), None, "{line:?}");
        }
        assert!(Question::Hold(long).line().len() as u64 <= REQUEST_BYTES);
    }

    #[tokio::test]
    async fn a_question_is_answered_and_the_socket_is_private() {
        let temp = tempfile::tempdir().unwrap();
        let run = temp.path().join("run");
        let socket = Socket::bind(&run).unwrap();
        let mode = std::fs::metadata(run.join(NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let serve = socket.serve(|question| Box::pin(async move { format!("{question:?}").into_bytes() }));
        let answers = async {
            // One that connects and says nothing holds nobody up.
            let _silent = UnixStream::connect(run.join(NAME)).await.unwrap();
            let status = asked(run.clone(), Question::Status).await.unwrap();
            (status, asked(run.clone(), Question::Journal).await.unwrap())
        };
        tokio::select! {
            biased;
            () = serve => unreachable!(),
            (status, journal) = answers => {
                assert_eq!(status, b"Status");
                assert_eq!(journal, b"Journal");
            }
        }
        assert!(!run.join(NAME).exists(), "the socket goes with its daemon");
    }

    #[tokio::test]
    async fn a_socket_left_by_a_dead_daemon_is_replaced_and_a_live_one_is_not() {
        let temp = tempfile::tempdir().unwrap();
        drop(std::os::unix::net::UnixListener::bind(temp.path().join(NAME)).unwrap());
        let socket = Socket::bind(temp.path()).unwrap();
        assert!(matches!(Socket::bind(temp.path()), Err(BindError::Taken(_))));
        drop(socket);
    }

    #[test]
    fn no_daemon_is_said_with_the_mend() {
        let temp = tempfile::tempdir().unwrap();
        let error = ask(temp.path(), &Question::Status).unwrap_err();
        assert_eq!(error.exit(), Exit::Unknown);
        assert!(error.to_string().contains("bcd node"), "{error}");
    }
}
