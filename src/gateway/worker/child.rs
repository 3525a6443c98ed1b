//! A worker's process beside whoever needs one.

use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::Options;

/// A child process that serves a worker's directory. It ends with this process, however that ends, and when this is
/// dropped.
#[derive(Debug)]
pub struct Child(std::process::Child);

impl Child {
    /// Starts `bcd worker` of the program `exe`; what it has to say goes to `log`.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn start(exe: &Path, options: &Options, log: Stdio) -> io::Result<Self> {
        let child = Command::new(exe)
            .arg("worker")
            .arg("--state")
            .arg(&options.state)
            .args(["--trust-domain", &options.trust_domain])
            .args(["--certificate-life", &format!("{}ms", options.certificate_life.as_millis())])
            .args(["--rejoin-within", &format!("{}s", options.rejoin_within.as_secs())])
            // Nothing is ever written: the pipe ends with this process, and the worker with it.
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log)
            // Ctrl-C at the terminal is this process's to handle: it may still need the worker.
            .process_group(0)
            .spawn()?;
        Ok(Self(child))
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Its database bears a kill, as it bears any crash.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
