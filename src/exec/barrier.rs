//! `inventory.barrier`: all that this host holds at one moment. A host is empty only when every list is known and
//! empty; a list that could not be looked at is null, and `known` says so.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::time::timeout;

use super::Shared;
use super::kinds::Ended;
use super::programs::{Marked, Programs};
use crate::blocking;
use crate::failpoint;
use crate::journal::{State, Unfinished, begun};
use crate::model::{BarrierId, CommandId, Effect, JournalId, Kind, NodeId, Reason, Terminal};

/// Entries of one list that are named; the rest is counted. Two lists of entries of at most 300 bytes stay below the
/// limit of a result.
const NAMED: usize = 400;

#[derive(Debug, Serialize)]
struct Answer<'a> {
    barrier_id: &'a BarrierId,
    /// Whether every list below is known.
    known: bool,
    assignments: List<Nothing>,
    instances: List<Nothing>,
    processes: List<Process>,
    commands: List<Line>,
    /// Highest number of the node's queue that came to this process. Null when it is not known that all up to it are
    /// answered.
    highest_seq: Option<u64>,
}

/// This build can hold none.
#[derive(Debug, Serialize)]
enum Nothing {}

#[derive(Debug, Serialize)]
struct List<T> {
    /// False: nobody could look. That is not an empty list.
    known: bool,
    items: Option<Vec<T>>,
    /// Entries beyond those named.
    left_out: usize,
}

#[derive(Debug, Serialize)]
struct Process {
    pid: i32,
    command_id: String,
    attempt: u32,
}

#[derive(Debug, Serialize)]
struct Line {
    id: CommandId,
    kind: String,
    state: &'static str,
    attempt: u32,
}

impl<T> List<T> {
    fn none() -> Self {
        Self { known: true, items: Some(Vec::new()), left_out: 0 }
    }

    fn of(found: Option<Vec<T>>) -> Self {
        let left_out = found.as_ref().map_or(0, |items| items.len().saturating_sub(NAMED));
        let items = found.map(|mut items| {
            items.truncate(NAMED);
            items
        });
        Self { known: items.is_some(), items, left_out }
    }
}

/// Looks and answers, as the command `own`.
pub(super) async fn run(id: &BarrierId, own: &CommandId, shared: &Shared) -> Ended {
    failpoint::hit(failpoint::EFFECT_STARTED);
    let limit = Kind::InventoryBarrier.properties().max_run_time;
    let mut trouble = Vec::new();
    let (highest_seq, commands) = match timeout(limit, commands(own, shared)).await {
        Ok(Ok((seq, commands))) => (Some(seq), Some(commands)),
        Ok(Err(why)) => (None, note(&mut trouble, why)),
        Err(_) => (None, note(&mut trouble, late("the journal did not answer", limit))),
    };
    // After the commands: what starts a program in between is named by one list or the other.
    let processes = match timeout(limit, processes(shared)).await {
        Ok(Ok(found)) => Some(found),
        Ok(Err(why)) => note(&mut trouble, why),
        Err(_) => note(&mut trouble, late("/proc did not answer", limit)),
    };
    let answer = Answer {
        barrier_id: id,
        known: trouble.is_empty(),
        assignments: List::none(),
        instances: List::none(),
        processes: List::of(processes),
        commands: List::of(commands),
        highest_seq,
    };
    ended(&answer, &trouble.join("; "))
}

fn note<T>(trouble: &mut Vec<String>, why: String) -> Option<T> {
    trouble.push(why);
    None
}

fn late(what: &str, limit: Duration) -> String {
    format!("{what} within {} s", limit.as_secs())
}

fn ended(answer: &Answer<'_>, trouble: &str) -> Ended {
    // Ids and numbers always have a form in JSON.
    let output = serde_json::to_vec(answer).unwrap_or_default();
    if answer.known {
        let (state, effect) = (Terminal::Succeeded, Effect::Complete);
        return Ended { state, reason: None, message: String::new(), effect, output };
    }
    Ended {
        state: Terminal::Failed,
        reason: Some(Reason::InventoryUnknown),
        message: format!("the node could not look at all that it holds: {trouble}"),
        effect: Effect::None,
        output,
    }
}

/// The number up to which everything is answered, and every command but `own` that has not ended.
async fn commands(own: &CommandId, shared: &Shared) -> Result<(u64, Vec<Line>), String> {
    let seq = shared.arrivals.settled().await;
    let unfinished = shared.parts.journal.unfinished().await.map_err(|error| error.to_string())?;
    let others = unfinished.into_iter().filter(|command| command.id != *own).map(line);
    Ok((seq, others.collect()))
}

fn line(command: Unfinished) -> Line {
    let Unfinished { id, kind, state, attempt } = command;
    let state = if state == State::Running { "RUNNING" } else { "ACCEPTED" };
    Line { id, kind, state, attempt }
}

/// Processes of commands of this node, whoever started them and however they got away from their parents.
async fn processes(shared: &Shared) -> Result<Vec<Process>, String> {
    let (state, journal) = (shared.parts.state.clone(), shared.parts.journal.id());
    let (programs, node) = (Arc::clone(&shared.parts.programs), shared.parts.audience.node_id.clone());
    let looked = blocking::run(move || look(&*programs, &state, &node, journal)).await;
    looked.map_err(|error| format!("the look at the processes broke off: {error}"))?
}

fn look(
    programs: &dyn Programs,
    state: &Path,
    node: &NodeId,
    journal: JournalId,
) -> Result<Vec<Process>, String> {
    let mut journals: BTreeSet<JournalId> =
        begun::journals(state, node).map_err(|error| format!("the begun records cannot be read: {error}"))?;
    journals.insert(journal);
    let found = programs.running(&journals).map_err(|error| format!("/proc cannot be read: {error}"))?;
    let process = |Marked { pid, command, attempt }| Process { pid, command_id: command, attempt };
    Ok(found.into_iter().map(process).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_nobody_could_look_at_is_null_and_says_so() {
        let unknown = serde_json::to_value(List::<Line>::of(None)).expect("JSON");
        assert_eq!(unknown, serde_json::json!({"known": false, "items": null, "left_out": 0}));
        let empty = serde_json::to_value(List::<Line>::of(Some(Vec::new()))).expect("JSON");
        assert_eq!(empty, serde_json::json!({"known": true, "items": [], "left_out": 0}));
    }

    #[test]
    fn the_longest_answer_fits_into_a_result() {
        let id = CommandId::new("c".repeat(128)).expect("an id");
        let line = || Line { id: id.clone(), kind: "k".repeat(80), state: "ACCEPTED", attempt: u32::MAX };
        let process = || Process { pid: i32::MAX, command_id: id.to_string(), attempt: u32::MAX };
        let answer = Answer {
            barrier_id: &BarrierId::new("b".repeat(128)).expect("an id"),
            known: true,
            assignments: List::none(),
            instances: List::none(),
            processes: List::of(Some((0..2000).map(|_| process()).collect())),
            commands: List::of(Some((0..2000).map(|_| line()).collect())),
            highest_seq: Some(u64::MAX),
        };
        let output = ended(&answer, "").output;
        assert!(output.len() <= crate::model::limits::RESULT_BYTES, "{} bytes", output.len());
        let read: serde_json::Value = serde_json::from_slice(&output).expect("JSON");
        assert_eq!(read["commands"]["left_out"], 1600);
    }
}
