//! Begun records: one small file beside the journal for each command that may not run twice, and for each program,
//! made before the effect.
//!
//! A copy of journal.db restored alone forgets that a command ran. The record does not: it is created with O_EXCL,
//! so that a second start of the same command meets it, and it lives as long as the command's tombstone. That of a
//! program also says who supervises it, so that the next daemon finds it again.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::libc;
use serde::{Deserialize, Serialize};

use super::durable::Durable;
use super::record::Running;
use crate::failpoint;
use crate::model::{BootId, CommandId, Digest, JournalId, NodeId, ServerTime};
use crate::write_fault::{self, Point};

/// A record has ids of 128 bytes, a digest, a few numbers, and the paths of at most five control groups.
const RECORD_BYTES: u64 = 32 << 10;

/// Who starts a command.
#[derive(Debug, Clone)]
pub struct Starter {
    /// This node.
    pub node_id: NodeId,
    /// The journal that knows the command as RUNNING.
    pub journal_id: JournalId,
    /// This boot.
    pub boot_id: BootId,
}

/// What a record says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The node that it is a command of: a state directory can have been another node's before. Absent in records of
    /// builds that did not say, and taken for this node's.
    #[serde(default)]
    pub node_id: Option<NodeId>,
    /// The command.
    pub id: CommandId,
    /// SHA-256 of its payload.
    pub body_sha256: Digest,
    /// The kind's name.
    pub kind: String,
    /// Which execution began.
    pub attempt: u32,
    /// The journal that it began under.
    pub journal_id: JournalId,
    /// Until when the command may be accepted; the record outlives it as the tombstone does.
    pub not_after: ServerTime,
    /// When it started, by the working clock.
    pub started: Option<ServerTime>,
    /// The boot that it began in; absent in records of builds that did not say.
    #[serde(default)]
    pub boot_id: Option<BootId>,
    /// Whether it may run twice: then a record forbids its own attempt alone.
    #[serde(default)]
    pub retry_safe: bool,
    /// Who carries it out, where that is a process of its own.
    #[serde(default)]
    pub supervisor: Option<Supervisor>,
}

/// A process that carries a command out and outlives the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Supervisor {
    /// Its pid; it means nothing without the two that follow.
    pub pid: i32,
    /// When the kernel started it: clock ticks since the boot.
    pub start: u64,
    /// The boot.
    pub boot_id: BootId,
    /// Control groups that hold what it started.
    #[serde(default)]
    pub groups: Vec<PathBuf>,
}

/// Proof that the record is durable, so that the effect may start.
#[derive(Debug)]
pub struct Begun {
    path: PathBuf,
}

/// Why a record was not made: the effect must not start.
#[derive(Debug, thiserror::Error)]
pub enum BegunError {
    /// The command began before, perhaps under a journal that is lost. It must never start again.
    #[error("{path} exists: the command began before and must not start again")]
    AlreadyExists {
        /// The record.
        path: PathBuf,
    },
    /// The record could not be made durable.
    #[error("cannot {action} the begun record {path}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The record.
        path: PathBuf,
        /// The kernel's word.
        source: io::Error,
    },
}

impl BegunError {
    /// The kernel's word, where that was it.
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => source.raw_os_error(),
            Self::AlreadyExists { .. } => None,
        }
    }
}

/// The directory of the records.
pub(super) fn dir(state: &Path) -> PathBuf {
    state.join("begun")
}

// An id has only letters, digits and `. _ : -`, begins with a letter or digit and is at most 128 bytes: a safe
// file name. The attempt is no part of it where the command may not run twice: it has no second attempt under any
// journal.
fn name_of(id: &CommandId, attempt: Option<u32>) -> String {
    attempt.map_or_else(|| format!("{id}.json"), |attempt| format!("{id}~{attempt}.json"))
}

impl Record {
    /// The record of a command that is about to start, without its supervisor.
    pub fn of(starter: &Starter, running: &Durable<Running>) -> Self {
        let command = running.command.command();
        Self {
            node_id: Some(starter.node_id.clone()),
            id: command.header.id.clone(),
            body_sha256: command.body_sha256,
            kind: command.header.kind.clone(),
            attempt: running.attempt,
            journal_id: starter.journal_id.clone(),
            not_after: command.header.not_after,
            started: running.started,
            retry_safe: running.command.retry_safe(),
            supervisor: None,
            boot_id: Some(starter.boot_id.clone()),
        }
    }

    /// Whether it is a command of another node.
    pub(super) fn is_foreign(&self, node: &str) -> bool {
        self.node_id.as_ref().is_some_and(|own| own.as_str() != node)
    }

    /// Its file's name, in the directory of the records and in that of the outcomes.
    pub(super) fn name(&self) -> String {
        name_of(&self.id, self.retry_safe.then_some(self.attempt))
    }

    /// Creates the record and makes it durable. Blocks.
    ///
    /// # Errors
    /// See [`BegunError`]; in any case the effect must not start now. After an `Io` it may be tried again.
    pub fn create(&self, state: &Path) -> Result<Begun, BegunError> {
        write(state, self)
    }

