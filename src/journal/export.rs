//! Everything that stands in a journal, and in the begun records beside it, as JSON lines; in pages, so that no reader
//! holds the writer for long and no answer is too large. A line is as it stood at one moment; pages follow one another.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use rusqlite::Connection;
use serde::Serialize;

use super::begun::{self, Record};
use super::inspect::{self, CommandLine, Snapshot};
use super::rows;
use crate::model::CommandId;

/// Bytes of lines after which a page ends.
const PAGE_BYTES: usize = 4 << 20;
/// Commands looked at for one page.
const PAGE_ROWS: u32 = 4096;

/// Where the next page begins: behind a command, or behind a begun record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cursor {
    /// Commands behind this one; absent: from the first.
    Commands(Option<CommandId>),
    /// Begun records behind this one; absent: from the first.
    Begun(Option<CommandId>),
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (part, after) = match self {
            Self::Commands(after) => ("commands", after),
            Self::Begun(after) => ("begun", after),
        };
        write!(f, "{part}/{}", after.as_ref().map_or("", |id| id.as_str()))
    }
}

impl FromStr for Cursor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (part, after) = text.split_once('/').ok_or(())?;
        let after = if after.is_empty() { None } else { Some(CommandId::new(after).map_err(|_| ())?) };
        match part {
            "commands" => Ok(Self::Commands(after)),
            "begun" => Ok(Self::Begun(after)),
            _ => Err(()),
        }
    }
}

/// Some lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Each with its end of line.
    pub lines: String,
    /// Where it goes on; absent after the last.
    pub next: Option<Cursor>,
}

/// A line. `type` tells which; a reader passes over those that it does not know.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "kebab-case")]
enum Line<'a> {
    Journal(&'a Snapshot),
    Command {
        #[serde(flatten)]
        command: CommandLine,
        /// Of a result that is not acked yet, base64.
        #[serde(skip_serializing_if = "Option::is_none")]
        output: Option<String>,
    },
    Begun(&'a Record),
    UnreadableBegun {
        path: &'a Path,
    },
}

fn add(lines: &mut String, line: &Line<'_>) -> rusqlite::Result<()> {
    let text = serde_json::to_string(line)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    lines.push_str(&text);
    lines.push('\n');
    Ok(())
}

/// The page at `cursor` of an open journal, whose records lie in `state`.
pub(super) fn page(conn: &Connection, db: &Path, state: &Path, cursor: &Cursor) -> rusqlite::Result<Page> {
    let mut lines = String::new();
    let next = match cursor {
        Cursor::Commands(after) => {
            if after.is_none() {
                add(&mut lines, &Line::Journal(&inspect::snapshot_of(conn, db, 0)?))?;
            }
            let last = commands(conn, after.as_ref(), &mut lines)?;
            Some(last.map_or(Cursor::Begun(None), |last| Cursor::Commands(Some(last))))
        }
        Cursor::Begun(after) => {
            records(state, after.as_ref(), &mut lines)?.map(|last| Cursor::Begun(Some(last)))
        }
    };
    Ok(Page { lines, next })
}

/// The last one, when there may be more.
fn commands(
    conn: &Connection,
    after: Option<&CommandId>,
    lines: &mut String,
) -> rusqlite::Result<Option<CommandId>> {
    let rows = rows::behind(conn, after, PAGE_ROWS)?;
    let all = rows.len() < PAGE_ROWS as usize;
    let mut last = None;
    for row in rows {
        last = Some(row.id.clone());
        let command = inspect::line_of(row.clone());
        let unacked = row.result_seq.is_some();
        let output = rows::done_of(conn, row)?.filter(|_| unacked).map(|done| done.outcome.output);
        let output = output.map(|bytes| data_encoding::BASE64.encode(&bytes));
        add(lines, &Line::Command { command, output })?;
        if lines.len() >= PAGE_BYTES {
            return Ok(last);
        }
    }
    Ok(if all { None } else { last })
}

fn records(
    state: &Path,
    after: Option<&CommandId>,
    lines: &mut String,
) -> rusqlite::Result<Option<CommandId>> {
    let records =
        begun::read_all(state).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    if after.is_none() {
        for path in &records.unreadable {
            add(lines, &Line::UnreadableBegun { path })?;
        }
    }
    for record in records.whole.iter().filter(|record| after.is_none_or(|after| record.id > *after)) {
        add(lines, &Line::Begun(record))?;
        if lines.len() >= PAGE_BYTES {
            return Ok(Some(record.id.clone()));
        }
    }
    Ok(None)
}
