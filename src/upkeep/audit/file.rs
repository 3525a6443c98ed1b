//! The file: appended to, synced, and put aside when it is full. All of it blocks.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::state_dir::{StateDir, StateError};
use crate::write_fault::{self, Point};

/// Its name in the state directory; older ones have `.1`, `.2` and so on behind it.
const NAME: &str = "audit.log";
/// As far back lines are looked for that a crash left in the journal too: the lines of a second and more, which is when the
/// journal forgets them.
const TAIL_BYTES: u64 = 4 << 20;

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
    /// Adds lines, durably: all of them, or as far as anybody can see none.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn append(&self, lines: &[String]) -> Result<(), StateError> {
        if lines.is_empty() {
            return Ok(());
        }
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
        self.fault(Point::AuditSync, "sync")?;
        file.sync_all().map_err(|error| self.error("sync", &error))
    }

    /// Makes room under the name: the oldest of those that stay goes. After a crash a number may be missing, nothing else.
    fn put_aside(&self, dir: &StateDir) -> Result<(), StateError> {
        self.fault(Point::AuditRename, "rename")?;
        let named = |number: u32| if number == 0 { NAME.to_owned() } else { format!("{NAME}.{number}") };
        // Fewer may be configured than once were.
        for name in dir.names()? {
            let number = name.strip_prefix("audit.log.").and_then(|text| text.parse::<u32>().ok());
            if number.is_some_and(|number| number >= self.retention.files) {
                dir.remove(&name)?;
            }
        }
        for number in (0..self.retention.files).rev() {
            dir.rename_unsynced(&named(number), &named(number + 1))?;
        }
        dir.sync()
    }

    /// The last lines of the file, and of the one before it where it is short.
    ///
    /// # Errors
    /// See [`StateError`].
    pub fn tail(&self) -> Result<HashSet<String>, StateError> {
        let mut found = HashSet::new();
        let Some(dir) = StateDir::open(&self.state)? else { return Ok(found) };
        let mut left = TAIL_BYTES;
        let there = dir.names()?;
        for name in [NAME, "audit.log.1"].into_iter().filter(|name| there.iter().any(|known| known == name)) {
            let file = dir.open_to_append(name)?;
            let tail = last_bytes(&file, left).map_err(|error| self.error("read", &error))?;
            left -= tail.len() as u64;
            found.extend(String::from_utf8_lossy(&tail).lines().map(str::to_owned));
        }
        Ok(found)
    }

    fn fault(&self, point: Point, doing: &'static str) -> Result<(), StateError> {
        write_fault::check(point, &self.state.join(NAME)).map_err(|error| self.error(doing, &error))
    }

    fn error(&self, doing: &'static str, error: &io::Error) -> StateError {
        StateError::of_io(doing, &self.state.join(NAME), error)
    }
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
