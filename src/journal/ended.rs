//! Outcome records: how a supervised program ended, written by its supervisor beside the journal.
//!
//! The daemon may be away when a program ends; the record waits for the next one, and lives as long as the command's
//! begun record. Its file is made at its full size before the program starts, and written into: a disk that has become
//! full meanwhile takes the outcome all the same.
//!
//! ```text
//! seal: SHA-256 of the text, hex ─ line feed ─ text: JSON in one line ─ line feed ─ what was reserved and not used
//! ```
//!
//! The seal is written last and holds for every byte: whatever a crash leaves of a record is either all of it or none.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::libc;
use serde::{Deserialize, Serialize};

use super::begun::{Record, read_file, sync_dir};
use super::files;
use crate::failpoint;
use crate::model::limits::TEXT_BYTES;
use crate::model::{Digest, Outcome};
use crate::write_fault::{self, Point};

/// Longest file that is read; [`Ended::most_bytes`] of the longest output and of the longest begun record is less.
const RECORD_BYTES: u64 = 1 << 20;
/// A digest in hex and a line feed.
const SEAL_BYTES: usize = 65;
/// What stands around output, message and begun record: keys, tokens, numbers, two times.
const FRAME_BYTES: usize = 1024;
/// A character of a message in JSON at worst: `\u0000`.
const ESCAPED: usize = 6;

/// How a program ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// The begun record, so that a row can be made from this one alone.
    pub begun: Record,
    /// Its end.
    pub outcome: Outcome,
}

/// Why no room was reserved: the program must not start.
#[derive(Debug, thiserror::Error)]
pub enum ReserveError {
    /// It has ended before.
    #[error("{path} exists: the program ran before and must not start again")]
    Ended {
        /// The record.
        path: PathBuf,
    },
    /// There is no room; it may be tried again.
    #[error("cannot reserve {bytes} bytes for the outcome in {path}")]
    Io {
        /// What was asked for.
        bytes: u64,
        /// The record.
        path: PathBuf,
        /// The kernel's word.
        source: io::Error,
    },
}

impl ReserveError {
    /// The kernel's word, where that was it.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => source.raw_os_error(),
            Self::Ended { .. } => None,
        }
    }
}

/// The directory of the records.
pub(super) fn dir(state: &Path) -> PathBuf {
    state.join("outcome")
}

/// What a file tells.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    /// Nothing yet: it is reserved, or its supervisor died before it had sealed it.
    Nothing,
    /// Its seal does not hold.
    Damaged,
    Whole(Box<Ended>),
}

impl Told {
    fn by(bytes: &[u8]) -> Self {
        let Some((seal, rest)) = bytes.split_at_checked(SEAL_BYTES).filter(|(seal, _)| seal[0] != 0) else {
            return Self::Nothing;
        };
        let text = rest.split_inclusive(|byte| *byte == b'\n').next().unwrap_or_default();
        match serde_json::from_slice(text) {
            Ok(ended) if seal == seal_of(text).as_bytes() => Self::Whole(Box::new(ended)),
            _ => Self::Damaged,
        }
    }

    /// Absent without a file.
    fn at(path: &Path) -> io::Result<Option<Self>> {
        match read_file(path, RECORD_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Ok(None) => Ok(Some(Self::Damaged)),
            read => read.map(|bytes| bytes.as_deref().map(Self::by)),
        }
    }
}

fn seal_of(text: &[u8]) -> String {
    format!("{}\n", Digest::of(text).hex())
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    options
}

fn open(path: &Path) -> io::Result<File> {
    options().create(true).truncate(false).open(path)
}

/// Room for an outcome that was set aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// By this call: whoever made it gives it back.
    Made,
    /// By another one, which may have its program running: it is not this one's to give back.
    Found,
}

impl Ended {
    /// Bytes of a record at most, whose output has at most `output`.
    fn most_bytes(begun: &Record, output: usize) -> u64 {
        let base64 = 4 * (output / 3 + 1);
        // One that has no JSON is refused when it is to be made.
        let begun = serde_json::to_vec(begun).map_or(0, |text| text.len());
        (SEAL_BYTES + FRAME_BYTES + begun + ESCAPED * TEXT_BYTES + base64) as u64
    }

    /// Has the file system set aside what the record of a program takes whose output has at most `output` bytes, before
    /// it starts: blocks and the inode, so that [`Self::write`] needs neither. Blocks.
    ///
    /// # Errors
    /// See [`ReserveError`]; the program must not start now.
    pub fn reserve(state: &Path, begun: &Record, output: usize) -> Result<Room, ReserveError> {
        let path = dir(state).join(begun.name());
        let bytes = Self::most_bytes(begun, output);
        let reserve = || {
            let (file, room) = match options().create_new(true).open(&path) {
                Ok(file) => (file, Room::Made),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match Told::at(&path)? {
                    Some(Told::Nothing) => (open(&path)?, Room::Found),
                    Some(_) => return Ok(None),
                    // Given back in this moment.
                    None => return Err(error),
                },
                Err(error) => return Err(error),
            };
            let allocated = write_fault::check(Point::OutcomeReserve, &path)
                .and_then(|()| files::allocate(&file, bytes))
                .and_then(|()| file.sync_all());
            if allocated.is_err() && room == Room::Made {
                // A part of the room is of no use, and others may need it.
                let _ = std::fs::remove_file(&path);
            }
            allocated.map(|()| Some(room))
        };
        match reserve() {
            Ok(Some(room)) => Ok(room),
            Ok(None) => Err(ReserveError::Ended { path }),
            Err(source) => Err(ReserveError::Io { bytes, path, source }),
        }
    }

