//! What the kernel counts of a process.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::time::ClockId;
use nix::unistd::Pid;

/// Counts of a moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    /// Resident memory, KiB.
    pub(super) rss_kib: u64,
    /// Of it what no other process could share: stacks and heap, KiB.
    pub(super) anon_kib: u64,
    /// Time on a processor, that of threads which have ended included.
    pub(super) cpu: Duration,
    /// Times that a thread gave the processor away by itself, all threads that live.
    pub(super) voluntary: u64,
}

/// The number of `name:` in a file of the form of /proc/PID/status.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The processor time of a whole process. A sum over its threads would lose what those did that have ended.
fn on_cpu(pid: u32) -> Option<Duration> {
    let clock = ClockId::pid_cpu_clock_id(Pid::from_raw(i32::try_from(pid).ok()?)).ok()?;
    clock.now().ok().map(Duration::from)
}

impl Usage {
    /// Of a process that runs; absent when it is gone.
    pub(super) fn of(pid: u32) -> Option<Self> {
        let base = PathBuf::from(format!("/proc/{pid}"));
        let status = std::fs::read_to_string(base.join("status")).ok()?;
        let mut usage = Self {
            rss_kib: field(&status, "VmRSS")?,
            anon_kib: field(&status, "RssAnon")?,
            cpu: on_cpu(pid)?,
            voluntary: 0,
        };
        // A thread that ends meanwhile takes its count with it.
        for task in std::fs::read_dir(base.join("task")).ok()?.flatten() {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
            usage.voluntary += field(&status, "voluntary_ctxt_switches").unwrap_or_default();
        }
        Some(usage)
    }
}

/// A child process that does not outlive its handle, and that ends with this process: its standard input does.
#[derive(Debug)]
pub(super) struct Process(Child);

impl Process {
    pub(super) fn start(command: &mut Command) -> std::io::Result<Self> {
        command.stdin(Stdio::piped()).spawn().map(Self)
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// Sends it a line.
    pub(super) fn begin(&mut self) -> std::io::Result<()> {
        self.0.stdin.as_mut().map_or(Ok(()), |stdin| stdin.write_all(b"\n"))
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }
}

impl Process {
    /// Kills it and waits for its end; an end that has come before is as good.
    pub(super) fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_has_been_on_a_processor() {
        let usage = Usage::of(std::process::id()).expect("it runs");
        assert!(usage.rss_kib >= usage.anon_kib && usage.anon_kib > 0, "{usage:?}");
        assert!(usage.cpu > Duration::ZERO, "{usage:?}");
        assert_eq!(Usage::of(u32::MAX), None);
    }

    #[test]
    fn a_thread_that_has_ended_has_been_on_a_processor() {
        let own = std::process::id();
        let before = Usage::of(own).expect("it runs").cpu;
        let busy = || {
            let turns: u64 = std::hint::black_box((0..20_000_000_u64).map(std::hint::black_box).sum());
            (turns, ClockId::CLOCK_THREAD_CPUTIME_ID.now().expect("a clock"))
        };
        let (_, spent) = std::thread::spawn(busy).join().expect("ended");
        let spent = Duration::from(spent);
        assert!(spent > Duration::ZERO && Usage::of(own).expect("it runs").cpu - before >= spent);
    }

    #[test]
    fn a_process_ends_with_its_handle() {
        let process = Process::start(Command::new("sleep").arg("60")).expect("started");
        let pid = process.id();
        assert!(Usage::of(pid).is_some());
        drop(process);
        assert_eq!(Usage::of(pid), None);
    }
}
