//! SQLite's own VFS with its syncs counted, for `bcd bench`. Simulation builds only.
#![allow(unsafe_code, reason = "SQLite calls a VFS through C pointers")]

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use rusqlite::ffi;

/// The syncs that SQLite has asked for, of every file opened through [`NAME`] in this process.
#[derive(Debug, Clone, Copy)]
pub struct SyncCount(());

impl SyncCount {
    /// So many until now.
    pub fn syncs(self) -> u64 {
        SYNCS.load(Ordering::Relaxed)
    }
}

/// What the VFS is called.
pub(super) const NAME: &CStr = c"bcd-counts-syncs";

static SYNCS: AtomicU64 = AtomicU64::new(0);

/// A table of SQLite's file methods, and its copy in which the sync is ours.
#[derive(Clone, Copy)]
struct Tables {
    own: &'static ffi::sqlite3_io_methods,
    counting: &'static ffi::sqlite3_io_methods,
}

/// SQLite's VFS has a table for the database and one for files without locks; never more than a few.
static TABLES: Mutex<Vec<Tables>> = Mutex::new(Vec::new());

/// The address of SQLite's default VFS, which lives as long as the process.
static OWN: OnceLock<usize> = OnceLock::new();

fn own() -> Option<*mut ffi::sqlite3_vfs> {
    OWN.get().map(|address| *address as *mut ffi::sqlite3_vfs)
}

/// Registers the VFS, once a process. None: SQLite has no VFS to count in, or takes no other.
pub(super) fn register() -> Option<SyncCount> {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    let registered = *REGISTERED.get_or_init(|| {
        // SAFETY: a null name asks for the default VFS; the answer is null or valid for the life of the process.
        let default = unsafe { ffi::sqlite3_vfs_find(std::ptr::null()) };
        // SAFETY: as above.
        let Some(default_vfs) = (unsafe { default.as_ref() }) else { return false };
        OWN.get_or_init(|| default as usize);
        // Everything but opening is the default's: its functions look at nothing of the VFS but `pAppData`.
        let ours = ffi::sqlite3_vfs {
            zName: NAME.as_ptr(),
            pNext: std::ptr::null_mut(),
            xOpen: Some(open),
            ..*default_vfs
        };
        // SAFETY: leaked, so that it is valid for the life of the process, as its name is.
        let code = unsafe { ffi::sqlite3_vfs_register(Box::leak(Box::new(ours)), 0) };
        code == ffi::SQLITE_OK
    });
    registered.then_some(SyncCount(()))
}

/// The counting copy of a table.
fn counting(own: &'static ffi::sqlite3_io_methods) -> &'static ffi::sqlite3_io_methods {
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = tables.iter().find(|tables| std::ptr::eq(tables.own, own)) {
        return found.counting;
    }
    let counting = Box::leak(Box::new(ffi::sqlite3_io_methods { xSync: Some(sync), ..*own }));
    tables.push(Tables { own, counting });
    counting
}

unsafe extern "C" fn open(
    _vfs: *mut ffi::sqlite3_vfs,
    name: *const c_char,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    let Some(own) = own() else { return ffi::SQLITE_CANTOPEN };
    // SAFETY: the default VFS is valid, and the arguments are SQLite's, made for a VFS of the same `szOsFile`.
    unsafe {
        let Some(open) = (*own).xOpen else { return ffi::SQLITE_CANTOPEN };
        let code = open(own, name, file, flags, out_flags);
        // The tables of the default VFS are static; null means that the file was not opened.
        if let Some(methods) = (*file).pMethods.as_ref() {
            (*file).pMethods = counting(methods);
        }
        code
    }
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, flags: c_int) -> c_int {
    SYNCS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: SQLite calls it for an open file, whose table is one of ours.
    let table = unsafe { (*file).pMethods };
    let found = {
        let tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
        tables.iter().find(|tables| std::ptr::eq(tables.counting, table)).map(|tables| tables.own)
    };
    match found.and_then(|own| own.xSync) {
        // SAFETY: the method that the file was opened with.
        Some(sync) => unsafe { sync(file, flags) },
        None => ffi::SQLITE_IOERR_FSYNC,
    }
}
