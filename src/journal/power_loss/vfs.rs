//! SQLite's way to the simulated disk: a VFS that behaves as SQLite's own on Linux, down to which sync also syncs
//! the directory.
//!
//! Its I/O methods are of version 1, without shared memory: WAL works only where exclusive locking was set before
//! it, so every run proves that order too. Locks are not kept: one connection at a time is open on a disk.
#![allow(unsafe_code, reason = "SQLite calls a VFS through C pointers")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rusqlite::ffi;

use super::super::disk::Disk as JournalDisk;
use super::super::error::OpenError;
use super::disk::{self, Disk, DiskError, Image, Inode};

/// A registered VFS with a disk of its own. It is to outlive every connection through it.
#[derive(Debug)]
pub(super) struct Vfs {
    vfs: *mut ffi::sqlite3_vfs,
    name: CString,
    disk: Arc<Mutex<Disk>>,
}

/// What SQLite keeps of an open file; SQLite allocates it, zeroed, by `szOsFile`.
#[repr(C)]
struct Handle {
    base: ffi::sqlite3_file,
    /// The disk of the VFS that opened it.
    disk: *const Mutex<Disk>,
    inode: Inode,
    /// The next sync also syncs the directory: a log or rollback journal whose entry may be new.
    sync_dir: bool,
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(lock_any),
    xUnlock: Some(lock_any),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

/// Longest path, bytes.
const PATH: c_int = 1024;

impl Vfs {
    /// Registers a VFS under a name of its own, so that no two tests share a disk.
    pub(super) fn new() -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(format!("bcd-power-loss-{count}")).expect("no NUL");
        let disk = Arc::new(Mutex::new(Disk::default()));
        let vfs = Box::into_raw(Box::new(ffi::sqlite3_vfs {
            iVersion: 1,
            szOsFile: c_int::try_from(size_of::<Handle>()).expect("a small struct"),
            mxPathname: PATH,
            pNext: std::ptr::null_mut(),
            zName: name.as_ptr(),
            pAppData: Arc::as_ptr(&disk).cast_mut().cast(),
            xOpen: Some(open),
            xDelete: Some(delete),
            xAccess: Some(access),
            xFullPathname: Some(full_pathname),
            xDlOpen: None,
            xDlError: None,
            xDlSym: None,
            xDlClose: None,
            xRandomness: Some(randomness),
            xSleep: Some(sleep),
            xCurrentTime: Some(current_time),
            xGetLastError: None,
            xCurrentTimeInt64: None,
            xSetSystemCall: None,
            xGetSystemCall: None,
            xNextSystemCall: None,
        }));
        // SAFETY: `vfs` is valid and stays so until it is unregistered in `drop`; so do its name and its disk.
        let registered = unsafe { ffi::sqlite3_vfs_register(vfs, 0) };
        assert_eq!(registered, ffi::SQLITE_OK, "registering a VFS");
        Self { vfs, name, disk }
    }

    /// What SQLite knows it by.
    pub(super) fn name(&self) -> &CStr {
        &self.name
    }

    /// The disk.
    pub(super) fn disk(&self) -> MutexGuard<'_, Disk> {
        disk::lock(&self.disk)
    }

    /// Puts another disk in its place. No file may be open.
    pub(super) fn boot(&self, image: Image) {
        let mut disk = self.disk();
        assert_eq!(disk.open_files, 0, "a connection is still open");
        *disk = Disk::boot(image);
    }
}

impl Drop for Vfs {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, and valid until below.
        unsafe { ffi::sqlite3_vfs_unregister(self.vfs) };
        if self.disk().open_files == 0 {
            // SAFETY: made by `Box::into_raw`, and no connection is left that would use it.
            drop(unsafe { Box::from_raw(self.vfs) });
        } else {
            // A test that failed half-way: what its connections point to stays for good.
            std::mem::forget((Arc::clone(&self.disk), std::mem::take(&mut self.name)));
        }
    }
}

fn base_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn io_error(error: DiskError) -> io::Error {
    match error {
        DiskError::Off => io::Error::other("the power is off"),
        DiskError::Missing => io::ErrorKind::NotFound.into(),
        DiskError::Exists => io::ErrorKind::AlreadyExists.into(),
        DiskError::Full => io::Error::from_raw_os_error(nix::libc::ENOSPC),
        DiskError::Broken => io::Error::from_raw_os_error(nix::libc::EIO),
    }
}

impl JournalDisk for Vfs {
    fn vfs(&self) -> Option<&CStr> {
        Some(&self.name)
    }

    fn exists(&self, path: &Path) -> Result<bool, OpenError> {
        Ok(self.disk().inode(&base_name(path)).is_some())
    }

    fn create(&self, path: &Path) -> io::Result<()> {
        self.disk().create(&base_name(path)).map(drop).map_err(io_error)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk().rename(&base_name(from), &base_name(to)).map_err(io_error)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.disk().unlink(&base_name(path)).map_err(io_error)
    }

