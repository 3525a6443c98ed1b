//! Tokens, nodes and certificates: whom the join service has let in.

mod rejoin;

use std::collections::BTreeMap;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior, params};

pub use self::rejoin::RejoinTry;
use super::facts;
use super::ticket::Grant;
use crate::gateway::store::{corrupt, int, uint};
use crate::model::{Digest, NodeId, Reason, Role, ServerTime};
use crate::wire::bundle::LIST;
use crate::wire::dsse::{Envelope, PublicKey};

/// A repeated join holds at least this long after the first, ms: a machine that was killed in the middle of its
/// join needs no second ticket.
const REPEAT_MS: i64 = 24 * 3600 * 1000;

/// Longest wait for another process that writes.
const BUSY: Duration = Duration::from_secs(10);

/// Times are ms since the Unix epoch by the worker's clock.
const TABLES: &str = "
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tokens (
  sha256 TEXT PRIMARY KEY, uses INTEGER NOT NULL, used INTEGER NOT NULL DEFAULT 0,
  expires_ms INTEGER NOT NULL, site TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS joins (
  token_sha256 TEXT NOT NULL, spki_sha256 TEXT NOT NULL, node_id TEXT NOT NULL, joined_ms INTEGER NOT NULL,
  PRIMARY KEY (token_sha256, spki_sha256)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (
  node_id TEXT PRIMARY KEY, generation INTEGER NOT NULL, role TEXT NOT NULL, site TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS certificates (
  serial TEXT PRIMARY KEY, node_id TEXT NOT NULL, generation INTEGER NOT NULL, spki_sha256 TEXT NOT NULL,
  not_after_ms INTEGER NOT NULL, revoked INTEGER NOT NULL DEFAULT 0) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS certificates_by_key ON certificates (spki_sha256);
CREATE TABLE IF NOT EXISTS rejoins (
  serial TEXT NOT NULL, spki_sha256 TEXT NOT NULL, generation INTEGER NOT NULL,
  PRIMARY KEY (serial, spki_sha256)) WITHOUT ROWID;
";

/// A certificate that ran out before this, and whose key lets nobody in again, needs no revocation: no clock that a gateway
/// judges by is so wrong.
const RUN_OUT: Duration = Duration::from_secs(7 * 24 * 3600);
const REVOKED_AT_ONCE: i64 = 1024;
const _: () = assert!(REVOKED_AT_ONCE.unsigned_abs() == crate::wire::revocation::SERIALS as u64);

/// A join, as far as the tables decide it.
#[derive(Debug)]
pub struct JoinTry {
    /// Digest of the token.
    pub token: Digest,
    /// SHA-256 of the public key.
    pub spki: Digest,
    /// The role asked for.
    pub role: Role,
    /// The id to give if the machine is new.
    pub fresh: NodeId,
    /// The worker's clock.
    pub now: ServerTime,
}

/// What the machine is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolled {
    /// Its id.
    pub node: NodeId,
    /// Where it stands.
    pub site: String,
    /// What it is called.
    pub labels: BTreeMap<String, String>,
    /// host or ramdisk.
    pub role: Role,
    /// Its identity generation.
    pub generation: u64,
}

/// Who holds a certificate.
#[derive(Debug, Clone)]
pub struct Holder {
    /// The node that it names.
    pub node: NodeId,
    /// Its serial, hex.
    pub serial: String,
    /// Its key.
    pub key: PublicKey,
    /// When it runs out.
    pub not_after: ServerTime,
}

/// Why a machine is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The token is not known.
    #[error("this join service does not know the ticket's token")]
    UnknownToken,
    /// The token has run out.
    #[error("the ticket has run out; ask for a new one")]
    ExpiredToken,
    /// The token is used up.
    #[error("the ticket has been used up; ask for a new one")]
    UsedToken,
    /// The certificate, or its node, is not known.
    #[error("this join service does not know the certificate; join again")]
    UnknownCertificate,
    /// The certificate was revoked.
    #[error("the certificate was revoked; join again with a new ticket")]
    Revoked,
    /// The node has joined again since.
    #[error("the node has joined again since this certificate was signed")]
    Superseded,
    /// The node has used a newer certificate.
    #[error("the node has used a newer certificate than this one")]
    Renewed,
    /// The certificate holds still.
    #[error("the certificate holds until {0}: it can be renewed")]
    StillValid(ServerTime),
    /// The certificate ran out too long ago.
    #[error(
        "the certificate ran out at {0}, longer ago than its key may join again; join again with a new ticket"
    )]
    TooLate(ServerTime),
}

