//! Events in the journal: numbers, room, forgetting, a new numbering for an old copy.
//!
//! An event is written by the job, and so in the transaction, of the change that it tells of. Its number is the
//! journal's. A number whose event was dropped is a gap, and needs no record of its own: what lies between two
//! stored events, or between the last acked one and the first, was dropped, and the event behind it says so.

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{Connection, OptionalExtension as _, Row as SqlRow, params};
use serde_json::json;

use super::core::{Core, Named};
use super::inspect::EventLine;
use super::rows::{parsed, signed, unsigned};
use crate::model::limits::EVENT_BYTES;
use crate::model::{Event, EventClass, EventType, JournalId, NewEvent};
use crate::mutant::{self, Mutant};

/// Pause between two security events that somebody else can provoke at will, ms of boot time.
const SECURITY_PAUSE_MS: u64 = 60_000;
/// What a row costs beside its body, bytes: numbers, type, boot id and the tree.
const BESIDE_BODY: u64 = 160;

/// How much may wait for an ack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventLimits {
    /// Events.
    pub count: u64,
    /// Their size, bytes.
    pub bytes: u64,
}

impl Default for EventLimits {
    fn default() -> Self {
        Self { count: 10_000, bytes: 64 << 20 }
    }
}

/// When a security event was written last, and how many have come since.
#[derive(Debug, Clone, Copy, Default)]
struct Limited {
    written_ms: Option<u64>,
    since: u64,
}

/// What is counted about events. Put back when what it counts is rolled back.
#[derive(Debug, Clone, Copy)]
pub(super) struct EventCounts {
    limits: EventLimits,
    /// Stored, not acked.
    count: u64,
    bytes: u64,
    /// Of them those that may go first.
    metrics: u64,
    /// The last number given.
    last: u64,
    /// The highest number acked.
    acked: u64,
    limited: [Limited; EventType::ALL.len()],
}

/// What waits, as others see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PendingEvents {
    /// How many.
    pub count: u64,
    /// The last number given.
    pub last: u64,
}

impl EventCounts {
    /// Reads them from an open journal.
    pub(super) fn read(conn: &Connection, limits: EventLimits) -> rusqlite::Result<Self> {
        let sql = "SELECT count(*), coalesce(sum(octet_length(body)), 0), coalesce(sum(class = ?), 0),
            coalesce(max(seq), 0) FROM events";
        let (count, bodies, metrics, stored) = conn.query_row(sql, [EventClass::Metric], |row| {
            Ok((unsigned(row, 0)?, unsigned(row, 1)?, unsigned(row, 2)?, unsigned(row, 3)?))
        })?;
        let (last, acked) = conn.query_row("SELECT event_seq, acked_event_seq FROM journal", [], |row| {
            Ok((unsigned(row, 0)?, unsigned(row, 1)?))
        })?;
        Ok(Self {
            limits,
            count,
            bytes: bodies + count * BESIDE_BODY,
            metrics,
            last: last.max(stored).max(acked),
            acked,
            limited: [Limited::default(); EventType::ALL.len()],
        })
    }

    pub(super) fn last(&self) -> u64 {
        self.last
    }

    pub(super) fn pending(&self) -> PendingEvents {
        PendingEvents { count: self.count, last: self.last }
    }

    /// Full of what may not be dropped: then no command is taken on, since each would bring more of it.
    pub(super) fn are_stuck(&self) -> bool {
        self.metrics == 0 && self.is_full_for(BESIDE_BODY)
    }

    fn is_full_for(&self, bytes: u64) -> bool {
        self.count >= self.limits.count || self.bytes.saturating_add(bytes) > self.limits.bytes
    }

    /// Whether an event may be written now; with how many it stands for.
    fn admit(&mut self, kind: EventType, now_ms: u64) -> Option<u64> {
        if kind.class() != EventClass::Security {
            return Some(1);
        }
        let limited = &mut self.limited[kind as usize];
        limited.since += 1;
        let early = limited.written_ms.is_some_and(|at| now_ms < at.saturating_add(SECURITY_PAUSE_MS));
        if early {
            return None;
        }
        limited.written_ms = Some(now_ms);
        Some(std::mem::take(&mut limited.since))
    }

    fn gone(&mut self, count: u64, body_bytes: u64, metrics: u64) {
        self.count = self.count.saturating_sub(count);
        self.bytes = self.bytes.saturating_sub(body_bytes + count * BESIDE_BODY);
        self.metrics = self.metrics.saturating_sub(metrics);
    }
}

