//! Starting one program, and the only handle on it.
//!
//! The handle watches the program through a pidfd and reaps it last, after its group was signalled: a pid or group id
//! that is not reaped cannot have been given to somebody else.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::libc;
use nix::unistd::{Gid, Uid, User};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;

use super::super::mark::{self, Mark};
use crate::model::ExecArgs;

/// Searched for a program that is named without a path, and given to the program.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why there is no program.
#[derive(Debug, thiserror::Error)]
pub(super) enum SpawnError {
    /// Nothing was done.
    #[error("{what}: {errno}")]
    NotStarted {
        /// The thing and its place.
        what: String,
        /// The kernel's word, with its number; shown by the message, so it is no `source`.
        errno: io::Error,
    },
    /// It was started and had to be killed at once.
    #[error("the program was started and killed at once, since it could not be watched: {0}")]
    Lost(io::Error),
}

/// A running program. Dropped before it was reaped (a task that was aborted), it is reaped by a thread when it ends:
/// dropping ends no program.
#[derive(Debug)]
pub(super) struct Program {
    child: Option<Child>,
    group: Pid,
    exit: AsyncFd<OwnedFd>,
    /// Its standard input, when it has bytes for it.
    pub(super) stdin: Option<pipe::Sender>,
    /// Its standard output; taken once.
    pub(super) stdout: Option<pipe::Receiver>,
    /// Its standard error; taken once.
    pub(super) stderr: Option<pipe::Receiver>,
}

/// Starts the program. Blocks (name service, fork, exec), within a runtime.
pub(super) fn spawn(args: &ExecArgs, mark: &Mark) -> Result<Program, SpawnError> {
    let user = args.user.as_deref().map(Switch::to).transpose()?.flatten();
    let cwd = args.cwd.as_deref().unwrap_or("/");
    let mut command = Command::new(&args.argv[0]);
    command.args(&args.argv[1..]).env_clear().env("PATH", PATH).envs(&args.env.0);
    command.env(mark::VARIABLE, mark.value());
    let stdin = if args.stdin_base64.is_empty() { Stdio::null() } else { Stdio::piped() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let setup = Setup { user, cwd: c_string(cwd)?, oom_score_adj: lowered_oom_score() };
    before_exec(&mut command, setup);
    let child = command.spawn().map_err(|errno| SpawnError::NotStarted {
        what: format!("cannot start {:?} in {cwd}{}", args.argv[0], as_user(args.user.as_deref())),
        errno,
    })?;
    Program::watch(child)
}

fn as_user(user: Option<&str>) -> String {
    user.map(|user| format!(" as {user}")).unwrap_or_default()
}

fn c_string(text: &str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|error| SpawnError::NotStarted {
        what: format!("{text:?} holds a NUL"),
        errno: error.into(),
    })
}

impl Program {
    fn watch(mut child: Child) -> Result<Self, SpawnError> {
        let group = Pid::from_child(&child);
        let watched = pidfd_open(group, PidfdFlags::NONBLOCK).map_err(io::Error::from).and_then(|pidfd| {
            Ok((
                register(pidfd)?,
                child.stdin.take().map(|pipe| pipe::Sender::from_owned_fd(pipe.into())).transpose()?,
                child.stdout.take().map(|pipe| pipe::Receiver::from_owned_fd(pipe.into())).transpose()?,
                child.stderr.take().map(|pipe| pipe::Receiver::from_owned_fd(pipe.into())).transpose()?,
            ))
        });
        match watched {
            Ok((exit, stdin, stdout, stderr)) => {
                Ok(Self { child: Some(child), group, exit, stdin, stdout, stderr })
            }
            Err(error) => {
                let _ = kill_process_group(group, Signal::KILL);
                let _ = child.wait();
                Err(SpawnError::Lost(error))
            }
        }
    }