    /// Whether the record exists, whole or not. Blocks.
    ///
    /// # Errors
    /// Nobody knows.
    pub fn exists(&self, state: &Path) -> io::Result<bool> {
        match dir(state).join(self.name()).symlink_metadata() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Begun {
    /// Creates the record of a command that is about to start and makes it durable. Blocks.
    ///
    /// # Errors
    /// See [`BegunError`]; in any case the effect must not start now. After an `Io` it may be tried again.
    pub fn create(state: &Path, starter: &Starter, running: &Durable<Running>) -> Result<Self, BegunError> {
        Record::of(starter, running).create(state)
    }

    /// Where the record lies.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn write(state: &Path, record: &Record) -> Result<Begun, BegunError> {
    let path = dir(state).join(record.name());
    let failed = |action| {
        let path = path.clone();
        move |source| BegunError::Io { action, path, source }
    };
    let text = serde_json::to_vec(record).map_err(io::Error::other).map_err(failed("encode"))?;
    let opened = write_fault::check(Point::BegunCreate, &path).and_then(|()| {
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&path)
    });
    let mut file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            return Err(BegunError::AlreadyExists { path });
        }
        Err(source) => return Err(failed("create")(source)),
    };
    let mut sync = || {
        write_fault::check(Point::BegunWrite, &path)?;
        file.write_all(&text)?;
        failpoint::hit(failpoint::BEGUN_CREATED);
        write_fault::check(Point::BegunSync, &path)?;
        file.sync_all()?;
        write_fault::check(Point::BegunDirSync, &path)?;
        sync_dir(&dir(state))
    };
    let synced = sync();
    if let Err(source) = synced {
        // Ours, and without an effect: away with it, so that the next try makes a new file with a sync of its own.
        // Should it stay, it costs one `interrupted`, never a second run.
        if let Err(error) = std::fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "a begun record without an effect cannot be removed");
        }
        return Err(failed("sync")(source));
    }
    failpoint::hit(failpoint::BEGUN);
    Ok(Begun { path })
}

pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// What lies in the directory.
#[derive(Debug, Default)]
pub(super) struct Records {
    /// This node's.
    pub(super) whole: Vec<Record>,
    /// Another node's: its commands are none of ours, whatever became of them.
    pub(super) foreign: Vec<Record>,
    /// Cut short by a crash before their sync (so before any effect), or damaged: they still forbid a start.
    pub(super) unreadable: Vec<PathBuf>,
}

impl Records {
    /// Says what is left alone; of another node's records one line a node, with the way to name them.
    pub(super) fn tell(&self, state: &Path) {
        for path in &self.unreadable {
            tracing::warn!(path = %path.display(), "a begun record cannot be read; it stays and forbids its command");
        }
        for node in self.foreign_nodes() {
            let records = self.foreign.iter().filter(|record| record.node_id.as_ref() == Some(node)).count();
            let state = state.display();
            tracing::warn!(
                %node,
                records,
                "another node's commands began in this state directory, and nothing is told of them; move away, while \
                 bcd is stopped, what this names: grep -lF '\"node_id\":\"{node}\"' {state}/begun/* {state}/outcome/*"
            );
        }
    }

    /// The other nodes.
    pub(super) fn foreign_nodes(&self) -> BTreeSet<&NodeId> {
        self.foreign.iter().filter_map(|record| record.node_id.as_ref()).collect()
    }
}

/// Reads every record, for a node.
pub(super) fn read_all(state: &Path, node: &str) -> io::Result<Records> {
    let mut records = Records::default();
    let entries = match std::fs::read_dir(dir(state)) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(records),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let path = entry?.path();
        match read(&path)? {
            Some(record) if dir(state).join(record.name()) == path => records.whole.push(record),
            _ => records.unreadable.push(path),
        }
    }
    records.whole.extend(super::ended::without_begun(state)?);
    records.foreign = records.whole.extract_if(.., |record| record.is_foreign(node)).collect();
    records.whole.sort_by(|a, b| (&a.id, a.attempt).cmp(&(&b.id, b.attempt)));
    Ok(records)
}

/// The journals that the records were made under, another node's among them: its programs hold this host too. Blocks.
///
/// # Errors
/// The records cannot be read.
pub fn journals(state: &Path, node: &NodeId) -> io::Result<BTreeSet<JournalId>> {
    let Records { whole, foreign, .. } = read_all(state, node.as_str())?;
    Ok(whole.into_iter().chain(foreign).map(|record| record.journal_id).collect())
}

fn read(path: &Path) -> io::Result<Option<Record>> {
    Ok(read_file(path, RECORD_BYTES)?.and_then(|text| serde_json::from_slice(&text).ok()))
}

/// A regular file's bytes, of at most `limit`; absent when it is another thing or longer.
pub(super) fn read_file(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    // O_NONBLOCK: opening a FIFO that somebody put there must not wait for its other end.
    let flags = libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Ok(file) => file,
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Ok(None),
        Err(error) => return Err(error),
    };
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut text = Vec::new();
    file.take(limit + 1).read_to_end(&mut text)?;
    Ok((text.len() as u64 <= limit).then_some(text))
}

/// Removes the records of a command up to this attempt, if there are any, and what its supervisor wrote.
pub(super) fn remove(state: &Path, id: &CommandId, attempt: u32) -> io::Result<()> {
    for dir in [super::ended::dir(state), dir(state)] {
        // An attempt is an execution, of which a command has few.
        for attempt in std::iter::once(None).chain((1..=attempt).map(Some)) {
            match std::fs::remove_file(dir.join(name_of(id, attempt))) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}
