//! Two machines with one identity. Nobody can tell which of them is the clone, but an honest machine never goes back to
//! a boot or a process that it has left, and never forgets a session that it has answered with a heartbeat.

use rusqlite::{Connection, params};
use serde_json::json;

use super::hello::{HelloFacts, Known};
use super::{events, revocations};
use crate::model::{Reason, ServerTime};

/// Alternations are counted over this long, ms.
const WINDOW_MS: i64 = 10 * 60_000;
/// More of them than this quarantine the node's certificates.
const TOLERATED: i64 = 3;
/// Boots and processes remembered of a node: many times what a quarantine takes.
const REMEMBERED: i64 = 32;

/// What a Hello shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Likeness {
    /// The one machine, as far as anybody can tell.
    Single,
    /// Another machine has said Hello as this node.
    Double,
    /// Too often by now: its certificates are revoked.
    Quarantined,
}

/// Judges a Hello of a known node, before its row is written over.
pub(super) fn judge(
    db: &Connection,
    facts: &HelloFacts,
    known: &Known,
    now: ServerTime,
) -> rusqlite::Result<Likeness> {
    let alternated = returns(db, facts, known)? || forgets(facts, known);
    remember(db, facts, now)?;
    // A machine that reboots faster than its old session is missed is no clone, but worth a look.
    let beside = known.connected && known.boot_id != facts.boot_id.as_str();
    if !alternated && !beside {
        return Ok(Likeness::Single);
    }
    let count = if alternated { count(db, facts, now)? } else { 0 };
    let quarantined = count > TOLERATED;
    let detail = json!({
        "previousBootId": known.boot_id,
        "bootId": facts.boot_id,
        "previousIncarnation": known.incarnation,
        "incarnation": facts.incarnation,
        "alternations": count,
        "windowSeconds": WINDOW_MS / 1000,
        "quarantined": quarantined,
    });
    events::add(db, now.0, "security.node.duplicate-session", facts.node.as_str(), &detail)?;
    if !quarantined {
        return Ok(Likeness::Double);
    }
    let serials = revocations::revoke(db, &facts.node, Some(&facts.serial), Reason::DuplicateIdentity, now)?;
    forget(db, facts.node.as_str())?;
    let reason = Reason::DuplicateIdentity.token();
    let detail = json!({"reason": reason, "alternations": count, "serials": serials});
    events::add(db, now.0, "security.node.quarantined", facts.node.as_str(), &detail)?;
    Ok(Likeness::Quarantined)
}

/// Whether the Hello goes back to a boot or a process that another one has followed.
fn returns(db: &Connection, facts: &HelloFacts, known: &Known) -> rusqlite::Result<bool> {
    let (node, boot, incarnation) = (facts.node.as_str(), facts.boot_id.as_str(), facts.incarnation.as_str());
    let boot_seen = boot != known.boot_id
        && db
            .prepare_cached("SELECT 1 FROM appearances WHERE node_id = ? AND boot_id = ?")?
            .exists([node, boot])?;
    let incarnation_seen = incarnation != known.incarnation
        && db
            .prepare_cached("SELECT 1 FROM appearances WHERE node_id = ? AND incarnation = ?")?
            .exists([node, incarnation])?;
    Ok(boot_seen || incarnation_seen)
}

/// Whether the Hello knows nothing of a session that its own journal has answered: a machine cloned with its memory,
/// whose boot and process are the same.
fn forgets(facts: &HelloFacts, known: &Known) -> bool {
    known.journal_id == facts.journal_id.as_str() && facts.last_epoch < known.acked_epoch
}

fn remember(db: &Connection, facts: &HelloFacts, now: ServerTime) -> rusqlite::Result<()> {
    let node = facts.node.as_str();
    db.prepare_cached(
        "INSERT OR REPLACE INTO appearances (node_id, boot_id, incarnation, at_ms) VALUES (?, ?, ?, ?)",
    )?
    .execute(params![node, facts.boot_id.as_str(), facts.incarnation.as_str(), now.0])?;
    db.prepare_cached(
        "DELETE FROM appearances WHERE node_id = ?1 AND at_ms < (
           SELECT at_ms FROM appearances WHERE node_id = ?1 ORDER BY at_ms DESC LIMIT 1 OFFSET ?2)",
    )?
    .execute(params![node, REMEMBERED - 1])?;
    Ok(())
}

fn count(db: &Connection, facts: &HelloFacts, now: ServerTime) -> rusqlite::Result<i64> {
    let node = facts.node.as_str();
    db.prepare_cached("DELETE FROM alternations WHERE node_id = ? AND at_ms <= ?")?
        .execute(params![node, now.0 - WINDOW_MS])?;
    db.prepare_cached("INSERT INTO alternations (node_id, at_ms) VALUES (?, ?)")?
        .execute(params![node, now.0])?;
    db.prepare_cached("SELECT count(*) FROM alternations WHERE node_id = ?")?
        .query_row([node], |row| row.get(0))
}

/// Forgets who has been seen as a node, and how often they alternated.
pub(super) fn forget(db: &Connection, node: &str) -> rusqlite::Result<()> {
    db.execute("DELETE FROM alternations WHERE node_id = ?", [node])?;
    db.execute("DELETE FROM appearances WHERE node_id = ?", [node])?;
    // The epoch that the other machine has answered is not this one's to know.
    db.execute("UPDATE nodes SET acked_epoch = ? WHERE node_id = ?", params![0, node])?;
    Ok(())
}
