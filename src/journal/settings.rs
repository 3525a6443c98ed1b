//! Every setting of the database, once, with its reason. Each is read back: a pragma that is not taken says nothing.

use std::ffi::CStr;
use std::path::Path;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags};

use super::Memory;
use super::error::OpenError;

/// A pragma, what it is set to, and what it must read back as.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    pub(super) name: &'static str,
    pub(super) set: &'static str,
    pub(super) read: &'static str,
}

/// What `page_size` says below.
pub(super) const PAGE_BYTES: u64 = 4096;

/// In the order in which they must be set.
pub(super) const SETTINGS: &[Setting] = &[
    // Only heard before the first page is written.
    Setting { name: "page_size", set: "4096", read: "4096" },
    // Before WAL: then the index of the log is on the heap and no -shm file exists, and no second bcd gets in.
    Setting { name: "locking_mode", set: "EXCLUSIVE", read: "exclusive" },
    // One sync a commit, which overwrites. DELETE takes four and can lose the last commit: its unlink is not synced.
    Setting { name: "journal_mode", set: "WAL", read: "wal" },
    // NORMAL does not sync a commit in WAL, and so loses accepted commands.
    Setting { name: "synchronous", set: "FULL", read: "2" },
    // Pages of log (4 MiB) after which a commit also carries them into the file; the grown log holds as much.
    Setting { name: "wal_autocheckpoint", set: "1000", read: "1000" },
    // Truncating the log would have it grow again.
    Setting { name: "journal_size_limit", set: "-1", read: "-1" },
    Setting { name: "foreign_keys", set: "ON", read: "1" },
    // A read error of a mapped file is a SIGBUS, not an error.
    Setting { name: "mmap_size", set: "0", read: "0" },
    // No temporary files: they would lie outside of the state directory.
    Setting { name: "temp_store", set: "MEMORY", read: "2" },
    // A table of a foreign file must not run code of its schema.
    Setting { name: "trusted_schema", set: "OFF", read: "0" },
];

/// Waiting for SQLite's own lock, ms: another process that just looks at the file.
const BUSY_MS: u64 = 5000;

/// Opens an existing file; makes none, and follows no link.
pub(super) fn connect(db: &Path, vfs: Option<&CStr>) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
        | OpenFlags::SQLITE_OPEN_NO_MUTEX
        | OpenFlags::SQLITE_OPEN_NOFOLLOW
        | OpenFlags::SQLITE_OPEN_EXRESCODE;
    let conn = match vfs {
        Some(vfs) => Connection::open_with_flags_and_vfs(db, flags, vfs)?,
        None => Connection::open_with_flags(db, flags)?,
    };
    conn.busy_timeout(std::time::Duration::from_millis(BUSY_MS))?;
    // docs/decisions/0099-statements-are-not-compiled-for-their-values.md
    conn.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true)?;
    conn.set_prepared_statement_cache_capacity(Memory::HOST.statements);
    Ok(conn)
}

/// Sets each, then reads each back.
pub(super) fn apply(settings: &[Setting], conn: &Connection, db: &Path) -> Result<(), OpenError> {
    let sqlite = |source| OpenError::Sqlite { path: db.to_owned(), source };
    for setting in settings {
        // Some pragmas answer with a row and some do not.
        let mut set = conn.prepare(&format!("PRAGMA {} = {}", setting.name, setting.set)).map_err(sqlite)?;
        let mut rows = set.query([]).map_err(sqlite)?;
        while rows.next().map_err(sqlite)?.is_some() {}
        drop(rows);
    }
    verify(settings, conn, db)
}

/// Reads each back.
pub(super) fn verify(settings: &[Setting], conn: &Connection, db: &Path) -> Result<(), OpenError> {
    for setting in settings {
        let found =
            read(conn, setting.name).map_err(|source| OpenError::Sqlite { path: db.to_owned(), source })?;
        if found != setting.read {
            return Err(OpenError::Setting {
                path: db.to_owned(),
                name: setting.name,
                wanted: setting.read.to_owned(),
                found,
            });
        }
    }
    Ok(())
}

fn read(conn: &Connection, name: &str) -> rusqlite::Result<String> {
    conn.query_row(&format!("PRAGMA {name}"), [], |row| {
        Ok(match row.get_ref(0)? {
            rusqlite::types::ValueRef::Integer(number) => number.to_string(),
            rusqlite::types::ValueRef::Text(text) => String::from_utf8_lossy(text).into_owned(),
            other => format!("{:?}", other.data_type()),
        })
    })
}
