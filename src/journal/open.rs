//! Opening: files, lock, checks, settings, schema, and the settling of what an older incarnation left.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::Connection;
use rusqlite::config::DbConfig;
use serde_json::json;
use tokio::sync::watch;

use super::audit;
use super::begun::{self, Record};
use super::core::{Core, Counters, Named, Shared};
use super::disk::{Disk, Ground, KERNEL};
use super::durable::Durable;
use super::error::{OpenError, WriteError, is_corrupt};
use super::events::{self, EventCounts, EventLimits};
use super::faults::Faults;
use super::lock::Lock;
use super::record::{Reattached, State};
use super::recovery::{self, Becomes, BootSays, Found, Left};
use super::rescue::Identity;
use super::room::{self, Limits, Room};
use super::rows::{self, Row};
use super::schema::{self, Head};
use super::trouble::Troubles;
use super::{Facts, Journal, Memory, Options, Recovered, files, ops, settings};
use crate::clock::{Clock, SystemClock};
use crate::model::{BootId, CommandId, EventType, JournalId, Kind, NewEvent, Outcome, ServerTime};

/// An open, locked journal in which nothing has been recovered yet: the moment to end leftover programs.
#[derive(Debug)]
pub struct Locked {
    options: Options,
    state: PathBuf,
    db: PathBuf,
    conn: Connection,
    head: Head,
    faults: Faults,
    clock: Arc<dyn Clock>,
    event_limits: EventLimits,
    /// Name of the corrupt file that this journal replaces, until it has told so.
    moved_aside: Option<String>,
    audits: bool,
    limits: Limits,
    memory: Memory,
    open: Option<Identity>,
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

    /// The same, with the syncs that SQLite asks for counted. Blocks.
    ///
    /// # Errors
    /// See [`OpenError`].
    #[cfg(feature = "fakehw")]
    pub fn open_counting(options: Options, new_id: JournalId) -> Result<(Self, super::SyncCount), OpenError> {
        let count = super::sync_count::register().ok_or_else(|| OpenError::Io {
            action: "count the syncs of",
            path: options.state.clone(),
            source: std::io::ErrorKind::Unsupported.into(),
        })?;
        Ok((Self::open_on(super::disk::COUNTED, options, new_id, None)?, count))
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
        let mut first = establish(ground, &options, &db, &new_id, birth);
        // A start on a full disk: the log needs room, and results may be owed.
        if first.as_ref().is_err_and(OpenError::wants_space) && room::release_earlier(&state).unwrap_or(false)
        {
            tracing::warn!("the disk is full: the reserve was given back, so that the journal can be opened");
            first = establish(ground, &options, &db, &new_id, birth);
        }
        let conn = match first {
            Err(OpenError::Sqlite { source, .. }) if is_corrupt(&source) => {
                let aside = files::move_aside(ground.disk, &state, &db, unix_s())?;
                tracing::error!(error = %source, kept = %aside.display(), "the journal is corrupt and was moved aside");
                files::prepare(ground.disk, &state, &db, unix_s())?;
                establish(ground, &options, &db, &new_id, birth)?
            }
            other => other?,
        };
        let head = schema::head(&conn).map_err(|source| OpenError::Sqlite { path: db.clone(), source })?;
        let sqlite = |source| OpenError::Sqlite { path: db.clone(), source };
        let told = EventCounts::read(&conn, EventLimits::default()).map_err(sqlite)?.last() > 0;
        let moved_aside = files::untold(ground.disk, &state, told)?;
        // A file in memory has no other name to be found by.
        let open = match ground.disk.vfs() {
            None => Some(Identity::of(&db).map_err(|source| OpenError::Io {
                action: "look at",
                path: db.clone(),
                source,
            })?),
            Some(_) => None,
        };
        Ok(Self {
            options,
            state,
            db,
            conn,
            head,
            faults: Faults::default(),
            clock: Arc::new(SystemClock),
            event_limits: EventLimits::default(),
            moved_aside,
            audits: false,
            limits: Limits::NONE,
            memory: Memory::HOST,
            open,
            lock,
        })
    }

    /// Has events stamped by this clock instead of the machine's.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Sets how many events may wait.
    #[must_use]
    pub fn with_event_limits(mut self, limits: EventLimits) -> Self {
        self.event_limits = limits;
        self
    }

    /// What bcd may take of the disk; without a word there is no budget and no reserve.
    #[must_use]
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Has a line made for audit.log whenever a command ends; without a word none is.
    #[must_use]
    pub fn with_audit(mut self, audits: bool) -> Self {
        self.audits = audits;
        self
    }

