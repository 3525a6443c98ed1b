//! Starting one program.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nix::libc;
use nix::unistd::{Gid, Uid, User};
use rustix::process::Pid;

use crate::exec::mark::{self, Mark};
use crate::model::ExecArgs;

/// Searched for a program that is named without a path, and given to the program.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why there is no program: nothing was done.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {errno}")]
pub(super) struct SpawnError {
    /// The thing and its place.
    what: String,
    /// The kernel's word, with its number; shown by the message, so it is no `source`.
    errno: io::Error,
}

/// A running program, this process's child.
#[derive(Debug)]
pub(super) struct Program {
    /// Its pid, and its process group's id.
    pub(super) pid: Pid,
    /// Its standard input, when it has bytes for it.
    pub(super) stdin: Option<OwnedFd>,
    /// Its standard output.
    pub(super) stdout: Option<OwnedFd>,
    /// Its standard error.
    pub(super) stderr: Option<OwnedFd>,
}

/// Starts the program within control groups, named by their open `cgroup.procs`. Blocks (name service, fork, exec).
pub(super) fn spawn(args: &ExecArgs, mark: &Mark, groups: Vec<File>) -> Result<Program, SpawnError> {
    let user = args.user.as_deref().map(Switch::to).transpose()?.flatten();
    let cwd = args.cwd.as_deref().unwrap_or("/");
    let mut command = Command::new(&args.argv[0]);
    command.args(&args.argv[1..]).env_clear().env("PATH", PATH).envs(&args.env.0);
    command.env(mark::VARIABLE, mark.value());
    let stdin = if args.stdin_base64.is_empty() { Stdio::null() } else { Stdio::piped() };
    command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
    let setup = Setup { user, cwd: c_string(cwd)?, oom_score_adj: lowered_oom_score(), groups };
    before_exec(&mut command, setup);
    let mut child = command.spawn().map_err(|errno| SpawnError {
        what: format!("cannot start {:?} in {cwd}{}", args.argv[0], as_user(args.user.as_deref())),
        errno,
    })?;
    Ok(Program {
        pid: Pid::from_child(&child),
        stdin: child.stdin.take().map(OwnedFd::from),
        stdout: child.stdout.take().map(OwnedFd::from),
        stderr: child.stderr.take().map(OwnedFd::from),
    })
}

fn as_user(user: Option<&str>) -> String {
    user.map(|user| format!(" as {user}")).unwrap_or_default()
}

fn c_string(text: &str) -> Result<CString, SpawnError> {
    CString::new(text)
        .map_err(|error| SpawnError { what: format!("{text:?} holds a NUL"), errno: error.into() })
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
        let failed = |what: String| move |errno: io::Error| SpawnError { what, errno };
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
    groups: Vec<File>,
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
        for group in &self.groups {
            // SAFETY: the descriptor is open and two bytes can be read from the literal; 0 means this process.
            if unsafe { libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
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
