//! What a journal stands on. A production build has one ground, the kernel's files under SQLite's own VFS with the
//! settings of [`settings`]; the power-loss tests put a simulated disk, or settings that are wrong on purpose, in
//! its place, under the same steps in the same order.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::libc;

use super::begun::sync_dir;
use super::error::OpenError;
use super::files;
use super::settings::{self, Setting};

/// The files and the settings of one opening.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ground<'a> {
    pub(super) disk: &'a dyn Disk,
    pub(super) settings: &'a [Setting],
}

/// The only ground in production.
pub(super) const KERNEL: Ground<'static> =
    Ground { disk: &Kernel { vfs: None }, settings: settings::SETTINGS };

/// The kernel's ground, with SQLite's syncs counted.
#[cfg(feature = "fakehw")]
pub(super) const COUNTED: Ground<'static> =
    Ground { disk: &Kernel { vfs: Some(super::sync_count::NAME) }, settings: settings::SETTINGS };

/// What opening does by hand to the database and its log, beside SQLite.
pub(super) trait Disk: std::fmt::Debug {
    /// SQLite's VFS over the same files; absent for SQLite's own.
    fn vfs(&self) -> Option<&CStr>;

    /// Whether a regular file of ours is there; anything else in its place is refused.
    fn exists(&self, path: &Path) -> Result<bool, OpenError>;

    /// Makes an empty file, for us alone, where none is. Not durable before it and the directory are synced.
    fn create(&self, path: &Path) -> io::Result<()>;

    /// Renames a file. Not durable before the directory is synced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file's name. Not durable before the directory is synced.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// The names in a directory.
    fn names(&self, dir: &Path) -> io::Result<Vec<String>>;

    /// Makes the entries of a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;

    /// Appends zeros up to `bytes`.
    fn grow(&self, path: &Path, bytes: u64) -> io::Result<()>;

    /// Makes a file's content and length durable.
    fn sync(&self, path: &Path) -> io::Result<()>;
}

/// The kernel's file system.
#[derive(Debug)]
struct Kernel {
    vfs: Option<&'static CStr>,
}

impl Disk for Kernel {
    fn vfs(&self) -> Option<&CStr> {
        self.vfs
    }

    fn exists(&self, path: &Path) -> Result<bool, OpenError> {
        files::regular(path)
    }

    fn create(&self, path: &Path) -> io::Result<()> {
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)
            .map(drop)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn names(&self, dir: &Path) -> io::Result<Vec<String>> {
        // A name that is not UTF-8 is none of ours.
        let name = |entry: std::fs::DirEntry| entry.file_name().into_string().ok();
        std::fs::read_dir(dir)?.filter_map(|entry| entry.map(name).transpose()).collect()
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        sync_dir(dir)
    }

    fn grow(&self, path: &Path, bytes: u64) -> io::Result<()> {
        let file: File =
            OpenOptions::new().append(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC).open(path)?;
        let mut left = bytes.saturating_sub(file.metadata()?.len());
        let zeros = [0_u8; 64 << 10];
        while left > 0 {
            let piece = usize::try_from(left).unwrap_or(zeros.len()).min(zeros.len());
            io::Write::write_all(&mut &file, &zeros[..piece])?;
            left -= piece as u64;
        }
        Ok(())
    }

    fn sync(&self, path: &Path) -> io::Result<()> {
        OpenOptions::new()
            .append(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)?
            .sync_all()
    }
}
