//! The files that must survive a crash: written as a temporary file, synced, renamed, the directory synced.
//!
//! A [`StateDir`] holds its directory open and names files relative to it, so that nobody can put a symlink in the
//! way between a check and a use. Private files are 0600 from their creation, directories 0700; whatever belongs to
//! somebody else, or can be read by others, is refused with the command that mends it. All of it blocks.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::model::Exit;
use crate::write_fault::{self, Point};

/// Why a state file or directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// It belongs to another user.
    #[error("{path} belongs to uid {owner}, and bcd runs as uid {own}; run bcd as that user, or: chown {own} {path}", path = path.display())]
    Owner {
        /// What.
        path: PathBuf,
        /// To whom it belongs.
        owner: u32,
        /// As whom this process runs.
        own: u32,
    },
    /// Others may read or write it.
    #[error("{path} has mode {mode:04o} and would be open to other users; mend it: chmod {wanted:04o} {path}", path = path.display())]
    Mode {
        /// What.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
        /// What it should have.
        wanted: u32,
    },
    /// A symlink, a device, or a file where a directory is due.
    #[error("{path} is not a {wanted} (a symlink is not followed here); move it away", path = path.display())]
    Kind {
        /// What.
        path: PathBuf,
        /// `file` or `directory`.
        wanted: &'static str,
    },
    /// Larger than any file of that name can be.
    #[error("{path} is larger than {limit} bytes, so it is not what it should be; move it away", path = path.display())]
    TooLarge {
        /// What.
        path: PathBuf,
        /// The most that is read.
        limit: u64,
    },
    /// Another process holds the directory.
    #[error("another bcd process is changing {}; wait until it has ended", .0.display())]
    Busy(PathBuf),
    /// It is missing and cannot be made.
    #[error("cannot make the directory {path}{hint}; make it by hand, or choose another with --state DIR (for the status socket: --run DIR)", path = path.display(), hint = hint(*source))]
    NotMade {
        /// Which.
        path: PathBuf,
        /// The system's error.
        source: Errno,
    },
    /// The system refused.
    #[error("cannot {doing} {path}{hint}", path = path.display(), hint = hint(*source))]
    System {
        /// The operation, as a verb.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Its error.
        source: Errno,
    },
}

fn hint(errno: Errno) -> &'static str {
    match errno {
        Errno::ACCESS | Errno::PERM => " (run bcd as the user that owns it, or as root)",
        Errno::NOSPC | Errno::DQUOT => " (free some space)",
        Errno::ROFS => " (remount it writable)",
        _ => "",
    }
}

impl StateError {
    /// The system's error, where it is one.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::NotMade { source, .. } | Self::System { source, .. } => Some(source.raw_os_error()),
            _ => None,
        }
    }

    /// Where a directory should be, there is none.
    pub fn none(path: &Path) -> Self {
        system("open", path, Errno::NOENT)
    }

    /// Of an error of a file that this directory gave.
    pub fn of_io(doing: &'static str, path: &Path, error: &std::io::Error) -> Self {
        system(doing, path, errno_of(error))
    }

    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Owner { .. } | Self::Mode { .. } | Self::Kind { .. } => Exit::Permission,
            Self::System { source, .. } | Self::NotMade { source, .. }
                if matches!(*source, Errno::ACCESS | Errno::PERM) =>
            {
                Exit::Permission
            }
            Self::Busy(_) => Exit::TryLater,
            Self::TooLarge { .. } | Self::System { .. } | Self::NotMade { .. } => Exit::CannotWrite,
        }
    }
}

/// A private directory, held open.
#[derive(Debug)]
pub struct StateDir {
    path: PathBuf,
    fd: OwnedFd,
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl StateDir {
    /// Opens a directory, making it (and what lies above it) where it is missing.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn ensure(path: &Path) -> Result<Self, StateError> {
        match Self::open(path)? {
            Some(dir) => Ok(dir),
            None => {
                make(path, Mode::RWXU)?;
                let missing = || system("open", path, Errno::NOENT);
                Self::open(path)?.ok_or_else(missing)
            }
        }
    }

