//! One daemon a state directory: a lock that dies with its holder, and the holder's pid for the message.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::libc;
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::error::OpenError;

/// The right to a state directory's journal. Held until it is dropped. flock(2) and not fcntl(2): the latter is lost when any descriptor of the file is closed.
#[derive(Debug)]
#[must_use = "dropping it gives the journal back"]
pub struct Lock {
    _file: Flock<File>,
}

/// A holder that has just taken the lock and not yet written its pid, or a dead one's pid that it has not replaced, is
/// waited for in so many of these steps.
const STARTS: u32 = 25;

/// A journal that this very process is still closing (a simulated agent that starts again) is waited for this long.
const OWN_CLOSE: (u32, Duration) = (200, Duration::from_millis(10));

/// Takes the lock of the journal in a state directory, whether or not there is a journal: no daemon has it meanwhile.
/// Blocks.
///
/// # Errors
/// [`OpenError::Held`] while a daemon has it; the file system's.
pub fn claim(state: &Path) -> Result<Lock, OpenError> {
    Lock::take(state, &state.join("journal.db"))
}

impl Lock {
    /// Takes the lock of a state directory; `journal` is named when somebody else has it.
    pub(super) fn take(state: &Path, journal: &Path) -> Result<Self, OpenError> {
        let path = state.join("journal.lock");
        let failed = |action| {
            let path = path.clone();
            move |source| OpenError::Io { action, path, source }
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(&path)
            .map_err(failed("open"))?;
        for tried in 0..=OWN_CLOSE.0 {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(mut locked) => {
                    // The lock holds without it; only a message would be poorer.
                    if let Err(error) = write_pid(&mut locked) {
                        tracing::warn!(path = %path.display(), %error, "the pid cannot be written");
                    }
                    return Ok(Self { _file: locked });
                }
                Err((back, Errno::EWOULDBLOCK)) => file = back,
                Err((_, errno)) => return Err(failed("lock")(errno.into())),
            }
            let holder = read_pid(&mut file);
            if holder != std::process::id() && (tried >= STARTS || lives(holder)) {
                break;
            }
            std::thread::sleep(OWN_CLOSE.1);
        }
        Err(OpenError::Held { path: journal.to_owned(), pid: read_pid(&mut file) })
    }
}

/// Whether there is a process of that id, whosever it is.
fn lives(pid: u32) -> bool {
    let pid = i32::try_from(pid).unwrap_or(0);
    pid > 0 && !matches!(kill(Pid::from_raw(pid), None), Err(Errno::ESRCH))
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

fn read_pid(file: &mut File) -> u32 {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.take(16).read_to_string(&mut text));
    read.ok().and_then(|_| text.trim().parse().ok()).unwrap_or(0)
}
