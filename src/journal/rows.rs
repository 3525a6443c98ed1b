//! Rows of `commands` and `results`: the statements, once each.

use rusqlite::types::Type;
use rusqlite::{CachedStatement, Connection, OptionalExtension as _, Row as SqlRow, params};

use super::record::State;
use crate::model::{BootId, CommandId, Digest, Done, Incarnation, Kind, Outcome, Reason, ServerTime};

/// A kind's name in a row, bytes: a rejected command may name any.
const KIND_BYTES: usize = 80;

/// A command as it stands on disk, without its output.
#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) id: CommandId,
    pub(super) body_sha256: Digest,
    pub(super) kind: String,
    pub(super) retry_safe: bool,
    pub(super) not_after: ServerTime,
    pub(super) state: State,
    pub(super) attempt: u32,
    pub(super) incarnation: String,
    pub(super) accepted: Option<ServerTime>,
    pub(super) started: Option<ServerTime>,
    pub(super) outcome: Option<Outcome>,
    pub(super) result_seq: Option<u64>,
}

/// Columns in the order of [`row_of`].
macro_rules! select {
    ($tail:literal) => {
        concat!(
            "SELECT id, body_sha256, kind, retry_safe, not_after_ms, state, attempt, incarnation, accepted_ms, ",
            "started_ms, outcome, result_seq FROM commands ",
            $tail
        )
    };
}

/// A value of the wrong shape in a column.
pub(super) fn parsed<T, E: std::error::Error + Send + Sync + 'static>(
    column: usize,
    value: Result<T, E>,
) -> rusqlite::Result<T> {
    value.map_err(|error| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error)))
}

pub(super) fn unsigned(row: &SqlRow<'_>, column: usize) -> rusqlite::Result<u64> {
    let value: i64 = row.get(column)?;
    u64::try_from(value).map_err(|_| rusqlite::Error::IntegralValueOutOfRange(column, value))
}

/// SQLite's integers are signed; a number beyond them is nobody's count.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn row_of(row: &SqlRow<'_>) -> rusqlite::Result<Row> {
    let time = |column| row.get::<_, Option<i64>>(column).map(|ms| ms.map(ServerTime));
    let outcome = match row.get_ref(10)?.as_str_or_null()? {
        Some(text) => Some(parsed(10, serde_json::from_str(text))?),
        None => None,
    };
    Ok(Row {
        id: parsed(0, CommandId::new(row.get::<_, String>(0)?))?,
        body_sha256: Digest(row.get(1)?),
        kind: row.get(2)?,
        retry_safe: row.get(3)?,
        not_after: ServerTime(row.get(4)?),
        state: row.get(5)?,
        attempt: row.get(6)?,
        incarnation: row.get(7)?,
        accepted: time(8)?,
        started: time(9)?,
        outcome,
        result_seq: row.get::<_, Option<i64>>(11)?.and_then(|seq| u64::try_from(seq).ok()),
    })
}

pub(super) fn find(conn: &Connection, id: &CommandId) -> rusqlite::Result<Option<Row>> {
    conn.prepare_cached(select!("WHERE id = ?"))?.query_row([id.as_str()], row_of).optional()
}

/// The boot in which a row was written last.
pub(super) fn boot_of(conn: &Connection, id: &CommandId) -> rusqlite::Result<Option<BootId>> {
    let sql = "SELECT boot_id FROM commands WHERE id = ?";
    conn.prepare_cached(sql)?
        .query_row([id.as_str()], |row| parsed(0, BootId::new(row.get::<_, String>(0)?)))
        .optional()
}

/// Commands that have not ended.
pub(super) fn unfinished(conn: &Connection) -> rusqlite::Result<Vec<Row>> {
    conn.prepare(select!("WHERE state < 3 ORDER BY id"))?.query_map([], row_of)?.collect()
}

/// Commands for a reader: what has not ended first, then the latest ends.
pub(super) fn newest(conn: &Connection, limit: u64) -> rusqlite::Result<Vec<Row>> {
    let sql =
        select!("ORDER BY state >= 3, coalesce(started_ms, accepted_ms, not_after_ms) DESC, id LIMIT ?");
    conn.prepare(sql)?.query_map([signed(limit)], row_of)?.collect()
}

/// Commands by id, behind one.
pub(super) fn behind(conn: &Connection, after: Option<&CommandId>, limit: u32) -> rusqlite::Result<Vec<Row>> {
    let sql = select!("WHERE id > ? ORDER BY id LIMIT ?");
    let after = after.map_or("", CommandId::as_str);
    conn.prepare(sql)?.query_map(params![after, limit], row_of)?.collect()
}

