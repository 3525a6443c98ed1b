//! The way out of an identity: it and its journal are moved aside, within the state directory. Nothing is deleted.
//!
//! Order, each rename durable before the next: what a killed join left, identity.json (the switch: from here on the
//! machine has not joined), what belonged to it, journal.db last. So a journal without an identity is a reset that was
//! killed, and the next join finishes it under the same time.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::keys;
use super::stored::{self, Stored as _, StoredIdentity};
use crate::clock::{Clock as _, SystemClock};
use crate::failpoint;
use crate::journal::{self, OpenError};
use crate::model::{Exit, NodeId, ServerTime};
use crate::state_dir::{StateDir, StateError};

/// Between a name and the time at which it was moved aside.
pub(super) const ASIDE: &str = ".reset-";
const JOURNAL: &str = "journal.db";
/// What is moved, in this order. Begun and outcome records go with the journal that they belong to, floors with the
/// deployment that they are of. The reserve is room on the disk, and stays for whoever comes.
const ORDER: [&str; 8] = [
    stored::PENDING,
    stored::IDENTITY,
    keys::FOLDER,
    "floors.json",
    "begun",
    "outcome",
    "journal.db-wal",
    JOURNAL,
];

/// What was moved aside.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aside {
    /// Whose identity it was, where that could be read.
    pub node_id: Option<NodeId>,
    /// Where things are now; empty: there was nothing.
    pub moved: Vec<PathBuf>,
}

/// Why nothing, or not everything, was moved.
#[derive(Debug, thiserror::Error)]
pub enum ResetError {
    /// A file or directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// A daemon holds the journal.
    #[error(transparent)]
    Journal(#[from] OpenError),
}

impl ResetError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::State(error) => error.exit(),
            Self::Journal(error) => error.exit(),
        }
    }
}

/// Moves identity and journal of a state directory aside, named by the local clock. Blocks.
///
/// # Errors
/// See [`ResetError`]; a daemon that runs hinders it. What was moved stays moved, and the next reset or join goes on.
pub fn reset(state: &Path) -> Result<Aside, ResetError> {
    reset_at(state, now())
}

/// For names alone.
fn now() -> ServerTime {
    ServerTime(SystemClock.wall_ms())
}

fn reset_at(state: &Path, now: ServerTime) -> Result<Aside, ResetError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(Aside::default()) };
    // First: whoever meets a running daemon is to be told how to stop it.
    let _journal = journal::claim(dir.path())?;
    let _lock = dir.lock()?;
    // A damaged one is what a reset is for.
    let node_id = StoredIdentity::read(&dir).ok().flatten().map(|stored| stored.node_id);
    Ok(Aside { node_id, moved: move_aside(&dir, now)? })
}

/// Moves on what a killed reset has left, where one was killed. Blocks.
///
/// # Errors
/// As [`reset`].
pub fn finish_reset(state: &Path) -> Result<Aside, ResetError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(Aside::default()) };
    let _lock = dir.lock()?;
    let names = dir.names()?;
    if names.iter().any(|name| name == stored::IDENTITY || name == stored::PENDING) {
        return Ok(Aside::default());
    }
    Ok(Aside { node_id: None, moved: finish_killed(&dir)? })
}

/// Finishes a reset that was killed, in a directory that is locked and has no identity and no join under way. Blocks.
pub(super) fn finish_killed(dir: &StateDir) -> Result<Vec<PathBuf>, ResetError> {
    if !dir.names()?.iter().any(|name| name == JOURNAL) {
        return Ok(Vec::new());
    }
    let _journal = journal::claim(dir.path())?;
    move_aside(dir, now())
}

fn move_aside(dir: &StateDir, now: ServerTime) -> Result<Vec<PathBuf>, ResetError> {
    let names = dir.names()?;
    let there = |name: &str| names.iter().any(|there| there == name);
    let stamp = stamp(&names, now);
    let mut moved = Vec::new();
    for name in ORDER.into_iter().filter(|name| there(name)) {
        if name == JOURNAL {
            failpoint::hit(failpoint::RESET_HALF);
        }
        let aside = format!("{name}{ASIDE}{stamp}");
        dir.rename(name, &aside)?;
        moved.push(dir.path().join(aside));
        if name == stored::IDENTITY {
            failpoint::hit(failpoint::RESET_IDENTITY);
        }
    }
    failpoint::hit(failpoint::RESET_DONE);
    Ok(moved)
}

/// The time in the names: of the reset that was killed, or one that no name has yet.
fn stamp(names: &[String], now: ServerTime) -> String {
    let there = |name: &str| names.iter().any(|there| there == name);
    let aside = |name: &str, stamp: &str| there(&format!("{name}{ASIDE}{stamp}"));
    let last = names.iter().filter_map(|name| name.strip_prefix(stored::IDENTITY)?.strip_prefix(ASIDE)).max();
    // The journal goes last, and every name once: else that reset came to its end, and what is there came after it.
    let killed =
        |stamp: &&str| !aside(JOURNAL, stamp) && !ORDER.iter().any(|name| there(name) && aside(name, stamp));
    if let Some(stamp) = last.filter(killed) {
        return stamp.to_owned();
    }
    let taken = |stamp: &String| names.iter().any(|name| name.ends_with(&format!("{ASIDE}{stamp}")));
    let mut seconds = (0..).map(|s| utc(now.plus(Duration::from_secs(s))));
    seconds.find(|stamp| !taken(stamp)).unwrap_or_default()
}

