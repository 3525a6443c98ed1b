//! The Hello transaction, and what waits for a session's first heartbeat.

use std::sync::Weak;

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::commands::{Deliver, read_deliver};
use super::duplicates::{self, Likeness};
use super::lease::{Lease, PATIENCE_MS, Route, Stray, other_gateway};
use super::notices::{self, Notice};
use super::updates::{Applied, Effects, apply};
use super::{Store, StoreError, corrupt, events, int, node_events, revocations, uint};
use crate::gateway::update::Update;
use crate::model::{BootId, CommandId, Incarnation, JournalId, Kind, NodeId, Reason, ServerTime};
use crate::wire::pb;

/// How far a node's claimed epoch may lie above the stored one: one lie must not lock the node out.
const EPOCH_AHEAD: u64 = 1 << 20;

/// A Hello whose fields and certificate were checked.
#[derive(Debug, Clone)]
pub struct HelloFacts {
    /// Who.
    pub node: NodeId,
    /// Serial of the certificate, hex.
    pub serial: String,
    /// The kernel's boot.
    pub boot_id: BootId,
    /// The journal file.
    pub journal_id: JournalId,
    /// The daemon process.
    pub incarnation: Incarnation,
    /// Of the daemon.
    pub version: String,
    /// Well-formed, sorted, unique.
    pub capabilities: Vec<String>,
    /// Of the last Welcome applied; 0 for none.
    pub last_epoch: u64,
    /// Results not yet acked.
    pub results: Vec<Update>,
    /// What this incarnation runs.
    pub running: Vec<CommandId>,
}

/// Why a Hello is refused by what is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HelloRefusal {
    /// Its caller has hung up while it waited.
    Gone,
    /// The gateway's lease is over.
    Fenced,
    /// Its certificate was revoked, for this reason.
    Revoked(Reason),
    /// It never joined here.
    UnknownNode,
    /// It has joined again since its certificate was signed.
    IdentitySuperseded,
}

/// A session that may be welcomed.
#[derive(Debug)]
pub struct Opened {
    /// Above every earlier one of the node.
    pub epoch: u64,
    /// Events stored of this journal.
    pub acked_event_seq: u64,
    /// Another journal than last time.
    pub journal_changed: bool,
    /// Another boot than last time.
    pub boot_changed: bool,
    /// Another machine has said Hello as this node.
    pub duplicate: bool,
    /// Of the replayed results.
    pub effects: Effects,
}

/// What goes out after a session's first heartbeat.
#[derive(Debug)]
pub struct FirstHeartbeat {
    /// In seq order.
    pub replay: Vec<Deliver>,
    /// Cancellations asked for and not yet answered.
    pub cancels: Vec<(CommandId, pb::Envelope)>,
    /// Ended `journal-lost`.
    pub ended: Vec<CommandId>,
}

/// The epoch of a new session, and whether the node's claim was too high to be believed.
fn next_epoch(stored: u64, last_epoch: u64) -> (u64, bool) {
    if last_epoch > stored.saturating_add(EPOCH_AHEAD) {
        (stored + 1, true)
    } else {
        (stored.max(last_epoch) + 1, false)
    }
}

/// What is stored of a node.
#[derive(Debug)]
pub(super) struct Known {
    pub generation: i64,
    pub epoch: u64,
    pub boot_id: String,
    pub journal_id: String,
    pub incarnation: String,
    /// The highest epoch of which a heartbeat was acked.
    pub acked_epoch: u64,
    pub connected: bool,
}

impl Store {
    /// The Hello transaction. `caller` is gone once nobody waits for the Welcome: after an outage of the store, Hellos
    /// of calls that were given up meanwhile must not supersede the sessions that came of later ones.
    ///
    /// # Errors
    /// See [`StoreError`]; a refusal is the inner error.
    pub async fn hello(
        &self,
        facts: HelloFacts,
        lease: Lease,
        caller: Weak<()>,
    ) -> Result<Result<Opened, HelloRefusal>, StoreError> {
        let now = self.clock();
        self.run(move |db| match caller.strong_count() {
            0 => Ok(Err(HelloRefusal::Gone)),
            _ => hello(db, &facts, &lease, now()),
        })
        .await
    }