/// Commands of a state.
pub(super) fn count(conn: &Connection, state: State) -> rusqlite::Result<u64> {
    conn.query_row("SELECT count(*) FROM commands WHERE state = ?", [state], |row| unsigned(row, 0))
}

/// Commands of each state that there is, read once.
pub(super) fn counts(conn: &Connection) -> rusqlite::Result<Vec<(State, u64)>> {
    let mut counts = conn.prepare("SELECT state, count(*) FROM commands GROUP BY state")?;
    counts.query_map([], |row| Ok((row.get(0)?, unsigned(row, 1)?)))?.collect()
}

/// Commands whose result is still owed or to come.
pub(super) fn owed(conn: &Connection) -> rusqlite::Result<u64> {
    conn.query_row("SELECT count(*) FROM commands WHERE state < 4", [], |row| unsigned(row, 0))
}

/// The last number given to a result that is still there.
pub(super) fn last_seq(conn: &Connection) -> rusqlite::Result<u64> {
    conn.query_row("SELECT coalesce(max(seq), 0) FROM results", [], |row| unsigned(row, 0))
}

/// Writes a row whole; an older one of the same id gives way to it, but who asked stays known until the end.
pub(super) fn put(
    conn: &Connection,
    row: &Row,
    incarnation: &Incarnation,
    boot: &BootId,
    asked: Option<&str>,
) -> rusqlite::Result<()> {
    let sql =
        "INSERT INTO commands (id, body_sha256, kind, retry_safe, not_after_ms, state, attempt, incarnation,
            boot_id, accepted_ms, started_ms, outcome, result_seq, asked)
        VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
        ON CONFLICT (id) DO UPDATE SET state = excluded.state, attempt = excluded.attempt,
            incarnation = excluded.incarnation, boot_id = excluded.boot_id, started_ms = excluded.started_ms,
            outcome = excluded.outcome, result_seq = excluded.result_seq,
            asked = CASE WHEN excluded.state < 3 THEN coalesce(excluded.asked, asked) END";
    let outcome = row.outcome.as_ref().map(encoded).transpose()?;
    conn.prepare_cached(sql)?.execute(params![
        row.id.as_str(),
        row.body_sha256.0,
        row.kind.get(..row.kind.floor_char_boundary(KIND_BYTES)),
        row.retry_safe,
        row.not_after.0,
        row.state,
        row.attempt,
        incarnation.as_str(),
        boot.as_str(),
        row.accepted.map(|time| time.0),
        row.started.map(|time| time.0),
        outcome,
        row.result_seq.map(signed),
        asked,
    ])?;
    Ok(())
}

/// Who asked for a command that has not ended.
pub(super) fn asked(conn: &Connection, id: &CommandId) -> rusqlite::Result<Option<String>> {
    let sql = "SELECT asked FROM commands WHERE id = ?";
    Ok(conn.prepare_cached(sql)?.query_row([id.as_str()], |row| row.get(0)).optional()?.flatten())
}

/// Marks an accepted command as running; false when it does not stand there as accepted.
pub(super) fn set_running(
    conn: &Connection,
    id: &CommandId,
    attempt: u32,
    started: Option<ServerTime>,
) -> rusqlite::Result<bool> {
    let sql = "UPDATE commands SET state = ?, attempt = ?, started_ms = ? WHERE id = ? AND state = ?";
    let values = params![State::Running, attempt, started.map(|time| time.0), id.as_str(), State::Accepted];
    Ok(conn.prepare_cached(sql)?.execute(values)? == 1)
}

/// Says whose a running command is; empty: nobody's, so that a redelivery runs it again.
pub(super) fn set_incarnation(conn: &Connection, id: &CommandId, incarnation: &str) -> rusqlite::Result<()> {
    let sql = "UPDATE commands SET incarnation = ? WHERE id = ? AND state = ?";
    conn.prepare_cached(sql)?.execute(params![incarnation, id.as_str(), State::Running])?;
    Ok(())
}

