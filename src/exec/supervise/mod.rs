//! The supervisor of one program: a process of its own (`bcd supervise`), single-threaded, that outlives the daemon.
//!
//! ```text
//! job over standard input ─▶ room for the outcome ─▶ begun record (O_EXCL, synced) ─▶ answer ─▶ program …
//!     ─▶ all of it gone ─▶ outcome record
//! ```
//!
//! The order is what is promised: nothing starts before the record is durable, a record that exists starts nothing, and
//! the supervisor ends only when its outcome is durable and nothing that it started is left. The daemon hears nothing
//! of the end but the end of this process: the outcome record is the truth, for this daemon and for the next one.

mod end;
mod follow;
pub(super) mod group;
#[cfg(feature = "fakehw")]
pub mod imitation;
pub mod job;
mod output;
mod spawn;

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use nix::libc;
use rustix::fs::FlockOperation;

use self::end::{Cause, Streams};
pub(super) use self::follow::CANCEL;
use self::follow::{Signals, Terms, follow};
use self::group::Plan;
use self::job::{Answer, Job};
use super::kinds::Ended as End;
use super::process;
use crate::clock::{Clock as _, SystemClock};
use crate::failpoint;
use crate::journal::begun::Record;
use crate::journal::{BegunError, Ended, OutcomeRoom, ReserveError};
use crate::model::limits::STREAM_BYTES;
use crate::model::{ExecArgs, Exit, Kind, Outcome};

/// Between SIGTERM and SIGKILL when the arguments say nothing.
const GRACE: Duration = Duration::from_secs(10);
/// Between two attempts to write the outcome: a disk that takes writes again is found soon.
const WRITE_AGAIN: Duration = Duration::from_secs(1);

/// The whole process.
pub fn main() -> Exit {
    match supervise() {
        Ok(()) => Exit::Done,
        Err(error) => {
            say(&error.to_string());
            Exit::Failed
        }
    }
}

/// The daemon's log, while somebody reads it.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "bcd supervise: {text}");
}

fn supervise() -> io::Result<()> {
    close_the_rest()?;
    let signals = Signals::block()?;
    // Away from the daemon's terminal and group; it fails where this process leads a session already.
    let _ = nix::unistd::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let job: Job = job::receive(io::stdin())?;
    failpoint::hit(failpoint::SUPERVISOR_STARTED);
    let plan = Plan::of(&job.mark(), &job.args);
    let (answer, begun) = begin(&job, &plan);
    // A daemon that is gone meanwhile needs no answer: the record is what the next one goes by.
    let _ = job::send(File::from(io::stdin().as_fd().try_clone_to_owned()?), &answer);
    let Some(begun) = begun else { return Ok(()) };
    let_go()?;
    let outcome = carry_out(&job, &begun, &plan, &signals);
    write(&Ended { begun, outcome }, &job);
    failpoint::hit(failpoint::OUTCOME);
    Ok(())
}