    /// A session's first heartbeat: the node is connected, the verdict over a lost journal falls, and what is in
    /// flight is delivered again.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn first_heartbeat(
        &self,
        route: Route,
        running: Vec<CommandId>,
        connected: serde_json::Value,
    ) -> Result<Result<FirstHeartbeat, Stray>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            let now = now();
            match route.stray(db, now)? {
                Some(stray) => Ok(Err(stray)),
                None => first_heartbeat(db, &route.node, &running, &connected, now).map(Ok),
            }
        })
        .await
    }

    /// Ends a session's part in the routing, if it still has one. Whether it was written.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn disconnected(
        &self,
        route: Route,
        last_seen: ServerTime,
        reason: &'static str,
    ) -> Result<bool, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            let (now, node) = (now(), route.node.as_str());
            if let Some(Stray::Unknown | Stray::Superseded | Stray::Fenced) = route.stray(db, now)? {
                return Ok(false);
            }
            let changed = db
                .prepare_cached(
                    "UPDATE nodes SET state = 'disconnected', patience_ms = ?, last_seen_ms = ?
                     WHERE node_id = ? AND state = 'connected'",
                )?
                .execute(params![PATIENCE_MS, last_seen.0, node])?;
            if changed == 1 {
                let detail =
                    json!({"epoch": route.epoch, "reason": reason, "gateway": &*route.lease.gateway});
                events::add(db, now.0, "node.disconnected", node, &detail)?;
            }
            Ok(changed == 1)
        })
        .await
    }

    /// A Goodbye of the live epoch and incarnation takes the node out of placement.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn out_of_placement(&self, route: Route, incarnation: Incarnation) -> Result<(), StoreError> {
        let now = self.clock();
        self.run(move |db| {
            if route.stray(db, now())?.is_none() {
                db.execute(
                    "UPDATE nodes SET placed = 0 WHERE node_id = ? AND incarnation = ?",
                    params![route.node.as_str(), incarnation.as_str()],
                )?;
            }
            Ok(())
        })
        .await
    }

    /// Last-seen times and credits of a gateway's live sessions: node, epoch, time, credits as JSON. Answers the nodes
    /// that have newer sessions elsewhere.
    ///
    /// # Errors
    /// See [`StoreError`]; the inner error is the end of the lease.
    pub async fn seen(
        &self,
        lease: Lease,
        seen: Vec<(NodeId, u64, ServerTime, String)>,
    ) -> Result<Result<Vec<NodeId>, Stray>, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            if !lease.holds(db, now())? {
                return Ok(Err(Stray::Fenced));
            }
            let mut update = db.prepare_cached(
                "UPDATE nodes SET last_seen_ms = ?, free_credits = ? WHERE node_id = ? AND epoch = ?",
            )?;
            let mut moved = Vec::new();
            for (node, epoch, at, credits) in seen {
                if update.execute(params![at.0, credits, node.as_str(), int(epoch)])? == 0 {
                    moved.push(node);
                }
            }
            Ok(Ok(moved))
        })
        .await
    }
}