impl EventClass {
    /// Every class with its number on disk. A number is never given to another class.
    const CODES: [(Self, i64); 4] =
        [(Self::Transition, 1), (Self::Security, 2), (Self::Log, 3), (Self::Metric, 4)];
}

impl ToSql for EventClass {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let code = Self::CODES.iter().find(|(class, _)| class == self).map(|(_, code)| *code);
        Ok(ToSqlOutput::from(code.unwrap_or_default()))
    }
}

impl FromSql for EventClass {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let code = value.as_i64()?;
        let found = Self::CODES.iter().find(|(_, known)| *known == code);
        found.map(|(class, _)| *class).ok_or(FromSqlError::OutOfRange(code))
    }
}

/// Writes an event, within the job of the change that it tells of; makes room first, by its class.
pub(super) fn add(core: &mut Core, event: NewEvent) -> rusqlite::Result<()> {
    let NewEvent { kind, mut body } = event;
    let boot_ms = u64::try_from(core.clock.boot().as_millis()).unwrap_or(u64::MAX);
    let Some(stands_for) = core.counters.events.admit(kind, boot_ms) else { return Ok(()) };
    if kind.class() == EventClass::Security
        && let Some(fields) = body.as_object_mut()
    {
        fields.insert("count".into(), stands_for.into());
    }
    let mut body = body.to_string();
    if body.len() > EVENT_BYTES {
        body = json!({ "too_large": body.len() }).to_string();
    }
    let bytes = body.len() as u64 + BESIDE_BODY;
    while core.counters.events.is_full_for(bytes) && core.counters.events.metrics > 0 {
        drop_oldest_metric(core)?;
    }
    core.counters.events.last += 1;
    let seq = core.counters.events.last;
    if core.counters.events.is_full_for(bytes) && !kind.class().is_kept() {
        // Its number is used up all the same, so that the next event tells of it.
        core.conn
            .prepare_cached("UPDATE journal SET event_seq = ?, events_dropped = events_dropped + 1")?
            .execute([signed(seq)])?;
        return Ok(());
    }
    let sql =
        "INSERT INTO events (seq, class, type, body, at_ms, boot_id, boot_ms) VALUES (?, ?, ?, ?, ?, ?, ?)";
    core.conn.prepare_cached(sql)?.execute(params![
        signed(seq),
        kind.class(),
        kind.name(),
        body,
        core.clock.wall_ms(),
        core.boot_id.as_str(),
        signed(boot_ms),
    ])?;
    let counts = &mut core.counters.events;
    counts.count += 1;
    counts.bytes += bytes;
    counts.metrics += u64::from(kind.class() == EventClass::Metric);
    Ok(())
}

fn drop_oldest_metric(core: &mut Core) -> rusqlite::Result<()> {
    // The number is written out for the partial index to be used.
    let sql = "DELETE FROM events WHERE seq = (SELECT min(seq) FROM events WHERE class = 4) RETURNING octet_length(body)";
    let body: Option<u64> =
        core.conn.prepare_cached(sql)?.query_row([], |row| unsigned(row, 0)).optional()?;
    match body {
        Some(body) => {
            core.counters.events.gone(1, body, 1);
            core.conn.prepare_cached("UPDATE journal SET events_dropped = events_dropped + 1")?.execute([])?;
        }
        // The count says that there is one and the table says that there is none: the table is right.
        None => core.counters.events.metrics = 0,
    }
    Ok(())
}

/// Forgets what the control plane has stored of this journal. An ack for another journal forgets nothing.
pub(super) fn forget(core: &mut Core, journal: &JournalId, acked: u64) -> rusqlite::Result<()> {
    let counts = &core.counters.events;
    let acked = if mutant::is(Mutant::EventAckedTooFar) { counts.last } else { acked.min(counts.last) };
    if core.counters.named.id != *journal || acked <= counts.acked {
        return Ok(());
    }
    let sql = "SELECT count(*), coalesce(sum(octet_length(body)), 0), coalesce(sum(class = ?), 0) FROM events WHERE seq <= ?";
    let (count, bytes, metrics) =
        core.conn.prepare_cached(sql)?.query_row(params![EventClass::Metric, signed(acked)], |row| {
            Ok((unsigned(row, 0)?, unsigned(row, 1)?, unsigned(row, 2)?))
        })?;
    core.conn.prepare_cached("DELETE FROM events WHERE seq <= ?")?.execute([signed(acked)])?;
    core.conn.prepare_cached("UPDATE journal SET acked_event_seq = ?")?.execute([signed(acked)])?;
    core.counters.events.gone(count, bytes, metrics);
    core.counters.events.acked = acked;
    Ok(())
}

