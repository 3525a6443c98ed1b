//! Results that wait for a worker's judgement, and what it was.

use bytes::Bytes;
use rusqlite::{Connection, params};
use serde_json::json;

use super::{Store, StoreError, corrupt, events, int, uint};
use crate::gateway::update::{End, Update};
use crate::gateway::worker::Judged;
use crate::model::{CommandId, Kind, NodeId, Reason};

/// Its event.
const REFUSED: &str = "security.result.refused";
/// What a command says whose result holds.
pub const VERIFIED: &str = "verified";
/// Asked for at once: as many, and as many bytes.
const AT_ONCE: i64 = 64;
const AT_ONCE_BYTES: usize = 1 << 20;

/// A result that waits.
#[derive(Debug, Clone)]
pub struct Waiting {
    /// Its number.
    pub number: u64,
    /// From whom it came.
    pub node: NodeId,
    /// The CommandUpdate, encoded.
    pub claim: Bytes,
}

/// Keeps a result for the worker, where it is signed or should be.
pub(super) fn add(
    db: &Connection,
    node: &NodeId,
    (id, kind): (&CommandId, Option<&str>),
    update: &Update,
    ended: bool,
) -> rusqlite::Result<()> {
    let asks = kind.is_some_and(Kind::signs_results);
    let Some(fact) = update.fact.as_ref().filter(|fact| fact.signed || asks) else { return Ok(()) };
    db.prepare_cached("INSERT INTO facts (node_id, command_id, ended, claim) VALUES (?, ?, ?, ?)")?
        .execute(params![node.as_str(), id.as_str(), ended, &fact.update[..]])?;
    Ok(())
}

/// Whether a command's result says the same end again that did not hold when it was judged: by its node's next key, or by
/// another gateway, it may. One at a time.
pub(super) fn may_heal(db: &Connection, id: &CommandId, end: &End) -> rusqlite::Result<bool> {
    db.prepare_cached(
        "SELECT 1 FROM commands WHERE id = ?1 AND state = ?2 AND reason = ?3 AND effect = ?4 AND output = ?5
           AND verdict NOT IN ('', ?6) AND NOT EXISTS (SELECT 1 FROM facts WHERE command_id = ?1 AND ended)",
    )?
    .exists(params![id.as_str(), end.state.name(), end.reason, end.effect, end.output, VERIFIED])
}

/// Whether any waits.
pub(super) fn wait(db: &Connection) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM facts LIMIT 1")?.exists([])
}

impl Store {
    /// The oldest results that wait.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn facts_to_judge(&self) -> Result<Vec<Waiting>, StoreError> {
        self.run(|db| {
            let mut rows =
                db.prepare_cached("SELECT number, node_id, claim FROM facts ORDER BY number LIMIT ?")?;
            let rows = rows.query_map([AT_ONCE], |row| {
                let node = NodeId::new(row.get::<_, String>(1)?).map_err(|error| corrupt(1, error))?;
                Ok(Waiting { number: uint(row.get(0)?), node, claim: row.get::<_, Vec<u8>>(2)?.into() })
            })?;
            let (mut page, mut bytes) = (Vec::new(), 0);
            for row in rows {
                let row = row?;
                bytes += row.claim.len();
                if bytes > AT_ONCE_BYTES && !page.is_empty() {
                    break;
                }
                page.push(row);
            }
            Ok(page)
        })
        .await
    }

    /// Writes down what was made of results; those that another gateway was faster with are written down already.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn judged(&self, judged: Vec<(u64, Judged)>) -> Result<(), StoreError> {
        let now = self.clock();
        self.run(move |db| {
            for (number, judged) in &judged {
                let taken = db
                    .prepare_cached(
                        "DELETE FROM facts WHERE number = ? RETURNING node_id, command_id, ended",
                    )?
                    .query_map([int(*number)], |row| {
                        Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get::<_, bool>(2)?))
                    })?
                    .next()
                    .transpose()?;
                let Some((node, command, ended)) = taken else { continue };
                let verdict = judged.refused.map_or(VERIFIED, |reason| reason.token());
                let news = match ended {
                    // What has held once goes on to hold.
                    true => db
                        .prepare_cached(
                            "UPDATE commands SET verdict = ?1 WHERE id = ?2 AND verdict NOT IN (?1, ?3)",
                        )?
                        .execute([verdict, &command, VERIFIED])?,
                    false => 1,
                };
                // A node that was deleted since has done nothing that anybody should look into.
                if let Some(reason) = judged.refused
                    && reason != Reason::UnknownNode
                    && news == 1
                {
                    let detail = json!({"commandId": command, "reason": reason, "detail": judged.message});
                    events::add(db, now().0, REFUSED, &node, &detail)?;
                }
            }
            Ok(())
        })
        .await
    }
}
