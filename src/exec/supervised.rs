//! The daemon's side of a supervisor: starting one, waiting for its end, and reading what it wrote.
//!
//! A handle ends nothing when it is dropped: the supervisor goes on, and whoever reads the state directory next finds
//! it by its record.

use std::collections::BTreeSet;
use std::future::ready;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rustix::fs::FlockOperation;
use rustix::process::pidfd_send_signal;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time;

use super::cancel::Cancelled;
use super::launch::Launcher;
use super::leftovers;
use super::mark::{self, Marked};
use super::process;
use super::programs::{Program, Programs, Settled};
use super::supervise::CANCEL;
use super::supervise::job::{self, Answer, Job};
use crate::blocking;
use crate::journal::begun::{Record, Supervisor};
use crate::journal::{self, Ended, Locked, OpenError, Trouble};
use crate::model::{BootId, CommandId, JournalId, Outcome};

/// Longest wait for a record: what has not been synced by then is no disk to start on.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two attempts to watch a supervisor, or to read an outcome.
const AGAIN: Duration = Duration::from_secs(1);

/// The supervisor of a program, by its record.
#[derive(Debug)]
pub(super) struct Supervised {
    state: PathBuf,
    begun: Record,
    boot_id: BootId,
    _child: Option<Reap>,
}

/// Runs programs on this machine, each under a process of its own.
#[derive(Debug, Clone)]
pub struct Supervisors {
    program: PathBuf,
}

impl Supervisors {
    /// This very program, though its file was replaced since it started: a supervisor is of its daemon's release.
    pub fn of_this_program() -> Self {
        Self::new("/proc/self/exe".into())
    }

    /// `program` is `bcd`, which is started again as each program's supervisor.
    pub fn new(program: PathBuf) -> Self {
        Self { program }
    }
}

impl Programs for Supervisors {
    fn settle(&self, locked: &Locked, state: &Path, boot_id: &BootId) -> Result<Settled, OpenError> {
        leftovers::settle(locked, state, boot_id)
    }

    fn lives(&self, supervisor: &Supervisor, boot_id: &BootId) -> bool {
        process::may_live(supervisor, boot_id)
    }

    fn end(&self, begun: &Record) {
        leftovers::end_one(begun);
    }

    fn start(&self, job: Job) -> BoxFuture<'static, Result<Box<dyn Program>, StartError>> {
        let program = self.program.clone();
        async move { Ok(Box::new(start(&program, job).await?) as Box<dyn Program>) }.boxed()
    }

    fn find(&self, state: PathBuf, begun: Record, boot_id: &BootId) -> Box<dyn Program> {
        Box::new(Supervised::find(state, begun, boot_id))
    }

    fn running(&self, journals: &BTreeSet<JournalId>) -> io::Result<Vec<Marked>> {
        mark::find(journals)
    }
}

impl Program for Supervised {
    fn ended<'a>(self: Box<Self>, cancelled: &'a mut Cancelled) -> BoxFuture<'a, Outcome> {
        (*self).ended(cancelled).boxed()
    }
}

/// Why no program was started by this call.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// There is a record of this attempt: it must not start again.
    #[error("the command began before")]
    Began,
    /// Nothing was started; it may be tried again.
    #[error("the supervisor cannot be started: {detail}")]
    Failed {
        /// What did not work.
        detail: String,
        /// The kernel's word about a file that could not be written, where that was it.
        errno: Option<i32>,
    },
}

impl StartError {
    /// Nothing was started, and the kernel said nothing of a file.
    pub fn failed(detail: impl Into<String>) -> Self {
        Self::Failed { detail: detail.into(), errno: None }
    }

    /// What an operator has to mend before a record can be written again.
    pub(super) fn trouble(&self) -> Option<Trouble> {
        match self {
            Self::Failed { detail, errno: Some(errno) } => {
                let why = journal::why(nix::errno::Errno::from_raw(*errno));
                Some(Trouble { why, detail: detail.clone() })
            }
            Self::Failed { errno: None, .. } | Self::Began => None,
        }
    }
}

/// Starts a supervisor and waits until its record is durable.
pub(super) async fn start(program: &Path, job: Job) -> Result<Supervised, StartError> {
    let (state, boot_id, mut begun) = (job.state.clone(), job.boot_id.clone(), job.begun.clone());
    let program = program.to_owned();
    let launched = blocking::run(move || launch(&program, &job)).await;
    let (child, supervisor) = launched.unwrap_or_else(|error| match error.try_into_panic() {
        Ok(panic) => std::panic::resume_unwind(panic),
        Err(ends) => Err(StartError::failed(ends.to_string())),
    })?;
    begun.supervisor = Some(supervisor);
    Ok(Supervised { state, begun, boot_id, _child: Some(child) })
}

/// Blocks.
fn launch(program: &Path, job: &Job) -> Result<(Reap, Supervisor), StartError> {
    let launcher = Launcher::for_this_process();
    let (child, answer) =
        hand_over(launcher, program, job).map_err(|error| StartError::failed(error.to_string()))?;
    match answer {
        Ok(Answer::Durable(supervisor)) => {
            if launcher == Launcher::Systemd {
                // The client, which holds the socket and the lock open: its unit goes on without it.
                child.kill();
                return Ok((Reap(None), supervisor));
            }
            return Ok((child, supervisor));
        }
        Ok(Answer::Exists) => return Err(StartError::Began),
        Ok(Answer::Failed { detail, errno }) => return Err(StartError::Failed { detail, errno }),
        Err(_) => {}
    }
    // It died, or hangs on its disk. Ended for certain, it has left a record or has started nothing.
    child.kill();
    launcher.end(&job.begun);
    match job.begun.exists(&job.state) {
        Ok(false) => Err(StartError::failed("it ended before it had made its record")),
        Ok(true) | Err(_) => Err(StartError::Began),
    }
}