fn hello(
    db: &Connection,
    facts: &HelloFacts,
    lease: &Lease,
    now: ServerTime,
) -> rusqlite::Result<Result<Opened, HelloRefusal>> {
    if !lease.holds(db, now)? {
        return Ok(Err(HelloRefusal::Fenced));
    }
    let node = facts.node.as_str();
    let known = db
        .prepare_cached(
            "SELECT generation, epoch, boot_id, journal_id, state, incarnation, acked_epoch FROM nodes
             WHERE node_id = ?",
        )?
        .query_row([node], |row| {
            Ok(Known {
                generation: row.get(0)?,
                epoch: uint(row.get(1)?),
                boot_id: row.get(2)?,
                journal_id: row.get(3)?,
                connected: row.get::<_, String>(4)? == "connected",
                incarnation: row.get(5)?,
                acked_epoch: uint(row.get(6)?),
            })
        })
        .optional()?;
    let Some(known) = known else { return Ok(Err(HelloRefusal::UnknownNode)) };
    if let Some(reason) = revocations::revoked(db, &facts.serial)? {
        return Ok(Err(HelloRefusal::Revoked(reason)));
    }
    let signed_for: Option<i64> = db
        .prepare_cached("SELECT generation FROM certs WHERE serial = ? AND node_id = ?")?
        .query_row([facts.serial.as_str(), node], |row| row.get(0))
        .optional()?;
    if signed_for.is_some_and(|generation| generation < known.generation) {
        return Ok(Err(HelloRefusal::IdentitySuperseded));
    }

    let likeness = duplicates::judge(db, facts, &known, now)?;
    if likeness == Likeness::Quarantined {
        revocations::tell_its_gateway(db, &facts.node, now)?;
        return Ok(Err(HelloRefusal::Revoked(Reason::DuplicateIdentity)));
    }

    let (epoch, lied) = next_epoch(known.epoch, facts.last_epoch);
    let at = now.0;
    if lied {
        let detail = json!({"claimed": facts.last_epoch, "stored": known.epoch});
        events::add(db, at, "security.node.epoch-ahead", node, &detail)?;
    }
    if let Some(other) = other_gateway(db, node, &lease.gateway)? {
        notices::tell(db, &other, &Notice::Session(facts.node.clone()), now)?;
    }
    let journal_changed = !known.journal_id.is_empty() && known.journal_id != facts.journal_id.as_str();
    let boot_changed = !known.boot_id.is_empty() && known.boot_id != facts.boot_id.as_str();
    let acked_event_seq = node_events::acked(db, &facts.node, &facts.journal_id)?;
    db.prepare_cached(
        "UPDATE nodes SET epoch = ?, boot_id = ?, journal_id = ?, incarnation = ?, version = ?, capabilities = ?,
         acked_event_seq = ?, journal_verdict_due = journal_verdict_due OR ?, placed = 1, last_seen_ms = ?,
         gateway_id = ?, serial = ? WHERE node_id = ?",
    )?
    .execute(params![
        int(epoch),
        facts.boot_id.as_str(),
        facts.journal_id.as_str(),
        facts.incarnation.as_str(),
        facts.version,
        json!(facts.capabilities).to_string(),
        int(acked_event_seq),
        journal_changed,
        at,
        &*lease.gateway,
        facts.serial,
        node,
    ])?;
    events::count(db, "hellos", 1)?;
    let mut effects = apply(db, &facts.node, epoch, &facts.results, now)?;
    // After the results: what has ended stays so.
    running(db, facts, now)?;
    if boot_changed && journal_changed {
        // No result can come any more, and the new boot says enough.
        effects.applied.extend(rebooted(db, &facts.node, now)?);
    }
    let duplicate = likeness == Likeness::Double;
    Ok(Ok(Opened { epoch, acked_event_seq, journal_changed, boot_changed, duplicate, effects }))
}

/// Raises what the node names as running. Its RUNNING goes with the session in which it is said, and is not said again:
/// the daemon that would have may be dead, and its program under the next one.
fn running(db: &Connection, facts: &HelloFacts, now: ServerTime) -> rusqlite::Result<()> {
    let mut raise = db.prepare_cached(
        "UPDATE commands SET state = 'running', redeliver = 0, attempt = max(attempt, 1),
         accepted_ms = iif(accepted_ms = 0, ?, accepted_ms)
         WHERE id = ? AND node_id = ? AND deliveries > 0 AND state IN ('pending', 'dispatched', 'accepted')",
    )?;
    for id in &facts.running {
        raise.execute(params![now.0, id.as_str(), facts.node.as_str()])?;
    }
    Ok(())
}

