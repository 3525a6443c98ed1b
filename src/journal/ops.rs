//! What the writer does: a function an operation, within the transaction of its batch.

use std::sync::Arc;

use rusqlite::params;
use serde_json::json;

use super::Admission;
use super::audit;
use super::core::Core;
use super::durable::Durable;
use super::events;
use super::record::{Accepted, Running, State};
use super::rows::{self, Row};
use crate::admission::{self, Admitted, Context, Decision, JournalFacts, Known, KnownState};
use crate::failpoint;
use crate::model::limits::UNACKED_RESULTS;
use crate::model::{
    Answer, AnswerState, Command, CommandId, Done, Effect, EventType, Kind, NewEvent, Outcome, Reason,
    ServerTime, Terminal,
};
use crate::mutant::{self, Mutant};
use crate::wire::dsse::Verified;

/// An [`Admission`] before its commit.
pub(super) enum Admitting {
    Answered(Answer),
    Ended(Done),
    Accepted(Accepted),
    Restarted(Running),
}

impl Admitting {
    pub(super) fn after_sync(self) -> Admission {
        match self {
            Self::Answered(answer) => Admission::Answered(answer),
            Self::Ended(done) => Admission::Ended(Durable::after_sync(done)),
            Self::Accepted(accepted) => Admission::Accepted(Durable::after_sync(accepted)),
            Self::Restarted(running) => Admission::Restarted(Durable::after_sync(running)),
        }
    }
}

/// Looks up, decides and writes.
pub(super) fn admit(
    core: &mut Core,
    command: Verified<Command>,
    context: &Context,
) -> rusqlite::Result<Admitting> {
    let header = command.get().header.clone();
    let body_sha256 = command.get().body_sha256;
    let row = rows::find(&core.conn, &header.id)?;
    let facts = JournalFacts {
        row: match row.clone() {
            Some(row) if !mutant::is(Mutant::DuplicateStarted) => Some(known(core, row)?),
            _ => None,
        },
        birth: core.counters.named.birth,
        // Each command in flight will need room for its result, so it is counted from its acceptance on.
        room: row.is_some() || (core.counters.owed < UNACKED_RESULTS && !core.counters.events.are_stuck()),
        disk: core.hindrance()?,
    };
    let answer = |state| Admitting::Answered(Answer { id: Some(header.id.clone()), body_sha256, state });
    let fresh = |state, attempt| Row {
        id: header.id.clone(),
        body_sha256,
        kind: header.kind.clone(),
        retry_safe: false,
        not_after: header.not_after,
        state,
        attempt,
        incarnation: String::new(),
        accepted: context.now,
        started: None,
        outcome: None,
        result_seq: None,
    };
    let asking = core.audits.then(|| command.clone());
    let asked = |args| asking.as_ref().map(|command| audit::asked(command, args)).transpose();
    Ok(match admission::decide(command, context, &facts) {
        Decision::Refuse { reason, detail } => {
            if reason == Reason::CommandIdConflict {
                let body = json!({ "id": header.id.as_str(), "body_sha256": body_sha256.to_string() });
                events::add(core, NewEvent::new(EventType::CommandIdConflict, body))?;
            }
            answer(AnswerState::Refused { reason, detail })
        }
        Decision::IsAccepted => answer(AnswerState::Accepted),
        Decision::IsRunning { attempt } => answer(AnswerState::Running { attempt }),
        Decision::Again(_) if mutant::is(Mutant::ResultNotResent) => answer(AnswerState::Accepted),
        Decision::Again(done) => Admitting::Ended(done),
        Decision::Reject(mut done) => {
            if done.outcome.state != Terminal::Rejected {
                done.outcome.started = row.as_ref().and_then(|row| row.started);
            }
            done.outcome.finished = context.now;
            if row.is_none() {
                core.counters.owed += 1;
            }
            let row = row.unwrap_or_else(|| fresh(State::Done, 0));
            end_asked(core, row, &done.outcome, asked(None)?)?;
            failpoint::hit(failpoint::DONE_WRITTEN);
            Admitting::Ended(done)
        }
        Decision::Admit { admitted, attempt } => {
            if row.is_none() {
                core.counters.owed += 1;
            }
            let (retry_safe, asked) = (admitted.retry_safe(), asked(Some(admitted.args()))?);
            if row.is_some_and(|row| row.state == State::Running) {
                let row = Row { retry_safe, ..fresh(State::Running, attempt) };
                return restart(core, admitted, row, asked.as_deref());
            }
            put(core, &Row { retry_safe, ..fresh(State::Accepted, attempt) }, asked.as_deref())?;
            let body = json!({ "id": header.id.as_str(), "kind": header.kind });
            events::add(core, NewEvent::new(EventType::CommandAccepted, body))?;
            failpoint::hit(failpoint::ACCEPT_WRITTEN);
            Admitting::Accepted(Accepted { command: Arc::new(admitted), attempt })
        }
    })
}