    /// Opens a directory; absent when there is none.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open(path: &Path) -> Result<Option<Self>, StateError> {
        match rustix::fs::open(path, DIRECTORY, Mode::empty()) {
            Ok(fd) => Self::checked(path.to_owned(), fd).map(Some),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(directory_error(path, errno)),
        }
    }

    /// A directory within this one, made where it is missing.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn ensure_sub(&self, name: &str) -> Result<Self, StateError> {
        let path = self.path.join(name);
        match rustix::fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) => self.sync()?,
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(system("make", &path, errno)),
        }
        let fd = rustix::fs::openat(&self.fd, name, DIRECTORY, Mode::empty())
            .map_err(|errno| directory_error(&path, errno))?;
        Self::checked(path, fd)
    }

    fn checked(path: PathBuf, fd: OwnedFd) -> Result<Self, StateError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| system("look at", &path, errno))?;
        private(&path, &stat, 0o700)?;
        Ok(Self { path, fd })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the directory for this process until the guard is dropped; whoever else wants it is refused.
    ///
    /// # Errors
    /// Another process has it.
    pub fn lock(&self) -> Result<DirLock, StateError> {
        let fd = rustix::fs::openat(&self.fd, ".", DIRECTORY, Mode::empty())
            .map_err(|errno| system("open", &self.path, errno))?;
        match rustix::fs::flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(DirLock { _fd: fd }),
            Err(Errno::WOULDBLOCK) => Err(StateError::Busy(self.path.clone())),
            Err(errno) => Err(system("lock", &self.path, errno)),
        }
    }

    /// Reads a private file of at most `limit` bytes; absent when there is none.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>, StateError> {
        let path = self.path.join(name);
        fault(Point::StateRead, "read", &path)?;
        // NONBLOCK: a FIFO of that name must not hold the daemon at its start.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP) => return Err(StateError::Kind { path, wanted: "file" }),
            Err(errno) => return Err(system("open", &path, errno)),
        };
        let file = self.checked_file(path.clone(), fd)?;
        let mut bytes = Vec::new();
        file.take(limit.saturating_add(1))
            .read_to_end(&mut bytes)
            .map_err(|error| system("read", &path, errno_of(&error)))?;
        if bytes.len() as u64 > limit {
            return Err(StateError::TooLarge { path, limit });
        }
        Ok(Some(bytes))
    }

    /// Replaces a file as a whole: after a crash it is the old one or the new one.
    ///
    /// # Errors
    /// See [`StateError`]; the old file stays.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        let temporary = format!(".{name}.tmp");
        // One that a crash left behind; a new one is always made, so that its mode and owner are ours.
        self.remove_unsynced(&temporary)?;
        self.create(&temporary, bytes)?;
        fault(Point::StateRename, "replace", &self.path.join(name))?;
        rustix::fs::renameat(&self.fd, temporary.as_str(), &self.fd, name)
            .map_err(|errno| system("replace", &self.path.join(name), errno))?;
        self.sync()
    }

    /// Gives a file or directory another name, durably, and never that of another one.
    ///
    /// # Errors
    /// See [`StateError`]; it keeps its name. One that is taken is `EEXIST`.
    pub fn rename(&self, from: &str, to: &str) -> Result<(), StateError> {
        let path = self.path.join(from);
        fault(Point::StateRename, "rename", &path)?;
        let mut renamed = rustix::fs::renameat_with(&self.fd, from, &self.fd, to, RenameFlags::NOREPLACE);
        // A file system that does not know the flag.
        if renamed == Err(Errno::INVAL) {
            renamed = match rustix::fs::statat(&self.fd, to, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) => rustix::fs::renameat(&self.fd, from, &self.fd, to),
                Ok(_) => Err(Errno::EXIST),
                Err(errno) => Err(errno),
            };
        }
        renamed.map_err(|errno| system("rename", &path, errno))?;
        self.sync()
    }

    /// Creates a file that must not exist yet, durably.
    ///
    /// # Errors
    /// See [`StateError`]; a file of that name is `EEXIST`.
    pub fn write_new(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        self.create(name, bytes)?;
        self.sync()
    }

    fn create(&self, name: &str, bytes: &[u8]) -> Result<(), StateError> {
        let path = self.path.join(name);
        fault(Point::StateCreate, "create", &path)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| system("create", &path, errno))?;
        let mut file = File::from(fd);
        fault(Point::StateWrite, "write", &path)?;
        file.write_all(bytes).map_err(|error| system("write", &path, errno_of(&error)))?;
        fault(Point::StateSync, "sync", &path)?;
        file.sync_all().map_err(|error| system("sync", &path, errno_of(&error)))
    }

    /// Opens a private file to be read and added to, and makes it where it is missing, not durably yet.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn open_to_append(&self, name: &str) -> Result<File, StateError> {
        let path = self.path.join(name);
        // NONBLOCK: as in `read`.
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let fd = match rustix::fs::openat(&self.fd, name, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => fd,
            Err(Errno::LOOP | Errno::ISDIR) => return Err(StateError::Kind { path, wanted: "file" }),
            Err(errno) => return Err(system("open", &path, errno)),
        };
        self.checked_file(path, fd)
    }

    fn checked_file(&self, path: PathBuf, fd: OwnedFd) -> Result<File, StateError> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| system("look at", &path, errno))?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(StateError::Kind { path, wanted: "file" });
        }
        private(&path, &stat, 0o600)?;
        Ok(File::from(fd))
    }

    /// Gives a file another name, in the place of one that has it, not durably yet; a missing one is fine.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn rename_unsynced(&self, from: &str, to: &str) -> Result<(), StateError> {
        match rustix::fs::renameat(&self.fd, from, &self.fd, to) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(system("rename", &self.path.join(from), errno)),
        }
    }

    /// Removes a file, durably; a missing one is fine.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn remove(&self, name: &str) -> Result<(), StateError> {
        self.remove_unsynced(name)?;
        self.sync()
    }

    /// Removes a file, a link, or a directory with all that is in it, durably. No link is followed.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn remove_all(&self, name: &str) -> Result<(), StateError> {
        let path = self.path.join(name);
        let removed = match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => std::fs::remove_dir_all(&path).map_err(|error| errno_of(&error)),
            removed => removed,
        };
        removed.map_err(|errno| system("remove", &path, errno))?;
        self.sync()
    }

    fn remove_unsynced(&self, name: &str) -> Result<(), StateError> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => Err(system("remove", &self.path.join(name), errno)),
        }
    }

    /// The names in it, sorted; what is not UTF-8 is left out, since no file of ours is.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn names(&self) -> Result<Vec<String>, StateError> {
        let failed = |errno| system("list", &self.path, errno);
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            if let Ok(name) = entry.file_name().to_str()
                && !matches!(name, "." | "..")
            {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Makes names durable that were made, changed or taken away.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn sync(&self) -> Result<(), StateError> {
        fault(Point::StateDirSync, "sync", &self.path)?;
        rustix::fs::fsync(&self.fd).map_err(|errno| system("sync", &self.path, errno))
    }
}