fn first_heartbeat(
    db: &Connection,
    node: &NodeId,
    running: &[CommandId],
    connected: &serde_json::Value,
    now: ServerTime,
) -> rusqlite::Result<FirstHeartbeat> {
    let verdict_due: bool = db
        .prepare_cached("SELECT journal_verdict_due FROM nodes WHERE node_id = ?")?
        .query_row([node.as_str()], |row| row.get(0))?;
    db.prepare_cached(
        "UPDATE nodes SET state = 'connected', journal_verdict_due = 0, last_seen_ms = ?, acked_epoch = epoch
         WHERE node_id = ?",
    )?
    .execute(params![now.0, node.as_str()])?;
    events::add(db, now.0, "node.connected", node.as_str(), connected)?;

    let in_flight: Vec<(Deliver, bool)> = db
        .prepare_cached(
            "SELECT id, seq, deliveries + 1, lane, payload, cancel, signatures, retry_safe FROM commands
             WHERE node_id = ? AND state IN ('dispatched', 'accepted', 'running') ORDER BY seq",
        )?
        .query_map([node.as_str()], |row| Ok((read_deliver(row)?, row.get(7)?)))?
        .collect::<Result<_, _>>()?;
    let mut out = FirstHeartbeat { replay: Vec::new(), cancels: Vec::new(), ended: Vec::new() };
    for (deliver, retry_safe) in in_flight {
        let runs = running.contains(&deliver.id);
        if verdict_due && !retry_safe && !runs {
            journal_lost(db, &deliver.id, now)?;
            out.ended.push(deliver.id);
            continue;
        }
        if runs {
            out.cancels.extend(deliver.cancel.map(|cancel| (deliver.id, cancel)));
        } else {
            db.prepare_cached("UPDATE commands SET deliveries = deliveries + 1, redeliver = 0 WHERE id = ?")?
                .execute([deliver.id.as_str()])?;
            out.replay.push(deliver);
        }
    }
    Ok(out)
}

/// Completes accepted commands whose success is a new boot. Acks are for results; nothing here came as one.
fn rebooted(db: &Connection, node: &NodeId, now: ServerTime) -> rusqlite::Result<Vec<Applied>> {
    let mut ended = Vec::new();
    for kind in Kind::ALL.into_iter().filter(|kind| kind.ends_in_a_new_boot()) {
        let ids: Vec<CommandId> = db
            .prepare_cached(
                "UPDATE commands SET state = 'succeeded', reason = 'rebooted', effect = 'complete', ended_ms = ?,
                 message = 'the machine came back with another boot and another journal',
                 terminal_changes = terminal_changes + 1
                 WHERE node_id = ? AND kind = ? AND state IN ('accepted', 'running') RETURNING id",
            )?
            .query_map(params![now.0, node.as_str(), kind.name()], |row| {
                CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))
            })?
            .collect::<Result<_, _>>()?;
        ended.extend(ids.into_iter().map(Applied::Completed));
    }
    Ok(ended)
}

fn journal_lost(db: &Connection, id: &CommandId, now: ServerTime) -> rusqlite::Result<()> {
    db.prepare_cached(
        "UPDATE commands SET state = 'failed', reason = 'journal-lost', effect = 'unknown', ended_ms = ?,
         message = 'the journal that knew the command is lost', terminal_changes = terminal_changes + 1
         WHERE id = ?",
    )?
    .execute(params![now.0, id.as_str()])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_rises_above_the_stored_and_the_claimed_one() {
        assert_eq!(next_epoch(0, 0), (1, false));
        assert_eq!(next_epoch(7, 3), (8, false));
        assert_eq!(next_epoch(3, 7), (8, false), "a restored store does not go back");
    }

    #[test]
    fn a_claim_too_far_ahead_is_not_believed() {
        assert_eq!(next_epoch(5, 5 + EPOCH_AHEAD), (6 + EPOCH_AHEAD, false));
        assert_eq!(next_epoch(5, 6 + EPOCH_AHEAD), (6, true));
        assert_eq!(next_epoch(5, u64::MAX), (6, true));
    }
}
