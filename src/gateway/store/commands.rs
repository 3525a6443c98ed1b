//! A command's way to its node: enqueued, dispatched, cancelled, expired.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, Row, params};

use prost::Message as _;

use super::lease::{Route, Stray, other_gateway};
use super::notices::{self, Notice};
use super::{Store, StoreError, corrupt, uint};
use crate::gateway::body::COMMAND_TYPE;
use crate::gateway::command_state::State;
use crate::model::{CommandId, Digest, Lane, NodeId, ServerTime};
use crate::wire::pb;

/// A gateway that replays takes so many commands, ended no longer ago than this: their bodies hold yet.
const REPLAYS: u32 = 4;
const REPLAYED: Duration = Duration::from_secs(60);

/// A command to be queued.
#[derive(Debug)]
pub struct NewCommand {
    /// Its id.
    pub id: CommandId,
    /// For whom.
    pub node: NodeId,
    /// Its kind's name.
    pub kind: String,
    /// Whose credits it takes.
    pub lane: Lane,
    /// Whether it may run twice.
    pub retry_safe: bool,
    /// Its body, signed.
    pub envelope: pb::Envelope,
    /// As in the body.
    pub not_after: ServerTime,
    /// The gateway's clock.
    pub now: ServerTime,
}

/// Why a command is not queued.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnqueueError {
    /// The node never joined.
    #[error("no node {0} has joined this gateway; list them with: bcd ctl nodes")]
    UnknownNode(NodeId),
    /// The id is in use.
    #[error("the command id {0} is in use")]
    IdInUse(CommandId),
}

/// A command on its way out.
#[derive(Debug, Clone, PartialEq)]
pub struct Deliver {
    /// Its id.
    pub id: CommandId,
    /// Its number within the node's queue.
    pub seq: u64,
    /// Deliveries, this one included.
    pub attempt: u32,
    /// Its lane.
    pub lane: Lane,
    /// Its body, signed.
    pub envelope: pb::Envelope,
    /// Its cancellation, signed, once one was asked for: to be sent behind it.
    pub cancel: Option<pb::Envelope>,
}

/// What a dispatch found.
#[derive(Debug)]
pub struct Dispatched {
    /// Marked for this session, in seq order.
    pub out: Vec<Deliver>,
    /// How long the next back-off of the node still lasts.
    pub next_due: Option<Duration>,
}

/// What a cancellation did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cancelled {
    /// No such command.
    Unknown,
    /// It had ended.
    Ended,
    /// It was waiting here and has ended.
    Now(NodeId),
    /// Its node must be told.
    Tell(NodeId),
}

/// An envelope's signatures, as they are stored beside its payload.
fn signatures(envelope: &pb::Envelope) -> Vec<u8> {
    let signatures = envelope.signatures.clone();
    pb::Envelope { signatures, ..Default::default() }.encode_to_vec()
}

fn read_envelope(column: usize, bytes: &[u8]) -> rusqlite::Result<pb::Envelope> {
    pb::Envelope::decode(bytes).map_err(|error| corrupt(column, error))
}

/// Reads `id, seq, deliveries, lane, payload, cancel, signatures`, the first seven columns.
pub(super) fn read_deliver(row: &Row<'_>) -> rusqlite::Result<Deliver> {
    let lane: String = row.get(3)?;
    Ok(Deliver {
        id: CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?,
        seq: uint(row.get(1)?),
        attempt: row.get(2)?,
        lane: Lane::from_name(&lane).unwrap_or(Lane::Work),
        envelope: pb::Envelope {
            payload_type: COMMAND_TYPE.into(),
            payload: row.get::<_, Vec<u8>>(4)?.into(),
            signatures: read_envelope(6, row.get_ref(6)?.as_blob()?)?.signatures,
        },
        cancel: row.get_ref(5)?.as_blob_or_null()?.map(|bytes| read_envelope(5, bytes)).transpose()?,
    })
}

impl Store {
    /// Puts a command at the end of its node's queue.
    ///
    /// # Errors
    /// See [`StoreError`]; a command that cannot be queued is the inner error.
    pub async fn enqueue(&self, command: NewCommand) -> Result<Result<(), EnqueueError>, StoreError> {
        let gateway = self.gateway.clone();
        self.run(move |db| enqueue(db, command, &gateway)).await
    }

