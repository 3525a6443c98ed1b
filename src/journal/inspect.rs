//! Looking at a journal: a snapshot for people and programs, from the daemon or from its files.
//!
//! While a daemon runs, SQLite's lock keeps others out, and the daemon is asked for a [`Snapshot`]. Without one
//! [`read`] takes a private copy of the file and its log and reads that: it changes nothing in the state directory,
//! and takes no lock that a starting daemon would meet.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rusqlite::Connection;
use serde::{Deserialize, Serialize};

use super::check::{self, Check};
use super::error::OpenError;
use super::export::{self, Cursor};
use super::files::wal_of;
use super::record::State;
use super::rows::{self, Row};
use super::{events, schema, settings};
use crate::model::{CommandId, Digest, Effect, Exit, JournalId, NodeId, Reason, ServerTime, Terminal};

/// Commands in a snapshot: at about 400 bytes each it stays under 4 MiB.
const COMMANDS: u64 = 10_000;

/// What stands in a journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Version of the tables.
    pub schema: i64,
    /// Whose journal it is.
    pub node_id: String,
    /// Id of the file.
    pub journal_id: JournalId,
    /// Its birth; absent when it has none.
    pub birth: Option<ServerTime>,
    /// The server time mark.
    pub mark: Option<ServerTime>,
    /// Signed time.
    pub signed: Option<ServerTime>,
    /// Epoch of the last Welcome; 0 for none.
    pub last_epoch: u64,
    /// How many of each state.
    pub counts: Counts,
    /// Its events.
    pub events: EventLine,
    /// Size of the database, bytes.
    pub db_bytes: u64,
    /// Size of the write-ahead log, bytes; it is grown ahead of its use.
    pub wal_bytes: u64,
    /// What has not ended, then the latest.
    pub commands: Vec<CommandLine>,
    /// Older commands that are not shown.
    pub commands_left_out: u64,
}

/// Events, counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct EventLine {
    /// Stored and not acked.
    pub unacked: u64,
    /// Of them metrics, which are dropped first.
    pub metrics: u64,
    /// Their size, bytes.
    pub bytes: u64,
    /// The last number given.
    pub last: u64,
    /// The highest number acked; 0 for none.
    pub acked: u64,
    /// Dropped since the journal's birth.
    pub dropped: u64,
}

/// Commands by state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Counts {
    /// Known, not started.
    pub accepted: u64,
    /// Perhaps started.
    pub running: u64,
    /// Ended, not acked.
    pub done: u64,
    /// Ended and acked.
    pub tombstones: u64,
}

/// One command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandLine {
    /// The command.
    pub id: CommandId,
    /// The kind's name.
    pub kind: String,
    /// Where it stands.
    pub state: State,
    /// Whether it may run twice.
    pub retry_safe: bool,
    /// Executions so far.
    pub attempt: u32,
    /// SHA-256 of its payload.
    pub body_sha256: Digest,
    /// When it was accepted, in server time.
    pub accepted: Option<ServerTime>,
    /// When its last execution started.
    pub started: Option<ServerTime>,
    /// Until when it may be accepted.
    pub not_after: ServerTime,
    /// How it ended; absent while it has not.
    pub end: Option<End>,
}

/// How a command ended, without its output.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// Which end.
    pub state: Terminal,
    /// Why.
    pub reason: Option<Reason>,
    /// For people.
    pub message: String,
    /// What is known of the effect.
    pub effect: Effect,
    /// When, in server time.
    pub finished: Option<ServerTime>,
    /// Run time, ms.
    pub duration_ms: u64,
}

/// Why a journal cannot be looked at.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// There is none.
    #[error("{0} does not exist: this machine has not joined, or the state directory is another")]
    Missing(PathBuf),
    /// A daemon holds it, and would have to be asked.
    #[error("{path} is held by a running bcd (pid {pid}); ask it over its status socket")]
    Held {
        /// The journal.
        path: PathBuf,
        /// The holder.
        pid: i32,
    },
    /// It cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl InspectError {
    /// How a subcommand that meets it ends.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Missing(_) => Exit::Unknown,
            Self::Held { .. } => Exit::TryLater,
            Self::Open(error) => error.exit(),
        }
    }
}

/// Reads the snapshot of an open database.
pub(super) fn snapshot(conn: &Connection, db: &Path) -> rusqlite::Result<Snapshot> {
    snapshot_of(conn, db, COMMANDS)
}

/// The same with at most so many commands.
pub(super) fn snapshot_of(conn: &Connection, db: &Path, commands: u64) -> rusqlite::Result<Snapshot> {
    let head = schema::head(conn)?;
    let schema = conn.query_row("PRAGMA user_version", [], |row| row.get(0))?;
    let counted = rows::counts(conn)?;
    let count = |state| counted.iter().filter(|(of, _)| *of == state).map(|(_, count)| count).sum();
    let counts = Counts {
        accepted: count(State::Accepted),
        running: count(State::Running),
        done: count(State::Done),
        tombstones: count(State::Tombstone),
    };
    let commands: Vec<_> = rows::newest(conn, commands)?.into_iter().map(line_of).collect();
    let all = counts.accepted + counts.running + counts.done + counts.tombstones;
    let size = |path: &Path| path.metadata().map_or(0, |meta| meta.len());
    Ok(Snapshot {
        schema,
        node_id: head.node_id,
        journal_id: head.journal_id,
        birth: head.birth,
        mark: head.mark,
        signed: head.signed,
        last_epoch: head.last_epoch,
        counts,
        // A journal that no newer daemon has opened yet has none.
        events: if schema >= 2 { events::line(conn)? } else { EventLine::default() },
        db_bytes: size(db),
        wal_bytes: size(&wal_of(db)),
        commands_left_out: all.saturating_sub(commands.len() as u64),
        commands,
    })
}

