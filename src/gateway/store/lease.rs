//! Leases: a gateway's right to route, for as long as it renews it. Every routing write names the lease that it is made
//! under and is judged within its own transaction, by the clock as it is then: what a stopped process had in hand
//! when it was stopped does nothing when it goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use serde_json::json;

use super::{Store, StoreError, events, int, revocations, uint};
use crate::model::{NodeId, Reason, ServerTime};

/// A disconnected node is unreachable this long after its last frame, ms.
pub(super) const PATIENCE_MS: i64 = 40_000;
/// So much longer after its gateway was lost, ms: sessions need time to move to another one.
pub(super) const GATEWAY_LOSS_MS: i64 = 120_000;

/// A grant to one gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Whose.
    pub gateway: Arc<str>,
    /// Which grant: it rises with each.
    pub number: u64,
}

/// What a session may write of its node, and for how long: until the node says Hello again, or the lease is lost.
#[derive(Debug, Clone)]
pub struct Route {
    /// Whose session.
    pub node: NodeId,
    /// Which.
    pub epoch: u64,
    /// The gateway's.
    pub lease: Lease,
}

/// Why a session no longer routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stray {
    /// The node was deleted.
    Unknown,
    /// A newer session has the node.
    Superseded,
    /// The gateway's lease is over.
    Fenced,
    /// Its certificate was revoked, for this reason.
    Revoked(Reason),
}

impl Lease {
    /// Whether the lease holds at this moment.
    pub(super) fn holds(&self, db: &Connection, now: ServerTime) -> rusqlite::Result<bool> {
        db.prepare_cached(
            "SELECT 1 FROM gateways WHERE id = ? AND lease = ? AND held = 1 AND expires_ms > ?",
        )?
        .exists(params![&*self.gateway, int(self.number), now.0])
    }
}

impl Route {
    /// Why the session does not route at this moment; absent: it does.
    pub(super) fn stray(&self, db: &Connection, now: ServerTime) -> rusqlite::Result<Option<Stray>> {
        let newest: Option<(i64, String)> = db
            .prepare_cached("SELECT epoch, serial FROM nodes WHERE node_id = ?")?
            .query_row([self.node.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        let Some((epoch, serial)) = newest else { return Ok(Some(Stray::Unknown)) };
        if uint(epoch) != self.epoch {
            return Ok(Some(Stray::Superseded));
        }
        if !self.lease.holds(db, now)? {
            return Ok(Some(Stray::Fenced));
        }
        Ok(revocations::revoked(db, &serial)?.map(Stray::Revoked))
    }
}

impl Store {
    /// The control plane's clock, inside a job.
    pub(super) fn clock(&self) -> impl Fn() -> ServerTime + Send + 'static {
        let clock = self.clock.clone();
        move || ServerTime(clock.wall_ms())
    }

    /// Takes the gateway's lease anew. Earlier grants end with it, and so do the sessions that they had: `why` is what
    /// those nodes' events say. Absent: the last grant was not `after`, so that
    /// another process has taken it under this gateway's id.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn take_lease(
        &self,
        life: Duration,
        after: Option<Lease>,
        why: &'static str,
    ) -> Result<Option<Lease>, StoreError> {
        let (now, shared, gateway) = (self.clock(), self.shared.clone(), self.gateway.clone());
        self.run(move |db| {
            let now = now();
            if let Some(after) = after
                && last_grant(db, &gateway)? != after.number
            {
                return Ok(None);
            }
            let number: i64 = db
                .prepare_cached(
                    "INSERT INTO gateways (id, lease, expires_ms, held) VALUES (?1, 1, ?2, 1)
                     ON CONFLICT (id) DO UPDATE
                     SET lease = lease + 1, expires_ms = ?2, held = 1, sessions = 0
                     RETURNING lease",
                )?
                .query_row(params![&*gateway, now.plus(life).0], |row| row.get(0))?;
            lose_nodes(db, &gateway, why, now)?;
            shared.store(has_others(db, &gateway)?, Ordering::Relaxed);
            Ok(Some(Lease { gateway, number: uint(number) }))
        })
        .await
    }