/// Writes RUNNING, with the attempt raised, for a command that an older process left running; `row` has the attempts so
/// far, and was accepted again just now.
fn restart(
    core: &mut Core,
    admitted: Admitted,
    row: Row,
    asked: Option<&str>,
) -> rusqlite::Result<Admitting> {
    let (attempt, started) = (row.attempt.saturating_add(1), row.accepted);
    let id = row.id.clone();
    put(core, &Row { attempt, started, ..row }, asked)?;
    tell_running(core, &id, attempt)?;
    failpoint::hit(failpoint::RUN_WRITTEN);
    Ok(Admitting::Restarted(Running { command: Arc::new(admitted), attempt, started }))
}

fn tell_running(core: &mut Core, id: &CommandId, attempt: u32) -> rusqlite::Result<()> {
    let body = json!({ "id": id.as_str(), "attempt": attempt });
    events::add(core, NewEvent::new(EventType::CommandRunning, body))
}

fn tell_done(core: &mut Core, id: &CommandId, outcome: &Outcome) -> rusqlite::Result<()> {
    let mut body = json!({
        "id": id.as_str(),
        "attempt": outcome.attempt,
        "state": outcome.state,
        "effect": outcome.effect,
    });
    if let (Some(reason), Some(fields)) = (outcome.reason, body.as_object_mut()) {
        fields.insert("reason".into(), reason.token().into());
    }
    events::add(core, NewEvent::new(EventType::CommandDone, body))
}

/// Writes a row whole, as this incarnation's; `asked` where it is new who asked.
pub(super) fn put(core: &Core, row: &Row, asked: Option<&str>) -> rusqlite::Result<()> {
    rows::put(&core.conn, row, &core.incarnation, &core.boot_id, asked)
}

/// The row as admission sees it.
fn known(core: &Core, row: Row) -> rusqlite::Result<Known> {
    let body_sha256 = row.body_sha256;
    let ours = row.incarnation == core.incarnation.as_str();
    let attempt = row.attempt;
    let state = match row.state {
        State::Accepted if ours => KnownState::Accepted,
        State::Accepted => KnownState::AcceptedBefore,
        State::Running if !ours && row.retry_safe => KnownState::RunningBefore { attempt },
        // Recovery leaves no other RUNNING of an older incarnation; were there one, it is not for us to start.
        State::Running => KnownState::Running { attempt },
        State::Done | State::Tombstone => {
            let done = rows::done_of(&core.conn, row)?.ok_or(rusqlite::Error::QueryReturnedNoRows)?;
            KnownState::Done(done)
        }
    };
    Ok(Known { body_sha256, state })
}

/// Writes a row's end, and its result. A row that is new has been counted by the caller.
pub(super) fn end(core: &mut Core, row: Row, outcome: &Outcome) -> rusqlite::Result<()> {
    end_asked(core, row, outcome, None)
}

