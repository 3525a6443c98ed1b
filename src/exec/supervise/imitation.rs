//! Ends of programs that exist in a simulation alone, told in the words of the real ones.

use std::time::Duration;

use super::end::{Cause, Last, Status, Streams, Why, ended};
use super::job::Job;
use super::{grace, time_limit};
use crate::journal::begun::Record;
use crate::model::Outcome;
use crate::model::limits::STREAM_BYTES;

/// How such a program ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By itself, with this exit status.
    Exited(i32),
    /// By a cancellation, which its first signal carries out.
    Cancelled,
    /// At its time limit.
    TimeLimit,
}

/// SIGTERM.
const TERM: i32 = 15;

/// The outcome of a program that ran for so long.
pub fn outcome(job: &Job, begun: &Record, end: End, ran: Duration) -> Outcome {
    let told = |why| (Cause::Told(why, Last::Term), Status { code: None, signal: Some(TERM) });
    let (cause, status) = match end {
        End::Exited(code) => (Cause::Itself, Status { code: Some(code), signal: None }),
        End::Cancelled => told(Why::Cancelled),
        End::TimeLimit => told(Why::TimeLimit),
    };
    let limits = (time_limit(&job.args).as_secs(), grace(&job.args).as_secs());
    let end = ended(cause, Some(status), limits, Streams::new(STREAM_BYTES));
    end.into_outcome(begun.attempt, begun.started, begun.started.map(|at| at.plus(ran)), ran)
}

/// How long such a program may run.
pub fn limit(job: &Job) -> Duration {
    time_limit(&job.args)
}