pub(super) fn line_of(row: Row) -> CommandLine {
    let end = row.outcome.map(|outcome| End {
        state: outcome.state,
        reason: outcome.reason,
        message: outcome.message,
        effect: outcome.effect,
        finished: outcome.finished,
        duration_ms: outcome.duration_ms,
    });
    CommandLine {
        id: row.id,
        kind: row.kind,
        state: row.state,
        retry_safe: row.retry_safe,
        attempt: row.attempt,
        body_sha256: row.body_sha256,
        accepted: row.accepted,
        started: row.started,
        not_after: row.not_after,
        end,
    }
}

/// Reads a journal that no daemon holds. Blocks. Not within the process that has it open: closing the file here would
/// end SQLite's own lock there.
///
/// # Errors
/// See [`InspectError`].
pub fn read(state: &Path) -> Result<Snapshot, InspectError> {
    Opened::copy_of(state, None)?.with(snapshot)
}

/// Everything in a journal that no daemon holds, page by page. Blocks; as [`read`].
///
/// # Errors
/// See [`InspectError`].
pub fn export(state: &Path, mut take: impl FnMut(&str) -> bool) -> Result<(), InspectError> {
    let opened = Opened::copy_of(state, None)?;
    let mut cursor = Some(Cursor::Commands(None));
    while let Some(at) = cursor {
        let page = opened.with(|conn, db| export::page(conn, db, state, &at))?;
        if !take(&page.lines) {
            break;
        }
        cursor = page.next;
    }
    Ok(())
}

/// Checks a journal that no daemon holds; with a node, that it is this node's. Blocks; as [`read`].
///
/// # Errors
/// See [`InspectError`].
pub fn check(state: &Path, node: Option<&NodeId>) -> Result<Check, InspectError> {
    Opened::copy_of(state, node)?.with(|conn, db| check::check(conn, db, state))
}

/// A private copy of a journal, open.
struct Opened {
    conn: Connection,
    /// The journal that it is a copy of.
    db: PathBuf,
    // Last: the files go when the connection is closed.
    _copy: Copy,
}

impl Opened {
    fn with<T>(
        &self,
        look: impl FnOnce(&Connection, &Path) -> rusqlite::Result<T>,
    ) -> Result<T, InspectError> {
        let sqlite = |source| OpenError::Sqlite { path: self.db.clone(), source };
        Ok(look(&self.conn, &self.db).map_err(sqlite)?)
    }

    fn copy_of(state: &Path, node: Option<&NodeId>) -> Result<Self, InspectError> {
        let db = state.join("journal.db");
        let failed = |action, path: &Path| {
            let path = path.to_owned();
            move |source| OpenError::Io { action, path, source }
        };
        let file = match open_plain(&db) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(InspectError::Missing(db)),
            Err(error) => return Err(failed("open", &db)(error).into()),
        };
        if let Some(pid) = holder(&file).map_err(failed("look for a lock on", &db))? {
            return Err(InspectError::Held { path: db, pid });
        }
        let copy = Copy::new().map_err(failed("make a copy in", &std::env::temp_dir()))?;
        let copied = copy.0.join("journal.db");
        copy_into(file, &copied).map_err(failed("copy", &db))?;
        match open_plain(&wal_of(&db)) {
            Ok(log) => copy_into(log, &wal_of(&copied)).map_err(failed("copy", &wal_of(&db)))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("open", &wal_of(&db))(error).into()),
        }
        let sqlite = |source| OpenError::Sqlite { path: db.clone(), source };
        let conn = settings::connect(&copied, None).map_err(sqlite)?;
        conn.pragma_update(None, "locking_mode", "EXCLUSIVE").map_err(sqlite)?;
        if schema::check(&conn, &db, node)? == 0 {
            return Err(InspectError::Missing(db));
        }
        Ok(Self { conn, db, _copy: copy })
    }
}

fn open_plain(path: &Path) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

fn copy_into(mut from: File, to: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to)?;
    io::copy(&mut from, &mut file).map(|_| ())
}

/// Who holds SQLite's lock, which only asking does not take.
fn holder(file: &File) -> io::Result<Option<i32>> {
    let mut lock = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap_or(1),
        l_whence: i16::try_from(libc::SEEK_SET).unwrap_or(0),
        // SQLite locks the bytes from 1 GiB on (its PENDING_BYTE, RESERVED_BYTE and shared range).
        l_start: 0x4000_0000,
        l_len: 512,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok((i32::from(lock.l_type) != libc::F_UNLCK).then_some(lock.l_pid))
}

/// A private directory that goes with the value.
struct Copy(PathBuf);

impl Copy {
    fn new() -> io::Result<Self> {
        // mkdir takes no existing path, so a guessed name costs a try and nothing else.
        let name = |n: u32| format!("bcd-journal-{}-{n}", std::process::id());
        let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
        for path in (0..64).map(|n| std::env::temp_dir().join(name(n))) {
            match DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok(Self(path.canonicalize()?)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
