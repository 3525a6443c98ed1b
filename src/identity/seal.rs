//! What makes a golden image of a machine's disk: nothing of bcd's is left that tells which machine it was.

use std::path::{Path, PathBuf};

use super::reset::{self, ResetError};
use super::stored;
use crate::failpoint;
use crate::journal;
use crate::model::Exit;
use crate::state_dir::StateDir;

const JOURNAL: &str = "journal.db";
const LOCK: &str = "journal.lock";
const AUDIT: &str = "audit.log";
/// What bcd keeps in its state directory. The identity first: what a killed seal leaves is no node. The lock last: it is
/// there while a seal runs, and tells the next one whose directory this is.
const OURS: [&str; 13] = [
    stored::IDENTITY,
    stored::PENDING,
    super::keys::FOLDER,
    "floors.json",
    "begun",
    "outcome",
    AUDIT,
    "hold",
    "spec.json",
    "reserve",
    ".writable",
    JOURNAL,
    LOCK,
];
/// Without one of these, or what was moved aside from one, a directory may be anybody's who has keys or a hold.
const UNMISTAKABLE: [&str; 4] = [stored::IDENTITY, stored::PENDING, JOURNAL, LOCK];

/// What a seal has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sealed {
    /// Files and directories that are gone.
    pub removed: usize,
    /// What is not bcd's, and was left.
    pub left: Vec<PathBuf>,
}

/// Why nothing, or not everything, was removed.
#[derive(Debug, thiserror::Error)]
pub enum SealError {
    /// There is no such directory.
    #[error("there is no state directory {}, so nothing was sealed; name the one of this machine with --state", .0.display())]
    Missing(PathBuf),
    /// What is there may be another program's.
    #[error(
        "{path} has neither identity nor journal of bcd's, so nothing in it was removed; name the state directory with --state; if it is that one, remove by hand: {names}",
        path = .path.display(), names = .names.join(", ")
    )]
    NotOurs {
        /// The directory.
        path: PathBuf,
        /// What in it could be bcd's.
        names: Vec<String>,
    },
    /// As a reset: a file or directory cannot be used, or a daemon holds the journal.
    #[error(transparent)]
    Directory(#[from] ResetError),
}

impl SealError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Missing(_) | Self::NotOurs { .. } => Exit::Configuration,
            Self::Directory(error) => error.exit(),
        }
    }
}

/// Removes everything that bcd has written into its state directory, what was moved aside there too. Blocks.
///
/// # Errors
/// See [`SealError`]; a daemon that runs hinders it. Repeated, it goes on.
pub fn seal(state: &Path) -> Result<Sealed, SealError> {
    let dir = StateDir::open(state).map_err(ResetError::from)?;
    let dir = dir.ok_or_else(|| SealError::Missing(state.to_owned()))?;
    // Before the lock's file is made there.
    let before = dir.names().map_err(ResetError::from)?;
    let ours: Vec<String> = before.iter().filter(|name| is_ours(name)).cloned().collect();
    if !before.iter().any(|name| UNMISTAKABLE.iter().any(|sure| is(name, sure))) {
        if ours.is_empty() {
            return Ok(Sealed { removed: 0, left: before.iter().map(|name| state.join(name)).collect() });
        }
        return Err(SealError::NotOurs { path: state.to_owned(), names: ours });
    }
    Ok(clear(&dir)?)
}

fn clear(dir: &StateDir) -> Result<Sealed, ResetError> {
    let _journal = journal::claim(dir.path())?;
    let _lock = dir.lock()?;
    let names = dir.names()?;
    let mut sealed = Sealed::default();
    for ours in OURS {
        for name in names.iter().filter(|name| is(name, ours)) {
            dir.remove_all(name)?;
            sealed.removed += 1;
        }
        if ours == stored::IDENTITY {
            failpoint::hit(failpoint::SEAL_IDENTITY);
        }
    }
    sealed.left = names.iter().filter(|name| !is_ours(name)).map(|name| dir.path().join(name)).collect();
    Ok(sealed)
}

fn is_ours(name: &str) -> bool {
    OURS.iter().any(|ours| is(name, ours))
}