/// Stored events behind `after`, oldest first, at most `max` with bodies of `max_bytes` (at least one); and whether
/// there are more.
pub(super) fn read(
    core: &Core,
    after: u64,
    max: usize,
    max_bytes: usize,
) -> rusqlite::Result<(Vec<Event>, bool)> {
    let mut last = after.max(core.counters.events.acked);
    let sql = "SELECT seq, class, type, body, at_ms, boot_id, boot_ms FROM events WHERE seq > ? ORDER BY seq LIMIT ?";
    let mut statement = core.conn.prepare_cached(sql)?;
    let limit = i64::try_from(max).unwrap_or(i64::MAX).saturating_add(1);
    let found = statement.query_map(params![signed(last), limit], |row| event_of(core, row))?;
    let (mut page, mut bytes): (Vec<Event>, usize) = (Vec::new(), 0);
    for event in found {
        let mut event = event?;
        bytes = bytes.saturating_add(event.body.len());
        if !page.is_empty() && (page.len() >= max || bytes > max_bytes) {
            return Ok((page, true));
        }
        event.dropped = (event.seq > last + 1).then(|| (last + 1, event.seq - 1));
        last = event.seq;
        page.push(event);
    }
    Ok((page, false))
}

fn event_of(core: &Core, row: &SqlRow<'_>) -> rusqlite::Result<Event> {
    let boot: String = row.get(5)?;
    let boot_ms = unsigned(row, 6)?;
    Ok(Event {
        seq: unsigned(row, 0)?,
        class: row.get(1)?,
        kind: row.get(2)?,
        body: row.get(3)?,
        at_ms: row.get(4)?,
        boot_ms: (boot == core.boot_id.as_str()).then_some(boot_ms),
        dropped: None,
    })
}

/// The journal turned out to be an old copy of itself: it takes a new id, loses its birth, and gives what it owes
/// new numbers from 1 on. Commands, results and tombstones stay.
pub(super) fn rename(core: &mut Core, id: JournalId, gave_away: u64) -> rusqlite::Result<()> {
    let former = core.counters.named.id.clone();
    let seqs: Vec<u64> = core
        .conn
        .prepare("SELECT seq FROM events ORDER BY seq")?
        .query_map([], |row| unsigned(row, 0))?
        .collect::<rusqlite::Result<_>>()?;
    let counts = core.counters.events;
    let gaps = (counts.last - counts.acked).saturating_sub(seqs.len() as u64);
    {
        // Upwards, each to a number that is not above its own: none meets one that is still to go.
        let mut renumber = core.conn.prepare("UPDATE events SET seq = ? WHERE seq = ?")?;
        for (new, old) in (1_u64..).zip(&seqs) {
            renumber.execute(params![signed(new), signed(*old)])?;
        }
    }
    core.conn.execute(
        "UPDATE journal SET journal_id = ?, former_id = ?, birth_ms = NULL, event_seq = 0, acked_event_seq = 0",
        params![id.as_str(), former.as_str()],
    )?;
    core.counters.named = Named::new(id, None, 0);
    core.counters.events.last = seqs.len() as u64;
    core.counters.events.acked = 0;
    let body = json!({ "former": former.as_str(), "acked": gave_away, "gaps": gaps });
    add(core, NewEvent::new(EventType::JournalOldCopy, body))
}

/// The counts, for people.
pub(super) fn line(conn: &Connection) -> rusqlite::Result<EventLine> {
    let counts = EventCounts::read(conn, EventLimits::default())?;
    let dropped = conn.query_row("SELECT events_dropped FROM journal", [], |row| unsigned(row, 0))?;
    Ok(EventLine {
        unacked: counts.count,
        metrics: counts.metrics,
        bytes: counts.bytes,
        last: counts.last,
        acked: counts.acked,
        dropped,
    })
}

/// The id that the journal had before it was found to be an old copy.
pub(super) fn former_id(conn: &Connection) -> rusqlite::Result<Option<JournalId>> {
    let former: Option<String> = conn.query_row("SELECT former_id FROM journal", [], |row| row.get(0))?;
    former.map(|former| parsed(0, JournalId::new(former))).transpose()
}
