//! The file: appended to, synced, and put aside when it is full. All of it blocks.

use std::collections::{BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::state_dir::{StateDir, StateError};
use crate::write_fault::{self, Point};

/// Its name in the state directory; older ones have `.1`, `.2` and so on behind it.
const NAME: &str = "audit.log";
/// Behind the names of older ones, before their numbers.
const OLDER: &str = "audit.log.";
/// As far back lines are looked for that a crash left in the journal too: the lines of a second and more, which is when the
/// journal forgets them.
const TAIL_BYTES: u64 = 4 << 20;

/// The most older files that can be configured (`audit.files`). A higher number is not ours: logrotate's are dates.
pub const FILES: u32 = 1000;

/// How much of it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// A file is put aside before it becomes larger, bytes.
    pub file_bytes: u64,
    /// How many of those that were put aside stay; at least one.
    pub files: u32,
}

impl Default for Retention {
    fn default() -> Self {
        Self { file_bytes: 8 << 20, files: 4 }
    }
}

impl Retention {
    /// What all of it takes at most, bytes.
    pub fn bytes(self) -> u64 {
        self.file_bytes.saturating_mul(u64::from(self.files).saturating_add(1))
    }
}

/// The file of a state directory.
#[derive(Debug, Clone)]
pub struct AuditLog {
    /// The state directory.
    pub state: PathBuf,
    /// How much of it is kept.
    pub retention: Retention,
}

impl AuditLog {
    /// Adds lines, durably, in pieces that no file is too small for.
    ///
    /// # Errors
    /// See [`StateError`]; of a piece all lines are there, or as far as anybody can see none.
    pub fn append(&self, mut lines: &[String]) -> Result<(), StateError> {
        while !lines.is_empty() {
            let mut bytes = 0;
            let fits = lines.iter().take_while(|line| {
                bytes += line.len() as u64 + 1;
                bytes <= self.retention.file_bytes
            });
            // A line that is longer than a file has one of its own.
            let (piece, rest) = lines.split_at(fits.count().max(1));
            self.append_piece(piece)?;
            lines = rest;
        }
        Ok(())
    }

    fn append_piece(&self, lines: &[String]) -> Result<(), StateError> {
        let dir = StateDir::ensure(&self.state)?;
        let text: String = lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect();
        let (mut file, mut size) = self.open(&dir)?;
        if size > 0 && size.saturating_add(text.len() as u64) > self.retention.file_bytes {
            self.put_aside(&dir)?;
            (file, size) = self.open(&dir)?;
        }
        let added = self.add(&mut file, text.as_bytes());
        if added.is_err() {
            // A part of a line would run into the next one. Should it stay, the next opening takes it away.
            let _ = file.set_len(size);
        }
        added?;
        if size == 0 { dir.sync() } else { Ok(()) }
    }

    /// The file and the size of its whole lines: what a crash left of another one is cut off, and still in the journal.
    fn open(&self, dir: &StateDir) -> Result<(File, u64), StateError> {
        self.fault(Point::AuditOpen, "open")?;
        let file = dir.open_to_append(NAME)?;
        let cut = || -> io::Result<u64> {
            let size = file.metadata()?.len();
            let whole = whole_lines(&file, size)?;
            if whole < size {
                tracing::warn!(bytes = size - whole, "the end of audit.log is half a line, which is cut off");
                file.set_len(whole)?;
            }
            Ok(whole)
        };
        let size = cut().map_err(|error| self.error("look at", &error))?;
        Ok((file, size))
    }

    fn add(&self, file: &mut File, text: &[u8]) -> Result<(), StateError> {
        self.fault(Point::AuditWrite, "write")?;
        file.write_all(text).map_err(|error| self.error("write", &error))?;
        self.sync(file)
    }

    fn sync(&self, file: &File) -> Result<(), StateError> {
        self.fault(Point::AuditSync, "sync")?;
        file.sync_all().map_err(|error| self.error("sync", &error))
    }

    /// Makes room under the name: files move up to the first number that is free, and the oldest of those that stay goes
    /// where none is. After a crash a number may be missing, nothing else.
    fn put_aside(&self, dir: &StateDir) -> Result<(), StateError> {
        self.fault(Point::AuditRename, "rename")?;
        let taken = older(dir)?;
        let free = (1..=self.retention.files).find(|number| !taken.contains(number));
        for number in (0..free.unwrap_or(self.retention.files)).rev() {
            dir.rename_unsynced(&named(number), &named(number + 1))?;
        }
        dir.sync()
    }