/// A name, what was moved aside or put aside under it, and what a killed write left of it.
fn is(name: &str, ours: &str) -> bool {
    let name = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")).unwrap_or(name);
    let name = match name.split_once(reset::ASIDE) {
        Some((name, stamp)) if reset::is_stamp(stamp) => name,
        Some(_) => return false,
        None => name,
    };
    let Some(rest) = name.strip_prefix(ours) else { return false };
    match ours {
        JOURNAL => {
            let rest = rest.strip_prefix("-wal").unwrap_or(rest);
            rest.is_empty() || [".corrupt-", ".stray-"].iter().any(|aside| rest.starts_with(aside))
        }
        AUDIT => rest.is_empty() || rest.strip_prefix('.').is_some_and(|rest| rest.parse::<u32>().is_ok()),
        _ => rest.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_of_bcd_goes_and_what_is_not_its_own_stays_and_is_named() {
        let temp = tempfile::tempdir().unwrap();
        let dir = StateDir::ensure(&temp.path().join("state")).unwrap();
        for name in [
            "identity.json",
            ".identity.json.tmp",
            "identity.json.reset-20260101T000000Z",
            "journal.db",
            "journal.db-wal",
            "journal.db-wal.stray-1790000000",
            "journal.db-wal.reset-20260101T000000Z",
            "journal.db.corrupt-1790000000",
            "journal.db.corrupt-1790000000-wal",
            "journal.db.corrupt-1790000000.untold",
            "audit.log",
            "audit.log.1",
            "hold",
            ".writable",
            "..writable.tmp",
        ] {
            dir.write_new(name, b"x").unwrap();
        }
        for name in ["keys", "begun.reset-20260101T000000Z"] {
            dir.ensure_sub(name).unwrap().write_new("a", b"x").unwrap();
        }
        let theirs = [
            "audit.log.old",
            "hold.txt",
            "identity.json.reset-soon",
            "journal.db-journal",
            "journal.md",
            "keys.d",
            "keyshare",
            "notes.txt",
        ];
        for name in theirs {
            dir.write_new(name, b"theirs").unwrap();
        }
        let sealed = seal(dir.path()).unwrap();
        assert_eq!(dir.names().unwrap(), theirs);
        assert_eq!(sealed.left, theirs.map(|name| dir.path().join(name)));
        assert_eq!(seal(dir.path()).unwrap(), Sealed { removed: 0, ..sealed }, "it may be repeated");
    }

    #[test]
    fn a_directory_that_is_missing_or_may_be_anybodys_is_named_and_nothing_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("state");
        let told = |refused: SealError| {
            assert_eq!(refused.exit(), Exit::Configuration);
            refused.to_string()
        };
        assert!(told(seal(&path).unwrap_err()).contains(path.to_str().unwrap()));
        assert!(!path.exists());
        let dir = StateDir::ensure(&path).unwrap();
        dir.write_new("hold", b"x").unwrap();
        dir.ensure_sub("keys").unwrap();
        let told = told(seal(&path).unwrap_err());
        assert!(told.contains(path.to_str().unwrap()) && told.contains("hold, keys"), "{told}");
        assert_eq!(dir.names().unwrap(), ["hold", "keys"]);
        // What was moved aside is enough.
        dir.write_new("journal.db.reset-20260101T000000Z", b"x").unwrap();
        assert_eq!(seal(&path).unwrap().left, [""; 0].map(PathBuf::from));
        assert_eq!(dir.names().unwrap(), [""; 0]);
    }

    #[test]
    fn nothing_goes_while_a_daemon_holds_the_journal_and_no_link_is_followed() {
        let temp = tempfile::tempdir().unwrap();
        let dir = StateDir::ensure(&temp.path().join("state")).unwrap();
        dir.write_new("identity.json", b"x").unwrap();
        let theirs = temp.path().join("theirs");
        std::fs::create_dir(&theirs).unwrap();
        std::fs::write(theirs.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&theirs, dir.path().join("keys")).unwrap();
        let held = journal::claim(dir.path()).unwrap();
        assert!(seal(dir.path()).is_err());
        assert!(dir.read("identity.json", 10).unwrap().is_some());
        drop(held);
        seal(dir.path()).unwrap();
        assert!(dir.names().unwrap().is_empty() && theirs.join("file").exists());
    }
}
