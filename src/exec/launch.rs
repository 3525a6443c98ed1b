//! How a supervisor is started so that what ends the daemon does not end it.
//!
//! Under systemd a service's processes are killed with it, whoever their parent is, and share its sandbox. There the
//! supervisor is a transient service of its own, which PID 1 starts. Everywhere else it is a child in a session of its
//! own.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::supervise;
use super::supervise::job::Job;
use crate::journal::begun::Record;

/// What the names of supervisors' units begin with.
const UNIT: &str = "bcd-exec-";
/// Beyond a program's own grace: how long its supervisor may take to write the outcome at a host's shutdown, seconds.
const STOP_S: u64 = 15;

/// Who starts the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Launcher {
    /// This process.
    Own,
    /// systemd, since this process is a service of it.
    Systemd,
}

impl Launcher {
    /// For a daemon that is the main process of a system service. An unprivileged one may start no services, and its
    /// programs end with its own.
    pub(super) fn for_this_process() -> Self {
        let starts_units = Path::new("/run/systemd/system").is_dir() && rustix::process::geteuid().is_root();
        let main = std::env::var("SYSTEMD_EXEC_PID").ok();
        match starts_units && is_main(main.as_deref(), std::process::id()) {
            true => Self::Systemd,
            false => Self::Own,
        }
    }

    /// The command that starts it; its standard input and output are the caller's to set.
    pub(super) fn command(self, program: &Path, job: &Job) -> Command {
        let mut command = match self {
            Self::Own => {
                let mut command = Command::new(program);
                command.arg0("bcd");
                command
            }
            Self::Systemd => systemd_run(program, job),
        };
        command.arg("supervise").current_dir("/");
        command
    }

    /// Ends a supervisor whose starter was killed already and that has not answered. Blocks.
    pub(super) fn end(self, begun: &Record) {
        if self == Self::Systemd {
            let kill = ["--quiet", "--signal=SIGKILL", "kill", &unit(begun)];
            for arguments in [&kill[..], &["--quiet", "stop", &unit(begun)]] {
                let status = Command::new("systemctl").args(arguments).stdin(Stdio::null()).status();
                tracing::debug!(?status, unit = unit(begun), "a supervisor that does not answer is ended");
            }
        }
    }
}

/// The socket and the lock are handed to the unit as its standard input and output; its log is the daemon's. PID 1 has
/// no `/proc/self` of ours, so the program is named through this process.
fn systemd_run(program: &Path, job: &Job) -> Command {
    let program = match program.strip_prefix("/proc/self") {
        Ok(rest) => Path::new("/proc").join(std::process::id().to_string()).join(rest),
        Err(_) => program.to_owned(),
    };
    let grace = supervise::grace(&job.args).as_secs();
    let mut command = Command::new("systemd-run");
    command
        .args(["--quiet", "--collect", "--pipe", "--service-type=exec", "--property=KillMode=mixed"])
        // Its control group is its own, so that it can give its program one with limits.
        .args(["--property=Delegate=yes", "--property=OOMPolicy=continue"])
        .arg(format!("--property=TimeoutStopSec={}", grace + STOP_S))
        .arg(format!("--description=bcd: supervisor of {}", job.begun.id))
        .arg(format!("--unit={}", unit(&job.begun)))
        .arg("--")
        .arg(program);
    command
}

/// An id has only characters that a unit's name may have.
fn unit(begun: &Record) -> String {
    format!("{UNIT}{}-{}.service", begun.id, begun.attempt)
}

/// Whether a control group is that of a unit which was started for one supervisor.
pub(super) fn is_own_unit(group: &Path) -> bool {
    let name = group.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with(UNIT) && name.ends_with(".service")
}

/// systemd (248 and later) tells the process that it starts its own pid; children inherit the variable, and are others.
fn is_main(told: Option<&str>, own: u32) -> bool {
    told.is_some_and(|told| told == own.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_systemd_started_is_its_services_main_one() {
        assert!(is_main(Some("7"), 7));
        assert!(!is_main(Some("6"), 7), "a child of a service, such as a test under a CI runner");
        assert!(!is_main(None, 7));
    }

    #[test]
    fn a_unit_is_named_from_command_and_attempt_and_known_again() {
        let group = Path::new("/sys/fs/cgroup/system.slice/bcd-exec-c-1-2.service");
        assert!(is_own_unit(group));
        assert!(!is_own_unit(Path::new("/sys/fs/cgroup/system.slice/bcd.service")));
    }
}
