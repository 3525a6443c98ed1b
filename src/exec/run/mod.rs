//! `node.exec`: one program from its start to the end of everything that it started.
//!
//! A program ends by itself, at its time limit, or by a cancellation; the last two send SIGTERM to its group, wait the
//! grace, and send SIGKILL. The command ends when the program has exited and its output is closed, or [`LINGER`] later:
//! then whatever still stands in its group or carries its mark is killed, so that a daemonised grandchild neither holds
//! the command open nor outlives it. The program is reaped last.
//!
//! One task drives all of it; the two output streams, standard input and the exit are futures within that task.

mod output;
mod spawn;

use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::Duration;

use rustix::process::Signal;
use serde::Serialize;
use tokio::io::AsyncWriteExt as _;
use tokio::net::unix::pipe;
use tokio::time;

use self::output::{Capture, Stream};
use self::spawn::{Program, SpawnError};
use super::cancel::Cancelled;
use super::kinds::Ended;
use super::mark::{self, Mark};
use crate::failpoint;
use crate::model::limits::STREAM_BYTES;
use crate::model::{Effect, ExecArgs, Kind, Reason, Terminal};

/// After the exit: how long output that somebody holds open is waited for.
const LINGER: Duration = Duration::from_secs(2);
/// After everything was killed: how long what still stands in the pipes is read.
const LAST_READ: Duration = Duration::from_millis(500);
/// Between SIGTERM and SIGKILL when the arguments say nothing.
const GRACE: Duration = Duration::from_secs(10);

/// The output of `node.exec`.
#[derive(Debug, Serialize)]
struct Output {
    /// Exit status; null where there is none.
    exit_status: Option<i32>,
    /// The signal that ended it; null where none did.
    signal: Option<i32>,
    stdout: Stream,
    stderr: Stream,
}

/// Why the program came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    Itself,
    Told(Why, Last),
}

/// Who told it to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    TimeLimit,
    Cancelled,
}

/// The last signal that it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    Term,
    Kill,
}

/// Runs a program to its end. Dropping the future ends no program.
pub(super) async fn run(args: &ExecArgs, mark: &Mark, cancelled: &mut Cancelled) -> Ended {
    let limit =
        args.output_limit.map_or(STREAM_BYTES, |limit| usize::try_from(limit).unwrap_or(STREAM_BYTES));
    let (mut out, mut err) = (Capture::new(limit), Capture::new(limit));
    let stdin = match args.stdin() {
        Ok(bytes) => bytes,
        Err(error) => return not_started(Effect::None, error.to_string(), out, err),
    };
    let mut program = match start(args, mark).await {
        Ok(program) => program,
        Err(error) => {
            let effect = if matches!(error, SpawnError::Lost(_)) { Effect::Unknown } else { Effect::None };
            return not_started(effect, error.to_string(), out, err);
        }
    };
    failpoint::hit(failpoint::EFFECT_STARTED);

    let pipes = (program.stdin.take(), program.stdout.take(), program.stderr.take());
    let io = async {
        tokio::join!(feed(pipes.0, &stdin), drain(&mut out, pipes.1), drain(&mut err, pipes.2));
    };
    let cause = {
        let mut io = std::pin::pin!(io);
        let mut life = std::pin::pin!(until_exit(&program, args, mark, cancelled));
        let mut closed = false;
        let cause = tokio::select! {
            cause = &mut life => cause,
            () = &mut io => {
                closed = true;
                life.await
            }
        };
        closed = closed || time::timeout(LINGER, io.as_mut()).await.is_ok();
        program.signal_group(Signal::KILL);
        sweep(mark).await;
        if !closed {
            let _ = time::timeout(LAST_READ, io).await;
        }
        cause
    };
    match program.reap() {
        Ok(status) => ended(args, cause, status, out, err),
        Err(error) => {
            let message = format!("the program's status could not be read: {error}");
            Ended { effect: Effect::Unknown, ..failed(Reason::Interrupted, message, None, out, err) }
        }
    }
}

/// Starting waits for the name service, the fork and the exec: not on a worker thread.
async fn start(args: &ExecArgs, mark: &Mark) -> Result<Program, SpawnError> {
    let (args, mark) = (args.clone(), mark.clone());
    match tokio::task::spawn_blocking(move || spawn::spawn(&args, &mark)).await {
        Ok(started) => started,
        Err(error) => Err(SpawnError::Lost(std::io::Error::other(error))),
    }
}

async fn feed(pipe: Option<pipe::Sender>, bytes: &[u8]) {
    if let Some(mut pipe) = pipe {
        // A program may close its input early; that is its affair.
        let _ = pipe.write_all(bytes).await;
    }
}

