//! Which results a session still has to say. None is said twice in a session unless the gateway asks again by
//! delivering its command again.
//!
//! The journal is read in pages: once for Hello, on after Welcome where Hello had no room, and from the start when
//! the outbox had no room for a result. A page leaves out what was said before it came; what was queued in the outbox
//! when it came may stand in it as well, so those few are held against what was said.

use std::collections::{BTreeSet, VecDeque};

use crate::journal::{Durable, Unacked};
use crate::model::{CommandId, Done};

/// The results of one session.
#[derive(Debug, Default)]
pub(super) struct Resend {
    /// Said in this session and not yet acked; at most as many as the journal keeps unacked.
    said: BTreeSet<CommandId>,
    /// Read from the journal, not yet said.
    page: VecDeque<Durable<Done>>,
    owed: Read,
    /// A read is under way: what it finds may have been acked since.
    reading: bool,
    /// Acked while it is.
    acked: Vec<CommandId>,
    /// So many of the outbox's next results may have been read from the journal too.
    suspects: usize,
}

/// A read of the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Read {
    /// None is owed.
    #[default]
    Nothing,
    /// From behind this position on; absent is the start.
    Behind(Option<u64>),
}

impl Resend {
    /// A session whose Hello carries `said`. `next` is where the journal's rest begins.
    pub(super) fn after_hello(said: &[Durable<Done>], next: Option<u64>) -> Self {
        Self {
            said: said.iter().map(|done| done.id.clone()).collect(),
            owed: next.map_or(Read::Nothing, |next| Read::Behind(Some(next))),
            ..Self::default()
        }
    }

    /// A read of the journal has ended, and `queued` results wait in the outbox.
    pub(super) fn suspect(&mut self, queued: usize) {
        self.suspects = queued;
    }

    /// The read to begin now, if one is owed and the last page is said.
    pub(super) fn begin_read(&mut self) -> Option<Option<u64>> {
        match self.owed {
            Read::Behind(position) if self.page.is_empty() => {
                self.owed = Read::Nothing;
                self.reading = true;
                Some(position)
            }
            _ => None,
        }
    }

    /// Whether results that the journal holds are still to be said.
    pub(super) fn rest_waits(&self) -> bool {
        !self.page.is_empty() || self.reading || self.owed != Read::Nothing
    }

    /// A result found no room: everything unacked is read again, but what was said stays said. A read that is under way
    /// may have passed that result before it was there: another follows it.
    pub(super) fn missed(&mut self) {
        self.owed = Read::Behind(None);
    }

    /// A page has been read; `queued` results wait in the outbox.
    pub(super) fn read(&mut self, page: Unacked, queued: usize) {
        self.page.extend(page.results.into_iter().filter(|done| !self.said.contains(&done.id)));
        self.reading = false;
        for id in self.acked.drain(..) {
            self.said.remove(&id);
        }
        if self.owed == Read::Nothing {
            self.owed = page.next.map_or(Read::Nothing, |next| Read::Behind(Some(next)));
        }
        self.suspects = queued;
    }

    /// The next result of the page, now said.
    pub(super) fn next(&mut self) -> Option<Durable<Done>> {
        let done = self.page.pop_front()?;
        self.said.insert(done.id.clone());
        Some(done)
    }

    /// It could not be said after all: the next read of the journal finds it again.
    pub(super) fn put_off(&mut self, id: &CommandId) {
        self.said.remove(id);
    }

    /// Whether a result that comes out of the outbox is to be said now.
    pub(super) fn take(&mut self, id: &CommandId) -> bool {
        let suspect = self.suspects > 0;
        self.suspects = self.suspects.saturating_sub(1);
        let new = self.said.insert(id.clone());
        new || !suspect
    }

    /// A passing answer came out of the outbox.
    pub(super) fn passed(&mut self) {
        self.suspects = self.suspects.saturating_sub(1);
    }

    /// These are stored by the control plane. While suspects are left they stay said: one of them may be among these.
    pub(super) fn acked(&mut self, ids: &[CommandId]) {
        if self.suspects > 0 {
            return;
        }
        if self.reading {
            self.acked.extend_from_slice(ids);
            return;
        }
        for id in ids {
            self.said.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_missed_while_the_journal_is_read_is_read_after_that() {
        let mut resend = Resend::default();
        resend.missed();
        assert_eq!(resend.begin_read(), Some(None));
        assert_eq!(resend.begin_read(), None, "it is under way");
        resend.missed();
        resend.read(Unacked { results: Vec::new(), next: Some(7) }, 0);
        assert_eq!(resend.begin_read(), Some(None), "from the start, not from where that page ended");
        resend.read(Unacked { results: Vec::new(), next: Some(7) }, 0);
        assert_eq!(resend.begin_read(), Some(Some(7)));
        assert!(resend.rest_waits());
        resend.read(Unacked { results: Vec::new(), next: None }, 0);
        assert!(!resend.rest_waits());
    }
}
