//! One program from its start to the end of everything that it started: one loop over its pipes, its exit, the signals
//! of the daemon and a deadline.
//!
//! A program ends by itself, at its time limit, by a cancellation or by the host's shutdown; the last three send SIGTERM
//! to its group, wait the grace, and kill all of it. The command ends when the program has exited and its output is
//! closed, or [`LINGER`] later: then whatever it started is killed, so that a daemonised grandchild neither holds the
//! command open nor outlives it.
//!
//! This process is single-threaded and its program's subreaper: whatever the program starts becomes its child at the
//! latest when the parent dies, and stays a zombie until it is reaped here. So the pid of a child is never given to
//! somebody else, and "no child left" means that everything is gone.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal as Number};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, wait};

use super::end::{Cause, Last, Status, Streams, Why};
use super::group;
use super::output::Capture;
use super::spawn::Program;
use crate::clock::{Clock as _, SystemClock};
use crate::exec::process::{pids, stat};

/// After the exit: how long output that somebody holds open is waited for.
const LINGER: Duration = Duration::from_secs(2);
/// After everything was killed: how long what still stands in the pipes is read.
const LAST_READ: Duration = Duration::from_millis(500);
/// One read, bytes: what a pipe holds.
const READ_BYTES: usize = 64 << 10;
/// Longest sleep of the loop: a deadline that lies days away is looked at again.
const LONGEST_SLEEP: Duration = Duration::from_secs(600);
/// Rounds of a kill: a process that forks while it is killed leaves children for the next round. With [`ROUND_PAUSE`]
/// they bound it to about 5 s; what is left then hangs in the kernel.
const ROUNDS: u32 = 500;
/// Between two rounds: the time that a killed process takes to go.
const ROUND_PAUSE: Duration = Duration::from_millis(10);

/// Cancel, by the daemon.
pub(crate) const CANCEL: Signal = Signal::USR1;

/// The signals that this process hears of; all are blocked.
pub(super) struct Signals(SignalFd);

impl Signals {
    /// From now on a signal waits until it is read. Before anything could send one.
    pub(super) fn block() -> io::Result<Self> {
        let mut set = SigSet::empty();
        for number in [Number::SIGUSR1, Number::SIGTERM, Number::SIGINT, Number::SIGHUP, Number::SIGCHLD] {
            set.add(number);
        }
        set.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?))
    }

    /// Why the program is to end, if one of the signals says so.
    fn read(&self) -> Option<Why> {
        let mut why = None;
        while let Ok(Some(info)) = self.0.read_signal() {
            match i32::try_from(info.ssi_signo).ok().and_then(|number| Number::try_from(number).ok()) {
                Some(Number::SIGUSR1) => why = Some(Why::Cancelled),
                Some(Number::SIGTERM) => why = why.or(Some(Why::Shutdown)),
                _ => {}
            }
        }
        why
    }
}

/// What a program is given.
pub(super) struct Terms {
    pub(super) limit: Duration,
    pub(super) grace: Duration,
    pub(super) stdin: Vec<u8>,
    pub(super) groups: Vec<PathBuf>,
}

/// Bytes on their way into standard input.
struct Feed {
    pipe: File,
    bytes: Vec<u8>,
    sent: usize,
}

#[derive(Clone, Copy)]
enum Phase {
    Running,
    Told(Why),
    Killed(Why),
    Exited(Cause),
}

struct Follow<'a> {
    signals: &'a Signals,
    terms: &'a Terms,
    main: Pid,
    status: Option<Status>,
    phase: Phase,
    deadline: Duration,
    feed: Option<Feed>,
    out: Option<File>,
    err: Option<File>,
    buffer: Vec<u8>,
}

/// Follows a program to its end; nothing that it started is left then.
pub(super) fn follow(
    program: Program,
    terms: &Terms,
    signals: &Signals,
    streams: &mut Streams,
) -> (Cause, Option<Status>) {
    let feed = program.stdin.and_then(|pipe| Feed::new(pipe, &terms.stdin));
    let mut follow = Follow {
        signals,
        terms,
        main: program.pid,
        status: None,
        phase: Phase::Running,
        deadline: SystemClock.boot().saturating_add(terms.limit),
        feed,
        out: program.stdout.map(File::from),
        err: program.stderr.map(File::from),
        buffer: vec![0; READ_BYTES],
    };
    let cause = loop {
        follow.reap();
        if let Some(cause) = follow.over(SystemClock.boot()) {
            break cause;
        }
        follow.wait(streams);
    };
    follow.kill_all();
    let last = SystemClock.boot().saturating_add(LAST_READ);
    while follow.has_output() && SystemClock.boot() < last {
        follow.deadline = last;
        follow.wait(streams);
    }
    (cause, follow.status)
}

