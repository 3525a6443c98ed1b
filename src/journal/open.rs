//! Opening: files, lock, checks, settings, schema, and the settling of what an older incarnation left.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use tokio::sync::watch;

use super::begun::{self, Record};
use super::core::{Core, Counters, Shared};
use super::disk::{Disk, Ground, KERNEL};
use super::error::{OpenError, WriteError, is_corrupt};
use super::faults::Faults;
use super::lock::Lock;
use super::record::State;
use super::recovery::{self, Becomes, BootSays, Found};
use super::rows::{self, Row};
use super::schema::{self, Head};
use super::{Facts, Journal, Options, Recovered, files, ops, settings};
use crate::clock::{Clock as _, SystemClock};
use crate::model::{BootId, CommandId, JournalId, Kind, Outcome, ServerTime};

/// An open, locked journal in which nothing has been recovered yet: the moment to end leftover programs.
#[derive(Debug)]
pub struct Locked {
    options: Options,
    state: PathBuf,
    db: PathBuf,
    conn: Connection,
    head: Head,
    faults: Faults,
    // Last: the lock goes when the connection is closed.
    lock: Lock,
}

impl Locked {
    /// Makes a new, rowless journal for a join; replaces one that has no rows, whosever it is. Blocks.
    ///
    /// # Errors
    /// See [`OpenError`]; `NotEmpty` where commands would be lost.
    pub fn create(options: &Options, birth: Option<ServerTime>, id: JournalId) -> Result<(), OpenError> {
        let state = files::state_dir(&options.state)?;
        let db = state.join("journal.db");
        let lock = Lock::take(&state, &db)?;
        files::prepare(KERNEL.disk, &state, &db, unix_s())?;
        let conn = peek(KERNEL.disk, &db)?;
        if schema::check(&conn, &db, None)? > 0 {
            let sqlite = |source| OpenError::Sqlite { path: db.clone(), source };
            let rows = conn.query_row("SELECT count(*) FROM commands", [], |row| rows::unsigned(row, 0));
            let rows = rows.map_err(sqlite)?;
            if rows > 0 {
                return Err(OpenError::NotEmpty { path: db, rows });
            }
            drop(conn);
            files::remove_rowless(&state, &db)?;
            files::prepare(KERNEL.disk, &state, &db, unix_s())?;
        } else {
            drop(conn);
        }
        let conn = establish(KERNEL, options, &db, &id, birth)?;
        conn.close().map_err(|(_, source)| OpenError::Sqlite { path: db, source })?;
        drop(lock);
        Ok(())
    }