    /// Resolves when the program has exited; it is not reaped by that. Dropping the future loses nothing.
    pub(super) async fn exited(&self) {
        // A pidfd becomes readable once, at the exit, and stays so. The runtime going away is the only error, and
        // then this task goes with it.
        if self.exit.readable().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Signals its process group, which exists until the program is reaped.
    pub(super) fn signal_group(&self, signal: Signal) {
        if self.child.is_some()
            && let Err(error) = kill_process_group(self.group, signal)
        {
            tracing::debug!(group = %self.group, ?signal, %error, "no process of the group took the signal");
        }
    }

    /// Reaps the exited program.
    pub(super) fn reap(mut self) -> io::Result<ExitStatus> {
        match self.child.take() {
            // It has exited, so this does not block.
            Some(mut child) => child.wait(),
            None => Ok(ExitStatus::from_raw(0)),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take()
            && !matches!(child.try_wait(), Ok(Some(_)))
        {
            let reaper = std::thread::Builder::new().name("bcd-reap".into());
            if let Err(error) = reaper.spawn(move || child.wait()) {
                tracing::warn!(pid = %self.group, %error, "a program stays unreaped until this daemon ends");
            }
        }
    }
}

/// Watches a pidfd: it becomes readable at the exit.
#[allow(unsafe_code, reason = "tokio asks for a promise about the descriptor")]
fn register(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the OwnedFd is open, is given away here, and always names the same descriptor.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

/// Who the program runs as: looked up before the fork, since the name service may take locks and memory.
#[derive(Debug)]
struct Switch {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Switch {
    /// None: the daemon already is that user, and keeps its groups.
    fn to(name: &str) -> Result<Option<Self>, SpawnError> {
        let failed = |what: String| move |errno: io::Error| SpawnError::NotStarted { what, errno };
        let no_user = || format!("cannot look up the user {name:?} on this host");
        let user = User::from_name(name)
            .map_err(io::Error::from)
            .and_then(|user| user.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT)))
            .map_err(failed(no_user()))?;
        if user.uid == Uid::effective() {
            return Ok(None);
        }
        let groups = nix::unistd::getgrouplist(&c_string(name)?, user.gid)
            .map_err(|errno| failed(format!("cannot look up the groups of {name:?}"))(errno.into()))?;
        Ok(Some(Self { uid: user.uid, gid: user.gid, groups }))
    }
}

/// The daemon may be spared by the OOM killer; its programs must not inherit that.
fn lowered_oom_score() -> bool {
    std::fs::read_to_string("/proc/self/oom_score_adj")
        .ok()
        .and_then(|text| text.trim().parse::<i32>().ok())
        .is_some_and(|score| score < 0)
}

/// What the child does between fork and exec.
#[derive(Debug)]
struct Setup {
    user: Option<Switch>,
    cwd: CString,
    oom_score_adj: bool,
}

#[allow(unsafe_code, reason = "code between fork and exec is unsafe to hand over")]
fn before_exec(command: &mut Command, setup: Setup) {
    // SAFETY: `run` makes raw system calls alone: no memory is allocated or freed, no lock is taken.
    unsafe {
        command.pre_exec(move || setup.run());
    }
}

impl Setup {
    /// In the child, where only async-signal-safe calls are allowed. Working directory last, so that the user's own
    /// rights decide about it.
    #[allow(unsafe_code, reason = "raw system calls")]
    fn run(&self) -> io::Result<()> {
        nix::unistd::setsid()?;
        for signal in 1..=64 {
            // SAFETY: no handler is installed; numbers that cannot be set (KILL, STOP, the C library's) fail harmlessly.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        nix::sys::signal::SigSet::empty().thread_set_mask()?;
        if self.oom_score_adj {
            reset_oom_score();
        }
        nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
        // SAFETY: marks descriptors, closes none: the standard library's own pipe for this very error stays usable.
        let marked = unsafe {
            libc::syscall(libc::SYS_close_range, 3_u32, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC)
        };
        if marked != 0 {
            return Err(io::Error::last_os_error());
        }
        if let Some(user) = &self.user {
            nix::unistd::setgroups(&user.groups)?;
            nix::unistd::setresgid(user.gid, user.gid, user.gid)?;
            nix::unistd::setresuid(user.uid, user.uid, user.uid)?;
        }
        nix::unistd::chdir(self.cwd.as_c_str())?;
        Ok(())
    }
}

/// Failing is no reason not to run the program: it is then only spared longer.
fn reset_oom_score() {
    if let Ok(file) = nix::fcntl::open(
        c"/proc/self/oom_score_adj",
        nix::fcntl::OFlag::O_WRONLY,
        nix::sys::stat::Mode::empty(),
    ) {
        let _ = nix::unistd::write(&file, b"0");
    }
}
