//! The store's file: settings and schema. Gateways beside each other open one at a time ([`super::super::state_dir`]).

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rusqlite::Connection;
use rusqlite::config::DbConfig;

use super::OpenError;

/// The schema that this build writes.
const SCHEMA: i64 = 7;
/// A store that is held by another process for this long while it is opened is given up.
const OPENING: Duration = Duration::from_secs(10);

/// Times are ms since the Unix epoch by the gateway's clock; 0 is "not yet".
const TABLES: &str = "
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, count INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tokens (
  sha256 TEXT PRIMARY KEY, uses INTEGER NOT NULL, used INTEGER NOT NULL DEFAULT 0,
  expires_ms INTEGER NOT NULL, site TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE joins (
  token_sha256 TEXT NOT NULL, spki_sha256 TEXT NOT NULL, node_id TEXT NOT NULL, joined_ms INTEGER NOT NULL,
  PRIMARY KEY (token_sha256, spki_sha256)) WITHOUT ROWID;
CREATE TABLE nodes (
  node_id TEXT PRIMARY KEY, generation INTEGER NOT NULL, role TEXT NOT NULL, site TEXT NOT NULL,
  epoch INTEGER NOT NULL DEFAULT 0, boot_id TEXT NOT NULL DEFAULT '', journal_id TEXT NOT NULL DEFAULT '',
  incarnation TEXT NOT NULL DEFAULT '', version TEXT NOT NULL DEFAULT '',
  capabilities TEXT NOT NULL DEFAULT '[]', acked_event_seq INTEGER NOT NULL DEFAULT 0,
  -- 1 from a session's first heartbeat to its end.
  connected INTEGER NOT NULL DEFAULT 0,
  -- 0 after a Goodbye that takes the node out of placement.
  placed INTEGER NOT NULL DEFAULT 1,
  -- 1 from a Hello with a new journal until the verdict over what was in flight.
  journal_verdict_due INTEGER NOT NULL DEFAULT 0,
  last_seen_ms INTEGER NOT NULL DEFAULT 0, free_credits TEXT NOT NULL DEFAULT '{}',
  last_seq INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE TABLE certs (
  serial TEXT PRIMARY KEY, node_id TEXT NOT NULL, generation INTEGER NOT NULL,
  not_after_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE commands (
  number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, node_id TEXT NOT NULL, seq INTEGER NOT NULL,
  kind TEXT NOT NULL, lane TEXT NOT NULL, retry_safe INTEGER NOT NULL, payload BLOB NOT NULL,
  body_sha256 BLOB NOT NULL, not_after_ms INTEGER NOT NULL, state TEXT NOT NULL DEFAULT 'pending',
  deliveries INTEGER NOT NULL DEFAULT 0,
  -- Back-off after a refusal: not before, its present length, and the node's last word.
  not_before_ms INTEGER NOT NULL DEFAULT 0, backoff_ms INTEGER NOT NULL DEFAULT 0, why TEXT NOT NULL DEFAULT '',
  -- 1 when an accepted or running command was refused: its node left it behind and is owed another delivery.
  redeliver INTEGER NOT NULL DEFAULT 0,
  -- The cancellation, an encoded Envelope, once somebody asked for it.
  cancel BLOB,
  reason TEXT NOT NULL DEFAULT '', message TEXT NOT NULL DEFAULT '', effect TEXT NOT NULL DEFAULT '',
  attempt INTEGER NOT NULL DEFAULT 0, output TEXT NOT NULL DEFAULT '',
  terminal_changes INTEGER NOT NULL DEFAULT 0, late_facts INTEGER NOT NULL DEFAULT 0,
  enqueued_ms INTEGER NOT NULL, dispatched_ms INTEGER NOT NULL DEFAULT 0,
  accepted_ms INTEGER NOT NULL DEFAULT 0, ended_ms INTEGER NOT NULL DEFAULT 0);
CREATE INDEX commands_pending ON commands (node_id, lane, seq) WHERE state = 'pending' OR redeliver = 1;
CREATE INDEX commands_in_flight ON commands (node_id, seq) WHERE state IN ('dispatched', 'accepted', 'running');
CREATE INDEX commands_unaccepted ON commands (not_after_ms) WHERE state IN ('pending', 'dispatched');
CREATE INDEX commands_by_digest ON commands (node_id, body_sha256) WHERE state = 'dispatched';
CREATE TABLE late_facts (
  number INTEGER PRIMARY KEY, command_id TEXT NOT NULL, node_id TEXT NOT NULL, at_ms INTEGER NOT NULL,
  body_sha256 BLOB NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, effect TEXT NOT NULL,
  message TEXT NOT NULL, output TEXT NOT NULL);
CREATE TABLE events (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, at_ms INTEGER NOT NULL, kind TEXT NOT NULL, node_id TEXT NOT NULL,
  detail TEXT NOT NULL);
";

/// What the second schema added: the nodes' own events, each once, numbered in the order in which they came.
const NODE_EVENTS: &str = "
CREATE TABLE node_events (
  number INTEGER PRIMARY KEY AUTOINCREMENT, node_id TEXT NOT NULL, journal_id TEXT NOT NULL, seq INTEGER NOT NULL,
  class TEXT NOT NULL, type TEXT NOT NULL, body TEXT NOT NULL, at_ms INTEGER NOT NULL, age_ms INTEGER,
  received_ms INTEGER NOT NULL, dropped_from INTEGER, dropped_to INTEGER,
  UNIQUE (node_id, journal_id, seq));
";

/// What the third schema added: gateways beside each other, and what they judge of a node.
const SEVERAL: &str = "
CREATE TABLE gateways (
  id TEXT PRIMARY KEY, endpoints TEXT NOT NULL, sessions INTEGER NOT NULL DEFAULT 0,
  -- Rises with every grant; what was written under an older one no longer counts.
  lease INTEGER NOT NULL DEFAULT 0, expires_ms INTEGER NOT NULL DEFAULT 0,
  -- 0 once the lease was given back, or found to have run out.
  held INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
-- What one gateway tells another: a node has work, a command was cancelled, a node has moved.
CREATE TABLE notices (
  number INTEGER PRIMARY KEY AUTOINCREMENT, gateway_id TEXT NOT NULL, at_ms INTEGER NOT NULL, kind TEXT NOT NULL,
  subject TEXT NOT NULL);
-- The gateway that has the node's newest session.
ALTER TABLE nodes ADD COLUMN gateway_id TEXT NOT NULL DEFAULT '';
ALTER TABLE nodes ADD COLUMN state TEXT NOT NULL DEFAULT 'disconnected';
-- A disconnected node is unreachable this long after its last frame.
ALTER TABLE nodes ADD COLUMN patience_ms INTEGER NOT NULL DEFAULT 40000;
ALTER TABLE nodes DROP COLUMN connected;
-- The certificate of the newest session, and the highest epoch of which a heartbeat was acked.
ALTER TABLE nodes ADD COLUMN serial TEXT NOT NULL DEFAULT '';
ALTER TABLE nodes ADD COLUMN acked_epoch INTEGER NOT NULL DEFAULT 0;
CREATE INDEX nodes_by_gateway ON nodes (gateway_id) WHERE state = 'connected';
CREATE INDEX nodes_silent ON nodes (last_seen_ms) WHERE state = 'disconnected';
CREATE TABLE revocations (
  serial TEXT PRIMARY KEY, node_id TEXT NOT NULL, at_ms INTEGER NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
-- Who has said Hello as a node, and when a session of theirs was last the newest.
CREATE TABLE appearances (
  node_id TEXT NOT NULL, boot_id TEXT NOT NULL, incarnation TEXT NOT NULL, at_ms INTEGER NOT NULL,
  PRIMARY KEY (node_id, boot_id, incarnation)) WITHOUT ROWID;
CREATE TABLE alternations (number INTEGER PRIMARY KEY, node_id TEXT NOT NULL, at_ms INTEGER NOT NULL);
CREATE INDEX alternations_of ON alternations (node_id, at_ms);
-- Why a fact changes nothing, where it is not merely late.
ALTER TABLE late_facts ADD COLUMN refused TEXT NOT NULL DEFAULT '';
DELETE FROM meta WHERE key = 'gateway_id';
";

/// What the fourth schema added: a command's signatures, as an encoded Envelope without its payload. Cancellations are
/// encoded Envelopes from then on; one that waited unsigned is asked for anew.
const SIGNATURES: &str = "
ALTER TABLE commands ADD COLUMN signatures BLOB NOT NULL DEFAULT x'';
UPDATE commands SET cancel = NULL;
-- The join service has tables of its own.
DROP TABLE tokens;
DROP TABLE joins;
";

/// What the fifth schema took away: where gateways are is the worker's to know, for tickets and bundles.
const PLACES: &str = "
ALTER TABLE gateways DROP COLUMN endpoints;
";

/// What the sixth schema added: what the operator calls a node, a JSON object.
const LABELS: &str = "
ALTER TABLE nodes ADD COLUMN labels TEXT NOT NULL DEFAULT '{}';
";

/// What the seventh schema added: results until a worker has judged them, what it made of them, and revocations that the
/// join service has signed, encoded Envelopes.
const FACTS: &str = "
CREATE TABLE facts (
  number INTEGER PRIMARY KEY AUTOINCREMENT, node_id TEXT NOT NULL, command_id TEXT NOT NULL,
  -- 1: the command ended by it.
  ended INTEGER NOT NULL, claim BLOB NOT NULL);
ALTER TABLE commands ADD COLUMN verdict TEXT NOT NULL DEFAULT '';
CREATE TABLE signed_revocations (
  node_id TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, envelope BLOB NOT NULL) WITHOUT ROWID;
";

/// The steps from one schema to the next.
const STEPS: [&str; 7] = [TABLES, NODE_EVENTS, SEVERAL, SIGNATURES, PLACES, LABELS, FACTS];

/// Opens or makes the file, 0600 from its creation.
pub(super) fn open(path: &Path) -> Result<Connection, OpenError> {
    // SQLite gives -wal and -shm the mode of the database, so that making the database 0600 is enough.
    std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(nix::fcntl::OFlag::O_NOFOLLOW.bits())
        .open(path)
        .map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
    let sqlite = |source| OpenError::Sqlite { path: path.to_owned(), source };
    let db = Connection::open(path).map_err(sqlite)?;
    settings(&db, path)?;
    let found: i64 = db.pragma_query_value(None, "user_version", |row| row.get(0)).map_err(sqlite)?;
    let steps = usize::try_from(found).ok().and_then(|found| STEPS.get(found..));
    let newer = || OpenError::Newer { path: path.to_owned(), found, known: SCHEMA };
    let steps = steps.ok_or_else(newer)?.concat();
    if !steps.is_empty() {
        db.execute_batch(&format!("BEGIN IMMEDIATE; {steps} PRAGMA user_version = {SCHEMA}; COMMIT"))
            .map_err(sqlite)?;
    }
    // docs/decisions/0099-statements-are-not-compiled-for-their-values.md
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(sqlite)?;
    db.set_prepared_statement_cache_capacity(64);
    // From here on the writer waits for other processes itself.
    db.busy_timeout(Duration::ZERO).map_err(sqlite)?;
    Ok(db)
}

fn settings(db: &Connection, path: &Path) -> Result<(), OpenError> {
    let sqlite = |source| OpenError::Sqlite { path: path.to_owned(), source };
    db.busy_timeout(OPENING).map_err(sqlite)?;
    let mode: String =
        db.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get(0)).map_err(sqlite)?;
    db.pragma_update(None, "synchronous", "FULL").map_err(sqlite)?;
    let synchronous: i64 = db.pragma_query_value(None, "synchronous", |row| row.get(0)).map_err(sqlite)?;
    if mode != "wal" {
        return Err(OpenError::Setting { path: path.to_owned(), setting: "journal_mode = WAL" });
    }
    if synchronous != 2 {
        return Err(OpenError::Setting { path: path.to_owned(), setting: "synchronous = FULL" });
    }
    Ok(())
}
