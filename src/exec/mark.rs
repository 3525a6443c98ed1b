//! The mark that every program of a command carries in its environment, and the search for it in /proc.
//!
//! A process group loses a grandchild that calls setsid; an environment is inherited by all. A program that
//! clears its child's environment escapes the mark, not its supervisor, which adopts whatever the program starts; the
//! mark finds what a supervisor that was killed leaves behind.
//!
//! A pid alone is never signalled. The order is the proof: the pidfd is opened first and the mark is read through
//! the pid afterwards, so either the pidfd is the process that was read, or its process is gone and the signal goes
//! nowhere.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read as _};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::process::{is_a_lack, pids};
use crate::journal::begun::Record;
use crate::model::{CommandId, JournalId};

/// Name of the variable.
pub(super) const VARIABLE: &str = "BCD_EXEC";

/// Most of an environment that is read, bytes: the kernel gives arguments and environment at most 6 MiB together.
const ENVIRON_BYTES: u64 = 8 << 20;

/// Rounds of a sweep: a process that forks while it is killed leaves children for the next round. With
/// [`ROUND_PAUSE`] they bound a sweep to about 5 s; what is left then hangs in the kernel.
const ROUNDS: u32 = 250;

/// Between two rounds: the time that a killed process takes to go.
const ROUND_PAUSE: Duration = Duration::from_millis(20);

/// Whose processes are meant. The text is the beginning of an environment entry, up to its end or a slash, so that
/// attempt 1 never means attempt 10.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mark(String);

impl Mark {
    /// One attempt of one command.
    pub(super) fn attempt(journal: &JournalId, command: &CommandId, attempt: u32) -> Self {
        Self(format!("{journal}/{command}/{attempt}"))
    }

    /// The program of a begun record.
    pub(super) fn of(begun: &Record) -> Self {
        Self::attempt(&begun.journal_id, &begun.id, begun.attempt)
    }

    /// Everything that was started under a journal.
    pub(super) fn journal(journal: &JournalId) -> Self {
        Self(journal.to_string())
    }

    /// The variable's value.
    pub(super) fn value(&self) -> &str {
        &self.0
    }

    /// Parts of a value: its journal, command and attempt. None of what another program wrote under the name.
    fn parts(value: &str) -> Option<(&str, &str, u32)> {
        let mut parts = value.split('/');
        let (journal, command, attempt) = (parts.next()?, parts.next()?, parts.next()?.parse().ok()?);
        parts.next().is_none().then_some((journal, command, attempt))
    }

    fn is_in(&self, environ: &[u8]) -> bool {
        environ.split(|byte| *byte == 0).any(|entry| {
            entry
                .strip_prefix(VARIABLE.as_bytes())
                .and_then(|rest| rest.strip_prefix(b"="))
                .and_then(|value| value.strip_prefix(self.0.as_bytes()))
                .is_some_and(|rest| rest.is_empty() || rest.first() == Some(&b'/'))
        })
    }
}

/// What a sweep met.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Swept {
    /// Processes that were sent SIGKILL.
    pub(super) killed: BTreeSet<i32>,
    /// Whether any is still there.
    pub(super) remain: bool,
}

/// Kills every process that carries the mark and none of the spared ones, this process excepted, until none is left.
/// Blocks.
///
/// # Errors
/// /proc cannot be read, so nobody knows whether there are any.
pub(super) fn sweep(mark: &Mark, spared: &[Mark]) -> io::Result<Swept> {
    let mut swept = Swept::default();
    let mut buffer = Vec::new();
    let own = rustix::process::getpid();
    for _ in 0..ROUNDS {
        let mut found = false;
        for pid in pids()? {
            if pid != own && carries(pid, mark, spared, &mut buffer)? {
                found = true;
                if kill(pid, mark, spared, &mut buffer) {
                    swept.killed.insert(pid.as_raw_nonzero().get());
                }
            }
        }
        if !found {
            return Ok(swept);
        }
        thread::sleep(ROUND_PAUSE);
    }
    swept.remain = true;
    Ok(swept)
}

/// A process that was started for a command, or by one that was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marked {
    /// Its pid, when it was seen.
    pub pid: i32,
    /// The command's id, as its mark has it.
    pub command: String,
    /// Which execution.
    pub attempt: u32,
}

/// Every process that carries a mark of one of these journals, this process excepted. Blocks.
///
/// # Errors
/// /proc cannot be read, so nobody knows whether there are any.
pub(super) fn find(journals: &BTreeSet<JournalId>) -> io::Result<Vec<Marked>> {
    let own = rustix::process::getpid();
    let mut buffer = Vec::new();
    let mut found = Vec::new();
    for pid in pids()?.into_iter().filter(|pid| *pid != own) {
        if read_environ(pid, &mut buffer)? {
            found.extend(marked(pid, &buffer, journals));
        }
    }
    Ok(found)
}

fn marked(pid: Pid, environ: &[u8], journals: &BTreeSet<JournalId>) -> Option<Marked> {
    let mut entries = environ.split(|byte| *byte == 0);
    entries.find_map(|entry| {
        let value = entry.strip_prefix(VARIABLE.as_bytes())?.strip_prefix(b"=")?;
        let (journal, command, attempt) = Mark::parts(std::str::from_utf8(value).ok()?)?;
        let ours = journals.iter().any(|ours| ours.as_str() == journal);
        let pid = pid.as_raw_nonzero().get();
        // An id's length: a program may write what it likes into its own environment.
        let command = CommandId::new(command).ok()?.to_string();
        ours.then_some(Marked { pid, command, attempt })
    })
}

fn carries(pid: Pid, mark: &Mark, spared: &[Mark], buffer: &mut Vec<u8>) -> io::Result<bool> {
    Ok(read_environ(pid, buffer)? && mark.is_in(buffer) && !spared.iter().any(|spared| spared.is_in(buffer)))
}

/// False for a process that cannot be read (gone, a zombie, another user's): it carries no mark.
fn read_environ(pid: Pid, buffer: &mut Vec<u8>) -> io::Result<bool> {
    buffer.clear();
    let read = File::open(format!("/proc/{pid}/environ"))
        .and_then(|file| file.take(ENVIRON_BYTES).read_to_end(buffer));
    match read {
        Err(error) if is_a_lack(&error) => Err(error),
        read => Ok(read.is_ok()),
    }
}

fn kill(pid: Pid, mark: &Mark, spared: &[Mark], buffer: &mut Vec<u8>) -> bool {
    let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    carries(pid, mark, spared, buffer).unwrap_or(false) && pidfd_send_signal(&pidfd, Signal::KILL).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_means_its_own_attempt_command_and_journal_alone() {
        let journal = JournalId::new("j-1").expect("an id");
        let command = CommandId::new("c-1").expect("an id");
        let environ = b"PATH=/bin\0BCD_EXEC=j-1/c-1/1\0TERM=x\0";
        assert!(Mark::attempt(&journal, &command, 1).is_in(environ));
        assert!(Mark::journal(&journal).is_in(environ));
        assert!(!Mark::attempt(&journal, &command, 10).is_in(environ));
        assert!(!Mark::attempt(&journal, &command, 1).is_in(b"BCD_EXEC=j-1/c-1/10\0"));
        assert!(!Mark::journal(&journal).is_in(b"BCD_EXEC=j-11/c-1/1\0"));
        assert!(!Mark::journal(&journal).is_in(b"XBCD_EXEC=j-1/c-1/1\0A=BCD_EXEC=j-1/c-1/1\0"));
        assert!(!Mark::journal(&journal).is_in(b""));
    }
}
