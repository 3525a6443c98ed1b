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
use super::schema;
use crate::model::{CommandId, EventClass};

/// Bytes of lines after which a page ends.
const PAGE_BYTES: usize = 4 << 20;
/// Commands looked at for one page.
const PAGE_ROWS: u32 = 4096;

/// Where the next page begins: behind a command, a begun record or an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cursor {
    /// Commands behind this one; absent: from the first.
    Commands(Option<CommandId>),
    /// Begun records behind this one; absent: from the first.
    Begun(Option<CommandId>),
    /// Events behind this one; 0: from the first.
    Events(u64),
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (part, after) = match self {
            Self::Commands(after) => ("commands", after),
            Self::Begun(after) => ("begun", after),
            Self::Events(after) => return write!(f, "events/{after}"),
        };
        write!(f, "{part}/{}", after.as_ref().map_or("", |id| id.as_str()))
    }
}

impl FromStr for Cursor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (part, after) = text.split_once('/').ok_or(())?;
        if part == "events" {
            return after.parse().map(Self::Events).map_err(|_| ());
        }
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
    Event {
        seq: u64,
        class: &'static str,
        event: String,
        body: serde_json::Value,
        at_ms: i64,
        boot_id: String,
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
        Cursor::Begun(after) => Some(
            records(conn, state, after.as_ref(), &mut lines)?
                .map_or(Cursor::Events(0), |last| Cursor::Begun(Some(last))),
        ),
        Cursor::Events(after) => events(conn, *after, &mut lines)?.map(Cursor::Events),
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

/// The last one, when there may be more.
fn events(conn: &Connection, after: u64, lines: &mut String) -> rusqlite::Result<Option<u64>> {
    // A journal of the first schema that no daemon has opened since has none.
    if !conn.table_exists(None, "events")? {
        return Ok(None);
    }
    let sql = "SELECT seq, class, type, body, at_ms, boot_id FROM events WHERE seq > ? ORDER BY seq";
    let mut statement = conn.prepare(sql)?;
    let mut rows = statement.query([rows::signed(after)])?;
    while let Some(row) = rows.next()? {
        let seq = rows::unsigned(row, 0)?;
        let class: EventClass = row.get(1)?;
        let line = Line::Event {
            seq,
            class: class.name(),
            event: row.get(2)?,
            body: rows::parsed(3, serde_json::from_str(&row.get::<_, String>(3)?))?,
            at_ms: row.get(4)?,
            boot_id: row.get(5)?,
        };
        add(lines, &line)?;
        if lines.len() >= PAGE_BYTES {
            return Ok(Some(seq));
        }
    }
    Ok(None)
}

fn records(
    conn: &Connection,
    state: &Path,
    after: Option<&CommandId>,
    lines: &mut String,
) -> rusqlite::Result<Option<CommandId>> {
    let node = schema::head(conn)?.node_id;
    let records = begun::read_all(state, &node)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))?;
    if after.is_none() {
        for path in &records.unreadable {
            add(lines, &Line::UnreadableBegun { path })?;
        }
    }
    let mut left =
        records.whole.iter().filter(|record| after.is_none_or(|after| record.id > *after)).peekable();
    while let Some(record) = left.next() {
        add(lines, &Line::Begun(record))?;
        // A command that may run twice has a record an attempt, and no page ends between them.
        let same = left.peek().is_some_and(|next| next.id == record.id);
        if lines.len() >= PAGE_BYTES && !same {
            return Ok(Some(record.id.clone()));
        }
    }
    Ok(None)
}