    fn names(&self, _dir: &Path) -> io::Result<Vec<String>> {
        Ok(self.disk().names())
    }

    fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        self.disk().sync_dir().map_err(io_error)
    }

    fn grow(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let mut disk = self.disk();
        // A mutant that keeps no log has none to grow.
        let Some(inode) = disk.inode(&base_name(path)) else { return Ok(()) };
        let len = disk.content(inode).len();
        let missing = usize::try_from(bytes).map_err(io::Error::other)?.saturating_sub(len);
        if missing > 0 {
            disk.write(inode, len, &vec![0; missing]).map_err(io_error)?;
        }
        Ok(())
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        let mut disk = self.disk();
        // As above.
        let Some(inode) = disk.inode(&base_name(path)) else { return Ok(()) };
        disk.sync(inode).map_err(io_error)
    }
}

// The callbacks. None of them panics: unwinding into C would abort the process, and hide the assertion that failed.

fn code(done: Result<(), DiskError>, failed: c_int) -> c_int {
    match done {
        Ok(()) => ffi::SQLITE_OK,
        // As SQLite's own: of a write alone.
        Err(DiskError::Full) if failed == ffi::SQLITE_IOERR_WRITE => ffi::SQLITE_FULL,
        Err(_) => failed,
    }
}

/// # Safety
/// `vfs` is one of [`Vfs::new`], still registered.
unsafe fn disk_of<'a>(vfs: *mut ffi::sqlite3_vfs) -> MutexGuard<'a, Disk> {
    // SAFETY: pAppData points to the disk that the VFS keeps alive.
    disk::lock(unsafe { &*(*vfs).pAppData.cast::<Mutex<Disk>>() })
}

/// # Safety
/// `file` was opened by [`open`] and is not closed; its VFS is still registered.
unsafe fn handle<'a>(file: *mut ffi::sqlite3_file) -> (&'a mut Handle, MutexGuard<'a, Disk>) {
    // SAFETY: SQLite hands back what `open` wrote, and uses a file from one thread at a time.
    let handle = unsafe { &mut *file.cast::<Handle>() };
    // SAFETY: the VFS keeps its disk alive, and outlives its connections.
    let disk = disk::lock(unsafe { &*handle.disk });
    (handle, disk)
}

/// # Safety
/// `path` is null or a C string.
unsafe fn name_of(path: *const c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    (!path.is_null()).then(|| base_name(Path::new(&*unsafe { CStr::from_ptr(path) }.to_string_lossy())))
}

