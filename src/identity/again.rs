//! When an identity is replaced: what an operator does, and how a daemon notices.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::stored;

/// What an operator does about an identity that holds no longer: the one text for log, status and every error.
pub fn join_again(state: &Path) -> String {
    let state = state.display();
    format!("join again: stop bcd, then: bcd join --state {state} --reset --yes --ticket FILE")
}

/// What becomes of a node whose certificate has run out, and what an operator does where that does not help.
pub fn rejoins(state: &Path) -> String {
    format!(
        "bcd joins again by itself with its key, unless the join service refuses that; then {}",
        join_again(state)
    )
}

pub(super) fn join_again_beside(identity: &Path) -> String {
    join_again(identity.parent().unwrap_or(identity))
}

/// Which identity.json it is: another after every replacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    file: (u64, u64),
    /// ctime too: a file that is restored with its old mtime is another one all the same.
    times: [(i64, i64); 2],
}

impl Mark {
    /// Of the identity.json of a state directory; absent when there is none. Blocks.
    pub fn of(state: &Path) -> Option<Self> {
        let found = std::fs::symlink_metadata(state.join(stored::IDENTITY)).ok()?;
        Some(Self {
            file: (found.dev(), found.ino()),
            times: [(found.mtime(), found.mtime_nsec()), (found.ctime(), found.ctime_nsec())],
        })
    }
}