/// The same with who asked, where the row does not say.
fn end_asked(
    core: &mut Core,
    mut row: Row,
    outcome: &Outcome,
    asked: Option<String>,
) -> rusqlite::Result<()> {
    audit::ended(core, &row, asked, outcome)?;
    let seq = core.next_seq();
    row.state = State::Done;
    row.attempt = outcome.attempt;
    row.outcome = Some(outcome.clone());
    row.result_seq = Some(seq);
    put(core, &row, None)?;
    rows::put_output(&core.conn, &row.id, seq, &outcome.output)?;
    tell_done(core, &row.id, outcome)
}

/// Writes RUNNING.
pub(super) fn start(
    core: &mut Core,
    id: &CommandId,
    attempt: u32,
    started: Option<ServerTime>,
) -> rusqlite::Result<()> {
    if !rows::set_running(&core.conn, id, attempt, started)? {
        return Err(rusqlite::Error::QueryReturnedNoRows);
    }
    tell_running(core, id, attempt)?;
    failpoint::hit(failpoint::RUN_WRITTEN);
    Ok(())
}

/// Writes DONE.
pub(super) fn finish(core: &mut Core, id: &CommandId, outcome: &Outcome) -> rusqlite::Result<()> {
    // Without an audit log nobody reads the row.
    if core.audits
        && let Some(row) = rows::find(&core.conn, id)?
    {
        audit::ended(core, &row, None, outcome)?;
    }
    let seq = core.next_seq();
    if !rows::set_done(&core.conn, id, seq, outcome)? {
        return Err(rusqlite::Error::QueryReturnedNoRows);
    }
    tell_done(core, id, outcome)?;
    failpoint::hit(failpoint::DONE_WRITTEN);
    Ok(())
}

/// The end of one command.
pub(super) fn result(core: &Core, id: &CommandId) -> rusqlite::Result<Option<Done>> {
    match rows::find(&core.conn, id)? {
        Some(row) => rows::done_of(&core.conn, row),
        None => Ok(None),
    }
}

/// A page of owed results, oldest first.
pub(super) fn unacked(
    core: &Core,
    after: Option<u64>,
    max_bytes: usize,
) -> rusqlite::Result<(Vec<Done>, Option<u64>)> {
    if mutant::is(Mutant::ResultNotResent) {
        return Ok((Vec::new(), None));
    }
    // So many fit into no Hello and no frame; each costs its id and digest beside its output and its message.
    const AT_ONCE: u32 = 1024;
    const BESIDE_OUTCOME: u64 = 256;
    // The signed body says all of it once more, but for the output.
    const SIGNED: u64 = 1024;
    let max_bytes = u64::try_from(max_bytes).unwrap_or(u64::MAX);
    let found = rows::results_after(&core.conn, after.unwrap_or(0), AT_ONCE + 1)?;
    let (mut page, mut next) = (Vec::new(), None);
    let (mut bytes, mut last) = (0_u64, None);
    for (seq, id, outcome, kind) in found {
        let signed = if Kind::signs_results(&kind) { SIGNED } else { 0 };
        bytes = bytes.saturating_add(outcome + BESIDE_OUTCOME + signed);
        if !page.is_empty() && (bytes > max_bytes || page.len() >= AT_ONCE as usize) {
            next = last;
            break;
        }
        if let Some(done) = result(core, &id)? {
            page.push(done);
        }
        last = Some(seq);
    }
    Ok((page, next))
}

/// Writes the clocks; neither goes back.
pub(super) fn write_time(
    core: &Core,
    mark: Option<ServerTime>,
    signed: Option<ServerTime>,
) -> rusqlite::Result<()> {
    let sql = "UPDATE journal SET mark_ms = max(coalesce(mark_ms, ?1), coalesce(?1, mark_ms)),
        signed_ms = max(coalesce(signed_ms, ?2), coalesce(?2, signed_ms))";
    core.conn
        .prepare_cached(sql)?
        .execute(params![mark.map(|time| time.0), signed.map(|time| time.0)])
        .map(|_| ())
}

