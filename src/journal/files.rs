//! What the journal does by hand to its files: modes from creation, no link followed, nothing deleted.

use std::fs::{DirBuilder, File};
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use super::begun::sync_dir;
use super::disk::Disk;
use super::error::OpenError;
use crate::failpoint;

/// What a corrupt journal is called; the time in seconds follows.
const ASIDE: &str = "journal.db.corrupt-";
/// Behind the name of a moved-aside journal: an empty file that stands until an event has told of the move, whatever
/// crashes there are in between.
const UNTOLD: &str = ".untold";
/// Moved-aside files kept; older ones are removed.
const KEPT: usize = 3;

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Io { action, path, source }
}

fn not_synced(path: &Path) -> impl FnOnce(io::Error) -> OpenError {
    let path = path.to_owned();
    move |source| OpenError::Sync { path, source }
}

/// Makes the state directory where it is missing, checks that it is ours alone, and gives its canonical path.
pub(super) fn state_dir(state: &Path) -> Result<PathBuf, OpenError> {
    // Without a slash at the end, with which a link would be followed.
    let state = &state.components().collect::<PathBuf>();
    private_dir(state)?;
    let state = state.canonicalize().map_err(io_error("resolve", state))?;
    private_dir(&super::begun::dir(&state))?;
    private_dir(&super::ended::dir(&state))?;
    Ok(state)
}

fn private_dir(path: &Path) -> Result<(), OpenError> {
    match DirBuilder::new().mode(0o700).create(path) {
        // SQLite syncs no directory above its file, so a new one could vanish with everything in it.
        Ok(()) => match path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            Some(parent) => sync_dir(parent).map_err(not_synced(parent))?,
            None => sync_dir(Path::new(".")).map_err(not_synced(Path::new(".")))?,
        },
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(io_error("make the directory", path)(error)),
    }
    let meta = path.symlink_metadata().map_err(io_error("look at", path))?;
    if !meta.is_dir() {
        return Err(shape(path, "directory", &meta));
    }
    ours(path, &meta, 0o700)
}

fn ours(path: &Path, meta: &std::fs::Metadata, wanted: u32) -> Result<(), OpenError> {
    let me = nix::unistd::geteuid().as_raw();
    if meta.uid() != me {
        return Err(OpenError::Owner { path: path.to_owned(), owner: meta.uid(), me });
    }
    let mode = meta.mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(OpenError::Mode { path: path.to_owned(), mode, wanted });
    }
    Ok(())
}

fn shape(path: &Path, wanted: &'static str, meta: &std::fs::Metadata) -> OpenError {
    let found = match meta.file_type() {
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_dir() => "a directory",
        kind if kind.is_file() => "a file",
        _ => "a special file",
    };
    OpenError::Shape { path: path.to_owned(), wanted, found }
}

/// Whether a regular file of ours is there; anything else in its place is refused.
pub(super) fn regular(path: &Path) -> Result<bool, OpenError> {
    match path.symlink_metadata() {
        Ok(meta) if meta.is_file() => ours(path, &meta, 0o600).map(|()| true),
        Ok(meta) => Err(shape(path, "regular file", &meta)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(io_error("look at", path)(error)),
    }
}

/// The write-ahead log beside a database.
pub(super) fn wal_of(db: &Path) -> PathBuf {
    let mut name = db.as_os_str().to_owned();
    name.push("-wal");
    name.into()
}

/// Checks what is there, and makes an empty database file where there is none.
pub(super) fn prepare(disk: &dyn Disk, state: &Path, db: &Path, unix_s: i64) -> Result<(), OpenError> {
    let wal = wal_of(db);
    let wal_exists = disk.exists(&wal)?;
    if disk.exists(db)? {
        return Ok(());
    }
    if wal_exists {
        // SQLite would apply it to the new file: rows of a journal that is gone, under a new journal's id.
        let stray = match half_moved(disk, state).map_err(io_error("list", state))? {
            Some(aside) => wal_of(&aside),
            None => state.join(format!("journal.db-wal.stray-{unix_s}")),
        };
        disk.rename(&wal, &stray).map_err(io_error("move aside", &wal))?;
        disk.sync_dir(state).map_err(not_synced(state))?;
        tracing::warn!(kept = %stray.display(), "a write-ahead log without its journal was moved aside");
    }
    disk.create(db).map_err(io_error("create", db))?;
    disk.sync(db).map_err(not_synced(db))?;
    disk.sync_dir(state).map_err(not_synced(state))
}

/// Moves a database that SQLite cannot read aside, with its log. Nothing is deleted but the oldest of more than three.
pub(super) fn move_aside(
    disk: &dyn Disk,
    state: &Path,
    db: &Path,
    unix_s: i64,
) -> Result<PathBuf, OpenError> {
    // Behind every one that is there, should the clock have gone back: the oldest are told by their number.
    let kept = kept_aside(disk, state).map_err(io_error("list", state))?;
    let at = kept.first().map_or(unix_s, |(last, _)| unix_s.max(last + 1));
    let aside = state.join(format!("{ASIDE}{at}"));
    let wal = wal_of(db);
    match disk.create(&untold_of(&aside)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(io_error("note the move to", &aside)(error));
        }
        _ => disk.sync_dir(state).map_err(not_synced(state))?,
    }
    // The database first. A crash between the two leaves a log alone, which `prepare` lays beside its database; the
    // other way round it would leave a database without its log, perhaps one that opens and has forgotten commands.
    disk.rename(db, &aside).map_err(io_error("move aside", db))?;
    disk.sync_dir(state).map_err(not_synced(state))?;
    failpoint::hit(failpoint::JOURNAL_HALF_ASIDE);
    if disk.exists(&wal)? {
        disk.rename(&wal, &wal_of(&aside)).map_err(io_error("move aside", &wal))?;
        disk.sync_dir(state).map_err(not_synced(state))?;
    }
    forget_oldest(disk, state).map_err(io_error("tidy", state))?;
    Ok(aside)
}

