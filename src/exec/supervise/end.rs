//! How the end of a program is told.

use serde::Serialize;

use super::output::{Capture, Stream};
use crate::exec::kinds::Ended;
use crate::model::{Effect, Reason, Terminal};

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

/// What the kernel says of a program's end; one of the two is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Status {
    /// Exit status.
    pub(super) code: Option<i32>,
    /// The signal that ended it.
    pub(super) signal: Option<i32>,
}

/// Why the program came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cause {
    Itself,
    Told(Why, Last),
}

/// Who told it to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    TimeLimit,
    Cancelled,
    /// The machine goes down, or an operator ends the supervisor.
    Shutdown,
}

/// The last signal that it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Last {
    Term,
    Kill,
}

/// Both streams of a program.
pub(super) struct Streams {
    pub(super) out: Capture,
    pub(super) err: Capture,
}

impl Streams {
    pub(super) fn new(limit: usize) -> Self {
        Self { out: Capture::new(limit), err: Capture::new(limit) }
    }

    fn output(self, status: Option<Status>) -> Vec<u8> {
        let output = Output {
            exit_status: status.and_then(|status| status.code),
            signal: status.and_then(|status| status.signal),
            stdout: self.out.into_stream(),
            stderr: self.err.into_stream(),
        };
        // Numbers and base64 always have a form in JSON.
        serde_json::to_vec(&output).unwrap_or_default()
    }
}

/// Bytes of an output at most, where so many are kept of each stream: base64 of a head and a tail, twice, and the keys,
/// numbers and digests beside them.
pub(super) const fn most_output(limit: usize) -> usize {
    2 * 4 * (limit / 3 + 2) + 1024
}

/// Nothing was done.
pub(super) fn not_started(message: String, streams: Streams) -> Ended {
    Ended { effect: Effect::None, ..failed(Reason::CouldNotStart, message, None, streams) }
}

fn failed(reason: Reason, message: String, status: Option<Status>, streams: Streams) -> Ended {
    Ended {
        state: Terminal::Failed,
        reason: Some(reason),
        message,
        effect: Effect::Unknown,
        output: streams.output(status),
    }
}

/// Whether the program says that it did what it was asked to.
pub(super) fn is_success(status: Option<Status>) -> bool {
    status.is_some_and(|status| status.code == Some(0))
}

/// A program that the want of memory has ended, or one of its processes: by its limit, if it has one.
pub(super) fn out_of_memory(
    limit: Option<u64>,
    kills: u64,
    status: Option<Status>,
    streams: Streams,
) -> Ended {
    let why = match limit {
        Some(bytes) => format!("the program ran into its memory limit of {bytes} bytes"),
        None => "the host, or a group around bcd, ran out of memory".to_owned(),
    };
    let message = format!("{why}, and the kernel killed {kills} of the program's processes");
    failed(Reason::OutOfMemory, message, status, streams)
}

/// A program that ran; `limit_s` and `grace_s` are what it was given.
pub(super) fn ended(
    cause: Cause,
    status: Option<Status>,
    (limit_s, grace_s): (u64, u64),
    streams: Streams,
) -> Ended {
    let Cause::Told(why, last) = cause else { return by_itself(status, streams) };
    let how = match last {
        Last::Term => "ended after SIGTERM".to_owned(),
        Last::Kill => format!("ended by SIGKILL, {grace_s} s after SIGTERM"),
    };
    let (state, reason, asked) = match why {
        Why::TimeLimit => {
            (Terminal::Failed, Reason::TimeLimit, format!("ran into its time limit of {limit_s} s"))
        }
        Why::Cancelled => (Terminal::Cancelled, Reason::Cancelled, "was cancelled".to_owned()),
        Why::Shutdown => {
            (Terminal::Failed, Reason::Signal, "was told to end by its host's shutdown".to_owned())
        }
    };
    let message = format!("the program {asked} and {how}");
    Ended { state, ..failed(reason, message, status, streams) }
}

/// A signal that is not ours leaves open how far the program came.
fn by_itself(status: Option<Status>, streams: Streams) -> Ended {
    match status {
        Some(Status { code: Some(0), .. }) => Ended {
            state: Terminal::Succeeded,
            reason: None,
            message: String::new(),
            effect: Effect::Complete,
            output: streams.output(status),
        },
        Some(Status { code: Some(code), .. }) => {
            let message = format!("the program ended with exit status {code}");
            Ended { effect: Effect::Complete, ..failed(Reason::ExitStatus, message, status, streams) }
        }
        Some(Status { signal, .. }) => {
            let message = format!("the program was ended by signal {}", signal.unwrap_or_default());
            failed(Reason::Signal, message, status, streams)
        }
        None => failed(Reason::Interrupted, "the program's status could not be read".into(), None, streams),
    }
}
