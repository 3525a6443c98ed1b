//! Where a bench writes: a directory of its own on the disk that is asked about, gone when it ends.

use std::io;
use std::path::{Path, PathBuf};

/// Why there is no place to write.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Memory has nothing to sync.
    #[error(
        "{path} lies in memory (tmpfs), where a sync costs nothing; name a directory on the disk in question with --state",
        path = .0.display()
    )]
    InMemory(PathBuf),
    /// It is not there, or not ours to write.
    #[error(
        "cannot make a directory in {path}; name one on the disk in question that you may write with --state",
        path = path.display()
    )]
    Make {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A new directory, 0700; it and all that is in it are removed when this is dropped.
#[derive(Debug)]
pub struct Place(PathBuf);

/// Magic numbers of file systems in memory (statfs(2)).
const IN_MEMORY: [u32; 2] = [0x0102_1994, 0x8584_58f6];

impl Place {
    /// A directory in `parent`.
    ///
    /// # Errors
    /// See [`PlaceError`].
    pub fn make(parent: &Path) -> Result<Self, PlaceError> {
        let failed = |source| PlaceError::Make { path: parent.to_owned(), source };
        // Commands are given paths below it, and not all of them take relative ones.
        let parent = &parent.canonicalize().map_err(failed)?;
        let found = rustix::fs::statfs(parent).map_err(|errno| failed(errno.into()))?;
        // The kernel's number is 32 bits wide in a field of the machine's width.
        if IN_MEMORY.iter().any(|magic| i64::from(*magic) == found.f_type as i64) {
            return Err(PlaceError::InMemory(parent.to_owned()));
        }
        let made = nix::unistd::mkdtemp(&parent.join("bcd-bench-XXXXXX"));
        Ok(Self(made.map_err(|errno| failed(errno.into()))?))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "the bench's files cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_refused_with_the_mend() {
        let shm = Path::new("/dev/shm");
        if !shm.exists() {
            return;
        }
        let error = Place::make(shm).expect_err("refused");
        assert!(error.to_string().contains("--state"), "{error}");
        let left = std::fs::read_dir(shm).expect("readable").flatten();
        assert_eq!(
            left.filter(|entry| entry.file_name().to_string_lossy().starts_with("bcd-bench")).count(),
            0
        );
    }

    #[test]
    fn what_was_written_goes_with_the_place() {
        let parent = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).expect("a directory on disk");
        let place = Place::make(parent.path()).expect("a place");
        std::fs::write(place.path().join("file"), b"x").expect("written");
        drop(place);
        assert_eq!(std::fs::read_dir(parent.path()).expect("readable").count(), 0);
    }
}
