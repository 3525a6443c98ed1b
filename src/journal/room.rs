//! Room: what the file system has left, what bcd may take of it, and a reserve for results.
//!
//! Looked at before a command is taken on: one that could not be carried through is refused while there is still room
//! for the results of those that run. The reserve is a file that holds its blocks until a commit finds the disk full;
//! then they are given back to the file system, for the results that are owed. Until it stands again nothing is
//! admitted, so that nothing new eats it.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::libc;
use nix::sys::statvfs::{FsFlags, statvfs};

use super::files;
use super::trouble::Trouble;
use crate::model::Reason;

/// What bcd may take of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Everything in the state directory, bytes, the reserve included.
    pub state_bytes: u64,
    /// Size of the reserve, bytes; 0 for none.
    pub reserve_bytes: u64,
}

impl Limits {
    /// What a test or a simulated node takes: no budget, no reserve.
    pub const NONE: Self = Self { state_bytes: u64::MAX, reserve_bytes: 0 };
}

/// A host's reserve: the results of 26 commands in flight (the credits of all lanes) of 256 KiB, and their rows.
pub const RESERVE_BYTES: u64 = 8 << 20;
/// The least budget that leaves room for a journal beside reserve, log and [`IN_FLIGHT`].
pub const LEAST_STATE_BYTES: u64 = 64 << 20;
/// Budget that a new command must leave for those that are running: as the reserve.
const IN_FLIGHT: u64 = RESERVE_BYTES;
/// Free space below which no command is admitted, bytes: a begun record, the room of an outcome, a directory's block,
/// some log.
const LEAST_FREE: u64 = 1 << 20;
/// Free inodes below which no command is admitted: a begun record, an outcome record, temporary files.
const LEAST_INODES: u64 = 16;
/// Files in the state directory: a begun record a command that its tombstone is kept for, a week at most.
const MOST_FILES: u64 = 100_000;

/// The reserve's name in the state directory.
const RESERVE: &str = "reserve";

/// The room of one state directory.
#[derive(Debug)]
pub(super) struct Room {
    state: PathBuf,
    limits: Limits,
    reserved: AtomicBool,
    /// Everything beside the journal and the reserve, as last counted.
    other_bytes: AtomicU64,
    files: AtomicU64,
}

impl Room {
    /// Of a state directory; makes the reserve where there is room for it. Blocks.
    pub(super) fn new(state: &Path, limits: Limits) -> Self {
        let room = Self {
            state: state.to_owned(),
            limits,
            reserved: false.into(),
            other_bytes: 0.into(),
            files: 0.into(),
        };
        if limits.reserve_bytes > 0
            && let Err(trouble) = room.reserve()
        {
            tracing::warn!(detail = trouble.detail, "there is no reserve for results yet");
        }
        room
    }

    fn reserve_path(&self) -> PathBuf {
        self.state.join(RESERVE)
    }

    /// Makes the reserve where it is missing and leaves room for more than itself. Blocks.
    pub(super) fn reserve(&self) -> Result<(), Trouble> {
        let bytes = self.limits.reserve_bytes;
        if bytes == 0 || self.reserved.load(Ordering::Relaxed) {
            return Ok(());
        }
        let path = self.reserve_path();
        let held = path.symlink_metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
        if held < bytes {
            self.free(bytes - held + LEAST_FREE)?;
        }
        let doing = |error: &io::Error| Trouble::of(error, &format!("cannot make {}", path.display()));
        allocate(&path, bytes).map_err(|error| doing(&error))?;
        self.reserved.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Gives the reserve's blocks back to the file system; false when there were none.
    pub(super) fn release(&self) -> bool {
        if !self.reserved.swap(false, Ordering::Relaxed) {
            return false;
        }
        let opened = OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(self.reserve_path());
        match opened.and_then(|file| file.set_len(0)) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the reserve cannot be given back");
                false
            }
        }
    }

    /// Counts what lies in the state directory beside the journal and the reserve. Blocks.
    pub(super) fn count(&self) {
        let (mut bytes, mut files) = (0, 0);
        add_up(&self.state, 0, &mut bytes, &mut files);
        self.other_bytes.store(bytes, Ordering::Relaxed);
        self.files.store(files, Ordering::Relaxed);
    }

    /// Why no command is to be taken on, if there is a why. `journal_bytes` is what the journal has in use. A call to
    /// the kernel that answers from memory.
    pub(super) fn look(&self, journal_bytes: u64) -> Option<Trouble> {
        if let Err(trouble) = self.free(LEAST_FREE) {
            return Some(trouble);
        }
        let full = |detail: String| Some(Trouble { why: Reason::Disk, detail });
        if self.limits.reserve_bytes > 0 && !self.reserved.load(Ordering::Relaxed) {
            return full(format!(
                "the reserve of {} bytes for results is not there",
                self.limits.reserve_bytes
            ));
        }
        let others = self.other_bytes.load(Ordering::Relaxed);
        let used = journal_bytes.saturating_add(others).saturating_add(self.limits.reserve_bytes);
        if used.saturating_add(IN_FLIGHT) > self.limits.state_bytes {
            return full(format!(
                "{used} bytes of the {} of limits.state_bytes are used, and running commands need {IN_FLIGHT}",
                self.limits.state_bytes
            ));
        }
        let files = self.files.load(Ordering::Relaxed);
        (files > MOST_FILES).then(|| Trouble {
            why: Reason::Disk,
            detail: format!("{files} files in {}", self.state.display()),
        })
    }

    /// Whether the file system takes writes and has so many bytes left, and some inodes.
    fn free(&self, bytes: u64) -> Result<(), Trouble> {
        let path = self.state.display();
        let stat = statvfs(&self.state)
            .map_err(|errno| Trouble::of(&errno.into(), &format!("cannot look at the disk of {path}")))?;
        if stat.flags().contains(FsFlags::ST_RDONLY) {
            let detail = format!("the file system of {path} is read-only; remount it writable");
            return Err(Trouble { why: Reason::ReadOnly, detail });
        }
        // A file system that counts neither (tmpfs without a limit, btrfs) shows zeros.
        let free = stat.blocks_available().saturating_mul(stat.fragment_size());
        if stat.blocks() > 0 && free < bytes {
            let detail =
                format!("{free} bytes are free on the file system of {path}, {bytes} are needed; free some");
            return Err(Trouble { why: Reason::Disk, detail });
        }
        if stat.files() > 0 && stat.files_available() < LEAST_INODES {
            let left = stat.files_available();
            let detail = format!("{left} inodes are free on the file system of {path}; remove some files");
            return Err(Trouble { why: Reason::Disk, detail });
        }
        Ok(())
    }
}

