//! What makes a golden image of a machine's disk: nothing of bcd's is left that tells which machine it was.

use std::path::{Path, PathBuf};

use super::reset::ResetError;
use super::stored;
use crate::failpoint;
use crate::journal;
use crate::state_dir::StateDir;

/// How the names of everything begin that bcd keeps in its state directory. The identity first: what a killed seal leaves
/// is no node.
const OURS: [&str; 11] = [
    stored::IDENTITY,
    stored::PENDING,
    super::keys::FOLDER,
    "floors.json",
    "begun",
    "outcome",
    "audit.log",
    "hold",
    "spec.json",
    "reserve",
    "journal.",
];

/// What a seal has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sealed {
    /// Files and directories that are gone.
    pub removed: usize,
    /// What is not bcd's, and was left.
    pub left: Vec<PathBuf>,
}

/// Removes everything that bcd has written into its state directory, what was moved aside there too. Blocks.
///
/// # Errors
/// See [`ResetError`]; a daemon that runs hinders it. Repeated, it goes on.
pub fn seal(state: &Path) -> Result<Sealed, ResetError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(Sealed::default()) };
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
    let left = names.iter().filter(|name| !OURS.iter().any(|ours| is(name, ours)));
    sealed.left = left.map(|name| dir.path().join(name)).collect();
    Ok(sealed)
}

/// A name, what was moved aside under it, and what a killed write left of it.
fn is(name: &str, ours: &str) -> bool {
    let name = name.strip_prefix('.').filter(|name| name.ends_with(".tmp")).unwrap_or(name);
    match name.strip_prefix(ours) {
        Some(rest) => rest.is_empty() || ours.ends_with('.') || rest.starts_with(['.', '-']),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_of_bcd_goes_and_what_is_not_its_own_stays_and_is_named() {
        let temp = tempfile::tempdir().unwrap();
        let dir = StateDir::ensure(&temp.path().join("state")).unwrap();
        for name in
            ["identity.json", ".identity.json.tmp", "identity.json.reset-20260101T000000Z", "journal.db"]
        {
            dir.write_new(name, b"x").unwrap();
        }
        for name in ["keys", "begun.reset-20260101T000000Z"] {
            dir.ensure_sub(name).unwrap().write_new("a", b"x").unwrap();
        }
        for name in ["notes.txt", "keyshare"] {
            dir.write_new(name, b"theirs").unwrap();
        }
        let sealed = seal(dir.path()).unwrap();
        assert_eq!(dir.names().unwrap(), ["keyshare", "notes.txt"]);
        assert_eq!(sealed.left, ["keyshare", "notes.txt"].map(|name| dir.path().join(name)));
        assert_eq!(seal(dir.path()).unwrap().left, sealed.left, "it may be repeated");
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
