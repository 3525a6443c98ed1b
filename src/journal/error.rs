//! What can go wrong with the file, and the words for it.

use std::io;
use std::path::PathBuf;

use nix::errno::Errno;
use rusqlite::ffi::{SQLITE_FULL, SQLITE_IOERR_DIR_FSYNC, SQLITE_IOERR_FSYNC, sqlite3_system_errno};
use rusqlite::{Connection, ErrorCode};

use super::rescue::Failed;
use super::trouble::{self, Trouble};
use crate::model::{Exit, NodeId, Reason};

/// Why a journal cannot be opened. The file is where it was, and as it was.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another daemon holds it.
    #[error("another bcd (pid {pid}) holds {path}; stop it first (systemctl stop bcd, or kill {pid})")]
    Held {
        /// The journal.
        path: PathBuf,
        /// The holder; 0 when it has not written its pid.
        pid: u32,
    },
    /// Others could read or change the state.
    #[error("{path} is open to others (mode {mode:04o}); mend it with: chmod {wanted:o} {path}")]
    Mode {
        /// The directory or file.
        path: PathBuf,
        /// What it has.
        mode: u32,
        /// What it must have.
        wanted: u32,
    },
    /// The state belongs to another user.
    #[error("{path} belongs to uid {owner}, this process runs as uid {me}; mend it with: chown {me} {path}")]
    Owner {
        /// The directory or file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// This process.
        me: u32,
    },
    /// A symbolic link, or something else that bcd did not make.
    #[error("{path} is not a {wanted} but {found}; bcd follows no link in its state directory: remove it")]
    Shape {
        /// The path.
        path: PathBuf,
        /// `directory` or `regular file`.
        wanted: &'static str,
        /// What it is.
        found: &'static str,
    },
    /// The journal of another node.
    #[error(
        "{path} is the journal of node {found}, and this is node {expected}; if this machine joined anew, move \
         all that is the old one's aside with: mkdir {dir}/of-{found} && mv {path}* {dir}/begun {dir}/outcome \
         {dir}/of-{found}/", dir = dir_of(path)
    )]
    ForeignNode {
        /// The journal.
        path: PathBuf,
        /// Whose it is.
        found: String,
        /// Whose it should be.
        expected: NodeId,
    },
    /// Written by a newer release.
    #[error(
        "{path} was written by a newer bcd (schema {found}, this one knows {known}); it was left untouched: start \
         the newer release"
    )]
    Newer {
        /// The journal.
        path: PathBuf,
        /// Its schema.
        found: i64,
        /// The newest schema of this build.
        known: i64,
    },
    /// A database, but none of ours.
    #[error("{path} is a database that bcd did not write; move it away")]
    NotAJournal {
        /// The file.
        path: PathBuf,
    },
    /// A join may replace a rowless journal only.
    #[error(
        "{path} holds {rows} commands, and a join replaces only a journal without any; move it aside with: mkdir \
         {dir}/old && mv {path}* {dir}/old/", dir = dir_of(path)
    )]
    NotEmpty {
        /// The journal.
        path: PathBuf,
        /// Its commands and tombstones.
        rows: u64,
    },
    /// A setting that durability stands on did not hold.
    #[error("{path}: SQLite did not take the setting {name} = {wanted}, it has {found}")]
    Setting {
        /// The journal.
        path: PathBuf,
        /// The pragma.
        name: &'static str,
        /// What was set.
        wanted: String,
        /// What was read back.
        found: String,
    },
    /// The file system refused.
    #[error("cannot {action} {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// The kernel's word.
        source: io::Error,
    },
    /// A sync failed: what was written before it may be lost, whatever a later one says.
    #[error("cannot sync {path}")]
    Sync {
        /// The file or directory.
        path: PathBuf,
        /// The kernel's word.
        source: io::Error,
    },
    /// SQLite refused.
    #[error("cannot open the journal {path}")]
    Sqlite {
        /// The journal.
        path: PathBuf,
        /// SQLite's word.
        source: rusqlite::Error,
    },
}

fn dir_of(path: &std::path::Path) -> std::path::Display<'_> {
    path.parent().unwrap_or(path).display()
}

impl OpenError {
    /// Whether SQLite says that the file is damaged.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Sqlite { source, .. } if is_corrupt(source))
    }

    /// Whether space on the disk would mend it.
    pub(super) fn wants_space(&self) -> bool {
        match self {
            Self::Io { source, .. } => source
                .raw_os_error()
                .is_some_and(|errno| trouble::why(Errno::from_raw(errno)) == Reason::Disk),
            Self::Sqlite { source, .. } => source.sqlite_error_code() == Some(ErrorCode::DiskFull),
            _ => false,
        }
    }

    /// What a disk is to blame for; the file is to be left alone until it is mended. Absent for anything else.
    pub fn hindrance(&self) -> Option<Hindrance> {
        let trouble =
            |why, source: &dyn std::error::Error| Trouble { why, detail: format!("{self}: {source}") };
        match self {
            Self::Io { source, .. } => {
                let why = trouble::hindrance(Errno::from_raw(source.raw_os_error()?))?;
                Some(Hindrance::Passing(trouble(why, source)))
            }
            Self::Sync { source, .. } => {
                let why = trouble::why(source.raw_os_error().map_or(Errno::EIO, Errno::from_raw));
                Some(Hindrance::FailedSync(trouble(why, source)))
            }
            Self::Sqlite { source, .. } => {
                let WriteError { why, cause, .. } = WriteError::of(source, None);
                cause.hindrance(trouble(why, source))
            }
            _ => None,
        }
    }

    /// How a subcommand that meets it ends.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Held { .. } => Exit::TryLater,
            Self::Mode { .. } | Self::Owner { .. } | Self::Shape { .. } => Exit::Permission,
            Self::ForeignNode { .. }
            | Self::Newer { .. }
            | Self::NotAJournal { .. }
            | Self::NotEmpty { .. } => Exit::ForeignState,
            Self::Io { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => Exit::Permission,
            Self::Setting { .. } | Self::Io { .. } | Self::Sync { .. } | Self::Sqlite { .. } => {
                Exit::CannotWrite
            }
        }
    }
}