/// Gives a reserve back that an earlier process made; false when there was none.
pub(super) fn release_earlier(state: &Path) -> io::Result<bool> {
    let path = state.join(RESERVE);
    match OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path) {
        Ok(file) if file.metadata()?.blocks() > 0 => file.set_len(0).map(|()| true),
        Ok(_) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

fn allocate(path: &Path, bytes: u64) -> io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    if let Err(error) = files::allocate(&file, bytes) {
        let _ = file.set_len(0);
        return Err(error);
    }
    // A configuration may have made it smaller.
    file.set_len(bytes)?;
    file.sync_all()
}

/// The state directory's own folders are one deep; what lies deeper is not bcd's, and counted no further.
const DEPTH: usize = 3;

fn add_up(dir: &Path, depth: usize, bytes: &mut u64, files: &mut u64) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        // Of the entry itself: a link is not followed.
        let Ok(meta) = entry.metadata() else { continue };
        *files += 1;
        if meta.is_dir() {
            if depth < DEPTH {
                add_up(&entry.path(), depth + 1, bytes, files);
            }
            continue;
        }
        let name = entry.file_name();
        let counted_elsewhere =
            depth == 0 && ["journal.db", "journal.db-wal", RESERVE].iter().any(|own| name == *own);
        if !counted_elsewhere {
            *bytes = bytes.saturating_add(meta.blocks().saturating_mul(512));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(dir: &Path, limits: Limits) -> Room {
        Room::new(dir, limits)
    }

    #[test]
    fn the_reserve_holds_its_blocks_and_its_release_closes_admission_until_it_stands_again() {
        let dir = tempfile::tempdir().unwrap();
        let limits = Limits { state_bytes: LEAST_STATE_BYTES, reserve_bytes: 1 << 20 };
        let room = room(dir.path(), limits);
        let meta = || dir.path().join(RESERVE).metadata().unwrap();
        assert!(meta().blocks() * 512 >= 1 << 20 && meta().mode() & 0o7777 == 0o600, "{:?}", meta());
        assert_eq!(room.look(0), None);
        assert!(room.release() && !room.release(), "released once");
        assert_eq!(meta().blocks(), 0);
        assert_eq!(room.look(0).unwrap().why, Reason::Disk);
        room.reserve().unwrap();
        assert_eq!((room.look(0), meta().len()), (None, 1 << 20));
    }

    #[test]
    fn the_budget_refuses_before_it_is_passed_and_counts_everything() {
        let dir = tempfile::tempdir().unwrap();
        let limits = Limits { state_bytes: LEAST_STATE_BYTES, reserve_bytes: 1 << 20 };
        let room = room(dir.path(), limits);
        let most = LEAST_STATE_BYTES - IN_FLIGHT - (1 << 20);
        assert_eq!(room.look(most), None);
        assert!(room.look(most + 1).unwrap().detail.contains("limits.state_bytes"));
        std::fs::create_dir(dir.path().join("begun")).unwrap();
        std::fs::write(dir.path().join("begun/c-1.json"), vec![1; 100_000]).unwrap();
        std::fs::write(dir.path().join("journal.db"), vec![1; 100_000]).unwrap();
        room.count();
        assert_eq!(room.look(most).unwrap().why, Reason::Disk);
        assert_eq!(room.look(most - 200_000), None, "the journal is not counted twice");
    }
}
