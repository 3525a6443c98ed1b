//! What a node says of its commands. Refusals, ACCEPTED and RUNNING count from the live epoch only; a result is a
//! fact whichever session carried it.

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::{Store, StoreError, corrupt, events, facts, int};
use crate::gateway::command_state::State;
use crate::gateway::update::{End, Said, Update};
use crate::model::{CommandId, Lane, NodeId, Reason, ServerTime};
use crate::mutant::{self, Mutant};

/// Back-off after the first refusal, ms; doubles up to [`LONGEST_BACKOFF_MS`].
const FIRST_BACKOFF_MS: i64 = 1_000;
/// Longest back-off after a refusal, ms.
const LONGEST_BACKOFF_MS: i64 = 30_000;

/// What one update did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Applied {
    /// Nothing: an old epoch, nothing new, or a passing word on another command.
    Nothing,
    /// Back in the queue; its lane, and whether the node has no credit there.
    BackOff(Lane, bool),
    /// The node goes on with it.
    Progress,
    /// It has ended, and its credit is free.
    Ended(CommandId, Lane),
    /// It has ended by what a Hello shows, without a result.
    Completed(CommandId),
    /// A fact that changes nothing; stored, to be acked.
    Late(CommandId),
}

/// What a batch of updates did.
#[derive(Debug, Default)]
pub struct Effects {
    /// One each.
    pub applied: Vec<Applied>,
    /// A worker has something to judge.
    pub to_judge: bool,
}

impl Effects {
    /// The commands whose results are stored and may be acked.
    pub fn acks(&self) -> Vec<CommandId> {
        let acks = self.applied.iter().filter_map(|applied| match applied {
            Applied::Ended(id, _) | Applied::Late(id) => Some(id.clone()),
            Applied::Nothing | Applied::BackOff(..) | Applied::Progress | Applied::Completed(_) => None,
        });
        acks.collect()
    }

    /// The commands that have ended by it.
    pub fn ended(&self) -> Vec<CommandId> {
        let ended = self.applied.iter().filter_map(|applied| match applied {
            Applied::Ended(id, _) | Applied::Completed(id) => Some(id.clone()),
            _ => None,
        });
        ended.collect()
    }
}

impl Store {
    /// Applies a session's updates in their order.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn updates(
        &self,
        node: NodeId,
        epoch: u64,
        updates: Vec<Update>,
        now: ServerTime,
    ) -> Result<Effects, StoreError> {
        self.run(move |db| apply(db, &node, epoch, &updates, now)).await
    }
}

/// Applies updates within a job.
pub(super) fn apply(
    db: &Connection,
    node: &NodeId,
    epoch: u64,
    updates: &[Update],
    now: ServerTime,
) -> rusqlite::Result<Effects> {
    let live = db
        .prepare_cached("SELECT 1 FROM nodes WHERE node_id = ? AND epoch = ?")?
        .exists(params![node.as_str(), int(epoch)])?;
    let applied = updates.iter().map(|update| apply_one(db, node, live, update, now));
    let applied: Vec<Applied> = applied.collect::<Result<_, _>>()?;
    let ends = applied.iter().any(|one| matches!(one, Applied::Ended(..) | Applied::Late(_)));
    Ok(Effects { to_judge: ends && facts::wait(db)?, applied })
}

struct Row {
    id: CommandId,
    node: String,
    state: State,
    kind: String,
    lane: Lane,
    body_sha256: Vec<u8>,
    backoff_ms: i64,
    cancel_asked: bool,
    deliveries: u32,
}

fn apply_one(
    db: &Connection,
    node: &NodeId,
    live: bool,
    update: &Update,
    now: ServerTime,
) -> rusqlite::Result<Applied> {
    let row = match find(db, node, update)? {
        Some(row) => row,
        // A result of a command that this store does not know (it was restored, say) is acked and kept all the
        // same: left unacked, it would come again for ever.
        None => match (&update.said, &update.id) {
            (Said::Ended(end), Some(id)) => return late(db, node, (id, None), update, end, now),
            _ => return Ok(Applied::Nothing),
        },
    };
    if row.node != node.as_str() {
        return foreign(db, node, &row.id, update, Reason::WrongNode, now);
    }
    if row.body_sha256 != update.body_sha256.0 {
        return foreign(db, node, &row.id, update, Reason::CommandIdConflict, now);
    }
    match &update.said {
        Said::Ended(end) if row.state.is_terminal() && !mutant::is(Mutant::LateFactCounted) => {
            late(db, node, (&row.id, Some(&row.kind)), update, end, now)
        }
        Said::Ended(end) => {
            facts::add(db, node, (&row.id, Some(&row.kind)), update, true)?;
            ended(db, &row, end, now)
        }
        _ if !live => Ok(Applied::Nothing),
        Said::Refused { reason, detail, busy } => refused(db, &row, reason, detail, *busy, now),
        Said::Accepted => accepted(db, &row, now),
        Said::Running { attempt } => running(db, &row, *attempt, now),
    }
}

