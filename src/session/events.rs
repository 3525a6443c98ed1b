//! Which events a session has still to say, and when. Pure.
//!
//! They are read from the journal in their order and sent in batches, of which few are under way at once: what
//! stands before a result on a slow wire is bounded, and a gateway that does not keep up holds back the reading.

use std::collections::VecDeque;

use crate::journal::{Durable, EventPage};
use crate::model::{Event, EventClass};

/// Batches that may be under way unacked: one is stored while the next travels.
const UNDER_WAY: usize = 2;

/// The events of one session.
#[derive(Debug, Default)]
pub(super) struct EventFlow {
    /// Up to here they were said in this session, or stored by the control plane before it.
    after: u64,
    /// The last number of each batch that is not acked.
    under_way: VecDeque<u64>,
    /// Read from the journal, not yet said.
    page: VecDeque<Durable<Event>>,
    /// The journal's last number when it was read last.
    read_up_to: u64,
    /// The page before was not the last.
    more: bool,
}

impl EventFlow {
    /// The number behind which the journal is to be read now; its last number is `last`.
    pub(super) fn owed(&self, last: u64) -> Option<u64> {
        let wanted = self.page.is_empty() && self.under_way.len() < UNDER_WAY;
        (wanted && (self.more || last > self.read_up_to)).then_some(self.after)
    }

    /// A read begins, of a journal whose last number is `last`.
    pub(super) fn reads_up_to(&mut self, last: u64) {
        (self.read_up_to, self.more) = (last, false);
    }

    /// A page has been read.
    pub(super) fn read(&mut self, page: EventPage) {
        self.page.extend(page.events.into_iter().filter(|event| event.seq > self.after));
        self.more = page.more;
    }

    /// What goes now, as one batch. A metric waits until everything before it is acked, and what stands behind it
    /// waits too: an ack is cumulative, so that an event which is passed over would be forgotten unsaid.
    pub(super) fn next_batch(&mut self) -> Option<Vec<Durable<Event>>> {
        if self.under_way.len() >= UNDER_WAY {
            return None;
        }
        let metric = self.page.iter().position(|event| event.class == EventClass::Metric);
        let count =
            if self.under_way.is_empty() { self.page.len() } else { metric.unwrap_or(self.page.len()) };
        let batch: Vec<_> = self.page.drain(..count).collect();
        let last = batch.last()?.seq;
        self.after = last;
        self.under_way.push_back(last);
        Some(batch)
    }

    /// Events up to `seq` are stored by the control plane.
    pub(super) fn acked(&mut self, seq: u64) {
        while self.under_way.front().is_some_and(|last| *last <= seq) {
            self.under_way.pop_front();
        }
        self.page.retain(|event| event.seq > seq);
        self.after = self.after.max(seq);
    }
}
