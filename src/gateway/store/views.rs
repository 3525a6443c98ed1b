//! What the control socket shows.

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::{Store, StoreError, corrupt, uint};
use crate::gateway::control::{CommandView, NodeView, Stats};
use crate::model::{CommandId, NodeId, ServerTime};

const COMMAND: &str = "SELECT id, node_id, kind, state, reason, message, effect, deliveries, attempt, output,
  terminal_changes, late_facts, enqueued_ms, dispatched_ms, accepted_ms, ended_ms, why, verdict FROM commands";

fn command(row: &Row<'_>) -> rusqlite::Result<CommandView> {
    let (message, why): (String, String) = (row.get(5)?, row.get(16)?);
    Ok(CommandView {
        id: CommandId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?,
        node: NodeId::new(row.get::<_, String>(1)?).map_err(|error| corrupt(1, error))?,
        kind: row.get(2)?,
        state: row.get(3)?,
        reason: row.get(4)?,
        message: if message.is_empty() { why } else { message },
        effect: row.get(6)?,
        deliveries: row.get(7)?,
        attempt: row.get(8)?,
        output: row.get(9)?,
        terminal_changes: row.get(10)?,
        late_facts: row.get(11)?,
        enqueued_ms: row.get(12)?,
        dispatched_ms: row.get(13)?,
        accepted_ms: row.get(14)?,
        ended_ms: row.get(15)?,
        verdict: row.get(17)?,
    })
}

impl Store {
    /// One command.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn command(&self, id: CommandId) -> Result<Option<CommandView>, StoreError> {
        self.run(move |db| {
            db.prepare_cached(&format!("{COMMAND} WHERE id = ?"))?
                .query_row([id.as_str()], command)
                .optional()
        })
        .await
    }

    /// Commands, newest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn commands(&self, node: Option<NodeId>, limit: u32) -> Result<Vec<CommandView>, StoreError> {
        self.run(move |db| {
            let node = node.as_ref().map(NodeId::as_str);
            db.prepare(&format!("{COMMAND} WHERE ?1 IS NULL OR node_id = ?1 ORDER BY number DESC LIMIT ?2"))?
                .query_map(params![node, limit], command)?
                .collect()
        })
        .await
    }

    /// Every command, oldest first.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn history(&self) -> Result<Vec<CommandView>, StoreError> {
        self.run(|db| db.prepare(&format!("{COMMAND} ORDER BY number"))?.query_map([], command)?.collect())
            .await
    }

    /// The nodes, by id.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn nodes(&self, now: ServerTime) -> Result<Vec<NodeView>, StoreError> {
        self.run(move |db| {
            db.prepare(
                "SELECT node_id, state, epoch, site, boot_id, version, last_seen_ms, free_credits, gateway_id,
                   labels
                 FROM nodes ORDER BY node_id",
            )?
            .query_map([], |row| {
                let credits: String = row.get(7)?;
                let last_seen: i64 = row.get(6)?;
                Ok(NodeView {
                    node: NodeId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?,
                    state: row.get(1)?,
                    epoch: uint(row.get(2)?),
                    site: row.get(3)?,
                    boot_id: row.get(4)?,
                    version: row.get(5)?,
                    last_seen_age_ms: if last_seen == 0 { 0 } else { uint(now.0 - last_seen) },
                    free_credits: serde_json::from_str(&credits).unwrap_or_default(),
                    gateway: row.get(8)?,
                    labels: serde_json::from_str(&row.get::<_, String>(9)?).unwrap_or_default(),
                })
            })?
            .collect()
        })
        .await
    }

    /// The counts, of every gateway of the store.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn stats(&self) -> Result<Stats, StoreError> {
        self.run(stats).await
    }
}

fn stats(db: &Connection) -> rusqlite::Result<Stats> {
    let mut stats = Stats {
        nodes: uint(db.query_row("SELECT count(*) FROM nodes", [], |row| row.get(0))?),
        ..Stats::default()
    };
    let mut sessions =
        db.prepare("SELECT gateway_id, count(*) FROM nodes WHERE state = 'connected' GROUP BY gateway_id")?;
    for row in sessions.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))? {
        let (gateway, count): (String, i64) = row?;
        stats.sessions += uint(count);
        stats.gateways.insert(gateway, uint(count));
    }
    let mut states = db.prepare("SELECT state, count(*) FROM commands GROUP BY state")?;
    for row in states.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))? {
        let (state, count): (String, i64) = row?;
        stats.commands.insert(state, uint(count));
    }
    let mut counters = db.prepare("SELECT name, count FROM counters")?;
    for row in counters.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))? {
        let (name, count): (String, i64) = row?;
        if name == "hellos" {
            stats.hellos = uint(count);
        } else if let Some(token) = name.strip_prefix("refused.") {
            stats.refused.insert(token.to_owned(), uint(count));
        }
    }
    Ok(stats)
}