    /// Gives back what was reserved for programs that have no begun record, since their supervisors died before it was
    /// made. Only while no supervisor is about to make one. How many there were. Blocks.
    ///
    /// # Errors
    /// The records cannot be read.
    pub fn give_back_unbegun(state: &Path) -> io::Result<usize> {
        let mut given = 0;
        for path in unbegun(state)? {
            if matches!(Told::at(&path), Ok(Some(Told::Nothing))) {
                std::fs::remove_file(&path)?;
                given += 1;
            }
        }
        Ok(given)
    }

    /// Gives back what was reserved for a program that did not start, or whose supervisor is gone without a word. Blocks.
    pub fn give_back(state: &Path, begun: &Record) {
        let path = dir(state).join(begun.name());
        if matches!(Told::at(&path), Ok(Some(Told::Nothing)))
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "room for an outcome that never comes stays reserved");
        }
    }

    /// Makes the record durable, in the room that was reserved for it. Blocks.
    ///
    /// # Errors
    /// It is not durable; it may be tried again.
    pub fn write(&self, state: &Path) -> io::Result<()> {
        let dir = dir(state);
        let path = dir.join(self.begun.name());
        let mut text = serde_json::to_vec(self)?;
        text.push(b'\n');
        write_fault::check(Point::OutcomeOpen, &path)?;
        let file = open(&path)?;
        // Every try writes every byte: a sync that failed has forgotten what it could not write.
        write_fault::check(Point::OutcomeWrite, &path)?;
        file.write_all_at(&text, SEAL_BYTES as u64)?;
        failpoint::hit(failpoint::OUTCOME_WRITTEN);
        file.write_all_at(seal_of(&text).as_bytes(), 0)?;
        write_fault::check(Point::OutcomeSync, &path)?;
        file.sync_all()?;
        if let Err(error) = file.set_len((SEAL_BYTES + text.len()) as u64) {
            tracing::debug!(path = %path.display(), %error, "what was reserved and not used stays so");
        }
        write_fault::check(Point::OutcomeDirSync, &dir)?;
        sync_dir(&dir)
    }

    /// Reads how the program of a begun record ended; absent when no whole record says so. Blocks.
    ///
    /// # Errors
    /// The record cannot be read.
    pub fn read(state: &Path, begun: &Record) -> io::Result<Option<Outcome>> {
        let path = dir(state).join(begun.name());
        match Told::at(&path)? {
            None | Some(Told::Nothing) => Ok(None),
            Some(Told::Damaged) => {
                tracing::error!(path = %path.display(), "an outcome record is damaged; the outcome is not known");
                Ok(None)
            }
            Some(Told::Whole(ended)) => {
                let own = ended.begun.id == begun.id && ended.begun.attempt == begun.attempt;
                Ok(own.then_some(ended.outcome))
            }
        }
    }
}

/// The begun records that stand within outcome records and nowhere else.
pub(super) fn without_begun(state: &Path) -> io::Result<Vec<Record>> {
    let mut found = Vec::new();
    for path in unbegun(state)? {
        if let Some(Told::Whole(ended)) = Told::at(&path)?
            && path.file_name().is_some_and(|name| *name == *ended.begun.name())
        {
            found.push(ended.begun);
        }
    }
    Ok(found)
}

