//! What audit.log has yet to say: a line a command, made by the transaction of its end.
//!
//! Who asked for what stands in the command's row from its acceptance to its end: the daemon that tells the end may be
//! another one, which has never seen the signed body. Lines wait in a table of their own until they are in the file
//! (src/upkeep/audit.rs), so that neither a crash nor a disk that takes no writes loses one.

use rusqlite::params;
use serde::{Deserialize, Serialize};

use super::core::Core;
use super::rows::{self, Row, signed, unsigned};
use crate::model::{
    Args, Command, CommandId, Digest, Effect, ExecArgs, Kind, Outcome, Reason, ServerTime, Terminal,
};
use crate::wire::dsse::{Verified, Worker};

/// Argument bytes of a line: the body's digest stands for what is left out.
const ARGV_BYTES: usize = 4096;
/// Of a user's name: no system has a longer one.
const USER_BYTES: usize = 256;
/// Lines of a page.
const PAGE: usize = 512;
/// Bytes of a page, from which on it ends.
const PAGE_BYTES: usize = 256 << 10;

/// Lines that wait to be written.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AuditPage {
    /// Each a JSON object without its line feed, oldest first.
    pub lines: Vec<String>,
    /// The number of the last one; that of the page before where there is none.
    pub last: u64,
    /// Whether more stood behind them.
    pub more: bool,
}

/// Who asked for what.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Asked {
    signed_by: Option<Signer>,
    issued_at: Option<ServerTime>,
    argv: Option<Vec<String>>,
    argv_cut: bool,
    user: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Signer {
    worker: String,
    key: Digest,
}

/// A line of audit.log; docs/audit.md has the fields for its readers.
#[derive(Debug, Serialize)]
struct Line<'a> {
    at: ServerTime,
    journal: &'a str,
    id: &'a CommandId,
    kind: &'a str,
    body_sha256: Digest,
    #[serde(flatten)]
    asked: Asked,
    not_after: ServerTime,
    accepted: Option<ServerTime>,
    started: Option<ServerTime>,
    finished: Option<ServerTime>,
    duration_ms: u64,
    attempt: u32,
    state: Terminal,
    reason: Option<Reason>,
    effect: Effect,
    message: &'a str,
}

impl Asked {
    fn of(command: &Command, signer: Option<&Worker>, args: Option<&Args>) -> Self {
        let mut asked = Self {
            signed_by: signer.map(|worker| Signer { worker: worker.name.clone(), key: worker.key }),
            issued_at: Some(command.header.issued_at),
            ..Self::default()
        };
        if let Some(Args::Exec(args)) = args {
            asked.program(args);
        }
        asked
    }

    /// Neither environment nor standard input: they are where secrets are.
    fn program(&mut self, args: &ExecArgs) {
        let mut left = ARGV_BYTES;
        let mut argv = Vec::new();
        for arg in &args.argv {
            let kept = &arg[..arg.floor_char_boundary(left)];
            argv.push(kept.to_owned());
            // One more for each, so that empty ones come to an end too.
            left = left.saturating_sub(kept.len() + 1);
            if kept.len() < arg.len() || left == 0 {
                break;
            }
        }
        self.argv_cut = argv != args.argv;
        self.argv = Some(argv);
        self.user = args.user.as_ref().map(|user| user[..user.floor_char_boundary(USER_BYTES)].to_owned());
    }
}

/// Who asked for a command, as its row keeps it. `args` are absent where admission could not use them.
pub(super) fn asked(command: &Verified<Command>, args: Option<&Args>) -> rusqlite::Result<String> {
    let parsed = match args {
        Some(_) => None,
        // Of a command that is denied, too late or not this role's the arguments are as telling.
        None => Kind::from_name(&command.get().header.kind).and_then(|kind| command.get().body(kind).ok()),
    };
    let args = args.or(parsed.as_ref().map(|body| &body.args));
    encoded(&Asked::of(command.get(), command.signer(), args))
}

/// Makes the line of a command whose end is written next: that forgets who asked. `asked` where its row does not say.
pub(super) fn ended(
    core: &mut Core,
    row: &Row,
    asked: Option<String>,
    outcome: &Outcome,
) -> rusqlite::Result<()> {
    if !core.audits {
        return Ok(());
    }
    let asked = match asked {
        Some(asked) => Some(asked),
        None => rows::asked(&core.conn, &row.id)?,
    };
    let line = encoded(&Line {
        at: ServerTime(core.clock.wall_ms()),
        journal: core.counters.named.id.as_str(),
        id: &row.id,
        kind: &row.kind,
        body_sha256: row.body_sha256,
        // Of a command that was accepted under a journal that is lost nobody knows who asked.
        asked: asked.and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default(),
        not_after: row.not_after,
        accepted: row.accepted,
        started: outcome.started,
        finished: outcome.finished,
        duration_ms: outcome.duration_ms,
        attempt: outcome.attempt,
        state: outcome.state,
        reason: outcome.reason,
        effect: outcome.effect,
        message: message(outcome),
    })?;
    core.counters.audited += 1;
    core.conn
        .prepare_cached("INSERT INTO audit (seq, line) VALUES (?, ?)")?
        .execute(params![signed(core.counters.audited), line])?;
    Ok(())
}

/// Without the words for arguments that cannot be read: they quote what they cannot read, which may be a secret of the
/// environment.
fn message(outcome: &Outcome) -> &str {
    match outcome.reason {
        Some(reason @ (Reason::InvalidArguments | Reason::UnsupportedField)) => reason.token(),
        _ => &outcome.message,
    }
}

fn encoded(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// The number of the last line that waits; 0 for none.
pub(super) fn last(conn: &rusqlite::Connection) -> rusqlite::Result<u64> {
    conn.query_row("SELECT coalesce(max(seq), 0) FROM audit", [], |row| unsigned(row, 0))
}

/// Lines behind `after`.
pub(super) fn page(core: &Core, after: u64) -> rusqlite::Result<AuditPage> {
    let sql = "SELECT seq, line FROM audit WHERE seq > ? ORDER BY seq";
    let mut statement = core.conn.prepare_cached(sql)?;
    let mut found = statement.query([signed(after)])?;
    let (mut page, mut bytes) = (AuditPage { last: after, ..AuditPage::default() }, 0);
    while let Some(row) = found.next()? {
        if page.lines.len() >= PAGE || bytes >= PAGE_BYTES {
            page.more = true;
            break;
        }
        let line: String = row.get(1)?;
        bytes += line.len();
        page.last = unsigned(row, 0)?;
        page.lines.push(line);
    }
    Ok(page)
}

/// Forgets lines that are in the file.
pub(super) fn forget(core: &Core, up_to: u64) -> rusqlite::Result<()> {
    core.conn.prepare_cached("DELETE FROM audit WHERE seq <= ?")?.execute([signed(up_to)])?;
    Ok(())
}
