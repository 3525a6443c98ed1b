//! Which process is meant, across restarts: pid, start time and boot together, never a pid alone.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::journal::begun::Supervisor;
use crate::model::BootId;

/// This process.
pub(super) fn own(boot_id: BootId, groups: Vec<PathBuf>) -> Option<Supervisor> {
    let pid = rustix::process::getpid();
    Some(Supervisor { pid: pid.as_raw_nonzero().get(), start: stat(pid)?.start, boot_id, groups })
}

/// A handle on the process if it is alive; `boot_id` is this boot.
///
/// The order is the proof: the handle is opened first and the start time is read through the pid afterwards, so either
/// both are of one process, or that process is gone.
pub(super) fn open(supervisor: &Supervisor, boot_id: &BootId) -> Option<OwnedFd> {
    if supervisor.boot_id != *boot_id {
        return None;
    }
    let pid = Pid::from_raw(supervisor.pid)?;
    let handle = pidfd_open(pid, PidfdFlags::NONBLOCK).ok()?;
    let same = stat(pid).is_some_and(|stat| stat.start == supervisor.start);
    (same && !has_exited(&handle)).then_some(handle)
}

/// Also true of one that nobody has reaped yet.
fn has_exited(handle: &impl AsFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// What /proc says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) parent: i32,
    pub(super) start: u64,
}

pub(super) fn stat(pid: Pid) -> Option<Stat> {
    let text = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    parse(&String::from_utf8_lossy(&text))
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
        let own = own(boot("b-1"), Vec::new()).expect("this process");
        assert!(open(&own, &boot("b-1")).is_some());
        assert!(open(&own, &boot("b-2")).is_none(), "another boot's pid is another process");
        let older = Supervisor { start: own.start - 1, ..own };
        assert!(open(&older, &boot("b-1")).is_none(), "the pid was given to another process since");
    }

    #[test]
    fn a_process_that_has_exited_is_not_alive_though_nobody_has_reaped_it() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().expect("a child");
        let pid = Pid::from_child(&child);
        let start = stat(pid).expect("a process").start;
        let supervisor =
            Supervisor { pid: pid.as_raw_nonzero().get(), start, boot_id: boot("b-1"), groups: Vec::new() };
        let handle = open(&supervisor, &boot("b-1")).expect("it lives");
        child.kill().expect("a signal");
        poll(&mut [PollFd::new(&handle, PollFlags::IN)], None).expect("its end");
        assert!(open(&supervisor, &boot("b-1")).is_none());
        child.wait().expect("a status");
    }

    #[test]
    fn a_name_with_parentheses_hides_no_field() {
        let text = "7 (a) S 1 (b)) R 42 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2";
        assert_eq!(parse(text), Some(Stat { parent: 42, start: 98765 }));
        assert_eq!(parse("7 (a"), None);
    }
}