/// A directory taken for this process.
#[derive(Debug)]
#[must_use = "dropping it gives the directory back"]
pub struct DirLock {
    _fd: OwnedFd,
}

/// Makes a directory with its parents; every parent that got a new entry is synced.
///
/// # Errors
/// See [`StateError`].
pub fn make(path: &Path, mode: Mode) -> Result<(), StateError> {
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut existed = false;
    match rustix::fs::mkdir(path, mode) {
        Ok(()) => {}
        // Synced all the same: whoever made it may have been killed before it was.
        Err(Errno::EXIST) => existed = true,
        Err(Errno::NOENT) if parent != Path::new(".") => {
            // Only the last one is ours alone.
            make(parent, Mode::from_raw_mode(0o755))?;
            rustix::fs::mkdir(path, mode)
                .map_err(|source| StateError::NotMade { path: path.to_owned(), source })?;
        }
        Err(source) => return Err(StateError::NotMade { path: path.to_owned(), source }),
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let above = rustix::fs::open(parent, flags, Mode::empty());
    if existed && above.is_err() {
        // Another user's folder that only lets pass: it was not this process that made the entry.
        return Ok(());
    }
    above.and_then(|fd| rustix::fs::fsync(fd.as_fd())).map_err(|errno| system("sync", parent, errno))
}

fn private(path: &Path, stat: &rustix::fs::Stat, wanted: u32) -> Result<(), StateError> {
    let own = rustix::process::geteuid().as_raw();
    let mode = stat.st_mode & 0o7777;
    if stat.st_uid != own {
        return Err(StateError::Owner { path: path.to_owned(), owner: stat.st_uid, own });
    }
    if mode & 0o077 != 0 {
        return Err(StateError::Mode { path: path.to_owned(), mode, wanted });
    }
    Ok(())
}

fn system(doing: &'static str, path: &Path, source: Errno) -> StateError {
    StateError::System { doing, path: path.to_owned(), source }
}

fn directory_error(path: &Path, errno: Errno) -> StateError {
    match errno {
        Errno::LOOP | Errno::NOTDIR => StateError::Kind { path: path.to_owned(), wanted: "directory" },
        errno => system("open", path, errno),
    }
}

/// A fault that a test asked for.
fn fault(point: Point, doing: &'static str, path: &Path) -> Result<(), StateError> {
    write_fault::check(point, path).map_err(|error| system(doing, path, errno_of(&error)))
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    fn dir() -> (tempfile::TempDir, StateDir) {
        let temp = tempfile::tempdir().unwrap();
        let state = StateDir::ensure(&temp.path().join("a/state")).unwrap();
        (temp, state)
    }

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn a_replaced_file_is_private_and_whole_and_leaves_no_temporary_file() {
        let (_temp, state) = dir();
        // What a crash left behind.
        std::fs::write(state.path().join(".identity.json.tmp"), "half").unwrap();
        state.write("identity.json", b"one").unwrap();
        state.write("identity.json", b"two").unwrap();
        assert_eq!(state.read("identity.json", 10).unwrap().unwrap(), b"two");
        assert_eq!(state.names().unwrap(), ["identity.json"]);
        assert_eq!(mode(&state.path().join("identity.json")), 0o600);
        assert_eq!(mode(state.path()), 0o700);
    }

    #[test]
    fn a_symlink_is_never_followed() {
        let (temp, state) = dir();
        let target = temp.path().join("target");
        std::fs::write(&target, "theirs").unwrap();
        symlink(&target, state.path().join("link")).unwrap();
        assert!(matches!(state.read("link", 10), Err(StateError::Kind { .. })));
        assert!(state.write_new("link", b"x").is_err());
        state.write("link", b"ours").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"theirs", "the link was replaced, not followed");

        symlink(state.path(), temp.path().join("other")).unwrap();
        let refused = StateDir::ensure(&temp.path().join("other")).unwrap_err();
        assert_eq!(refused.exit(), Exit::Permission, "{refused}");
    }

    #[test]
    fn a_file_or_directory_open_to_others_is_refused_with_the_mend() {
        let (_temp, state) = dir();
        state.write("f", b"x").unwrap();
        let file = state.path().join("f");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
        let text = state.read("f", 10).unwrap_err().to_string();
        assert!(text.contains(&format!("chmod 0600 {}", file.display())), "{text}");
        std::fs::set_permissions(state.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let text = StateDir::open(state.path()).unwrap_err().to_string();
        assert!(text.contains(&format!("chmod 0700 {}", state.path().display())), "{text}");
    }

    #[test]
    fn a_file_over_its_limit_is_refused() {
        let (_temp, state) = dir();
        state.write("f", b"12345").unwrap();
        assert!(matches!(state.read("f", 4), Err(StateError::TooLarge { .. })));
        assert!(state.read("f", 5).is_ok());
    }

    #[test]
    fn a_directory_taken_by_one_is_busy_for_another() {
        let (_temp, state) = dir();
        let lock = state.lock().unwrap();
        let refused = StateDir::open(state.path()).unwrap().unwrap().lock().unwrap_err();
        assert_eq!(refused.exit(), Exit::TryLater);
        drop(lock);
        assert!(state.lock().is_ok());
    }
}
