//! Outcome records: how a supervised program ended, written by its supervisor beside the journal.
//!
//! The daemon may be away when a program ends; the record waits for the next one. It is replaced as a whole, so it is
//! there with everything in it or not at all, and lives as long as the command's begun record.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::libc;
use serde::{Deserialize, Serialize};

use super::begun::{Record, read_file, sync_dir};
use crate::failpoint;
use crate::model::Outcome;

/// A record holds a result's output, twice in base64 (once within the output), and little else.
const RECORD_BYTES: u64 = 1 << 20;

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The begun record, so that a row can be made from this one alone.
    pub begun: Record,
    /// Its end.
    pub outcome: Outcome,
}

/// The directory of the records.
pub(super) fn dir(state: &Path) -> PathBuf {
    state.join("outcome")
}

impl Ended {
    /// Makes the record durable. Blocks.
    ///
    /// # Errors
    /// It is not durable; it may be tried again.
    pub fn write(&self, state: &Path) -> io::Result<()> {
        let dir = dir(state);
        let name = self.begun.name();
        let temporary = dir.join(format!(".{name}.tmp"));
        // One that a crash left behind; only this program's own supervisor writes it.
        match std::fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let text = serde_json::to_vec(self)?;
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        failpoint::hit(failpoint::OUTCOME_WRITTEN);
        std::fs::rename(&temporary, dir.join(name))?;
        sync_dir(&dir)
    }

    /// Reads how the program of a begun record ended; absent when no whole record says so. Blocks.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn read(state: &Path, begun: &Record) -> io::Result<Option<Outcome>> {
        let path = dir(state).join(begun.name());
        let text = match read_file(&path, RECORD_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text?,
        };
        let ended = text.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        if ended.is_none() {
            tracing::error!(path = %path.display(), "an outcome record cannot be read; the outcome is not known");
        }
        let ended = ended.filter(|ended| ended.begun.id == begun.id && ended.begun.attempt == begun.attempt);
        Ok(ended.map(|ended| ended.outcome))
    }
}

/// The begun records that stand within outcome records and nowhere else.
pub(super) fn without_begun(state: &Path) -> io::Result<Vec<Record>> {
    let entries = match std::fs::read_dir(dir(state)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with('.') || super::begun::dir(state).join(name).symlink_metadata().is_ok() {
            continue;
        }
        let text = read_file(&path, RECORD_BYTES)?;
        let ended = text.and_then(|text| serde_json::from_slice::<Ended>(&text).ok());
        found.extend(ended.map(|ended| ended.begun).filter(|begun| begun.name() == name));
    }
    Ok(found)
}
