//! Named writes that a simulation build can be told to fail, so that a test can have a full, read-only or broken disk
//! exactly there. In a production build `check` is empty.
//!
//! Within a process [`arm`] arms a state directory. A process of its own reads the file that `BCD_WRITE_FAULTS` names,
//! at each write: a line `<point> <errno>` arms a point, an empty or missing file none.

use std::io;
use std::path::Path;

/// A write to a file beside the journal's database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// A begun record is created.
    BegunCreate,
    /// Its bytes are written.
    BegunWrite,
    /// It is synced.
    BegunSync,
    /// Its directory is synced.
    BegunDirSync,
    /// A state file is read.
    StateRead,
    /// A state file (identity, keys, floors) is created, as a temporary file.
    StateCreate,
    /// Its bytes are written.
    StateWrite,
    /// It is synced.
    StateSync,
    /// It is renamed into place.
    StateRename,
    /// Its directory is synced.
    StateDirSync,
    /// Room for an outcome record is set aside.
    OutcomeReserve,
    /// An outcome record is opened.
    OutcomeOpen,
    /// Its bytes are written.
    OutcomeWrite,
    /// It is synced.
    OutcomeSync,
    /// Its directory is synced.
    OutcomeDirSync,
    /// audit.log is opened.
    AuditOpen,
    /// Lines are added to it.
    AuditWrite,
    /// It is synced.
    AuditSync,
    /// It, or an older one, is renamed to make room for a new one.
    AuditRename,
    /// A commit of the journal: there is no room for it, whatever the errno.
    JournalWrite,
    /// A commit of the journal: the sync fails whatever the errno.
    JournalSync,
}

impl Point {
    /// Those of begun records.
    pub const BEGUN: [Self; 4] = [Self::BegunCreate, Self::BegunWrite, Self::BegunSync, Self::BegunDirSync];

    /// Those of state files.
    pub const STATE: [Self; 5] =
        [Self::StateCreate, Self::StateWrite, Self::StateSync, Self::StateRename, Self::StateDirSync];

    /// Those of an outcome that is written.
    pub const OUTCOME: [Self; 4] =
        [Self::OutcomeOpen, Self::OutcomeWrite, Self::OutcomeSync, Self::OutcomeDirSync];

    /// Those of audit.log.
    pub const AUDIT: [Self; 4] = [Self::AuditOpen, Self::AuditWrite, Self::AuditSync, Self::AuditRename];

    /// Its name in the file of faults.
    pub fn name(self) -> &'static str {
        match self {
            Self::BegunCreate => "begun.create",
            Self::BegunWrite => "begun.write",
            Self::BegunSync => "begun.sync",
            Self::BegunDirSync => "begun.dir-sync",
            Self::StateRead => "state.read",
            Self::StateCreate => "state.create",
            Self::StateWrite => "state.write",
            Self::StateSync => "state.sync",
            Self::StateRename => "state.rename",
            Self::StateDirSync => "state.dir-sync",
            Self::OutcomeReserve => "outcome.reserve",
            Self::OutcomeOpen => "outcome.open",
            Self::OutcomeWrite => "outcome.write",
            Self::OutcomeSync => "outcome.sync",
            Self::OutcomeDirSync => "outcome.dir-sync",
            Self::AuditOpen => "audit.open",
            Self::AuditWrite => "audit.write",
            Self::AuditSync => "audit.sync",
            Self::AuditRename => "audit.rename",
            Self::JournalWrite => "journal.write",
            Self::JournalSync => "journal.sync",
        }
    }
}

/// Fails where a fault is armed for `point` in the directory that `path` lies in.
///
/// # Errors
/// The armed one.
#[cfg(not(any(test, feature = "fakehw")))]
pub fn check(_point: Point, _path: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(any(test, feature = "fakehw"))]
pub use armed::{Armed, arm, check};

#[cfg(any(test, feature = "fakehw"))]
mod armed {
    use std::ffi::OsString;
    use std::path::PathBuf;
    use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

    use super::{Path, Point, io};

    static ARMED: Mutex<Vec<(PathBuf, Point, i32)>> = Mutex::new(Vec::new());

    fn armed() -> MutexGuard<'static, Vec<(PathBuf, Point, i32)>> {
        ARMED.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A fault that is gone when this is dropped.
    #[derive(Debug)]
    #[must_use = "dropping it ends the fault"]
    pub struct Armed(PathBuf);

    impl Drop for Armed {
        fn drop(&mut self) {
            armed().retain(|(dir, _, _)| *dir != self.0);
        }
    }

    /// From now on every write at `point` below `dir` fails with `errno`.
    pub fn arm(dir: &Path, point: Point, errno: i32) -> Armed {
        armed().push((dir.to_owned(), point, errno));
        Armed(dir.to_owned())
    }

    /// Fails where a fault is armed for `point` in the directory that `path` lies in.
    ///
    /// # Errors
    /// The armed one.
    pub fn check(point: Point, path: &Path) -> io::Result<()> {
        static FILE: OnceLock<Option<OsString>> = OnceLock::new();
        let here =
            armed().iter().find(|(dir, at, _)| *at == point && path.starts_with(dir)).map(|(_, _, e)| *e);
        let file = FILE.get_or_init(|| std::env::var_os("BCD_WRITE_FAULTS"));
        let told = || {
            let text = std::fs::read_to_string(file.as_ref()?).ok()?;
            let of_point =
                |line: &str| line.split_once(' ').filter(|(name, _)| *name == point.name())?.1.parse().ok();
            text.lines().find_map(of_point)
        };
        match here.or_else(told) {
            Some(errno) => Err(io::Error::from_raw_os_error(errno)),
            None => Ok(()),
        }
    }
}