/// Whatever a library of the daemon left open without its being closed at exec.
#[allow(unsafe_code, reason = "no safe wrapper closes a range")]
fn close_the_rest() -> io::Result<()> {
    // SAFETY: nothing of this process has opened a descriptor above standard error yet.
    match unsafe { libc::syscall(libc::SYS_close_range, 3_u32, libc::c_uint::MAX, 0_u32) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes the begun record. Absent: nothing may start.
fn begin(job: &Job, plan: &Plan) -> (Answer, Option<Record>) {
    let Some(supervisor) = process::own(job.boot_id.clone(), plan.groups.clone()) else {
        return (Answer::Failed { detail: "cannot read /proc/self/stat".into(), errno: None }, None);
    };
    let begun = Record { supervisor: Some(supervisor.clone()), ..job.begun.clone() };
    // Before any room is made: that of a command which began before is its supervisor's, or given back.
    match begun.exists(&job.state) {
        Ok(false) => {}
        Ok(true) => return (Answer::Exists, None),
        Err(error) => return (failed(&error, error.raw_os_error()), None),
    }
    let room = match Ended::reserve(&job.state, &begun, end::most_output(output_limit(&job.args))) {
        Ok(room) => room,
        Err(ReserveError::Ended { .. }) => return (Answer::Exists, None),
        Err(error @ ReserveError::Io { .. }) => return (failed(&error, error.errno()), None),
    };
    let error = match begun.create(&job.state) {
        Ok(_) => return (Answer::Durable(supervisor), Some(begun)),
        Err(error) => error,
    };
    if room == OutcomeRoom::Made {
        Ended::give_back(&job.state, &begun);
    }
    match error {
        BegunError::AlreadyExists { .. } => (Answer::Exists, None),
        BegunError::Io { .. } => (failed(&error, error.errno()), None),
    }
}

fn failed(error: &dyn std::error::Error, errno: Option<i32>) -> Answer {
    let cause = error.source().map(|cause| format!(": {cause}"));
    Answer::Failed { detail: format!("{error}{}", cause.unwrap_or_default()), errno }
}

/// Gives back the socket, and the lock that tells the next daemon of a record under way.
fn let_go() -> io::Result<()> {
    // Closing alone does not: a PID 1 that started this process keeps what it was handed while the unit lives.
    rustix::fs::flock(io::stdout(), FlockOperation::Unlock)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(&null)?;
    Ok(())
}

fn carry_out(job: &Job, begun: &Record, plan: &Plan, signals: &Signals) -> Outcome {
    let from = SystemClock.boot();
    let end = run(job, plan, signals);
    if !group::end(&plan.groups) {
        say(&format!("the control groups {:?} do not become empty", plan.groups));
    }
    failpoint::hit(failpoint::PROGRAM_ENDED);
    let duration = SystemClock.boot().saturating_sub(from);
    end.into_outcome(begun.attempt, begun.started, begun.started.map(|at| at.plus(duration)), duration)
}

fn run(job: &Job, plan: &Plan, signals: &Signals) -> End {
    let args = &job.args;
    let mut streams = Streams::new(output_limit(args));
    let stdin = match args.stdin() {
        Ok(bytes) => bytes,
        Err(error) => return end::not_started(error.to_string(), streams),
    };
    let entries = match plan.make() {
        Ok(entries) => entries,
        Err(error) => return end::not_started(error, streams),
    };
    let program = match spawn::spawn(args, &job.mark(), entries) {
        Ok(program) => program,
        Err(error) => return end::not_started(error.to_string(), streams),
    };
    failpoint::hit(failpoint::PROGRAM_STARTED);
    let terms = Terms { limit: time_limit(args), grace: grace(args), stdin, groups: plan.groups.clone() };
    let (cause, status) = follow(program, &terms, signals, &mut streams);
    let oom_kills = plan.oom_kills();
    if let (Cause::Itself, 1.., false) = (cause, oom_kills, end::is_success(status)) {
        return end::out_of_memory(args.memory_bytes, oom_kills, status, streams);
    }
    end::ended(cause, status, (terms.limit.as_secs(), terms.grace.as_secs()), streams)
}

/// What is kept of each stream, bytes.
fn output_limit(args: &ExecArgs) -> usize {
    let asked = args.output_limit.and_then(|limit| usize::try_from(limit).ok());
    asked.unwrap_or(STREAM_BYTES).min(STREAM_BYTES)
}

/// What a program may take at most.
pub(super) fn time_limit(args: &ExecArgs) -> Duration {
    args.time_limit_s.map_or(Kind::NodeExec.properties().default_run_time, Duration::from_secs)
}

/// Between SIGTERM and SIGKILL.
pub(super) fn grace(args: &ExecArgs) -> Duration {
    args.grace_s.map_or(GRACE, Duration::from_secs)
}

/// Until it is written: its room was set aside, but a disk may be read-only or broken, and then the outcome waits in
/// memory. Without its state directory nobody will ever ask for it.
fn write(ended: &Ended, job: &Job) {
    let mut said = false;
    while let Err(error) = ended.write(&job.state) {
        if !std::mem::replace(&mut said, true) {
            say(&format!("the outcome of {} cannot be written, and is tried again: {error}", ended.begun.id));
        }
        if error.kind() == io::ErrorKind::NotFound && !job.state.exists() {
            return say(&format!("{} is gone, and the outcome with it", job.state.display()));
        }
        thread::sleep(WRITE_AGAIN);
    }
}

#[cfg(test)]
mod tests;