async fn drain(capture: &mut Capture, pipe: Option<pipe::Receiver>) {
    if let Some(pipe) = pipe {
        capture.drain(pipe).await;
    }
}

/// Waits for the exit, and brings it about where the time limit or a cancellation asks for it.
async fn until_exit(program: &Program, args: &ExecArgs, mark: &Mark, cancelled: &mut Cancelled) -> Cause {
    let why = tokio::select! {
        biased;
        () = program.exited() => return Cause::Itself,
        () = cancelled.requested() => Why::Cancelled,
        () = time::sleep(time_limit(args)) => Why::TimeLimit,
    };
    program.signal_group(Signal::TERM);
    // A stopped process takes SIGTERM only once it goes on.
    program.signal_group(Signal::CONT);
    tokio::select! {
        biased;
        () = program.exited() => Cause::Told(why, Last::Term),
        () = time::sleep(grace(args)) => {
            program.signal_group(Signal::KILL);
            sweep(mark).await;
            program.exited().await;
            Cause::Told(why, Last::Kill)
        }
    }
}

fn time_limit(args: &ExecArgs) -> Duration {
    args.time_limit_s.map_or(Kind::NodeExec.properties().default_run_time, Duration::from_secs)
}

fn grace(args: &ExecArgs) -> Duration {
    args.grace_s.map_or(GRACE, Duration::from_secs)
}

async fn sweep(mark: &Mark) {
    let wanted = mark.clone();
    let swept = match tokio::task::spawn_blocking(move || mark::sweep(&wanted)).await {
        Ok(swept) => swept,
        Err(error) => Err(std::io::Error::other(error)),
    };
    match swept {
        Ok(swept) if swept.remain => {
            tracing::error!(mark = mark.value(), "a process of this command does not go away on SIGKILL");
        }
        Ok(_) => {}
        Err(error) => {
            tracing::error!(mark = mark.value(), %error, "cannot look for processes of this command in /proc");
        }
    }
}

fn not_started(effect: Effect, message: String, out: Capture, err: Capture) -> Ended {
    Ended { effect, ..failed(Reason::CouldNotStart, message, None, out, err) }
}

fn failed(reason: Reason, message: String, status: Option<ExitStatus>, out: Capture, err: Capture) -> Ended {
    Ended {
        state: Terminal::Failed,
        reason: Some(reason),
        message,
        effect: Effect::Unknown,
        output: output(status, out, err),
    }
}

fn output(status: Option<ExitStatus>, out: Capture, err: Capture) -> Vec<u8> {
    let output = Output {
        exit_status: status.and_then(|status| status.code()),
        signal: status.and_then(|status| status.signal()),
        stdout: out.into_stream(),
        stderr: err.into_stream(),
    };
    // Numbers and base64 always have a form in JSON.
    serde_json::to_vec(&output).unwrap_or_default()
}

fn ended(args: &ExecArgs, cause: Cause, status: ExitStatus, out: Capture, err: Capture) -> Ended {
    match cause {
        Cause::Itself => by_itself(status, out, err),
        Cause::Told(why, last) => {
            let how = match last {
                Last::Term => "ended after SIGTERM".to_owned(),
                Last::Kill => format!("ended by SIGKILL, {} s after SIGTERM", grace(args).as_secs()),
            };
            let (state, reason, asked) = match why {
                Why::TimeLimit => {
                    let asked = format!("ran into its time limit of {} s", time_limit(args).as_secs());
                    (Terminal::Failed, Reason::TimeLimit, asked)
                }
                Why::Cancelled => (Terminal::Cancelled, Reason::Cancelled, "was cancelled".to_owned()),
            };
            let message = format!("the program {asked} and {how}");
            Ended { state, ..failed(reason, message, Some(status), out, err) }
        }
    }
}

/// A signal that is not ours leaves open how far the program came.
fn by_itself(status: ExitStatus, out: Capture, err: Capture) -> Ended {
    match (status.code(), status.signal()) {
        (Some(0), _) => Ended {
            state: Terminal::Succeeded,
            reason: None,
            message: String::new(),
            effect: Effect::Complete,
            output: output(Some(status), out, err),
        },
        (Some(code), _) => {
            let message = format!("the program ended with exit status {code}");
            Ended { effect: Effect::Complete, ..failed(Reason::ExitStatus, message, Some(status), out, err) }
        }
        (None, signal) => {
            let message = format!("the program was ended by signal {}", signal.unwrap_or_default());
            failed(Reason::Signal, message, Some(status), out, err)
        }
    }
}

#[cfg(test)]
mod tests;