/// What a disk does to a journal that is to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hindrance {
    /// It passes when the disk is mended: this process may try again.
    Passing(Trouble),
    /// A sync failed. Pages that never reached the disk may be called clean by now, so that this process would read
    /// them, sync them in vain and believe it: it must not open the journal again.
    FailedSync(Trouble),
}

/// What a write that did not happen is due to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// A disk that is full, read-only or broken.
    Disk,
    /// A sync that failed.
    FailedSync,
    /// The operation or what it met in the file: no mended disk changes it.
    Other,
}

impl Cause {
    fn of(error: &rusqlite::Error) -> Self {
        if is_failed_sync(error) {
            return Self::FailedSync;
        }
        match error.sqlite_error_code() {
            Some(
                ErrorCode::DiskFull
                | ErrorCode::ReadOnly
                | ErrorCode::SystemIoFailure
                | ErrorCode::CannotOpen,
            ) => Self::Disk,
            _ => Self::Other,
        }
    }

    fn hindrance(self, trouble: Trouble) -> Option<Hindrance> {
        match self {
            Self::Disk => Some(Hindrance::Passing(trouble)),
            Self::FailedSync => Some(Hindrance::FailedSync(trouble)),
            Self::Other => None,
        }
    }
}

/// A write that did not happen: nothing was started, nothing was lost.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the journal cannot be written ({why}): {detail}")]
pub struct WriteError {
    /// `disk`, `read-only`, `io-error` or `stopping`.
    pub why: Reason,
    /// What it is due to.
    pub cause: Cause,
    /// SQLite's or the kernel's words.
    pub detail: String,
}

impl WriteError {
    /// `errno` is the kernel's word behind an error of I/O, where SQLite has kept it.
    pub(super) fn of(error: &rusqlite::Error, errno: Option<Errno>) -> Self {
        let why = match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Reason::Disk,
            Some(ErrorCode::ReadOnly) => Reason::ReadOnly,
            // SQLite calls a passed quota, and a file system that was remounted, an error of I/O as any other.
            Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) => {
                errno.map_or(Reason::IoError, trouble::why)
            }
            _ => Reason::IoError,
        };
        let detail = match errno {
            Some(errno) => format!("{error}: {}", errno.desc()),
            None => error.to_string(),
        };
        Self { why, cause: Cause::of(error), detail }
    }

    /// Of a file beside the database that cannot be read.
    pub(super) fn of_file(error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw);
        let why = errno.and_then(trouble::hindrance);
        let cause = why.map_or(Cause::Other, |_| Cause::Disk);
        Self { why: why.unwrap_or(Reason::IoError), cause, detail: error.to_string() }
    }

    fn other(why: Reason, detail: impl Into<String>) -> Self {
        Self { why, cause: Cause::Other, detail: detail.into() }
    }

    pub(super) fn stopping() -> Self {
        Self::other(Reason::Stopping, "the journal is closed")
    }

    pub(super) fn writer_gone() -> Self {
        Self::other(Reason::IoError, "the journal's writer has ended")
    }

    pub(super) fn no_thread(error: &io::Error) -> Self {
        Self::other(Reason::IoError, format!("the writer's thread cannot be started: {error}"))
    }

    pub(super) fn ended(failed: Failed) -> Self {
        let cause = if failed == Failed::Sync { Cause::FailedSync } else { Cause::Other };
        Self { why: Reason::IoError, cause, detail: failed.detail().into() }
    }

    /// What a disk is to blame for; absent for anything else.
    pub fn hindrance(&self) -> Option<Hindrance> {
        self.cause.hindrance(Trouble { why: self.why, detail: self.to_string() })
    }
}

/// After a failed sync the kernel may have dropped the pages and forgotten the error: a later sync that succeeds
/// proves nothing about them.
pub(super) fn is_failed_sync(error: &rusqlite::Error) -> bool {
    let code = error.sqlite_error().map(|error| error.extended_code);
    matches!(code, Some(SQLITE_IOERR_FSYNC | SQLITE_IOERR_DIR_FSYNC))
}

/// The kernel's word behind an error of I/O. SQLite keeps the last one, so it is asked for such an error alone.
#[allow(unsafe_code, reason = "rusqlite has no safe call for it")]
pub(super) fn system_errno(conn: &Connection, error: &rusqlite::Error) -> Option<Errno> {
    let io = matches!(error.sqlite_error_code(), Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen));
    if !io {
        return None;
    }
    // SAFETY: the handle is valid as long as the connection, which is borrowed; the call only reads a number.
    let errno = unsafe { sqlite3_system_errno(conn.handle()) };
    (errno != 0).then(|| Errno::from_raw(errno))
}

/// As SQLite tells of a sync that fails.
pub(super) fn failed_sync(error: &io::Error) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(SQLITE_IOERR_FSYNC), Some(error.to_string()))
}

/// As SQLite tells of a disk without room.
pub(super) fn full_disk(error: &io::Error) -> rusqlite::Error {
    rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(SQLITE_FULL), Some(error.to_string()))
}

/// What calls for moving the file aside, and nothing else does: a good file holds results that are owed.
pub(super) fn is_corrupt(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}