    /// Opens and locks the journal; a missing one is made anew, without a birth. Blocks.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(options: Options, new_id: JournalId) -> Result<Self, OpenError> {
        Self::open_on(KERNEL, options, new_id, None)
    }

    /// The same on a ground of the caller's choice; a journal that is made anew has this birth.
    pub(super) fn open_on(
        ground: Ground<'_>,
        options: Options,
        new_id: JournalId,
        birth: Option<ServerTime>,
    ) -> Result<Self, OpenError> {
        let state = files::state_dir(&options.state)?;
        let db = state.join("journal.db");
        let lock = Lock::take(&state, &db)?;
        files::prepare(ground.disk, &state, &db, unix_s())?;
        let conn = match establish(ground, &options, &db, &new_id, birth) {
            Err(OpenError::Sqlite { source, .. }) if is_corrupt(&source) => {
                let aside = files::move_aside(&state, &db, unix_s())?;
                tracing::error!(error = %source, kept = %aside.display(), "the journal is corrupt and was moved aside");
                files::prepare(ground.disk, &state, &db, unix_s())?;
                establish(ground, &options, &db, &new_id, birth)?
            }
            other => other?,
        };
        let head = schema::head(&conn).map_err(|source| OpenError::Sqlite { path: db.clone(), source })?;
        Ok(Self { options, state, db, conn, head, faults: Faults::default(), lock })
    }

    /// Has writes fail on demand; for tests.
    #[must_use]
    pub fn with_faults(mut self, faults: Faults) -> Self {
        self.faults = faults;
        self
    }

    /// What stands in it beside its commands.
    pub fn facts(&self) -> Facts {
        let Head { journal_id, birth, mark, signed, last_epoch, .. } = self.head.clone();
        Facts { journal_id, birth, mark, signed, last_epoch }
    }

    /// Ids of every journal under which something may have been started here: this one's, and those that the begun
    /// records name. After a lost journal its programs bear the older id. Blocks.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn started_under(&self) -> Result<BTreeSet<JournalId>, OpenError> {
        let records = begun::read_all(&self.state).map_err(|source| OpenError::Io {
            action: "read the begun records in",
            path: begun::dir(&self.state),
            source,
        })?;
        let ids = records.whole.into_iter().map(|record| record.journal_id);
        Ok(ids.chain([self.head.journal_id.clone()]).collect())
    }

    /// Settles every command that an older incarnation left, durably, and starts the writer. Blocks.
    ///
    /// # Errors
    /// A write failed.
    pub fn recover(self, signed: Option<ServerTime>) -> Result<(Journal, Recovered), WriteError> {
        let signed = signed.max(self.head.signed);
        let mode = self.options.mode;
        let mut core = self.into_core().map_err(|error| WriteError::of(&error))?;
        let records = begun::read_all(&core.state)
            .map_err(|error| WriteError { why: crate::model::Reason::IoError, detail: error.to_string() })?;
        for path in &records.unreadable {
            tracing::warn!(path = %path.display(), "a begun record cannot be read; it stays and forbids its command");
        }
        let recovered = core.run_one(|core| settle(core, &records.whole, signed))?;
        core.left.clone_from(&recovered.waiting);
        Ok((Journal::over(core, mode)?, recovered))
    }

    fn into_core(self) -> rusqlite::Result<Core> {
        let shared = Shared {
            journal_id: self.head.journal_id,
            birth: self.head.birth,
            last_epoch: self.head.last_epoch.into(),
            commits: 0.into(),
            failed: watch::Sender::new(false),
        };
        let counters = Counters { owed: rows::owed(&self.conn)? };
        let last_seq = rows::last_seq(&self.conn)?;
        Ok(Core {
            conn: self.conn,
            state: self.state,
            db: self.db,
            incarnation: self.options.incarnation,
            boot_id: self.options.boot_id,
            shared: Arc::new(shared),
            counters,
            last_seq,
            left: Vec::new(),
            faults: self.faults,
            _lock: self.lock,
        })
    }
}

fn unix_s() -> i64 {
    SystemClock.wall_ms() / 1000
}

/// A connection that leaves the file as it is: closing carries no log into it.
fn peek(disk: &dyn Disk, db: &Path) -> Result<Connection, OpenError> {
    let sqlite = |source| OpenError::Sqlite { path: db.to_owned(), source };
    let conn = settings::connect(db, disk.vfs()).map_err(sqlite)?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(sqlite)?;
    conn.pragma_update(None, "locking_mode", "EXCLUSIVE").map_err(sqlite)?;
    Ok(conn)
}

/// Checks whose file it is before anything is written, then brings settings and schema up to date.
fn establish(
    ground: Ground<'_>,
    options: &Options,
    db: &Path,
    new_id: &JournalId,
    birth: Option<ServerTime>,
) -> Result<Connection, OpenError> {
    let sqlite = |source| OpenError::Sqlite { path: db.to_owned(), source };
    let mut conn = peek(ground.disk, db)?;
    let version = schema::check(&conn, db, Some(&options.node_id))?;
    if let Some(damage) = schema::damage(&conn).map_err(sqlite)? {
        let corrupt = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
        return Err(sqlite(rusqlite::Error::SqliteFailure(corrupt, Some(damage))));
    }
    settings::apply(ground.settings, &conn, db)?;
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(sqlite)?;
    schema::migrate(&mut conn, version, &options.node_id, new_id, birth).map_err(sqlite)?;
    // After the first read or write: SQLite makes the log no earlier.
    files::grow_wal(ground.disk, db, options.wal_bytes)?;
    Ok(conn)
}