    /// Renews a lease. False: it had run out, or was taken anew by another process with this gateway's id.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn renew_lease(
        &self,
        lease: Lease,
        life: Duration,
        sessions: usize,
    ) -> Result<bool, StoreError> {
        let (now, shared) = (self.clock(), self.shared.clone());
        self.run(move |db| {
            let now = now();
            let sessions = i64::try_from(sessions).unwrap_or(i64::MAX);
            let renewed = db
                .prepare_cached(
                    "UPDATE gateways SET expires_ms = ?, sessions = ?
                     WHERE id = ? AND lease = ? AND held = 1 AND expires_ms > ?",
                )?
                .execute(params![now.plus(life).0, sessions, &*lease.gateway, int(lease.number), now.0])?;
            shared.store(has_others(db, &lease.gateway)?, Ordering::Relaxed);
            Ok(renewed == 1)
        })
        .await
    }

    /// Gives a lease back, so that nobody waits for its end. Nodes that it still had were told to go elsewhere.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn give_lease_back(&self, lease: Lease) -> Result<(), StoreError> {
        let now = self.clock();
        self.run(move |db| {
            db.execute(
                "UPDATE gateways SET held = 0, sessions = 0 WHERE id = ? AND lease = ?",
                params![&*lease.gateway, int(lease.number)],
            )?;
            lose_nodes(db, &lease.gateway, "draining", now())
        })
        .await
    }

    /// Finds leases that have run out: their gateways have lost their nodes. True: there were some.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn end_leases(&self) -> Result<bool, StoreError> {
        let now = self.clock();
        self.run(move |db| {
            let now = now();
            let ended: Vec<String> = db
                .prepare_cached(
                    "UPDATE gateways SET held = 0, sessions = 0 WHERE held = 1 AND expires_ms <= ? RETURNING id",
                )?
                .query_map([now.0], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            for gateway in &ended {
                lose_nodes(db, gateway, "gateway-lost", now)?;
            }
            Ok(!ended.is_empty())
        })
        .await
    }
}

fn last_grant(db: &Connection, gateway: &str) -> rusqlite::Result<u64> {
    db.prepare_cached("SELECT lease FROM gateways WHERE id = ?")?
        .query_row([gateway], |row| row.get(0))
        .optional()
        .map(|number| number.map_or(0, uint))
}

/// Whether another gateway holds a lease.
pub(super) fn has_others(db: &Connection, gateway: &str) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM gateways WHERE held = 1 AND id <> ?")?.exists([gateway])
}

/// A gateway's nodes are no longer connected, and nobody has seen them leave.
fn lose_nodes(db: &Connection, gateway: &str, why: &str, now: ServerTime) -> rusqlite::Result<()> {
    let mut lost = db.prepare_cached(
        "UPDATE nodes SET state = 'disconnected', patience_ms = ? WHERE gateway_id = ? AND state = 'connected'
         RETURNING node_id, epoch",
    )?;
    let lost = lost
        .query_map(params![PATIENCE_MS + GATEWAY_LOSS_MS, gateway], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<Vec<(String, i64)>, _>>()?;
    for (node, epoch) in lost {
        let detail = json!({"epoch": uint(epoch), "reason": why, "gateway": gateway});
        events::add(db, now.0, "node.disconnected", &node, &detail)?;
    }
    Ok(())
}

/// The gateway other than `own` that has the node's newest session and still holds its lease.
pub(super) fn other_gateway(db: &Connection, node: &str, own: &str) -> rusqlite::Result<Option<String>> {
    db.prepare_cached(
        "SELECT g.id FROM nodes n JOIN gateways g ON g.id = n.gateway_id
         WHERE n.node_id = ? AND g.id <> ? AND g.held = 1",
    )?
    .query_row([node, own], |row| row.get(0))
    .optional()
}