    /// Removes files that are more than are kept: fewer may be configured than once were.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn prune(&self) -> Result<(), StateError> {
        let Some(dir) = StateDir::open(&self.state)? else { return Ok(()) };
        for number in older(&dir)?.into_iter().filter(|number| *number > self.retention.files) {
            dir.remove(&named(number))?;
        }
        Ok(())
    }

    /// Takes half a line at the end away, which is nobody's, and behind it the last lines as long as they are among `lines`,
    /// so that they can be written anew. They are nobody's before
    /// that is done: whoever takes them away has them elsewhere.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn cut(&self, lines: &HashSet<String>) -> Result<(), StateError> {
        let Some(dir) = StateDir::open(&self.state)? else { return Ok(()) };
        let current = dir.names()?.iter().any(|name| name == NAME).then_some(0);
        for number in current.into_iter().chain(older(&dir)?) {
            let file = dir.open_to_append(&named(number))?;
            let cut = || -> io::Result<u64> {
                let size = whole_lines(&file, file.metadata()?.len())?;
                file.set_len(size)?;
                let tail = last_bytes(&file, TAIL_BYTES)?;
                let last = String::from_utf8_lossy(&tail);
                let ours =
                    last.split_inclusive('\n').rev().take_while(|line| lines.contains(line.trim_end()));
                let bytes: u64 = ours.map(|line| line.len() as u64).sum();
                file.set_len(size.saturating_sub(bytes))?;
                Ok(size.saturating_sub(bytes))
            };
            if cut().map_err(|error| self.error("cut", &error))? > 0 {
                break;
            }
        }
        Ok(())
    }

    /// The last lines of the file, and of those before it where it is short: synced before they are told of. A process that
    /// was killed may have left them, or the names of their files, in memory alone.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn tail(&self) -> Result<HashSet<String>, StateError> {
        let mut found = HashSet::new();
        let Some(dir) = StateDir::open(&self.state)? else { return Ok(found) };
        let current = dir.names()?.iter().any(|name| name == NAME).then_some(0);
        let mut left = TAIL_BYTES;
        for number in current.into_iter().chain(older(&dir)?) {
            let file = dir.open_to_append(&named(number))?;
            self.sync(&file)?;
            let tail = last_bytes(&file, left).map_err(|error| self.error("read", &error))?;
            found.extend(String::from_utf8_lossy(&tail).lines().map(str::to_owned));
            left -= tail.len() as u64;
            if left == 0 {
                break;
            }
        }
        dir.sync()?;
        Ok(found)
    }

    fn fault(&self, point: Point, doing: &'static str) -> Result<(), StateError> {
        write_fault::check(point, &self.state.join(NAME)).map_err(|error| self.error(doing, &error))
    }

    fn error(&self, doing: &'static str, error: &io::Error) -> StateError {
        StateError::of_io(doing, &self.state.join(NAME), error)
    }
}

/// Its name; 0 is the one that is written to.
fn named(number: u32) -> String {
    if number == 0 { NAME.to_owned() } else { format!("{OLDER}{number}") }
}

/// The numbers of older files, rising. Others of such a name are somebody else's.
fn older(dir: &StateDir) -> Result<BTreeSet<u32>, StateError> {
    let ours = |name: &String| {
        let number = name.strip_prefix(OLDER)?.parse().ok()?;
        ((1..=FILES).contains(&number) && named(number) == *name).then_some(number)
    };
    Ok(dir.names()?.iter().filter_map(ours).collect())
}

fn last_bytes(file: &File, most: u64) -> io::Result<Vec<u8>> {
    let size = file.metadata()?.len();
    let bytes = size.min(most);
    let mut tail = vec![0; usize::try_from(bytes).unwrap_or(0)];
    file.read_exact_at(&mut tail, size - bytes)?;
    Ok(tail)
}

/// How many bytes of the file lie before the end of its last whole line.
fn whole_lines(file: &File, size: u64) -> io::Result<u64> {
    const STEP: u64 = 64 << 10;
    let mut end = size;
    while end > 0 {
        let start = end.saturating_sub(STEP);
        let mut bytes = vec![0; usize::try_from(end - start).unwrap_or(0)];
        file.read_exact_at(&mut bytes, start)?;
        if let Some(at) = bytes.iter().rposition(|byte| *byte == b'\n') {
            return Ok(start + at as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}
