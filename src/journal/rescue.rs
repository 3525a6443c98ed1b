//! A journal whose file was taken away while it is open, and why a journal ends.
//!
//! Deleting an open file frees nothing and says nothing: commits go on into a file that no start will find. So each
//! batch first looks whether `journal.db` is still the file that is open. If it is not, the open file is written out
//! again in its place, whole, and this journal ends: the next process opens the copy, with the same id, and nothing is
//! lost. A command that was accepted between the deletion and the next look is in the copy.

use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::libc;
use rusqlite::Connection;

use super::begun::sync_dir;
use super::files::wal_of;

/// Why a journal takes no more writes. The process is to end, so that a new one reads what the disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failed {
    /// A sync failed: the kernel may have dropped the pages and forgotten the error.
    Sync,
    /// `journal.db` was removed or replaced.
    Displaced {
        /// The open file was written out again in its place.
        rescued: bool,
    },
    /// The writer panicked.
    Writer,
}

impl Failed {
    /// For the log, the status and whoever waits for a write.
    pub fn detail(self) -> &'static str {
        match self {
            Self::Sync => "a sync of the journal failed; the daemon must start anew",
            Self::Displaced { rescued: true } => {
                "journal.db was removed or replaced under the daemon and has been put back; the daemon must start anew"
            }
            Self::Displaced { rescued: false } => {
                "journal.db was removed or replaced under the daemon and could not be put back; the daemon must start anew"
            }
            Self::Writer => "the journal's writer panicked; the daemon must start anew",
        }
    }
}

/// Which file it is, whatever its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl Identity {
    /// Of the file of that name.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        let meta = path.symlink_metadata()?;
        Ok(Self { device: meta.dev(), inode: meta.ino() })
    }
}

/// Whether `db` is surely no longer the file `open`. An error of looking is no proof.
pub(super) fn displaced(db: &Path, open: Identity) -> bool {
    match Identity::of(db) {
        Ok(found) => found != open,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Writes the open database out again as `db`, durably. Whatever has its name, and the log, is moved aside.
pub(super) fn put_back(conn: &Connection, db: &Path, unix_s: i64) -> anyhow::Result<()> {
    let aside = |path: &Path| {
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".displaced-{unix_s}"));
        std::path::PathBuf::from(name)
    };
    let copy = db.with_extension("db.rescued");
    match std::fs::remove_file(&copy) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    // SQLite takes an empty file, and this one is for us alone from its creation.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(&copy)?;
    conn.execute("VACUUM INTO ?", [copy.to_string_lossy()])?;
    file.sync_all()?;
    // The log first: beside the copy it would be applied to it.
    for path in [&wal_of(db), db] {
        match std::fs::rename(path, aside(path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error.into()),
            _ => {}
        }
    }
    std::fs::rename(&copy, db)?;
    Ok(sync_dir(db.parent().unwrap_or(db))?)
}