impl Refusal {
    /// Its token.
    pub fn reason(self) -> Reason {
        match self {
            Self::UnknownToken => Reason::TicketInvalid,
            Self::ExpiredToken => Reason::TicketExpired,
            Self::UsedToken => Reason::TicketUsed,
            Self::UnknownCertificate => Reason::UnknownNode,
            Self::Revoked => Reason::CertificateRevoked,
            Self::Superseded | Self::Renewed => Reason::IdentitySuperseded,
            Self::StillValid(_) => Reason::CertificateValid,
            Self::TooLate(_) => Reason::RejoinTooLate,
        }
    }
}

/// The tables.
pub struct Enrolment(pub(super) Connection);

impl Enrolment {
    /// Opens or makes the file, 0600 from its creation.
    pub fn open(path: &Path) -> rusqlite::Result<Self> {
        std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .custom_flags(nix::fcntl::OFlag::O_NOFOLLOW.bits())
            .open(path)
            .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
        let db = Connection::open(path)?;
        // Several gateways may serve one store, and with it one worker's files.
        db.busy_timeout(BUSY)?;
        // docs/decisions/0099-statements-are-not-compiled-for-their-values.md
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
        db.pragma_update_and_check(None, "journal_mode", "WAL", |_| Ok(()))?;
        db.pragma_update(None, "synchronous", "FULL")?;
        db.execute_batch(&format!("BEGIN IMMEDIATE; {TABLES} {} COMMIT", facts::TABLE))?;
        // Files of earlier builds have none of it. Whoever opens at the same time may have been first. A key that is not
        // known verifies nothing: its node has another by its next renewal.
        for (table, column, kind) in [
            ("tokens", "labels", "TEXT NOT NULL DEFAULT '{}'"),
            ("nodes", "labels", "TEXT NOT NULL DEFAULT '{}'"),
            ("certificates", "public_key", "TEXT NOT NULL DEFAULT ''"),
            // Which of its node's it is, in the order of issue; and whether its key has signed something that came here.
            ("certificates", "issued", "INTEGER NOT NULL DEFAULT 0"),
            ("certificates", "used", "INTEGER NOT NULL DEFAULT 0"),
        ] {
            let has = "SELECT 1 FROM pragma_table_info(?) WHERE name = ?";
            if !db.prepare(has)?.exists([table, column])? {
                let add = format!("ALTER TABLE {table} ADD COLUMN {column} {kind}");
                if let Err(error) = db.execute_batch(&add)
                    && !db.prepare(has)?.exists([table, column])?
                {
                    return Err(error);
                }
            }
        }
        db.execute_batch(
            "CREATE INDEX IF NOT EXISTS certificates_by_node ON certificates (node_id, issued)",
        )?;
        // Earlier builds wrote it, and nobody read it.
        let has = "SELECT 1 FROM pragma_table_info('facts') WHERE name = 'output_sha256'";
        if db.prepare(has)?.exists([])?
            && let Err(error) = db.execute_batch("ALTER TABLE facts DROP COLUMN output_sha256")
            && db.prepare(has)?.exists([])?
        {
            return Err(error);
        }
        Ok(Self(db))
    }

    fn meta(&self, key: &str) -> rusqlite::Result<Option<String>> {
        self.0.query_row("SELECT value FROM meta WHERE key = ?", [key], |row| row.get(0)).optional()
    }

    fn set_meta(&self, key: &str, value: &str) -> rusqlite::Result<()> {
        self.0.execute("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", [key, value])?;
        Ok(())
    }

    fn endpoints_by_gateway(&self) -> rusqlite::Result<BTreeMap<String, Vec<String>>> {
        let text = self.meta("endpoints")?.unwrap_or_else(|| "{}".into());
        serde_json::from_str(&text).map_err(|error| corrupt(0, error))
    }

    /// Where gateways are, also those that do not run now: their nodes find them again.
    pub fn endpoints(&self) -> rusqlite::Result<Vec<String>> {
        let mut endpoints = Vec::new();
        for endpoint in self.endpoints_by_gateway()?.into_values().flatten() {
            if !endpoints.contains(&endpoint) {
                endpoints.push(endpoint);
            }
        }
        Ok(endpoints)
    }

    /// Notes where a gateway is; false: there would be none, or too many of all.
    pub fn set_endpoints(&self, gateway: &str, endpoints: &[String]) -> rusqlite::Result<bool> {
        let mut all = self.endpoints_by_gateway()?;
        // One that has moved to where another was has taken its place.
        all.retain(|other, places| other == gateway || !places.iter().any(|place| endpoints.contains(place)));
        all.insert(gateway.to_owned(), endpoints.to_vec());
        if endpoints.is_empty() || all.values().flatten().count() > LIST {
            return Ok(false);
        }
        self.set_meta("endpoints", &serde_json::to_string(&all).unwrap_or_default())?;
        Ok(true)
    }

