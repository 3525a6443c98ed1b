//! An EventBatch as the gateway reads it. An event over a limit is stored without what is over it: left unacked it
//! would come again for ever.

use crate::model::limits::{ENTRIES, EVENT_BYTES};
use crate::model::{EventClass, JournalId};
use crate::wire::pb;

/// A type's name, bytes.
const TYPE_BYTES: usize = 64;

/// Events of one journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Who numbered them.
    pub journal: JournalId,
    /// In the order in which they came.
    pub events: Vec<NodeEvent>,
}

/// One event of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeEvent {
    /// Its number within its journal.
    pub seq: u64,
    /// Its class's name; `unknown` for one that this build does not know.
    pub class: &'static str,
    /// Its type.
    pub kind: String,
    /// JSON; empty where it was over the limit.
    pub body: String,
    /// The node's wall clock.
    pub at_ms: i64,
    /// Age when it was sent, ms; absent for none.
    pub age_ms: Option<u64>,
    /// Numbers right before it whose events the node has dropped.
    pub dropped: Option<(u64, u64)>,
}

/// Why a batch is ignored.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadBatch {
    /// It names no journal.
    #[error("the batch's journal id is missing or malformed")]
    Journal,
    /// It has too many events.
    #[error("the batch has {0} events, at most {ENTRIES}")]
    TooMany(usize),
}

impl Batch {
    /// Reads a batch.
    ///
    /// # Errors
    /// See [`BadBatch`].
    pub fn read(batch: pb::EventBatch) -> Result<Self, BadBatch> {
        if batch.events.len() > ENTRIES {
            return Err(BadBatch::TooMany(batch.events.len()));
        }
        let journal = JournalId::new(batch.journal_id).map_err(|_| BadBatch::Journal)?;
        let numbered = batch.events.into_iter().filter(|event| event.seq > 0);
        Ok(Self { journal, events: numbered.map(read_one).collect() })
    }
}

fn read_one(event: pb::Event) -> NodeEvent {
    let class = match event.class() {
        pb::EventClass::Unspecified => "unknown",
        pb::EventClass::Transition => EventClass::Transition.name(),
        pb::EventClass::Security => EventClass::Security.name(),
        pb::EventClass::Log => EventClass::Log.name(),
        pb::EventClass::Metric => EventClass::Metric.name(),
    };
    let body = if event.body.len() > EVENT_BYTES { &[][..] } else { &event.body[..] };
    let before = event.seq.saturating_sub(1);
    // A range that does not end right before the event speaks of something else.
    let dropped =
        (event.dropped_from > 0 && event.dropped_from <= event.dropped_to && event.dropped_to == before)
            .then_some((event.dropped_from, event.dropped_to));
    NodeEvent {
        seq: event.seq,
        class,
        body: String::from_utf8_lossy(body).into_owned(),
        at_ms: event.at_ms,
        age_ms: event.age_ms,
        dropped,
        kind: event.r#type[..event.r#type.floor_char_boundary(TYPE_BYTES)].to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seq: u64) -> pb::Event {
        pb::Event { seq, class: 1, r#type: "command.done".into(), body: "{}".into(), ..Default::default() }
    }

    fn read(events: Vec<pb::Event>) -> Result<Batch, BadBatch> {
        Batch::read(pb::EventBatch { journal_id: "j-1".into(), events })
    }

    #[test]
    fn a_batch_without_a_journal_or_with_too_many_events_is_ignored() {
        let nameless = pb::EventBatch { journal_id: String::new(), events: vec![event(1)] };
        assert_eq!(Batch::read(nameless), Err(BadBatch::Journal));
        assert_eq!(read(vec![event(1); ENTRIES + 1]), Err(BadBatch::TooMany(ENTRIES + 1)));
    }

    #[test]
    fn an_event_over_its_limit_keeps_its_number_and_loses_its_body() {
        let big = pb::Event { body: vec![b'x'; EVENT_BYTES + 1].into(), ..event(7) };
        let batch = read(vec![event(0), big]).expect("read");
        let kept: Vec<_> = batch.events.iter().map(|event| (event.seq, event.body.as_str())).collect();
        assert_eq!(kept, [(7, "")]);
    }

    #[test]
    fn a_dropped_range_counts_only_right_before_its_event() {
        let dropped = |from, to| {
            let event = pb::Event { dropped_from: from, dropped_to: to, ..event(7) };
            read(vec![event]).expect("read").events[0].dropped
        };
        assert_eq!(dropped(3, 6), Some((3, 6)));
        assert_eq!((dropped(0, 0), dropped(3, 5), dropped(6, 3)), (None, None, None));
    }
}