fn find(db: &Connection, node: &NodeId, update: &Update) -> rusqlite::Result<Option<Row>> {
    let read = |row: &rusqlite::Row<'_>| {
        let (state, lane): (String, String) = (row.get(2)?, row.get(3)?);
        Ok(Row {
            id: CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?,
            node: row.get(1)?,
            state: State::from_name(&state).unwrap_or(State::Failed),
            lane: Lane::from_name(&lane).unwrap_or(Lane::Work),
            body_sha256: row.get(4)?,
            backoff_ms: row.get(5)?,
            cancel_asked: row.get(6)?,
            deliveries: row.get(7)?,
            kind: row.get(8)?,
        })
    };
    match &update.id {
        Some(id) => db
            .prepare_cached(
                "SELECT id, node_id, state, lane, body_sha256, backoff_ms, cancel IS NOT NULL, deliveries, kind
                 FROM commands WHERE id = ?",
            )?
            .query_row([id.as_str()], read)
            .optional(),
        None => db
            .prepare_cached(
                "SELECT id, node_id, state, lane, body_sha256, backoff_ms, cancel IS NOT NULL, deliveries, kind
                 FROM commands WHERE node_id = ? AND body_sha256 = ? AND state = 'dispatched'",
            )?
            .query_row(params![node.as_str(), update.body_sha256.0], read)
            .optional(),
    }
}

fn refused(
    db: &Connection,
    row: &Row,
    reason: &str,
    detail: &str,
    busy: Option<Reason>,
    now: ServerTime,
) -> rusqlite::Result<Applied> {
    if row.state.is_terminal() || row.state == State::Pending {
        return Ok(Applied::Nothing);
    }
    if row.cancel_asked && row.state == State::Dispatched && row.deliveries == 1 {
        // The only delivery was refused, which leaves no trace at the node: what was to be cancelled has ended here.
        // After more of them an earlier one may have been taken, and only the node can tell.
        let end = End {
            state: State::Cancelled,
            reason: "cancelled".into(),
            message: "cancelled before the node took it".into(),
            effect: "none",
            attempt: 0,
            output: String::new(),
        };
        return ended(db, row, &end, now);
    }
    if mutant::is(Mutant::BusyTerminal) && reason == Reason::Busy.token() {
        let end = End {
            state: State::Rejected,
            reason: reason.to_owned(),
            message: detail.to_owned(),
            effect: "none",
            attempt: 0,
            output: String::new(),
        };
        return ended(db, row, &end, now);
    }
    let backoff = next_backoff(row.backoff_ms);
    let why = if detail.is_empty() { reason.to_owned() } else { format!("{reason}: {detail}") };
    db.prepare_cached(
        // A stored state never sinks: what its node left behind and cannot take up again yet is owed a delivery.
        "UPDATE commands SET state = iif(state = 'dispatched', 'pending', state), redeliver = state <> 'dispatched',
         not_before_ms = ?, backoff_ms = ?, why = ? WHERE id = ?",
    )?
    .execute(params![now.0 + backoff, backoff, why, row.id.as_str()])?;
    Ok(Applied::BackOff(row.lane, busy == Some(Reason::Credits)))
}

/// The wait after a refusal, ms, by the one before it; 0 for none.
fn next_backoff(before_ms: i64) -> i64 {
    before_ms.saturating_mul(2).clamp(FIRST_BACKOFF_MS, LONGEST_BACKOFF_MS)
}