/// Applies the recovery table to every row and record.
fn settle(core: &mut Core, records: &[Record], signed: Option<ServerTime>) -> rusqlite::Result<Recovered> {
    let mut recovered = Recovered::default();
    ops::write_time(core, None, signed)?;
    // Sorted by id, as they were read.
    let record_of =
        |id: &CommandId| records.binary_search_by(|record| record.id.cmp(id)).ok().map(|at| &records[at]);
    let passed = |not_after: ServerTime| signed.is_some_and(|signed| signed >= not_after);
    for row in rows::unfinished(&core.conn)? {
        let begun = record_of(&row.id);
        let found = Found {
            row: Some(row.state),
            retry_safe: row.retry_safe,
            begun: begun.is_some(),
            executions: row.attempt,
            expired: passed(row.not_after),
            boot: boot_says(core, &row.kind, || match begun {
                Some(record) => Ok(record.boot_id.clone()),
                None => rows::boot_of(&core.conn, &row.id),
            })?,
        };
        settle_one(core, row, found, begun, signed, &mut recovered)?;
    }
    for record in records {
        if rows::find(&core.conn, &record.id)?.is_some() {
            continue;
        }
        if passed(record.not_after.plus(crate::model::limits::TOMBSTONE_GRACE)) {
            // Its tombstone went; the crash came before the removal was durable.
            if let Err(error) = begun::remove(&core.state, &record.id) {
                tracing::warn!(id = %record.id, %error, "a begun record cannot be removed");
            }
            continue;
        }
        let found = Found {
            row: None,
            retry_safe: false,
            begun: true,
            executions: record.attempt,
            expired: passed(record.not_after),
            boot: boot_says(core, &record.kind, || Ok(record.boot_id.clone()))?,
        };
        core.counters.owed += 1;
        settle_one(core, row_of(record), found, Some(record), signed, &mut recovered)?;
    }
    if let Some(signed) = signed {
        core.prune(signed)?;
    }
    recovered.unacked = rows::count(&core.conn, State::Done)?;
    Ok(recovered)
}

/// What the boot id says of a command of this kind that began, or was accepted, in the boot that `began` names.
fn boot_says(
    core: &Core,
    kind: &str,
    began: impl FnOnce() -> rusqlite::Result<Option<BootId>>,
) -> rusqlite::Result<BootSays> {
    if !Kind::from_name(kind).is_some_and(Kind::ends_in_a_new_boot) {
        return Ok(BootSays::Nothing);
    }
    Ok(match began()? {
        None => BootSays::Nothing,
        Some(boot) if boot == core.boot_id => BootSays::SameBoot,
        Some(_) => BootSays::OtherBoot,
    })
}

/// The row that a lost journal had, or an old copy has not.
fn row_of(record: &Record) -> Row {
    Row {
        id: record.id.clone(),
        body_sha256: record.body_sha256,
        kind: record.kind.clone(),
        retry_safe: false,
        not_after: record.not_after,
        state: State::Running,
        attempt: record.attempt,
        incarnation: String::new(),
        accepted: None,
        started: record.started,
        outcome: None,
        result_seq: None,
    }
}

fn settle_one(
    core: &mut Core,
    row: Row,
    found: Found,
    begun: Option<&Record>,
    signed: Option<ServerTime>,
    recovered: &mut Recovered,
) -> rusqlite::Result<()> {
    let id = row.id.clone();
    let attempt = row.attempt.max(begun.map_or(0, |record| record.attempt)).max(1);
    let started = row.started.or(begun.and_then(|record| record.started));
    match recovery::becomes(found) {
        Becomes::Stays => {}
        Becomes::WaitsAccepted => recovered.waiting.push(id),
        Becomes::WaitsRunning => {
            if row.state == State::Accepted {
                rows::set_running(&core.conn, &id, attempt, started)?;
            }
            recovered.waiting.push(id);
        }
        Becomes::Expired => {
            let outcome = Outcome { finished: signed, ..ops::expired(row.not_after) };
            ops::end(core, row, &outcome)?;
        }
        Becomes::Rebooted => {
            let outcome = Outcome { finished: signed, ..Outcome::rebooted(attempt, started) };
            ops::end(core, Row { started, ..row }, &outcome)?;
        }
        Becomes::Interrupted => {
            let outcome = Outcome { finished: signed, ..Outcome::interrupted(attempt, started) };
            ops::end(core, Row { started, ..row }, &outcome)?;
            recovered.interrupted.push(id);
        }
    }
    Ok(())
}
