//! A directory in memory that keeps a trace of everything that was done to it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Files by name: what a process finds after a crash.
pub(super) type Image = BTreeMap<String, Vec<u8>>;

/// A file, whatever its name is, or whether it still has one.
pub(super) type Inode = usize;

/// No journal of a test comes near it, bytes: a wild offset is answered as a full disk.
const FULL: usize = 64 << 20;

/// One thing done to the disk. A crash may strike before and after each.
#[derive(Debug, Clone)]
pub(super) enum Op {
    Create { name: String, inode: Inode },
    Rename { from: String, to: String },
    Unlink { name: String },
    SyncDir,
    Write { inode: Inode, at: usize, bytes: Arc<[u8]>, grows: bool },
    Truncate { inode: Inode, len: usize },
    Sync { inode: Inode },
}

/// Why the disk does not do what it is asked to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskError {
    /// The power is off.
    Off,
    /// There is no such file.
    Missing,
    /// There is one already.
    Exists,
    /// No room.
    Full,
    /// The device reports an error.
    Broken,
}

/// The disk as a running process sees it: every write is there at once.
#[derive(Debug, Default)]
pub(super) struct Disk {
    files: Vec<Vec<u8>>,
    names: BTreeMap<String, Inode>,
    trace: Vec<Op>,
    off: bool,
    /// After so many more operations, every one fails so.
    fault: Option<(usize, DiskError)>,
    /// Open files; while there are any, the disk belongs to a process.
    pub(super) open_files: usize,
}

impl Disk {
    /// A disk with the files of `image`, all durable.
    pub(super) fn boot(image: Image) -> Self {
        let names = image.keys().cloned().zip(0..).collect();
        Self { files: image.into_values().collect(), names, ..Self::default() }
    }

    /// From now on nothing is written: what closes files after the crash changes nothing.
    pub(super) fn cut_power(&mut self) {
        self.off = true;
    }

    /// Lets so many operations pass; from then on every one fails.
    pub(super) fn fail_after(&mut self, operations: usize, error: DiskError) {
        self.fault = Some((operations, error));
    }

    /// The cause is gone. Whether it had struck, or would have with the next operation.
    pub(super) fn mend(&mut self) -> bool {
        self.fault.take().is_some_and(|(left, _)| left == 0)
    }

    /// What has been done so far.
    pub(super) fn trace(&self) -> &[Op] {
        &self.trace
    }

    pub(super) fn inode(&self, name: &str) -> Option<Inode> {
        self.names.get(name).copied()
    }

    /// Every name.
    pub(super) fn names(&self) -> Vec<String> {
        self.names.keys().cloned().collect()
    }

    /// Every file, as the running process sees it.
    pub(super) fn image(&self) -> Image {
        let content = |inode: &Inode| self.content(*inode).to_vec();
        self.names.iter().map(|(name, inode)| (name.clone(), content(inode))).collect()
    }

    /// Content of a file, its name gone or not.
    pub(super) fn content(&self, inode: Inode) -> &[u8] {
        self.files.get(inode).map_or(&[], Vec::as_slice)
    }

    fn record(&mut self, op: Op) -> Result<(), DiskError> {
        if self.off {
            return Err(DiskError::Off);
        }
        match &mut self.fault {
            Some((0, error)) => return Err(*error),
            Some((left, _)) => *left -= 1,
            None => {}
        }
        apply(&op, &mut self.files, &mut self.names);
        self.trace.push(op);
        Ok(())
    }

    pub(super) fn create(&mut self, name: &str) -> Result<Inode, DiskError> {
        if self.names.contains_key(name) {
            return Err(DiskError::Exists);
        }
        let inode = self.files.len();
        self.record(Op::Create { name: name.to_owned(), inode })?;
        Ok(inode)
    }

    /// A file without a name. It is nobody's after a crash, so making it is no step of the trace.
    pub(super) fn create_nameless(&mut self) -> Inode {
        self.files.push(Vec::new());
        self.files.len() - 1
    }

    pub(super) fn rename(&mut self, from: &str, to: &str) -> Result<(), DiskError> {
        if !self.names.contains_key(from) {
            return Err(DiskError::Missing);
        }
        self.record(Op::Rename { from: from.to_owned(), to: to.to_owned() })
    }

    pub(super) fn unlink(&mut self, name: &str) -> Result<(), DiskError> {
        if !self.names.contains_key(name) {
            return Err(DiskError::Missing);
        }
        self.record(Op::Unlink { name: name.to_owned() })
    }

    pub(super) fn sync_dir(&mut self) -> Result<(), DiskError> {
        self.record(Op::SyncDir)
    }

    pub(super) fn write(&mut self, inode: Inode, at: usize, bytes: &[u8]) -> Result<(), DiskError> {
        let end = at.checked_add(bytes.len()).filter(|end| *end <= FULL).ok_or(DiskError::Full)?;
        let grows = end > self.content(inode).len();
        self.record(Op::Write { inode, at, bytes: bytes.into(), grows })
    }

    pub(super) fn truncate(&mut self, inode: Inode, len: usize) -> Result<(), DiskError> {
        if len > FULL {
            return Err(DiskError::Full);
        }
        self.record(Op::Truncate { inode, len })
    }

    pub(super) fn sync(&mut self, inode: Inode) -> Result<(), DiskError> {
        self.record(Op::Sync { inode })
    }
}

/// Does `op` to files and names.
pub(super) fn apply(op: &Op, files: &mut Vec<Vec<u8>>, names: &mut BTreeMap<String, Inode>) {
    match op {
        Op::Create { name, inode } => {
            hold(files, *inode);
            names.insert(name.clone(), *inode);
        }
        Op::Rename { from, to } => {
            if let Some(inode) = names.remove(from) {
                names.insert(to.clone(), inode);
            }
        }
        Op::Unlink { name } => {
            names.remove(name);
        }
        Op::Write { inode, at, bytes, .. } => put(hold(files, *inode), *at, bytes),
        Op::Truncate { inode, len } => hold(files, *inode).resize(*len, 0),
        Op::Sync { .. } | Op::SyncDir => {}
    }
}

/// The file of an inode, made where it is new.
pub(super) fn hold(files: &mut Vec<Vec<u8>>, inode: Inode) -> &mut Vec<u8> {
    if files.len() <= inode {
        files.resize_with(inode + 1, Vec::new);
    }
    &mut files[inode]
}

/// Writes bytes at an offset; a hole before them reads as zeros.
pub(super) fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = at + bytes.len();
    if file.len() < end {
        file.resize(end, 0);
    }
    file[at..end].copy_from_slice(bytes);
}

/// Its lock, whatever became of another holder.
pub(super) fn lock(disk: &Mutex<Disk>) -> MutexGuard<'_, Disk> {
    disk.lock().unwrap_or_else(PoisonError::into_inner)
}