/// `20261130T083000Z`.
fn utc(time: ServerTime) -> String {
    let text = ServerTime(time.0.div_euclid(1000).saturating_mul(1000)).to_string();
    text.chars().filter(|c| !matches!(c, '-' | ':')).collect()
}

/// Whether a text is such a time.
pub(super) fn is_stamp(text: &str) -> bool {
    let shape = |(at, byte): (usize, u8)| match at {
        8 => byte == b'T',
        15 => byte == b'Z',
        _ => byte.is_ascii_digit(),
    };
    text.len() == 16 && text.bytes().enumerate().all(shape)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: ServerTime = ServerTime(1_790_000_000_123);

    fn state(files: &[&str]) -> (tempfile::TempDir, StateDir) {
        let temp = tempfile::tempdir().unwrap();
        let dir = StateDir::ensure(&temp.path().join("state")).unwrap();
        for name in files {
            dir.write_new(name, name.as_bytes()).unwrap();
        }
        (temp, dir)
    }

    fn names(dir: &StateDir) -> Vec<String> {
        dir.names().unwrap().into_iter().filter(|name| name != "journal.lock").collect()
    }

    #[test]
    fn identity_and_journal_are_moved_aside_and_what_is_the_hosts_stays() {
        let (_temp, dir) = state(&["identity.json", "journal.db", "floors.json", "audit.log"]);
        let aside = reset_at(dir.path(), NOW).unwrap();
        assert_eq!(aside.moved.len(), 3);
        let stamp = "reset-20260921T141320Z";
        let expected = ["floors.json", "identity.json", "journal.db"].map(|name| format!("{name}.{stamp}"));
        assert_eq!(names(&dir), [&["audit.log".to_owned()][..], &expected].concat());
        let kept = dir.read(&expected[1], 100).unwrap().unwrap();
        assert_eq!(kept, b"identity.json", "it is the same file");
    }

    #[test]
    fn two_resets_within_a_second_keep_both_identities() {
        let (_temp, dir) = state(&["identity.json"]);
        reset_at(dir.path(), NOW).unwrap();
        dir.write_new("identity.json", b"another").unwrap();
        reset_at(dir.path(), NOW).unwrap();
        assert_eq!(
            names(&dir),
            ["identity.json.reset-20260921T141320Z", "identity.json.reset-20260921T141321Z"]
        );
    }

    #[test]
    fn a_join_that_was_killed_after_an_earlier_reset_is_moved_aside_under_a_time_of_its_own() {
        const FIRST: &str = "20260101T000000Z";
        let done = ["identity.json", "journal.db"].map(|name| format!("{name}.reset-{FIRST}"));
        for left in [&["join-pending.json"][..], &["join-pending.json", "journal.db"]] {
            let (_temp, dir) = state(&[&done.each_ref().map(String::as_str)[..], left].concat());
            for keys in ["keys", &format!("keys.reset-{FIRST}")] {
                dir.ensure_sub(keys).unwrap().write_new("a.key", keys.as_bytes()).unwrap();
            }
            let aside = reset_at(dir.path(), NOW).unwrap();
            assert_eq!(aside.moved.len(), left.len() + 1, "{left:?}");
            let moved = |name: &str| name.ends_with(".reset-20260921T141320Z");
            assert!(aside.moved.iter().all(|path| moved(path.to_str().unwrap())), "{aside:?}");
            let earlier: Vec<String> = names(&dir).into_iter().filter(|name| !moved(name)).collect();
            assert_eq!(
                earlier,
                ["identity.json", "journal.db", "keys"].map(|name| format!("{name}.reset-{FIRST}"))
            );
            let kept = dir.ensure_sub(&earlier[2]).unwrap().read("a.key", 100).unwrap();
            assert_eq!(kept, Some(earlier[2].clone().into_bytes()), "an aside is nobody's to overwrite");
        }
    }

    #[test]
    fn a_killed_reset_is_finished_under_its_own_time_and_a_directory_without_a_journal_is_left_alone() {
        let (_temp, dir) = state(&["identity.json.reset-20260101T000000Z", "journal.db", "journal.db-wal"]);
        finish_killed(&dir).unwrap();
        let asides = ["identity.json", "journal.db-wal", "journal.db"];
        let mut expected = asides.map(|name| format!("{name}.reset-20260101T000000Z"));
        expected.sort();
        assert_eq!(names(&dir), expected);
        dir.write_new("floors.json", b"{}").unwrap();
        finish_killed(&dir).unwrap();
        assert!(names(&dir).contains(&"floors.json".to_owned()));
    }

    #[test]
    fn nothing_is_moved_while_a_daemon_holds_the_journal_and_the_mend_is_told() {
        let (_temp, dir) = state(&["identity.json", "journal.db"]);
        let held = journal::claim(dir.path()).unwrap();
        let refused = reset_at(dir.path(), NOW).unwrap_err();
        assert_eq!(refused.exit(), Exit::TryLater);
        assert!(refused.to_string().contains("systemctl stop bcd"), "{refused}");
        assert_eq!(names(&dir), ["identity.json", "journal.db"]);
        drop(held);
        reset_at(dir.path(), NOW).unwrap();
    }
}
