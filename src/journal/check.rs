//! Whether a journal is sound: SQLite's own check, and what must hold between its rows and the begun records.

use std::path::Path;

use rusqlite::Connection;
use serde::{Deserialize, Serialize};

use super::begun;
use super::inspect::{self, Counts};
use super::rows;
use super::schema;

/// Problems told of each kind; more are counted by nobody.
const EACH: u32 = 20;

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// In words, with the id; none: it is sound.
    pub problems: Vec<String>,
    /// Commands by state.
    pub counts: Counts,
    /// Begun records.
    pub begun: u64,
    /// Size of the database, bytes.
    pub db_bytes: u64,
    /// Size of the log, bytes.
    pub wal_bytes: u64,
}

/// What must not be there: the words, and the ids that it is true of.
const BROKEN: &[(&str, &str)] = &[
    (
        "a result belongs to no finished command",
        "SELECT id FROM results WHERE NOT EXISTS (SELECT 1 FROM commands
            WHERE commands.id = results.id AND state = 3 AND result_seq = seq)",
    ),
    (
        "a finished command has no result",
        "SELECT id FROM commands WHERE state = 3 AND (outcome IS NULL OR NOT EXISTS
            (SELECT 1 FROM results WHERE seq = result_seq))",
    ),
    ("a tombstone has no outcome", "SELECT id FROM commands WHERE state = 4 AND outcome IS NULL"),
    ("a tombstone has a result", "SELECT id FROM commands WHERE state = 4 AND result_seq IS NOT NULL"),
    (
        "an unfinished command has an outcome",
        "SELECT id FROM commands WHERE state < 3 AND (outcome IS NOT NULL OR result_seq IS NOT NULL)",
    ),
    ("a running command has no attempt", "SELECT id FROM commands WHERE state = 2 AND attempt = 0"),
    ("a journal has no head", "SELECT 'journal' WHERE NOT EXISTS (SELECT 1 FROM journal WHERE one = 1)"),
];

/// The same of events, where there are any.
const BROKEN_EVENTS: &[(&str, &str)] = &[(
    "an event that is acked is still there",
    "SELECT CAST(seq AS TEXT) FROM events WHERE seq <= (SELECT acked_event_seq FROM journal)",
)];

/// Checks an open journal, whose records lie in `state`. Changes nothing.
pub(super) fn check(conn: &Connection, db: &Path, state: &Path) -> rusqlite::Result<Check> {
    let mut problems = damage(conn)?;
    // A journal of the first schema that no daemon has opened since has no events.
    let events = if conn.table_exists(None, "events")? { BROKEN_EVENTS } else { &[] };
    for (words, sql) in BROKEN.iter().chain(events) {
        let mut statement = conn.prepare(&format!("{sql} LIMIT {EACH}"))?;
        let ids = statement.query_map([], |row| row.get::<_, String>(0))?;
        for id in ids {
            problems.push(format!("{words}: {}", id?));
        }
    }
    let begun = records(conn, state, &mut problems)?;
    let snapshot = inspect::snapshot_of(conn, db, 0)?;
    let (counts, db_bytes, wal_bytes) = (snapshot.counts, snapshot.db_bytes, snapshot.wal_bytes);
    Ok(Check { problems, counts, begun, db_bytes, wal_bytes })
}

fn damage(conn: &Connection) -> rusqlite::Result<Vec<String>> {
    let mut statement = conn.prepare(&format!("PRAGMA integrity_check({EACH})"))?;
    let words = statement.query_map([], |row| row.get::<_, String>(0))?;
    words.filter(|word| !word.as_ref().is_ok_and(|word| word == "ok")).collect()
}

/// Each row can be read, and agrees with its record.
fn records(conn: &Connection, state: &Path, problems: &mut Vec<String>) -> rusqlite::Result<u64> {
    let records = match begun::read_all(state, &schema::head(conn)?.node_id) {
        Ok(records) => records,
        Err(error) => {
            problems.push(format!("the begun records cannot be read: {error}"));
            return Ok(0);
        }
    };
    for path in &records.unreadable {
        problems.push(format!("a begun record cannot be read: {}", path.display()));
    }
    for node in records.foreign_nodes() {
        problems.push(format!(
            "there are begun records of another node, {node}: move them out of {}",
            state.display()
        ));
    }
    for record in &records.whole {
        match rows::find(conn, &record.id) {
            Ok(Some(row)) if row.body_sha256 != record.body_sha256 => {
                problems.push(format!("a begun record is of other bytes than its command: {}", record.id));
            }
            Ok(_) => {}
            Err(error) => problems.push(format!("a command cannot be read: {}: {error}", record.id)),
        }
    }
    let mut after = None;
    loop {
        match rows::behind(conn, after.as_ref(), 1000) {
            Ok(page) => match page.last() {
                Some(last) => after = Some(last.id.clone()),
                None => break,
            },
            Err(error) => {
                let after = after.map_or("the first".to_owned(), |id| id.to_string());
                problems.push(format!("a command behind {after} cannot be read: {error}"));
                break;
            }
        }
    }
    Ok(records.whole.len() as u64)
}