fn accepted(db: &Connection, row: &Row, now: ServerTime) -> rusqlite::Result<Applied> {
    if !matches!(row.state, State::Pending | State::Dispatched) {
        return Ok(Applied::Nothing);
    }
    db.prepare_cached(
        "UPDATE commands SET state = 'accepted', accepted_ms = iif(accepted_ms = 0, ?, accepted_ms) WHERE id = ?",
    )?
    .execute(params![now.0, row.id.as_str()])?;
    Ok(Applied::Progress)
}

fn running(db: &Connection, row: &Row, attempt: u32, now: ServerTime) -> rusqlite::Result<Applied> {
    if row.state.is_terminal() {
        return Ok(Applied::Nothing);
    }
    db.prepare_cached(
        "UPDATE commands SET state = 'running', attempt = ?,
         accepted_ms = iif(accepted_ms = 0, ?, accepted_ms) WHERE id = ?",
    )?
    .execute(params![attempt, now.0, row.id.as_str()])?;
    Ok(Applied::Progress)
}

fn ended(db: &Connection, row: &Row, end: &End, now: ServerTime) -> rusqlite::Result<Applied> {
    db.prepare_cached(
        "UPDATE commands SET state = ?, reason = ?, message = ?, effect = ?, attempt = ?, output = ?,
         ended_ms = ?, terminal_changes = terminal_changes + 1 WHERE id = ?",
    )?
    .execute(params![
        end.state.name(),
        end.reason,
        end.message,
        end.effect,
        end.attempt,
        end.output,
        now.0,
        row.id.as_str(),
    ])?;
    Ok(Applied::Ended(row.id.clone(), row.lane))
}

/// An update that speaks of another node's command, or of other bytes under the id. A result of that kind changes
/// nothing, but is acked: left unacked it would come again for ever. Its output is not kept.
fn foreign(
    db: &Connection,
    node: &NodeId,
    id: &CommandId,
    update: &Update,
    why: Reason,
    now: ServerTime,
) -> rusqlite::Result<Applied> {
    tracing::warn!(%node, command = %id, %why, "an update speaks of another command");
    let Said::Ended(end) = &update.said else { return Ok(Applied::Nothing) };
    let added = db
        .prepare_cached(
            "INSERT INTO late_facts (command_id, node_id, at_ms, body_sha256, state, reason, effect, message, output,
               refused)
             SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, '', ?9 WHERE NOT EXISTS (
               SELECT 1 FROM late_facts WHERE command_id = ?1 AND node_id = ?2 AND body_sha256 = ?4 AND state = ?5
               AND refused = ?9)",
        )?
        .execute(params![
            id.as_str(),
            node.as_str(),
            now.0,
            update.body_sha256.0,
            end.state.name(),
            end.reason,
            end.effect,
            end.message,
            why.token(),
        ])?;
    if added == 1 {
        let detail = json!({"commandId": id, "state": end.state.name(), "reason": why});
        events::add(db, now.0, "node.report-failed", node.as_str(), &detail)?;
    }
    Ok(Applied::Late(id.clone()))
}

fn late(
    db: &Connection,
    node: &NodeId,
    (id, kind): (&CommandId, Option<&str>),
    update: &Update,
    end: &End,
    now: ServerTime,
) -> rusqlite::Result<Applied> {
    db.prepare_cached("UPDATE commands SET late_facts = late_facts + 1 WHERE id = ?")?
        .execute([id.as_str()])?;
    // One row a distinct fact: a result that is only sent again until its ack arrives adds none.
    let added = db.prepare_cached(
        "INSERT INTO late_facts (command_id, node_id, at_ms, body_sha256, state, reason, effect, message, output)
         SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9 WHERE NOT EXISTS (
           SELECT 1 FROM commands WHERE id = ?1 AND state = ?5 AND reason = ?6 AND output = ?9
           UNION ALL SELECT 1 FROM late_facts WHERE command_id = ?1 AND state = ?5 AND reason = ?6 AND output = ?9)",
    )?
    .execute(params![
        id.as_str(),
        node.as_str(),
        now.0,
        update.body_sha256.0,
        end.state.name(),
        end.reason,
        end.effect,
        end.message,
        end.output,
    ])?;
    if added == 1 {
        facts::add(db, node, (id, kind), update, false)?;
    } else if facts::may_heal(db, id, end)? {
        facts::add(db, node, (id, kind), update, true)?;
    }
    Ok(Applied::Late(id.clone()))
}

#[cfg(test)]
mod tests;