/// The outcome without its output, which stands in `results`.
fn encoded(outcome: &Outcome) -> rusqlite::Result<String> {
    let bare = Outcome { output: Vec::new(), message: outcome.message.clone(), ..*outcome };
    serde_json::to_string(&bare).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// Marks a command as done and keeps its output under `seq`; false when it does not stand there unfinished.
pub(super) fn set_done(
    conn: &Connection,
    id: &CommandId,
    seq: u64,
    outcome: &Outcome,
) -> rusqlite::Result<bool> {
    let sql = "UPDATE commands SET state = ?, attempt = ?, outcome = ?, result_seq = ?, asked = NULL WHERE id = ? AND state < 3";
    let values = params![State::Done, outcome.attempt, encoded(outcome)?, signed(seq), id.as_str()];
    if conn.prepare_cached(sql)?.execute(values)? != 1 {
        return Ok(false);
    }
    put_output(conn, id, seq, &outcome.output)?;
    Ok(true)
}

pub(super) fn put_output(conn: &Connection, id: &CommandId, seq: u64, output: &[u8]) -> rusqlite::Result<()> {
    conn.prepare_cached("INSERT INTO results (seq, id, output) VALUES (?, ?, ?)")?.execute(params![
        signed(seq),
        id.as_str(),
        output
    ])?;
    Ok(())
}

/// Makes a tombstone of a done command; false when there is no such result.
pub(super) fn bury(conn: &Connection, id: &CommandId) -> rusqlite::Result<bool> {
    let sql = "SELECT result_seq FROM commands WHERE id = ? AND state = ?";
    let seq: Option<i64> = conn
        .prepare_cached(sql)?
        .query_row(params![id.as_str(), State::Done], |row| row.get(0))
        .optional()?;
    let Some(seq) = seq else { return Ok(false) };
    conn.prepare_cached("DELETE FROM results WHERE seq = ?")?.execute([seq])?;
    conn.prepare_cached("UPDATE commands SET state = ?, result_seq = NULL WHERE id = ?")?
        .execute(params![State::Tombstone, id.as_str()])?;
    Ok(true)
}

/// Tombstones that need not be kept, at most `limit`.
pub(super) fn stale_tombstones(
    conn: &Connection,
    not_after_before: ServerTime,
    limit: u32,
) -> rusqlite::Result<Vec<(CommandId, u32)>> {
    let sql =
        "SELECT id, attempt FROM commands WHERE state = 4 AND not_after_ms < ? ORDER BY not_after_ms LIMIT ?";
    let mut statement: CachedStatement<'_> = conn.prepare_cached(sql)?;
    let ids = statement.query_map(params![not_after_before.0, limit], |row| {
        Ok((parsed(0, CommandId::new(row.get::<_, String>(0)?))?, row.get(1)?))
    })?;
    ids.collect()
}

pub(super) fn forget(conn: &Connection, id: &CommandId) -> rusqlite::Result<()> {
    conn.prepare_cached("DELETE FROM commands WHERE id = ? AND state = 4")?.execute([id.as_str()])?;
    Ok(())
}

/// The end of a row that has one, as it is told: with its output, or of a tombstone without and saying so.
pub(super) fn done_of(conn: &Connection, mut row: Row) -> rusqlite::Result<Option<Done>> {
    let Some(mut outcome) = row.outcome.take() else { return Ok(None) };
    match row.result_seq {
        Some(seq) => {
            outcome.output = conn
                .prepare_cached("SELECT output FROM results WHERE seq = ?")?
                .query_row([signed(seq)], |row| row.get(0))?;
        }
        None => outcome.message = Reason::AlreadyDone.token().to_owned(),
    }
    Ok(Some(done(&row, outcome)))
}

/// The end of a row, as it is told.
pub(super) fn done(row: &Row, outcome: Outcome) -> Done {
    Done {
        id: row.id.clone(),
        body_sha256: row.body_sha256,
        to_sign: Kind::signs_results(&row.kind),
        outcome,
    }
}

/// Numbers and ids of owed results behind `after`, with the size of their output and of the rest of their outcome, and
/// their kinds.
pub(super) fn results_after(
    conn: &Connection,
    after: u64,
    limit: u32,
) -> rusqlite::Result<Vec<(u64, CommandId, u64, String)>> {
    let sql =
        "SELECT results.seq, results.id, length(output) + coalesce(octet_length(outcome), 0), coalesce(kind, '')
        FROM results
        LEFT JOIN commands ON commands.id = results.id WHERE results.seq > ? ORDER BY results.seq LIMIT ?";
    let mut statement = conn.prepare_cached(sql)?;
    let found = statement.query_map(params![signed(after), limit], |row| {
        let id = parsed(1, CommandId::new(row.get::<_, String>(1)?))?;
        Ok((unsigned(row, 0)?, id, unsigned(row, 2)?, row.get(3)?))
    })?;
    found.collect()
}
