//! Writes that wait for somebody else's commit: acks and what is in audit.log (a second at most), and time marks (a minute
//! at most).

use std::time::Duration;

use super::core::Core;
use super::{begun, rows};
use crate::model::limits::UNACKED_RESULTS;
use crate::model::{CommandId, JournalId, ServerTime};
use crate::mutant::{self, Mutant};

const ACKS_WAIT: Duration = Duration::from_secs(1);
pub(super) const TIME_WAITS: Duration = Duration::from_secs(60);

/// What waits.
#[derive(Debug, Default)]
pub(super) struct Lazy {
    acks: Vec<CommandId>,
    /// Events of this journal up to this number.
    events: Option<(JournalId, u64)>,
    mark: Option<ServerTime>,
    signed: Option<ServerTime>,
    /// Lines up to this number are in audit.log.
    audited: Option<u64>,
}

impl Lazy {
    /// Adds acks. True when the writer must look at its timer anew.
    pub(super) fn acked(&mut self, mut ids: Vec<CommandId>) -> bool {
        let first = !self.has_acks();
        // Acks come from a peer and may name anything; one that is dropped comes again with its result.
        let room = usize::try_from(UNACKED_RESULTS).unwrap_or(usize::MAX).saturating_sub(self.acks.len());
        ids.truncate(room);
        self.acks.append(&mut ids);
        first && self.has_acks()
    }

    /// Adds an ack of events. True when the writer must look at its timer anew.
    pub(super) fn events_acked(&mut self, journal: JournalId, seq: u64) -> bool {
        let first = !self.has_acks();
        match &mut self.events {
            Some((known, acked)) if *known == journal => *acked = seq.max(*acked),
            events => *events = Some((journal, seq)),
        }
        first
    }

    /// Adds that lines are in audit.log. True when the writer must look at its timer anew.
    pub(super) fn audited(&mut self, up_to: u64) -> bool {
        let first = !self.has_acks();
        self.audited = self.audited.max(Some(up_to));
        first
    }

    /// Notes the clocks. True when the writer must look at its timer anew.
    pub(super) fn time(&mut self, mark: Option<ServerTime>, signed: Option<ServerTime>) -> bool {
        let first = self.wait().is_none();
        self.mark = self.mark.max(mark);
        self.signed = self.signed.max(signed);
        first
    }

    /// Takes back what could not be written.
    pub(super) fn put_back(&mut self, older: Self) {
        self.acked(older.acks);
        // What has come since is of the same journal or of a newer one.
        if let Some((journal, seq)) = older.events
            && self.events.as_ref().is_none_or(|(known, _)| *known == journal)
        {
            self.events_acked(journal, seq);
        }
        self.time(older.mark, older.signed);
        self.audited = self.audited.max(older.audited);
    }

    pub(super) fn has_acks(&self) -> bool {
        !self.acks.is_empty() || self.events.is_some() || self.audited.is_some()
    }

    /// Whether a result's ack is among them, which makes a tombstone of its row.
    pub(super) fn buries(&self) -> bool {
        !self.acks.is_empty()
    }

    /// How long it may wait for a commit of somebody else; absent when nothing waits.
    pub(super) fn wait(&self) -> Option<Duration> {
        if self.has_acks() {
            Some(ACKS_WAIT)
        } else {
            (self.mark.is_some() || self.signed.is_some()).then_some(TIME_WAITS)
        }
    }

    /// Writes it into the transaction that is open.
    pub(super) fn write(&self, core: &mut Core) -> rusqlite::Result<()> {
        for id in &self.acks {
            if rows::bury(&core.conn, id)? {
                core.counters.owed = core.counters.owed.saturating_sub(1);
            }
            if mutant::is(Mutant::TombstoneForgotten) {
                forget_at_once(core, id)?;
            }
        }
        if let Some((journal, seq)) = &self.events {
            super::events::forget(core, journal, *seq)?;
        }
        if let Some(up_to) = self.audited {
            super::audit::forget(core, up_to)?;
        }
        if self.mark.is_some() || self.signed.is_some() {
            super::ops::write_time(core, self.mark, self.signed)?;
        }
        if let Some(signed) = self.signed {
            core.prune(signed)?;
        }
        Ok(())
    }
}

/// What signed time does to a tombstone that it has passed.
fn forget_at_once(core: &Core, id: &CommandId) -> rusqlite::Result<()> {
    if let Some(row) = rows::find(&core.conn, id)?
        && begun::remove(&core.state, id, row.attempt).is_ok()
    {
        rows::forget(&core.conn, id)?;
    }
    Ok(())
}