unsafe extern "C" fn open(
    vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes its own VFS, a C string or null, and room for a `Handle`.
    unsafe {
        (*file).pMethods = std::ptr::null();
        let mut disk = disk_of(vfs);
        let create = flags & ffi::SQLITE_OPEN_CREATE != 0;
        let inode = match name_of(path) {
            None => disk.create_nameless(),
            Some(name) => match disk.inode(&name) {
                Some(_) if create && flags & ffi::SQLITE_OPEN_EXCLUSIVE != 0 => return ffi::SQLITE_CANTOPEN,
                Some(inode) => inode,
                None if create => match disk.create(&name) {
                    Ok(inode) => inode,
                    Err(_) => return ffi::SQLITE_CANTOPEN,
                },
                None => return ffi::SQLITE_CANTOPEN,
            },
        };
        disk.open_files += 1;
        drop(disk);
        let journal = flags & (ffi::SQLITE_OPEN_WAL | ffi::SQLITE_OPEN_MAIN_JOURNAL) != 0;
        file.cast::<Handle>().write(Handle {
            base: ffi::sqlite3_file { pMethods: &METHODS },
            disk: (*vfs).pAppData.cast(),
            inode,
            sync_dir: create && journal,
        });
        if !out_flags.is_null() {
            *out_flags = flags;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn delete(vfs: *mut ffi::sqlite3_vfs, path: *const c_char, sync_dir: c_int) -> c_int {
    // SAFETY: SQLite passes its own VFS and a C string.
    let (mut disk, name) = unsafe { (disk_of(vfs), name_of(path)) };
    match disk.unlink(&name.unwrap_or_default()) {
        Err(DiskError::Missing) => ffi::SQLITE_IOERR_DELETE_NOENT,
        Ok(()) if sync_dir & 1 != 0 => code(disk.sync_dir(), ffi::SQLITE_IOERR_DIR_FSYNC),
        done => code(done, ffi::SQLITE_IOERR_DELETE),
    }
}

unsafe extern "C" fn access(
    vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    flags: c_int,
    out: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes its own VFS, a C string and a place for the answer.
    unsafe {
        let disk = disk_of(vfs);
        let inode = name_of(path).and_then(|name| disk.inode(&name));
        // As SQLite's own: an empty file does not exist for this question.
        let there =
            inode.is_some_and(|inode| flags != ffi::SQLITE_ACCESS_EXISTS || !disk.content(inode).is_empty());
        *out = c_int::from(there);
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_pathname(
    _vfs: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    room: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: SQLite passes a C string, and `room` bytes that do not overlap it.
    unsafe {
        let path = CStr::from_ptr(path).to_bytes_with_nul();
        if usize::try_from(room).unwrap_or(0) < path.len() {
            return ffi::SQLITE_CANTOPEN;
        }
        out.copy_from_nonoverlapping(path.as_ptr().cast(), path.len());
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn randomness(_vfs: *mut ffi::sqlite3_vfs, len: c_int, out: *mut c_char) -> c_int {
    // SAFETY: SQLite passes `len` bytes to fill.
    unsafe { out.write_bytes(0x5a, usize::try_from(len).unwrap_or(0)) };
    len
}

unsafe extern "C" fn sleep(_vfs: *mut ffi::sqlite3_vfs, micros: c_int) -> c_int {
    micros
}

unsafe extern "C" fn current_time(_vfs: *mut ffi::sqlite3_vfs, out: *mut f64) -> c_int {
    // SAFETY: SQLite passes a place for the answer, a Julian day.
    unsafe { *out = 2_461_000.5 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    // SAFETY: SQLite passes an open file.
    let (_, mut disk) = unsafe { handle(file) };
    disk.open_files = disk.open_files.saturating_sub(1);
    ffi::SQLITE_OK
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    out: *mut c_void,
    len: c_int,
    at: ffi::sqlite3_int64,
) -> c_int {
    let (len, at) = (usize::try_from(len).unwrap_or(0), usize::try_from(at).unwrap_or(usize::MAX));
    // SAFETY: SQLite passes an open file and `len` bytes to fill.
    unsafe {
        let (handle, disk) = handle(file);
        let there = disk.content(handle.inode).get(at..).unwrap_or_default();
        let there = &there[..there.len().min(len)];
        out.cast::<u8>().copy_from_nonoverlapping(there.as_ptr(), there.len());
        if there.len() == len {
            return ffi::SQLITE_OK;
        }
        out.cast::<u8>().add(there.len()).write_bytes(0, len - there.len());
    }
    ffi::SQLITE_IOERR_SHORT_READ
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    bytes: *const c_void,
    len: c_int,
    at: ffi::sqlite3_int64,
) -> c_int {
    let (Ok(len), Ok(at)) = (usize::try_from(len), usize::try_from(at)) else {
        return ffi::SQLITE_IOERR_WRITE;
    };
    // SAFETY: SQLite passes an open file and `len` bytes.
    unsafe {
        let (handle, mut disk) = handle(file);
        let bytes = std::slice::from_raw_parts(bytes.cast::<u8>(), len);
        code(disk.write(handle.inode, at, bytes), ffi::SQLITE_IOERR_WRITE)
    }
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, len: ffi::sqlite3_int64) -> c_int {
    let Ok(len) = usize::try_from(len) else { return ffi::SQLITE_IOERR_TRUNCATE };
    // SAFETY: SQLite passes an open file.
    let (handle, mut disk) = unsafe { handle(file) };
    code(disk.truncate(handle.inode, len), ffi::SQLITE_IOERR_TRUNCATE)
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, _flags: c_int) -> c_int {
    // SAFETY: SQLite passes an open file.
    let (handle, mut disk) = unsafe { handle(file) };
    let mut done = disk.sync(handle.inode);
    if done.is_ok() && std::mem::take(&mut handle.sync_dir) {
        done = disk.sync_dir();
    }
    code(done, ffi::SQLITE_IOERR_FSYNC)
}

unsafe extern "C" fn file_size(file: *mut ffi::sqlite3_file, out: *mut ffi::sqlite3_int64) -> c_int {
    // SAFETY: SQLite passes an open file and a place for the answer.
    unsafe {
        let (handle, disk) = handle(file);
        *out = i64::try_from(disk.content(handle.inode).len()).unwrap_or(i64::MAX);
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn lock_any(_file: *mut ffi::sqlite3_file, _level: c_int) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn check_reserved_lock(_file: *mut ffi::sqlite3_file, out: *mut c_int) -> c_int {
    // SAFETY: SQLite passes a place for the answer.
    unsafe { *out = 0 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn file_control(_file: *mut ffi::sqlite3_file, op: c_int, arg: *mut c_void) -> c_int {
    if op != ffi::SQLITE_FCNTL_MMAP_SIZE {
        return ffi::SQLITE_NOTFOUND;
    }
    // Nothing here can be mapped, and the journal asks.
    // SAFETY: for this question SQLite passes a place for a 64-bit answer.
    unsafe { arg.cast::<ffi::sqlite3_int64>().write(0) };
    ffi::SQLITE_OK
}

unsafe extern "C" fn sector_size(_file: *mut ffi::sqlite3_file) -> c_int {
    4096
}

unsafe extern "C" fn device_characteristics(_file: *mut ffi::sqlite3_file) -> c_int {
    // As SQLite's own assumes of Linux: a torn write harms no byte beside those that it writes.
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}