/// The files of the directory that have no begun record beside them.
fn unbegun(state: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(dir(state)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        match super::begun::dir(state).join(entry.file_name()).symlink_metadata() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => found.push(entry.path()),
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;
    use crate::model::{CommandId, Effect, JournalId, ServerTime, Terminal};

    /// What a test may lose of a record at once: a disk writes no less than a sector.
    const SECTOR: usize = 512;

    fn state() -> tempfile::TempDir {
        let state = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(dir(state.path())).expect("a directory");
        state
    }

    fn begun() -> Record {
        Record {
            node_id: None,
            id: CommandId::new("c-1").expect("an id"),
            body_sha256: Digest::of(b"body"),
            kind: "node.exec".into(),
            attempt: 1,
            journal_id: JournalId::new("j-1").expect("an id"),
            not_after: ServerTime(2_000),
            started: Some(ServerTime(1_000)),
            retry_safe: false,
            supervisor: None,
            boot_id: None,
        }
    }

    fn ended(output: Vec<u8>) -> Ended {
        let outcome = Outcome {
            state: Terminal::Succeeded,
            reason: None,
            // The worst that JSON makes of a text.
            message: "\u{1}".repeat(TEXT_BYTES),
            effect: Effect::Complete,
            attempt: u32::MAX,
            started: Some(ServerTime(1_800_000_000_123)),
            finished: Some(ServerTime(1_800_000_000_123)),
            duration_ms: u64::MAX,
            output,
        };
        Ended { begun: begun(), outcome }
    }

    fn file(state: &tempfile::TempDir) -> PathBuf {
        dir(state.path()).join("c-1.json")
    }

    #[test]
    fn the_longest_outcome_is_written_into_its_reserve_and_what_is_left_of_it_is_given_back() {
        for output in [0, 1, 1000, crate::model::limits::RESULT_BYTES] {
            let state = state();
            Ended::reserve(state.path(), &begun(), output).expect("room");
            let before = file(&state).metadata().expect("a file");
            assert!(before.blocks() * 512 >= before.len() && before.mode() & 0o7777 == 0o600, "{before:?}");
            assert_eq!(Ended::read(state.path(), &begun()).expect("read"), None, "a reserve tells nothing");
            assert!(without_begun(state.path()).expect("read").is_empty());
            let ended = ended(vec![b'x'; output]);
            ended.write(state.path()).expect("written");
            let after = file(&state).metadata().expect("a file");
            assert_eq!(after.ino(), before.ino(), "the very file");
            assert!(after.len() <= before.len(), "{} of {}", after.len(), before.len());
            assert_eq!(Ended::read(state.path(), &begun()).expect("read"), Some(ended.outcome));
            assert_eq!(without_begun(state.path()).expect("read"), [begun()]);
        }
    }

    #[test]
    fn an_outcome_of_which_a_power_loss_has_taken_anything_is_none() {
        let state = state();
        let ended = ended(b"{\"a\":1}".repeat(500));
        Ended::reserve(state.path(), &begun(), ended.outcome.output.len()).expect("room");
        let reserved = std::fs::read(file(&state)).expect("a file");
        ended.write(state.path()).expect("written");
        let written = std::fs::read(file(&state)).expect("a file");
        let mut whole = reserved;
        whole[..written.len()].copy_from_slice(&written);
        assert_eq!(Told::by(&whole), Told::Whole(Box::new(ended)), "the reserve behind it does not matter");
        let used = written.len().div_ceil(SECTOR);
        for sector in 0..used {
            let mut torn = whole.clone();
            torn[sector * SECTOR..(sector + 1) * SECTOR].fill(0);
            assert!(!matches!(Told::by(&torn), Told::Whole(_)), "without sector {sector} of {used}");
            let cut = &whole[..sector * SECTOR];
            assert!(!matches!(Told::by(cut), Told::Whole(_)), "cut at sector {sector} of {used}");
        }
    }

    #[test]
    fn no_room_leaves_no_file_and_an_outcome_that_is_there_forbids_another_run() {
        let state = state();
        let fault = write_fault::arm(state.path(), Point::OutcomeReserve, 28);
        let error = Ended::reserve(state.path(), &begun(), 10).expect_err("a fault");
        assert!(
            matches!(&error, ReserveError::Io { source, .. } if source.raw_os_error() == Some(28)),
            "{error}"
        );
        assert!(!file(&state).exists());
        drop(fault);
        assert_eq!(Ended::reserve(state.path(), &begun(), 10).expect("room"), Room::Made);
        let before = Ended::reserve(state.path(), &begun(), 10).expect("that of a try before");
        assert_eq!(before, Room::Found);
        let fault = write_fault::arm(state.path(), Point::OutcomeReserve, 28);
        Ended::reserve(state.path(), &begun(), 10).expect_err("a fault");
        assert!(file(&state).exists(), "a try that fails takes no other's room");
        drop(fault);
        Ended::give_back(state.path(), &begun());
        assert!(!file(&state).exists(), "given back");

        let ended = ended(Vec::new());
        ended.write(state.path()).expect("written without a reserve too");
        let error = Ended::reserve(state.path(), &begun(), 10).expect_err("it has ended");
        assert!(matches!(error, ReserveError::Ended { .. }), "{error}");
        Ended::give_back(state.path(), &begun());
        assert_eq!(
            Ended::read(state.path(), &begun()).expect("read"),
            Some(ended.outcome),
            "an outcome stays"
        );
    }

    #[test]
    fn room_without_a_begun_record_is_given_back_and_nothing_else_is() {
        let state = state();
        let beside = state.path().join("begun");
        std::fs::create_dir(&beside).expect("a directory");
        let named = |id: &str| Record { id: CommandId::new(id).expect("an id"), ..begun() };
        for id in ["c-lost", "c-begun"] {
            Ended::reserve(state.path(), &named(id), 10).expect("room");
        }
        std::fs::write(beside.join("c-begun.json"), "{}").expect("a record");
        let ended = Ended { begun: named("c-ended"), ..ended(Vec::new()) };
        ended.write(state.path()).expect("written");
        assert_eq!(Ended::give_back_unbegun(state.path()).expect("read"), 1);
        let mut left: Vec<_> = std::fs::read_dir(dir(state.path()))
            .expect("a directory")
            .map(|entry| entry.expect("an entry").file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["c-begun.json", "c-ended.json"]);
        assert_eq!(Ended::give_back_unbegun(state.path()).expect("read"), 0);
    }
}