    /// What it keeps in memory; without a word a host's.
    #[must_use]
    pub fn with_memory(mut self, memory: Memory) -> Self {
        self.memory = memory;
        self
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

    /// What the begun records say was started here, under this journal or one that is lost. Blocks.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn begun(&self) -> Result<Vec<Record>, OpenError> {
        let records = begun::read_all(&self.state, self.options.node_id.as_str()).map_err(|source| {
            OpenError::Io { action: "read the begun records in", path: begun::dir(&self.state), source }
        })?;
        Ok(records.whole)
    }

    /// The id that this journal had before it was found to be an old copy: its programs bear it still.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn former_id(&self) -> Result<Option<JournalId>, OpenError> {
        events::former_id(&self.conn).map_err(|source| OpenError::Sqlite { path: self.db.clone(), source })
    }

    /// Settles every command that an older incarnation left, durably, and starts the writer: [`Self::recover_with`]
    /// where no process outlived the daemon. Blocks.
    ///
    /// # Errors
    /// A write failed.
    pub fn recover(self, signed: Option<ServerTime>) -> Result<(Journal, Recovered), WriteError> {
        self.recover_with(signed, &mut |_| Left::Nothing)
    }

    /// Settles every command that an older incarnation left, durably, and starts the writer. `left` is asked about
    /// the process that carries a command out. Blocks.
    ///
    /// # Errors
    /// A write failed.
    pub fn recover_with(
        self,
        signed: Option<ServerTime>,
        left: &mut dyn FnMut(&Record) -> Left<Box<Outcome>>,
    ) -> Result<(Journal, Recovered), WriteError> {
        let signed = signed.max(self.head.signed);
        let (mode, memory, node) = (self.options.mode, self.memory, self.options.node_id.clone());
        let moved_aside = self.moved_aside.clone();
        let mut core = self.into_core().map_err(|error| WriteError::of(&error, None))?;
        let records =
            begun::read_all(&core.state, node.as_str()).map_err(|error| WriteError::of_file(&error))?;
        records.tell(&core.state);
        let Settled { mut recovered, reattached } = core.run_one(|core| {
            if let Some(kept) = &moved_aside {
                events::add(core, NewEvent::new(EventType::JournalMovedAside, json!({ "kept": kept })))?;
            }
            let settled = settle(core, &records.whole, signed, left)?;
            events::add(core, started(core, &settled.recovered))?;
            Ok(settled)
        })?;
        // Should its mark stay, the next opening takes it away.
        if moved_aside.is_some()
            && let Err(error) = files::untold(KERNEL.disk, &core.state, true)
        {
            tracing::debug!(%error, "the mark of a move that was told stays for now");
        }
        recovered.foreign = records.foreign.len();
        recovered.reattached = reattached.into_iter().map(Durable::after_sync).collect();
        core.left.clone_from(&recovered.waiting);
        core.forget_the_start(memory);
        Ok((Journal::over(core, mode)?, recovered))
    }

    fn into_core(self) -> rusqlite::Result<Core> {
        let events = EventCounts::read(&self.conn, self.event_limits)?;
        let owed = rows::owed(&self.conn)?;
        let audited = audit::last(&self.conn)?;
        let named = Named::new(self.head.journal_id, self.head.birth, events.last());
        let shared = Shared {
            named: Arc::clone(&named).into(),
            pending: watch::Sender::new(events.pending()),
            owed: owed.into(),
            audited: watch::Sender::new(audited),
            last_epoch: self.head.last_epoch.into(),
            commits: 0.into(),
            failed: watch::Sender::new(None),
            troubles: Troubles::default(),
            room: Room::new(&self.state, self.limits),
        };
        let counters = Counters { named, events, owed, audited };
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
            audits: self.audits,
            left: Vec::new(),
            faults: self.faults,
            looked: None,
            lazy_alone: false,
            clock: self.clock,
            open: self.open,
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
    schema::migrate(&mut conn, version, &options.node_id, new_id, birth).map_err(sqlite)?;
    // After the first read or write: SQLite makes the log no earlier.
    files::grow_wal(ground.disk, db, options.wal_bytes)?;
    // Last: closing a journal whose sync has failed must carry nothing anywhere.
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false).map_err(sqlite)?;
    Ok(conn)
}

/// What recovery did, before its commit.
#[derive(Default)]
struct Settled {
    recovered: Recovered,
    reattached: Vec<Reattached>,
}

/// Asks what is left of the process that carries a command out.
type AskLeft<'a> = &'a mut dyn FnMut(&Record) -> Left<Box<Outcome>>;