/// A write that changes nothing.
pub(super) fn rewrite_head(core: &Core) -> rusqlite::Result<()> {
    core.conn.prepare_cached("UPDATE journal SET last_epoch = last_epoch")?.execute([]).map(|_| ())
}

/// Writes what a Welcome brought.
pub(super) fn welcomed(core: &mut Core, epoch: u64, mark: ServerTime) -> rusqlite::Result<()> {
    write_time(core, Some(mark), None)?;
    core.conn.prepare_cached("UPDATE journal SET last_epoch = ?")?.execute([rows::signed(epoch)])?;
    Ok(())
}

/// Writes the time of a signed answer: the mark is set anew, back too, and a journal without a birth has one.
pub(super) fn answered(core: &mut Core, time: ServerTime) -> rusqlite::Result<()> {
    let sql = "UPDATE journal SET mark_ms = ?1, signed_ms = max(coalesce(signed_ms, ?1), ?1),
        birth_ms = coalesce(birth_ms, ?1)";
    core.conn.prepare_cached(sql)?.execute([time.0])?;
    if core.counters.named.birth.is_none() {
        core.counters.named = core.counters.named.born(time);
    }
    Ok(())
}

/// Ends what an older incarnation left, no delivery took up, and signed time has passed.
pub(super) fn expire_left(core: &mut Core, signed: ServerTime) -> rusqlite::Result<Vec<Done>> {
    let mut ended = Vec::new();
    let mut still_left = Vec::new();
    for id in core.left.clone() {
        let Some(row) = rows::find(&core.conn, &id)? else { continue };
        let unfinished = matches!(row.state, State::Accepted | State::Running);
        if !unfinished || row.incarnation == core.incarnation.as_str() {
            continue;
        }
        if signed < row.not_after {
            still_left.push(id);
            continue;
        }
        let outcome = match row.state {
            State::Accepted => expired(row.not_after),
            _ => Outcome::interrupted(row.attempt, row.started),
        };
        let outcome = Outcome { finished: Some(signed), ..outcome };
        ended.push(rows::done(&row, outcome.clone()));
        end(core, row, &outcome)?;
    }
    // Ids that a failed commit brings back are found by the next start; until then they only wait longer.
    core.left = still_left.into_iter().chain(ended.iter().map(|done| done.id.clone())).collect();
    Ok(ended)
}

/// Ends a command that an older incarnation left and no delivery took up; gives the end of one that has ended, and
/// nothing of one that is in flight or not known.
pub(super) fn cancel_left(
    core: &mut Core,
    id: &CommandId,
    now: Option<ServerTime>,
) -> rusqlite::Result<Option<Done>> {
    let Some(row) = rows::find(&core.conn, id)? else { return Ok(None) };
    let unfinished = matches!(row.state, State::Accepted | State::Running);
    if !unfinished || row.incarnation == core.incarnation.as_str() {
        return rows::done_of(&core.conn, row);
    }
    // What a dead daemon had begun may have done something.
    let (effect, message) = match row.attempt {
        0 => (Effect::None, "cancelled before it started"),
        _ => (Effect::Unknown, "cancelled while it waited to run again"),
    };
    let outcome = Outcome {
        effect,
        attempt: row.attempt,
        started: row.started,
        finished: now,
        ..Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, message)
    };
    let done = rows::done(&row, outcome.clone());
    end(core, row, &outcome)?;
    failpoint::hit(failpoint::DONE_WRITTEN);
    Ok(Some(done))
}

/// The end of a command that was accepted and never begun.
pub(super) fn expired(not_after: ServerTime) -> Outcome {
    Outcome::not_run(Terminal::Rejected, Reason::Expired, format!("not_after was {not_after}"))
}