    /// Marks the node's next commands for a session, as far as `free` goes.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn dispatch(
        &self,
        route: Route,
        free: Vec<(Lane, u32)>,
    ) -> Result<Result<Dispatched, Stray>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            let now = now();
            match route.stray(db, now)? {
                Some(stray) => Ok(Err(stray)),
                None => dispatch(db, &route.node, &free, now).map(Ok),
            }
        })
        .await
    }

    /// Cancels a command; `cancel` is the signed cancellation.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn cancel(
        &self,
        id: CommandId,
        cancellation: pb::Envelope,
        now: ServerTime,
    ) -> Result<Cancelled, StoreError> {
        let gateway = self.gateway.clone();
        self.run(move |db| cancel(db, &id, &cancellation, &gateway, now)).await
    }

    /// Whose a command is and its cancellation, when one was asked for and the command has not ended.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn cancellation(&self, id: CommandId) -> Result<Option<(NodeId, pb::Envelope)>, StoreError> {
        self.run(move |db| {
            db.query_row(
                "SELECT node_id, cancel FROM commands WHERE id = ? AND cancel IS NOT NULL
                 AND state IN ('pending', 'dispatched', 'accepted', 'running')",
                [id.as_str()],
                |row| {
                    let node = NodeId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?;
                    Ok((node, read_envelope(1, row.get_ref(1)?.as_blob()?)?))
                },
            )
            .optional()
        })
        .await
    }

    /// The latest commands that a node has carried out to an end, as if they were to be delivered: no honest gateway
    /// does that. First those that may not run twice, which are few.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn lately_ended(&self, node: NodeId) -> Result<Vec<Deliver>, StoreError> {
        let since = self.clock()().minus(REPLAYED);
        self.run(move |db| {
            let mut rows = db.prepare_cached(
                "SELECT id, seq, deliveries, lane, payload, NULL, signatures FROM commands WHERE node_id = ?
                 AND state IN ('succeeded', 'failed') AND effect = 'complete' AND ended_ms > ?
                 ORDER BY retry_safe, ended_ms DESC, seq DESC LIMIT ?",
            )?;
            rows.query_map(params![node.as_str(), since.0, REPLAYS], read_deliver)?.collect()
        })
        .await
    }

    /// Ends the commands whose time has passed before a node said that it knows them.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn expire(&self, now: ServerTime) -> Result<Vec<CommandId>, StoreError> {
        self.run(move |db| expire(db, now)).await
    }
}

fn enqueue(
    db: &Connection,
    command: NewCommand,
    gateway: &str,
) -> rusqlite::Result<Result<(), EnqueueError>> {
    let taken = db.prepare_cached("SELECT 1 FROM commands WHERE id = ?")?.exists([command.id.as_str()])?;
    if taken {
        return Ok(Err(EnqueueError::IdInUse(command.id)));
    }
    let seq: Option<i64> = db
        .prepare_cached("UPDATE nodes SET last_seq = last_seq + 1 WHERE node_id = ? RETURNING last_seq")?
        .query_row([command.node.as_str()], |row| row.get(0))
        .optional()?;
    let Some(seq) = seq else { return Ok(Err(EnqueueError::UnknownNode(command.node))) };
    db.prepare_cached(
        "INSERT INTO commands (id, node_id, seq, kind, lane, retry_safe, payload, body_sha256, not_after_ms,
         enqueued_ms, signatures) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    )?
    .execute(params![
        command.id.as_str(),
        command.node.as_str(),
        seq,
        command.kind,
        command.lane.name(),
        command.retry_safe,
        &*command.envelope.payload,
        Digest::of(&command.envelope.payload).0,
        command.not_after.0,
        command.now.0,
        signatures(&command.envelope),
    ])?;
    if let Some(other) = other_gateway(db, command.node.as_str(), gateway)? {
        notices::tell(db, &other, &Notice::Work(command.node), command.now)?;
    }
    Ok(Ok(()))
}

