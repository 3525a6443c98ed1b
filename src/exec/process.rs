//! Which process is meant, across restarts: pid, start time and boot together, never a pid alone.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::journal::begun::Supervisor;
use crate::model::BootId;

/// This process.
pub(super) fn own(boot_id: BootId, groups: Vec<PathBuf>) -> Option<Supervisor> {
    let pid = rustix::process::getpid();
    Some(Supervisor { pid: pid.as_raw_nonzero().get(), start: stat(pid).ok()??.start, boot_id, groups })
}

/// A handle on the process if it is alive; `boot_id` is this boot.
///
/// The order is the proof: the handle is opened first and the start time is read through the pid afterwards, so either
/// both are of one process, or that process is gone.
///
/// # Errors
/// Nobody knows whether it is alive: there is no descriptor or no memory to look with.
pub(super) fn open(supervisor: &Supervisor, boot_id: &BootId) -> io::Result<Option<OwnedFd>> {
    open_by(supervisor, boot_id, |pid| pidfd_open(pid, PidfdFlags::NONBLOCK))
}

fn open_by(
    supervisor: &Supervisor,
    boot_id: &BootId,
    pidfd: impl FnOnce(Pid) -> rustix::io::Result<OwnedFd>,
) -> io::Result<Option<OwnedFd>> {
    if supervisor.boot_id != *boot_id {
        return Ok(None);
    }
    let Some(pid) = Pid::from_raw(supervisor.pid) else { return Ok(None) };
    let handle = match pidfd(pid) {
        Ok(handle) => handle,
        // The last two say that the number is a thread's of another process now, by the kernel's version.
        Err(Errno::SRCH | Errno::NOENT | Errno::INVAL) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    let same = stat(pid)?.is_some_and(|stat| stat.start == supervisor.start);
    Ok((same && !has_exited(&handle)).then_some(handle))
}

/// Whether the process is alive, as far as anybody can tell: what lives behind a look that failed must not lose its
/// program, nor the file that it will write into.
pub(super) fn may_live(supervisor: &Supervisor, boot_id: &BootId) -> bool {
    unless_gone(supervisor, &open(supervisor, boot_id))
}

fn unless_gone(supervisor: &Supervisor, looked: &io::Result<Option<OwnedFd>>) -> bool {
    match looked {
        Ok(handle) => handle.is_some(),
        Err(error) => {
            tracing::warn!(pid = supervisor.pid, %error, "a supervisor cannot be looked at and counts as alive");
            true
        }
    }
}

/// Also true of one that nobody has reaped yet.
fn has_exited(handle: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Whether it is this process that lacks something to look with, which says nothing of what is looked at.
pub(super) fn is_a_lack(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM))
}

/// What /proc says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    pub(super) start: u64,
}

/// Absent where there is no such process.
///
/// # Errors
/// /proc cannot be read.
pub(super) fn stat(pid: Pid) -> io::Result<Option<Stat>> {
    let gone = |error: &io::Error| {
        error.kind() == io::ErrorKind::NotFound || Errno::from_io_error(error) == Some(Errno::SRCH)
    };
    match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(text) => match parse(&String::from_utf8_lossy(&text)) {
            Some(stat) => Ok(Some(stat)),
            None => {
                Err(io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat has no start time")))
            }
        },
        Err(error) if gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The second field is the program's name in parentheses, which may hold anything, more of them included.
fn parse(stat: &str) -> Option<Stat> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    // From the third field on: state, parent, and the start time as the 22nd.
    let parent = fields.nth(1)?.parse().ok()?;
    let start = fields.nth(17)?.parse().ok()?;
    Some(Stat { parent, start })
}

/// The pids that /proc shows.
///
/// # Errors
/// It cannot be read.
pub(super) fn pids() -> std::io::Result<Vec<Pid>> {
    let mut pids = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        pids.extend(name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw));
    }
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boot(text: &str) -> BootId {
        BootId::new(text).expect("an id")
    }

    #[test]
    fn a_process_is_found_by_pid_start_time_and_boot_together() {
        fn found(supervisor: &Supervisor, id: &str) -> bool {
            open(supervisor, &boot(id)).expect("looked").is_some()
        }
        let own = own(boot("b-1"), Vec::new()).expect("this process");
        assert!(found(&own, "b-1"));
        assert!(!found(&own, "b-2"), "another boot's pid is another process");
        let older = Supervisor { start: own.start - 1, ..own };
        assert!(!found(&older, "b-1"), "the pid was given to another process since");
    }

    #[test]
    fn a_pid_that_is_now_a_thread_of_another_process_tells_that_it_is_gone() {
        let own = own(boot("b-1"), Vec::new()).expect("this process");
        let (told, tid) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let link = std::fs::read_link("/proc/thread-self").expect("a link");
            let tid = link.file_name().and_then(|name| name.to_str()?.parse::<i32>().ok());
            told.send(tid.expect("an id")).expect("a listener");
            ended.recv().expect("a word");
        });
        let tid = tid.recv().expect("an id");
        assert_ne!(tid, own.pid);
        let reused = Supervisor { pid: tid, ..own };
        assert!(open(&reused, &boot("b-1")).expect("known").is_none());
        assert!(!may_live(&reused, &boot("b-1")));
        for errno in [Errno::NOENT, Errno::INVAL] {
            assert!(open_by(&reused, &boot("b-1"), |_| Err(errno)).expect("known").is_none(), "{errno}");
        }
        end.send(()).expect("a listener");
        thread.join().expect("its end");
    }

    #[test]
    fn only_a_pid_that_nobody_has_tells_that_a_process_is_gone() {
        let own = own(boot("b-1"), Vec::new()).expect("this process");
        let with = |errno| open_by(&own, &boot("b-1"), |_| Err(errno));
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NODEV] {
            assert!(with(errno).is_err(), "nobody knows");
            assert!(unless_gone(&own, &with(errno)), "{errno}");
        }
        assert!(with(Errno::SRCH).expect("known").is_none());
        assert!(!unless_gone(&own, &with(Errno::SRCH)));
    }

    #[test]
    fn a_process_that_has_exited_is_not_alive_though_nobody_has_reaped_it() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().expect("a child");
        let pid = Pid::from_child(&child);
        let start = stat(pid).expect("read").expect("a process").start;
        let supervisor =
            Supervisor { pid: pid.as_raw_nonzero().get(), start, boot_id: boot("b-1"), groups: Vec::new() };
        let handle = open(&supervisor, &boot("b-1")).expect("looked").expect("it lives");
        child.kill().expect("a signal");
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).expect("its end");
        assert!(open(&supervisor, &boot("b-1")).expect("looked").is_none());
        child.wait().expect("a status");
    }

    #[test]
    fn a_name_with_parentheses_hides_no_field() {
        let text = "7 (a) S 1 (b)) R 42 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2";
        assert_eq!(parse(text), Some(Stat { parent: 42, start: 98765 }));
        assert_eq!(parse("7 (a"), None);
    }
}