/// Applies the recovery table to every row and record.
fn settle(
    core: &mut Core,
    records: &[Record],
    signed: Option<ServerTime>,
    left: AskLeft<'_>,
) -> rusqlite::Result<Settled> {
    let mut settled = Settled::default();
    ops::write_time(core, None, signed)?;
    // Sorted by id and attempt, as they were read: the last of an id tells of its latest attempt.
    let record_of = |id: &CommandId| {
        let end = records.partition_point(|record| record.id <= *id);
        records[..end].last().filter(|record| record.id == *id)
    };
    let passed = |not_after: ServerTime| signed.is_some_and(|signed| signed >= not_after);
    for row in rows::unfinished(&core.conn)? {
        let begun = record_of(&row.id);
        let expired = passed(row.not_after);
        settle_one(core, (row, true), begun, (expired, signed), left, &mut settled)?;
    }
    for record in records {
        if rows::find(&core.conn, &record.id)?.is_some() {
            continue;
        }
        if passed(record.not_after.plus(crate::model::limits::TOMBSTONE_GRACE)) {
            // Its tombstone went; the crash came before the removal was durable.
            if let Err(error) = begun::remove(&core.state, &record.id, record.attempt) {
                tracing::warn!(id = %record.id, %error, "a begun record cannot be removed");
            }
            continue;
        }
        core.counters.owed += 1;
        let latest = record_of(&record.id).unwrap_or(record);
        let expired = passed(record.not_after);
        settle_one(core, (row_of(latest), false), Some(latest), (expired, signed), left, &mut settled)?;
    }
    if let Some(signed) = signed {
        core.prune(signed)?;
    }
    settled.recovered.unacked = rows::count(&core.conn, State::Done)?;
    Ok(settled)
}

fn started(core: &Core, recovered: &Recovered) -> NewEvent {
    let body = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "incarnation": core.incarnation.as_str(),
        "boot_id": core.boot_id.as_str(),
        "interrupted": recovered.interrupted.len(),
        "waiting": recovered.waiting.len(),
        "unacked": recovered.unacked,
    });
    NewEvent::new(EventType::DaemonStarted, body)
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
        retry_safe: record.retry_safe,
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

/// Settles one command; its row stands in the journal, or is made from its record.
fn settle_one(
    core: &mut Core,
    (row, stands): (Row, bool),
    begun: Option<&Record>,
    (expired, signed): (bool, Option<ServerTime>),
    left: AskLeft<'_>,
    settled: &mut Settled,
) -> rusqlite::Result<()> {
    let recovered = &mut settled.recovered;
    let id = row.id.clone();
    let attempt = row.attempt.max(begun.map_or(0, |record| record.attempt)).max(1);
    let started = row.started.or(begun.and_then(|record| record.started));
    // The record of an earlier attempt tells nothing of this one.
    let own = begun.filter(|record| record.attempt == attempt);
    let mut outcome = None;
    let left = match own.map_or(Left::Nothing, left) {
        Left::Nothing => Left::Nothing,
        Left::Alive => Left::Alive,
        Left::Ended(ended) => {
            outcome = Some(*ended);
            Left::Ended(())
        }
    };
    let found = Found {
        row: stands.then_some(row.state),
        retry_safe: row.retry_safe,
        begun: begun.is_some(),
        executions: row.attempt,
        left,
        expired,
        boot: boot_says(core, &row.kind, || match own {
            Some(record) => Ok(record.boot_id.clone()),
            None => rows::boot_of(&core.conn, &id),
        })?,
    };
    let becomes = recovery::becomes(found);
    match becomes {
        Becomes::Stays => {}
        Becomes::WaitsAccepted => recovered.waiting.push(id),
        Becomes::WaitsRunning | Becomes::Reattached => {
            if !stands {
                ops::put(core, &row, None)?;
                rows::set_incarnation(&core.conn, &id, "")?;
            } else if row.state == State::Accepted {
                rows::set_running(&core.conn, &id, attempt, started)?;
            }
            match own.filter(|_| becomes == Becomes::Reattached) {
                Some(begun) => {
                    rows::set_incarnation(&core.conn, &id, core.incarnation.as_str())?;
                    settled.reattached.push(Reattached { begun: begun.clone() });
                }
                None => recovered.waiting.push(id),
            }
        }
        Becomes::Expired => {
            let outcome = Outcome { finished: signed, ..ops::expired(row.not_after) };
            ops::end(core, row, &outcome)?;
        }
        Becomes::Rebooted => {
            let outcome = Outcome { finished: signed, ..Outcome::rebooted(attempt, started) };
            ops::end(core, Row { started, ..row }, &outcome)?;
        }
        Becomes::Ended | Becomes::Interrupted => {
            let interrupted = Outcome { finished: signed, ..Outcome::interrupted(attempt, started) };
            if outcome.is_none() {
                recovered.interrupted.push(id);
            }
            ops::end(core, Row { started, ..row }, &outcome.unwrap_or(interrupted))?;
        }
    }
    Ok(())
}