    /// The newest trust bundle.
    pub fn bundle(&self) -> rusqlite::Result<Option<Envelope>> {
        let text = self.meta("bundle")?;
        text.map(|text| serde_json::from_str(&text).map_err(|error| corrupt(0, error))).transpose()
    }

    /// Runs `work` in one transaction: two workers over one file must not sign two bundles of one version.
    pub fn alone<T, E: From<rusqlite::Error>>(
        &self,
        work: impl FnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let transaction = rusqlite::Transaction::new_unchecked(&self.0, TransactionBehavior::Immediate)?;
        let done = work(self)?;
        transaction.commit()?;
        Ok(done)
    }

    /// Keeps a newer one.
    pub fn keep_bundle(&self, bundle: &Envelope) -> rusqlite::Result<()> {
        self.set_meta("bundle", &serde_json::to_string(bundle).unwrap_or_default())
    }

    /// Stores a new token.
    pub fn add_token(&self, token: &Digest, grant: &Grant) -> rusqlite::Result<()> {
        self.0.execute(
            "INSERT INTO tokens (sha256, uses, expires_ms, site, labels) VALUES (?, ?, ?, ?, ?)",
            params![token.hex(), grant.uses, grant.expires_at.0, grant.site, labels_text(&grant.labels)],
        )?;
        Ok(())
    }

    /// Uses a token once. The same token and key again give the same node and use nothing.
    pub fn join(&mut self, attempt: &JoinTry) -> rusqlite::Result<Result<Enrolled, Refusal>> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let joined = join(&transaction, attempt)?;
        transaction.commit()?;
        Ok(joined)
    }

    /// Notes that the holder of a certificate has proven itself: it needs none of those before it any more.
    pub fn used(&self, serial: &str) -> rusqlite::Result<()> {
        self.0.execute("UPDATE certificates SET used = 1 WHERE serial = ? AND used = 0", [serial])?;
        Ok(())
    }

    /// The node of a certificate that may be renewed.
    pub fn renew(&self, holder: &Holder) -> rusqlite::Result<Result<Enrolled, Refusal>> {
        Ok(match standing(&self.0, holder)? {
            None => Err(Refusal::UnknownCertificate),
            Some(Standing { revoked: true, .. }) => Err(Refusal::Revoked),
            Some(Standing { node, generation, .. }) if generation < node.generation => {
                Err(Refusal::Superseded)
            }
            Some(Standing { node, .. }) => Ok(node),
        })
    }

    /// Revokes all certificates of a node, or takes that back; how many it has.
    pub fn set_revoked(&self, node: &NodeId, revoked: bool) -> rusqlite::Result<usize> {
        self.0.execute(
            "UPDATE certificates SET revoked = ? WHERE node_id = ?",
            params![i64::from(revoked), node.as_str()],
        )
    }

    /// Serials of the certificates of a node that one revocation is to name, the newest first: those of use to nobody
    /// any more would make it too long to be taken. For `window` after its end the key of one may let its node in again.
    pub fn serials(&self, node: &NodeId, window: Duration, now: ServerTime) -> rusqlite::Result<Vec<String>> {
        let since = now.minus(RUN_OUT.max(window));
        let sql = "SELECT serial FROM certificates WHERE node_id = ? AND not_after_ms > ?
             ORDER BY not_after_ms DESC, serial LIMIT ?";
        self.0
            .prepare(sql)?
            .query_map(params![node.as_str(), since.0, REVOKED_AT_ONCE], |row| row.get(0))?
            .collect()
    }

    /// Forgets a node: its certificates are renewed no more, and a token that it has used lets it in no more.
    pub fn forget(&mut self, node: &NodeId) -> rusqlite::Result<()> {
        let transaction = self.0.transaction_with_behavior(TransactionBehavior::Immediate)?;
        for statement in [
            "DELETE FROM joins WHERE node_id = ?",
            "DELETE FROM rejoins WHERE serial IN (SELECT serial FROM certificates WHERE node_id = ?)",
            "DELETE FROM certificates WHERE node_id = ?",
            "DELETE FROM nodes WHERE node_id = ?",
        ] {
            transaction.execute(statement, [node.as_str()])?;
        }
        transaction.commit()
    }

    /// Records a certificate that was signed for a node.
    pub fn add_certificate(
        &self,
        serial: &str,
        node: &Enrolled,
        key: &PublicKey,
        not_after: ServerTime,
    ) -> rusqlite::Result<()> {
        self.0.execute(
            "INSERT INTO certificates (serial, node_id, generation, spki_sha256, not_after_ms, public_key, issued)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6,
               (SELECT coalesce(max(issued), 0) + 1 FROM certificates WHERE node_id = ?2))",
            params![
                serial,
                node.node.as_str(),
                int(node.generation),
                key.id().hex(),
                not_after.0,
                key.to_string()
            ],
        )?;
        Ok(())
    }
}