impl Follow<'_> {
    fn has_output(&self) -> bool {
        self.out.is_some() || self.err.is_some()
    }

    /// Does what the time or the exit asks for; the cause once the program has ended.
    fn over(&mut self, now: Duration) -> Option<Cause> {
        if self.status.is_some() && !matches!(self.phase, Phase::Exited(_)) {
            let cause = match self.phase {
                Phase::Told(why) => Cause::Told(why, Last::Term),
                Phase::Killed(why) => Cause::Told(why, Last::Kill),
                Phase::Running | Phase::Exited(_) => Cause::Itself,
            };
            self.phase = Phase::Exited(cause);
            self.deadline = now.saturating_add(LINGER);
        }
        match self.phase {
            Phase::Exited(cause) => (now >= self.deadline || !self.has_output()).then_some(cause),
            Phase::Running if now >= self.deadline => {
                self.tell(Why::TimeLimit, now);
                None
            }
            Phase::Told(why) if now >= self.deadline => {
                self.phase = Phase::Killed(why);
                self.deadline = now.saturating_add(LONGEST_SLEEP);
                self.kill_all();
                None
            }
            Phase::Running | Phase::Told(_) | Phase::Killed(_) => None,
        }
    }

    fn tell(&mut self, why: Why, now: Duration) {
        if !matches!(self.phase, Phase::Running) || self.status.is_some() {
            return;
        }
        self.phase = Phase::Told(why);
        self.deadline = now.saturating_add(self.terms.grace);
        // The program is not reaped yet, so the group is its own.
        let _ = kill_process_group(self.main, Signal::TERM);
        // A stopped process takes SIGTERM only once it goes on.
        let _ = kill_process_group(self.main, Signal::CONT);
    }

    /// Sleeps until something happens, and takes what came.
    fn wait(&mut self, streams: &mut Streams) {
        let sleep = self.deadline.saturating_sub(SystemClock.boot()).min(LONGEST_SLEEP);
        let ready = self.poll(sleep);
        if ready.signal
            && let Some(why) = self.signals.read()
        {
            self.tell(why, SystemClock.boot());
        }
        if ready.feed && self.feed.as_mut().is_some_and(|feed| !feed.push()) {
            self.feed = None;
        }
        if ready.out && !drain(&mut self.out, &mut self.buffer, &mut streams.out) {
            self.out = None;
        }
        if ready.err && !drain(&mut self.err, &mut self.buffer, &mut streams.err) {
            self.err = None;
        }
    }

    fn poll(&self, sleep: Duration) -> Ready {
        let mut polled = vec![PollFd::new(&self.signals.0, PollFlags::IN)];
        polled.extend(self.feed.as_ref().map(|feed| PollFd::new(&feed.pipe, PollFlags::OUT)));
        polled.extend(self.out.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        polled.extend(self.err.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::IN)));
        // Rounded up to a millisecond, so that a deadline is never found "not yet" again and again.
        let sleep = sleep.saturating_add(Duration::from_millis(1));
        let sleep = Timespec {
            tv_sec: i64::try_from(sleep.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: sleep.subsec_nanos().into(),
        };
        if poll(&mut polled, Some(&sleep)).is_err() {
            // Interrupted, or out of memory: the loop looks again, and does not spin.
            thread::sleep(Duration::from_millis(1));
            return Ready::default();
        }
        let mut happened = polled.iter().map(|polled| !polled.revents().is_empty());
        let mut next = |there: bool| there && happened.next().unwrap_or(false);
        Ready {
            signal: next(true),
            feed: next(self.feed.is_some()),
            out: next(self.out.is_some()),
            err: next(self.err.is_some()),
        }
    }

    /// Takes in every child that has exited; whether one is left.
    fn reap(&mut self) -> bool {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) if pid == self.main => {
                    self.status =
                        Some(Status { code: status.exit_status(), signal: status.terminating_signal() });
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    }

    /// Kills whatever the program started, until no child is left.
    fn kill_all(&mut self) {
        for _ in 0..ROUNDS {
            group::kill(&self.terms.groups);
            kill_children();
            if !self.reap() {
                break;
            }
            thread::sleep(ROUND_PAUSE);
        }
    }
}

/// Which of the things waited for has happened.
#[derive(Default)]
struct Ready {
    signal: bool,
    feed: bool,
    out: bool,
    err: bool,
}

/// A child that is not reaped keeps its pid, so the signal meets nobody else.
fn kill_children() {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    for pid in pids().unwrap_or_default() {
        if matches!(stat(pid), Ok(Some(stat)) if stat.parent == own) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// One piece, so that the program feels back-pressure; false at the end. An error of reading a pipe is its end.
fn drain(pipe: &mut Option<File>, buffer: &mut [u8], capture: &mut Capture) -> bool {
    match pipe.as_mut().map(|pipe| pipe.read(buffer)) {
        Some(Ok(count @ 1..)) => {
            capture.take(&buffer[..count]);
            true
        }
        Some(Err(error)) => error.kind() == io::ErrorKind::Interrupted,
        _ => false,
    }
}

impl Feed {
    fn new(pipe: OwnedFd, bytes: &[u8]) -> Option<Self> {
        rustix::io::ioctl_fionbio(&pipe, true).ok()?;
        Some(Self { pipe: File::from(pipe), bytes: bytes.to_vec(), sent: 0 })
    }

    /// Sends what fits; false when nothing is left to send. A program may close its input early; that is its affair.
    fn push(&mut self) -> bool {
        match self.pipe.write(&self.bytes[self.sent..]) {
            Ok(count) => {
                self.sent += count;
                self.sent < self.bytes.len()
            }
            Err(error) => matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted),
        }
    }
}