fn untold_of(aside: &Path) -> PathBuf {
    let mut name = aside.as_os_str().to_owned();
    name.push(UNTOLD);
    name.into()
}

/// The name of the journal that was moved aside last, where no event has told of it. `told` says that the journal in its
/// place has told of its start, and so of the move.
pub(super) fn untold(disk: &dyn Disk, state: &Path, told: bool) -> Result<Option<String>, OpenError> {
    let names = disk.names(state).map_err(io_error("list", state))?;
    let mut moved = Vec::new();
    for mark in names.iter().filter(|name| name.starts_with(ASIDE)) {
        let Some(aside) = mark.strip_suffix(UNTOLD) else { continue };
        if told {
            let mark = state.join(mark);
            disk.remove(&mark).map_err(io_error("remove", &mark))?;
        } else if names.iter().any(|name| name == aside) {
            // Else the move never began.
            moved.push(aside.to_owned());
        }
    }
    // Numbers of seconds, of one length for centuries to come.
    Ok(moved.into_iter().max())
}

/// The database that was moved aside last, where its log is not beside it.
fn half_moved(disk: &dyn Disk, state: &Path) -> io::Result<Option<PathBuf>> {
    let names = disk.names(state)?;
    let last = kept_aside(disk, state)?.into_iter().next().map(|(_, aside)| aside);
    let has_log = |aside: &Path| names.iter().any(|name| state.join(name) == wal_of(aside));
    Ok(last.filter(|aside| !has_log(aside)))
}

/// Removes a journal that holds nothing, its log first.
pub(super) fn remove_rowless(state: &Path, db: &Path) -> Result<(), OpenError> {
    let wal = wal_of(db);
    if wal.symlink_metadata().is_ok() {
        std::fs::remove_file(&wal).map_err(io_error("remove", &wal))?;
    }
    std::fs::remove_file(db).map_err(io_error("remove", db))?;
    sync_dir(state).map_err(not_synced(state))
}

/// Each log before its database: a database that is left by a crash in between is found again the next time.
fn forget_oldest(disk: &dyn Disk, state: &Path) -> io::Result<()> {
    for (_, path) in kept_aside(disk, state)?.into_iter().skip(KEPT) {
        for file in [wal_of(&path), path] {
            match disk.remove(&file) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

/// Databases that were moved aside, the latest first.
fn kept_aside(disk: &dyn Disk, state: &Path) -> io::Result<Vec<(i64, PathBuf)>> {
    let at = |name: &str| name.strip_prefix(ASIDE)?.parse().ok();
    let names = disk.names(state)?.into_iter();
    let mut kept: Vec<_> = names.filter_map(|name| Some((at(&name)?, state.join(name)))).collect();
    kept.sort_by_key(|(at, _)| std::cmp::Reverse(*at));
    Ok(kept)
}

/// Grows the log to `bytes` with zeros, so that commits overwrite: a growing file costs a journal commit of the file
/// system a sync. SQLite takes zeros behind its last frame for the end of the log, and writes over them.
pub(super) fn grow_wal(disk: &dyn Disk, db: &Path, bytes: u64) -> Result<(), OpenError> {
    let wal = wal_of(db);
    disk.grow(&wal, bytes).map_err(io_error("grow", &wal))?;
    disk.sync(&wal).map_err(not_synced(&wal))
}

/// Has the file system set `bytes` aside for a file from its beginning: a file with a hole would only look like it.
pub(super) fn allocate(file: &File, bytes: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => fill(file, bytes),
        allocated => Ok(allocated?),
    }
}

fn fill(mut file: &File, bytes: u64) -> io::Result<()> {
    let zeros = [0_u8; 64 << 10];
    let mut left = bytes;
    while left > 0 {
        let piece = usize::try_from(left).unwrap_or(zeros.len()).min(zeros.len());
        file.write_all(&zeros[..piece])?;
        left -= piece as u64;
    }
    Ok(())
}