/// A certificate, and the node that it is of.
struct Standing {
    node: Enrolled,
    revoked: bool,
    /// The certificate's.
    generation: u64,
}

fn standing(db: &Connection, holder: &Holder) -> rusqlite::Result<Option<Standing>> {
    db.query_row(
        "SELECT n.node_id, n.site, n.role, n.generation, n.labels, c.revoked, c.generation
         FROM certificates c JOIN nodes n USING (node_id) WHERE c.serial = ? AND c.node_id = ?",
        [&holder.serial, holder.node.as_str()],
        |row| Ok(Standing { node: read(row)?, revoked: row.get(5)?, generation: uint(row.get(6)?) }),
    )
    .optional()
}

fn join(db: &Connection, attempt: &JoinTry) -> rusqlite::Result<Result<Enrolled, Refusal>> {
    let token = attempt.token.hex();
    let row = db
        .query_row(
            "SELECT uses, used, expires_ms, site, labels FROM tokens WHERE sha256 = ?",
            [&token],
            |row| {
                let (uses, used): (i64, i64) = (row.get(0)?, row.get(1)?);
                Ok((used >= uses, row.get::<_, i64>(2)?, row.get::<_, String>(3)?, labels(row, 4)?))
            },
        )
        .optional()?;
    let Some((used_up, expires_ms, site, labels)) = row else { return Ok(Err(Refusal::UnknownToken)) };
    let spki = attempt.spki.hex();
    let before = db
        .query_row(
            "SELECT n.node_id, n.site, n.role, n.generation, n.labels, j.joined_ms FROM joins j JOIN nodes n USING (node_id)
             WHERE j.token_sha256 = ? AND j.spki_sha256 = ?",
            [&token, &spki],
            |row| Ok((read(row)?, row.get::<_, i64>(5)?)),
        )
        .optional()?;
    if let Some((joined, joined_ms)) = before {
        let until = expires_ms.max(joined_ms.saturating_add(REPEAT_MS));
        return Ok(if attempt.now.0 <= until { Ok(joined) } else { Err(Refusal::ExpiredToken) });
    }
    if attempt.now.0 > expires_ms {
        return Ok(Err(Refusal::ExpiredToken));
    }
    if used_up {
        return Ok(Err(Refusal::UsedToken));
    }
    let joined = Enrolled { node: attempt.fresh.clone(), site, labels, role: attempt.role, generation: 1 };
    db.execute("UPDATE tokens SET used = used + 1 WHERE sha256 = ?", [&token])?;
    db.execute(
        "INSERT INTO nodes (node_id, generation, role, site, labels) VALUES (?, 1, ?, ?, ?)",
        params![joined.node.as_str(), joined.role.name(), joined.site, labels_text(&joined.labels)],
    )?;
    db.execute(
        "INSERT INTO joins (token_sha256, spki_sha256, node_id, joined_ms) VALUES (?, ?, ?, ?)",
        params![token, spki, joined.node.as_str(), attempt.now.0],
    )?;
    Ok(Ok(joined))
}

fn read(row: &rusqlite::Row<'_>) -> rusqlite::Result<Enrolled> {
    let node = NodeId::new(row.get::<_, String>(0)?).map_err(|error| corrupt(0, error))?;
    let role = Role::from_name(&row.get::<_, String>(2)?).unwrap_or(Role::Host);
    let (site, generation, labels) = (row.get(1)?, uint(row.get(3)?), labels(row, 4)?);
    Ok(Enrolled { node, site, labels, role, generation })
}

fn labels(row: &rusqlite::Row<'_>, column: usize) -> rusqlite::Result<BTreeMap<String, String>> {
    serde_json::from_str(&row.get::<_, String>(column)?).map_err(|error| corrupt(column, error))
}

fn labels_text(labels: &BTreeMap<String, String>) -> String {
    // A map of strings cannot fail to serialise.
    serde_json::to_string(labels).unwrap_or_default()
}
