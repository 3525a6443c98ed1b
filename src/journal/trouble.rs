//! What hinders the state directory's writes at this moment, by where it was seen: so that a status can say it, and
//! admission refuse what could not be carried through.

use std::io;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use tokio::sync::Notify;

use crate::model::Reason;

/// Where trouble was seen. Each source clears its own, and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A commit. Hinders nobody by itself: the next operation tries anew, and one that is written clears it.
    Journal,
    /// A file beside the journal, such as a begun record. Nothing that needs one is admitted.
    Files,
    /// The look at the file system's room. Nothing is admitted.
    Room,
    /// audit.log. Nothing is admitted.
    Audit,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// `disk`, `read-only` or `io-error`.
    pub why: Reason,
    /// For people: the thing and the kernel's word.
    pub detail: String,
}

impl Trouble {
    /// Of an error of the file system.
    pub fn of(error: &io::Error, doing: &str) -> Self {
        let errno = error.raw_os_error().map_or(Errno::EIO, Errno::from_raw);
        Self { why: why(errno), detail: format!("{doing}: {error}") }
    }
}

/// The word for an error of the file system: what an operator has to mend. No inodes are told as no space.
pub fn why(errno: Errno) -> Reason {
    match errno {
        Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Reason::Disk,
        Errno::EROFS => Reason::ReadOnly,
        _ => Reason::IoError,
    }
}

/// The same for an error that a disk gives until it is mended, or a process that has too little of something; absent
/// for any other, which waiting does not change.
pub fn hindrance(errno: Errno) -> Option<Reason> {
    let passes = matches!(
        errno,
        Errno::ENOSPC
            | Errno::EDQUOT
            | Errno::EROFS
            | Errno::EIO
            | Errno::EMFILE
            | Errno::ENFILE
            | Errno::ENOMEM
            | Errno::ESTALE
            | Errno::ETIMEDOUT
    );
    passes.then(|| why(errno))
}

/// The trouble of each source, shared by whoever meets it and whoever tells of it.
#[derive(Debug, Default)]
pub(super) struct Troubles {
    standing: Mutex<[Option<Trouble>; 4]>,
    changed: Notify,
}

impl Troubles {
    fn slot<T>(&self, source: Source, change: impl FnOnce(&mut Option<Trouble>) -> T) -> T {
        change(&mut self.standing.lock().unwrap_or_else(PoisonError::into_inner)[source as usize])
    }

    pub(super) fn set(&self, source: Source, trouble: Trouble) {
        let old = self.slot(source, |slot| slot.replace(trouble));
        if old.is_none() {
            self.changed.notify_one();
        }
    }

    pub(super) fn clear(&self, source: Source) {
        if self.slot(source, Option::take).is_some() {
            self.changed.notify_one();
        }
    }

    pub(super) fn of(&self, source: Source) -> Option<Trouble> {
        self.slot(source, |slot| slot.clone())
    }

    /// What stands, one of each why.
    pub(super) fn all(&self) -> Vec<Trouble> {
        let mut all: Vec<Trouble> = Vec::new();
        for source in [Source::Room, Source::Files, Source::Audit, Source::Journal] {
            all.extend(self.of(source).filter(|new| all.iter().all(|known| known.why != new.why)));
        }
        all
    }

    /// Returns when some trouble has come or gone since the last call.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}