fn hand_over(launcher: Launcher, program: &Path, job: &Job) -> io::Result<(Reap, io::Result<Answer>)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(PATIENCE))?;
    ours.set_write_timeout(Some(PATIENCE))?;
    // The lock is the supervisor's standard output until its record is durable: a daemon that starts meanwhile waits for
    // it, and so never settles a command whose program is about to start (leftovers.rs).
    let lock = leftovers::records(&job.state)?;
    rustix::fs::flock(&lock, FlockOperation::LockShared)?;
    let child = launcher
        .command(program, job)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(lock))
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", program.display())))?;
    let child = Reap(Some(child));
    let answer = job::send(&ours, job).and_then(|()| job::receive(&ours));
    Ok((child, answer))
}

impl Supervised {
    /// The supervisor that a record names.
    pub(super) fn find(state: PathBuf, begun: Record, boot_id: &BootId) -> Self {
        Self { state, begun, boot_id: boot_id.clone(), _child: None }
    }

    /// The way to its end; absent when it is gone. A lack of descriptors or memory passes, and says nothing of it.
    async fn watch(&self) -> Option<AsyncFd<OwnedFd>> {
        let supervisor = self.begun.supervisor.as_ref()?;
        let look = || process::open(supervisor, &self.boot_id)?.map(register).transpose();
        until_told(&self.begun.id, "its supervisor cannot be watched", || ready(look())).await
    }

    /// Waits for the supervisor's end and reads the outcome. A cancellation is passed on; the outcome says what came of
    /// it.
    pub(super) async fn ended(self, cancelled: &mut Cancelled) -> Outcome {
        if let Some(exit) = self.watch().await {
            tokio::select! {
                biased;
                () = exited(&exit) => {}
                () = cancelled.requested() => {
                    // One that has just ended takes no signal, and needs none.
                    if let Err(error) = pidfd_send_signal(exit.get_ref(), CANCEL) {
                        tracing::debug!(id = %self.begun.id, %error, "the supervisor took no signal");
                    }
                    exited(&exit).await;
                }
            }
        }
        self.outcome().await
    }

    async fn outcome(&self) -> Outcome {
        let look = || {
            let (state, begun) = (self.state.clone(), self.begun.clone());
            blocking::run(move || read(&state, &begun)).map(|read| read.map_err(io::Error::other).flatten())
        };
        until_told(&self.begun.id, "its outcome cannot be read", look).await
    }
}

/// Looks until the look tells something: an error tells nothing of a program.
async fn until_told<T, F: Future<Output = io::Result<T>>>(
    id: &CommandId,
    what: &str,
    mut look: impl FnMut() -> F,
) -> T {
    loop {
        match look().await {
            Ok(told) => return told,
            Err(error) => tracing::warn!(%id, %error, "{what}; tried again"),
        }
        time::sleep(AGAIN).await;
    }
}

/// The outcome of a supervisor that is gone; without one, what it started is ended. Blocks.
pub(super) fn read(state: &Path, begun: &Record) -> io::Result<Outcome> {
    if let Some(outcome) = Ended::read(state, begun)? {
        return Ok(outcome);
    }
    leftovers::end_one(begun);
    Ended::give_back(state, begun);
    Ok(Outcome {
        message: "the program's supervisor ended without telling its outcome; what the program had started was ended"
            .into(),
        ..Outcome::interrupted(begun.attempt, begun.started)
    })
}

/// A pidfd becomes readable once, at the exit, and stays so.
async fn exited(exit: &AsyncFd<OwnedFd>) {
    // The runtime going away is the only error, and then this task goes with it.
    if exit.readable().await.is_err() {
        std::future::pending::<()>().await;
    }
}

#[allow(unsafe_code, reason = "tokio asks for a promise about the descriptor")]
fn register(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the OwnedFd is open, is given away here, and always names the same descriptor.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

/// A child that is reaped when it is dropped, by a thread where it has not ended yet: dropping ends no process.
#[derive(Debug)]
struct Reap(Option<Child>);

impl Reap {
    fn kill(mut self) {
        if let Some(mut child) = self.0.take() {
            // An error says that it has ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Reap {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take()
            && !matches!(child.try_wait(), Ok(Some(_)))
        {
            let reaper = std::thread::Builder::new().name("bcd-reap".into());
            if let Err(error) = reaper.spawn(move || child.wait()) {
                tracing::warn!(%error, "a supervisor stays unreaped until this daemon ends");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_look_that_lacks_a_descriptor_is_made_again_until_it_tells_something() {
        let mut looks = 0;
        let look = || {
            looks += 1;
            ready(if looks < 3 { Err(rustix::io::Errno::MFILE.into()) } else { Ok(looks) })
        };
        let id = CommandId::new("c-1").expect("an id");
        assert_eq!(until_told(&id, "it cannot be watched", look).await, 3);
    }
}
