//! Directories of gateways and workers, each 0700: one's own, which one process holds at a time, with its sockets and a
//! gateway's id, and that of the store, which gateways beside each other open one after the other.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg, OFlag};
use tokio::net::UnixListener;

use super::worker::write_whole;

/// Another gateway that opens the store is waited for so long.
const OPENING: Duration = Duration::from_secs(10);
/// Between two looks at it.
const TRY_AGAIN: Duration = Duration::from_millis(10);

/// Why a directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another process has it.
    #[error("another process runs on {0}; stop it, or name another directory with --state")]
    Held(PathBuf),
    /// Not ours alone.
    #[error("the directory {0} is open to others; close it with: chmod 700 {0}")]
    Open(PathBuf),
    /// Another gateway is in the middle of opening it.
    #[error("another gateway has been opening the store in {0} for {wait} s; look at that one first", wait = OPENING.as_secs())]
    Opening(PathBuf),
    /// It cannot be used.
    #[error("cannot use the directory {path}")]
    Io {
        /// The directory or a file in it.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// A directory that this process alone uses, until it is dropped.
#[derive(Debug)]
pub struct Held {
    dir: PathBuf,
    /// Made here, and removed in the end.
    sockets: Mutex<Vec<PathBuf>>,
    _lock: Flock<File>,
}

impl Held {
    /// Makes the directory when it is missing, and takes its lock. Blocks.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn take(dir: &Path) -> Result<Self, StateError> {
        make_closed(dir)?;
        match lock(&dir.join("lock"))? {
            Some(lock) => Ok(Self { dir: dir.to_owned(), sockets: Mutex::default(), _lock: lock }),
            None => Err(StateError::Held(dir.to_owned())),
        }
    }

    /// The gateway's id: `fresh` at its first start, the same ever after. Blocks.
    ///
    /// # Errors
    /// The file that keeps it cannot be read or made.
    pub fn id(&self, fresh: &str) -> Result<String, StateError> {
        let path = self.dir.join("id");
        match std::fs::read_to_string(&path) {
            Ok(id) if !id.trim().is_empty() => Ok(id.trim().to_owned()),
            Ok(_) => Err(io(&path)(std::io::ErrorKind::InvalidData.into())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                write_whole(&path, fresh.as_bytes()).map_err(io(&path))?;
                Ok(fresh.to_owned())
            }
            Err(error) => Err(io(&path)(error)),
        }
    }

    /// Listens on a socket of that name; what a dead process left there is removed, which the lock makes safe.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn socket(&self, name: &str) -> std::io::Result<UnixListener> {
        let path = self.dir.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Nobody else can reach it before its mode is set: the directory is 0700.
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        Ok(listener)
    }
}

/// The turn to open a store: its schema is made by one process.
#[derive(Debug)]
pub struct Opening {
    _lock: Flock<File>,
}

impl Opening {
    /// Makes the directory when it is missing, and waits for the turn. Blocks.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn wait(dir: &Path) -> Result<Self, StateError> {
        make_closed(dir)?;
        let path = dir.join("store.lock");
        let mut waited = Duration::ZERO;
        loop {
            if let Some(lock) = lock(&path)? {
                return Ok(Self { _lock: lock });
            }
            if waited >= OPENING {
                return Err(StateError::Opening(dir.to_owned()));
            }
            std::thread::sleep(TRY_AGAIN);
            waited += TRY_AGAIN;
        }
    }
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { path, source }
}

/// Makes a directory that is nobody else's, or finds that it is. Blocks.
///
/// # Errors
/// See [`StateError`].
pub fn make_closed(dir: &Path) -> Result<(), StateError> {
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(io(dir)(error)),
        _ => {}
    }
    let found = std::fs::symlink_metadata(dir).map_err(io(dir))?;
    if !found.is_dir() {
        return Err(io(dir)(std::io::ErrorKind::NotADirectory.into()));
    }
    if found.permissions().mode() & 0o077 != 0 {
        return Err(StateError::Open(dir.to_owned()));
    }
    Ok(())
}

/// Takes a lock file, made when it is missing; absent: another has it.
fn lock(path: &Path) -> Result<Option<Flock<File>>, StateError> {
    let file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(path)
        .map_err(io(path))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(io(path)(errno.into())),
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        for socket in self.sockets.get_mut().unwrap_or_else(PoisonError::into_inner) {
            let _ = std::fs::remove_file(socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_is_made_closed_and_held_by_one_gateway() {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = parent.path().join("gw");
        let held = Held::take(&dir).expect("taken");
        assert_eq!(std::fs::metadata(&dir).expect("there").permissions().mode() & 0o777, 0o700);
        assert!(matches!(Held::take(&dir), Err(StateError::Held(_))));
        drop(held);
        Held::take(&dir).expect("free again");
    }

    #[test]
    fn a_directory_that_others_may_read_is_refused_with_the_mend() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("chmod");
        let error = Held::take(dir.path()).expect_err("refused").to_string();
        assert!(error.contains("chmod 700"), "{error}");
    }
}
