//! The tables, as numbered migrations.

use std::path::Path;

use rusqlite::{Connection, OptionalExtension as _, Transaction, TransactionBehavior, params};

use super::error::OpenError;
use crate::model::{JournalId, NodeId, ServerTime};

/// `bcdj`, in the header of the file.
const APPLICATION_ID: i64 = 0x6263_646a;

/// One step a schema version; a released one never changes.
const MIGRATIONS: &[&str] = &[
    "
    CREATE TABLE journal (
        one INTEGER PRIMARY KEY CHECK (one = 1),
        node_id TEXT NOT NULL,
        journal_id TEXT NOT NULL,
        birth_ms INTEGER,
        mark_ms INTEGER,
        signed_ms INTEGER,
        last_epoch INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    -- Keyed by the id alone, so that an accept dirties one page of one tree. Outputs are kept out of it.
    CREATE TABLE commands (
        id TEXT PRIMARY KEY,
        body_sha256 BLOB NOT NULL CHECK (length(body_sha256) = 32),
        kind TEXT NOT NULL,
        retry_safe INTEGER NOT NULL,
        not_after_ms INTEGER NOT NULL,
        state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 4),
        attempt INTEGER NOT NULL,
        incarnation TEXT NOT NULL,
        boot_id TEXT NOT NULL,
        accepted_ms INTEGER,
        started_ms INTEGER,
        outcome TEXT,
        result_seq INTEGER
    ) STRICT, WITHOUT ROWID;
    -- Tombstones by the time at which they may go.
    CREATE INDEX tombstones ON commands (not_after_ms) WHERE state = 4;
    -- Results that are owed, in the order in which they became durable.
    CREATE TABLE results (
        seq INTEGER PRIMARY KEY,
        id TEXT NOT NULL,
        output BLOB NOT NULL
    ) STRICT;
",
    "
    -- What is told beside results and not yet acked.
    CREATE TABLE events (
        seq INTEGER PRIMARY KEY,
        class INTEGER NOT NULL CHECK (class BETWEEN 1 AND 4),
        type TEXT NOT NULL,
        body TEXT NOT NULL,
        at_ms INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        boot_ms INTEGER NOT NULL
    ) STRICT;
    -- Metrics, which go first.
    CREATE INDEX metrics ON events (seq) WHERE class = 4;
    -- The last number given, where no row shows it any more; the highest acked; dropped in all.
    ALTER TABLE journal ADD COLUMN event_seq INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE journal ADD COLUMN acked_event_seq INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE journal ADD COLUMN events_dropped INTEGER NOT NULL DEFAULT 0;
    -- The id that it had before it was found to be an old copy.
    ALTER TABLE journal ADD COLUMN former_id TEXT;
",
    "
    -- Who asked for a command, until it has ended.
    ALTER TABLE commands ADD COLUMN asked TEXT;
    -- Lines that are not in audit.log yet.
    CREATE TABLE audit (
        seq INTEGER PRIMARY KEY,
        line TEXT NOT NULL
    ) STRICT;
",
];

/// The newest schema of this build.
pub(super) fn newest() -> i64 {
    i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX)
}

/// The one row of `journal`.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub(super) node_id: String,
    pub(super) journal_id: JournalId,
    pub(super) birth: Option<ServerTime>,
    pub(super) mark: Option<ServerTime>,
    pub(super) signed: Option<ServerTime>,
    pub(super) last_epoch: u64,
}

/// Whether the file is one of ours that this build can read; writes nothing. Gives its schema version, 0 for an
/// empty file.
pub(super) fn check(conn: &Connection, db: &Path, node: Option<&NodeId>) -> Result<i64, OpenError> {
    let path = || db.to_owned();
    let sqlite = |source| OpenError::Sqlite { path: path(), source };
    let number = |pragma: &str| conn.query_row(pragma, [], |row| row.get::<_, i64>(0)).map_err(sqlite);
    let version = number("PRAGMA user_version")?;
    let application = number("PRAGMA application_id")?;
    let tables = number("SELECT count(*) FROM sqlite_schema")?;
    if version == 0 && tables == 0 {
        return Ok(0);
    }
    if application != APPLICATION_ID {
        return Err(OpenError::NotAJournal { path: path() });
    }
    if version > newest() {
        return Err(OpenError::Newer { path: path(), found: version, known: newest() });
    }
    let found: String =
        conn.query_row("SELECT node_id FROM journal", [], |row| row.get(0)).map_err(sqlite)?;
    match node {
        Some(expected) if found != expected.as_str() => {
            Err(OpenError::ForeignNode { path: path(), found, expected: expected.clone() })
        }
        _ => Ok(version),
    }
}

/// Brings a file of version `from` up to date; an empty one becomes the journal `new_id` of `node`.
pub(super) fn migrate(
    conn: &mut Connection,
    from: i64,
    node: &NodeId,
    new_id: &JournalId,
    birth: Option<ServerTime>,
) -> rusqlite::Result<()> {
    let from = usize::try_from(from).unwrap_or(0);
    if from >= MIGRATIONS.len() {
        return Ok(());
    }
    let tx = Transaction::new(conn, TransactionBehavior::Immediate)?;
    for step in &MIGRATIONS[from..] {
        tx.execute_batch(step)?;
    }
    if from == 0 {
        tx.execute(
            "INSERT INTO journal (one, node_id, journal_id, birth_ms, signed_ms, mark_ms) VALUES (1, ?, ?, ?3, ?3, ?3)",
            params![node.as_str(), new_id.as_str(), birth.map(|time| time.0)],
        )?;
        tx.pragma_update(None, "application_id", APPLICATION_ID)?;
    }
    tx.pragma_update(None, "user_version", newest())?;
    tx.commit()
}

/// Makes an empty file the journal that a release with the first `version` migrations would have made.
#[cfg(test)]
pub(super) fn create_old(
    conn: &Connection,
    version: usize,
    node: &NodeId,
    id: &JournalId,
) -> rusqlite::Result<()> {
    for step in &MIGRATIONS[..version] {
        conn.execute_batch(step)?;
    }
    conn.execute(
        "INSERT INTO journal (one, node_id, journal_id) VALUES (1, ?, ?)",
        [node.as_str(), id.as_str()],
    )?;
    conn.pragma_update(None, "application_id", APPLICATION_ID)?;
    conn.pragma_update(None, "user_version", version.to_string())
}

/// Reads the one row of `journal`.
pub(super) fn head(conn: &Connection) -> rusqlite::Result<Head> {
    let sql =
        "SELECT node_id, journal_id, birth_ms, mark_ms, signed_ms, last_epoch FROM journal WHERE one = 1";
    conn.query_row(sql, [], |row| {
        let time = |column| row.get::<_, Option<i64>>(column).map(|ms| ms.map(ServerTime));
        Ok(Head {
            node_id: row.get(0)?,
            journal_id: super::rows::parsed(1, JournalId::new(row.get::<_, String>(1)?))?,
            birth: time(2)?,
            mark: time(3)?,
            signed: time(4)?,
            last_epoch: super::rows::unsigned(row, 5)?,
        })
    })
}

/// The damage that SQLite's own check finds.
pub(super) fn damage(conn: &Connection) -> rusqlite::Result<Option<String>> {
    let word: Option<String> = conn.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).optional()?;
    Ok(word.filter(|word| word != "ok"))
}