fn dispatch(
    db: &Connection,
    node: &NodeId,
    free: &[(Lane, u32)],
    now: ServerTime,
) -> rusqlite::Result<Dispatched> {
    let mut out: Vec<Deliver> = Vec::new();
    for (lane, free) in free.iter().filter(|(_, free)| *free > 0) {
        let mut due = db.prepare_cached(
            "SELECT id, seq, deliveries + 1, lane, payload, cancel, signatures FROM commands WHERE node_id = ? AND lane = ?
             AND (state = 'pending' OR redeliver = 1) AND not_before_ms <= ?
             AND (redeliver = 1 OR not_after_ms > ?) ORDER BY seq LIMIT ?",
        )?;
        let rows = due.query_map(params![node.as_str(), lane.name(), now.0, now.0, free], read_deliver)?;
        for row in rows {
            out.push(row?);
        }
    }
    out.sort_by_key(|deliver| deliver.seq);
    let mut mark = db.prepare_cached(
        "UPDATE commands SET state = iif(state = 'pending', 'dispatched', state), redeliver = 0,
         deliveries = deliveries + 1,
         dispatched_ms = iif(dispatched_ms = 0, ?, dispatched_ms) WHERE id = ?",
    )?;
    for deliver in &out {
        mark.execute(params![now.0, deliver.id.as_str()])?;
    }
    let next_due: Option<i64> = db
        .prepare_cached(
            "SELECT min(not_before_ms) FROM commands WHERE node_id = ? AND (state = 'pending' OR redeliver = 1)
             AND not_before_ms > ?",
        )?
        .query_row(params![node.as_str(), now.0], |row| row.get(0))?;
    Ok(Dispatched { out, next_due: next_due.map(|due| ServerTime(due).since(now)) })
}

fn cancel(
    db: &Connection,
    id: &CommandId,
    cancellation: &pb::Envelope,
    gateway: &str,
    now: ServerTime,
) -> rusqlite::Result<Cancelled> {
    let row = db
        .query_row("SELECT node_id, state, deliveries FROM commands WHERE id = ?", [id.as_str()], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, u32>(2)?))
        })
        .optional()?;
    let Some((node, state, deliveries)) = row else { return Ok(Cancelled::Unknown) };
    let node = NodeId::new(node).map_err(|error| corrupt(0, error))?;
    match State::from_name(&state) {
        // Never delivered, or delivered once and refused: its node has no trace of it. After more deliveries an
        // earlier one may have been taken and its answers lost, so that only the node can tell.
        Some(State::Pending) if deliveries <= 1 => {
            db.execute(
                "UPDATE commands SET state = 'cancelled', reason = 'cancelled', effect = 'none', ended_ms = ?,
                 message = 'cancelled before it was delivered', terminal_changes = terminal_changes + 1
                 WHERE id = ?",
                params![now.0, id.as_str()],
            )?;
            Ok(Cancelled::Now(node))
        }
        Some(State::Pending | State::Dispatched | State::Accepted | State::Running) => {
            db.execute(
                "UPDATE commands SET cancel = coalesce(cancel, ?) WHERE id = ?",
                params![cancellation.encode_to_vec(), id.as_str()],
            )?;
            if let Some(other) = other_gateway(db, node.as_str(), gateway)? {
                notices::tell(db, &other, &Notice::Cancelled(id.clone()), now)?;
            }
            Ok(Cancelled::Tell(node))
        }
        _ => Ok(Cancelled::Ended),
    }
}

fn expire(db: &Connection, now: ServerTime) -> rusqlite::Result<Vec<CommandId>> {
    let mut ended = db.prepare_cached(
        "UPDATE commands SET state = 'expired', reason = 'expired', ended_ms = ?1,
         message = why, effect = iif(deliveries = 0, 'none', 'unknown'),
         terminal_changes = terminal_changes + 1
         WHERE state IN ('pending', 'dispatched') AND not_after_ms <= ?1 RETURNING id",
    )?;
    let ids = ended.query_map([now.0], |row| row.get::<_, String>(0))?;
    ids.map(|id| CommandId::new(id?).map_err(|error| corrupt(0, error))).collect()
}
