//! `bcd status`.

use std::fmt::Write as _;
use std::time::Duration;

use super::{ConfigArgs, fail, print};
use crate::clock::{Clock as _, SystemClock};
use crate::model::{Exit, ServerTime};
use crate::session::SessionState;
use crate::status::Report;
use crate::status::socket::{Question, ask};

/// Say how the daemon of this machine is.
///
/// Exit code 0: it answered (with --brief: it is ready); 1: not ready; 3: no daemon answers.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// Only whether it is ready: whether a heartbeat was acked within the last three intervals.
    #[arg(long, conflicts_with = "json")]
    brief: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &Args) -> Result<Exit, Exit> {
    let config = args.config.load()?;
    let bytes = ask(&config.run, &Question::Status).map_err(|error| fail(&error, error.exit()))?;
    if args.json {
        let document: serde_json::Value = read(&bytes)?;
        super::print_json(&document)?;
        return Ok(Exit::Done);
    }
    if let Ok(Hindered { error }) = serde_json::from_slice(&bytes) {
        return match args.brief {
            true => print(&format!("not ready: {error}\n")).map(|()| Exit::Failed),
            false => print(&format!("{error}\n")).map(|()| Exit::Done),
        };
    }
    let report: Report = read(&bytes)?;
    if !args.brief {
        print(&text(&report, SystemClock.wall_ms()))?;
        return Ok(Exit::Done);
    }
    match report.ready() {
        Ok(()) => print("ready\n").map(|()| Exit::Done),
        Err(why) => print(&format!("not ready: {why}\n")).map(|()| Exit::Failed),
    }
}

/// The answer of a daemon that cannot read who it is.
#[derive(serde::Deserialize)]
struct Hindered {
    error: String,
}

fn read<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Exit> {
    serde_json::from_slice(bytes).map_err(|error| {
        super::note("bcd: the daemon's answer cannot be read; restart it after replacing the binary");
        fail(&error, Exit::Unknown)
    })
}

/// A local clock this far from the control plane's is worth a line.
const CLOCK_DIFFERENCE: Duration = Duration::from_secs(60);

/// What an operator does about a local clock that is wrong.
pub(super) fn clock_difference(server: ServerTime, wall_ms: i64) -> Option<String> {
    let local = ServerTime(wall_ms);
    let (apart, word) =
        if local < server { (server.since(local), "behind") } else { (local.since(server), "ahead of") };
    (apart >= CLOCK_DIFFERENCE).then(|| {
        format!(
            "this machine's is {} s {word} the control plane's; bcd works all the same, but logs are dated wrongly: timedatectl set-ntp true",
            apart.as_secs()
        )
    })
}

fn text(report: &Report, wall_ms: i64) -> String {
    let mut out = String::new();
    let mut row = |name: &str, text: String| {
        let _ = writeln!(out, "{name:<12} {text}");
    };
    let node = &report.node;
    row(
        "node",
        format!(
            "{} ({}, site {}, trust domain {}, identity generation {})",
            node.id,
            node.role.name(),
            node.site,
            node.trust_domain,
            node.generation
        ),
    );
    if !node.labels.is_empty() {
        let labels: Vec<_> = node.labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        row("labels", labels.join(", "));
    }
    row("key", format!("SHA-256 {}", node.fingerprint));
    row("session", session(report));
    if let Some(end) = &report.session.last_end {
        let reason = end.reason.map(|reason| format!("{reason}: ")).unwrap_or_default();
        row("last end", format!("{} ago, {reason}{}", span(report.age(end.at_boot_ms)), end.detail));
    }
    let lanes: Vec<_> = report.lanes.iter().map(|(lane, free)| format!("{lane} {free}")).collect();
    row("free credits", lanes.join(", "));
    let running: Vec<_> = report.running.iter().map(ToString::to_string).collect();
    row("running", if running.is_empty() { "nothing".into() } else { running.join(", ") });
    if let Some(journal) = &report.journal {
        row(
            "journal",
            format!(
                "{}: {} accepted, {} running, {} results not acked, {} tombstones",
                journal.id, journal.accepted, journal.running, journal.unacked, journal.tombstones
            ),
        );
    }
    let certificate = &report.certificate;
    let left = match certificate.remaining_s {
        Some(0) => "has run out".into(),
        Some(left) => format!("holds for {}", span(Duration::from_secs(left))),
        None => "server time is not known yet".into(),
    };
    row("certificate", format!("{left}, until {}", certificate.not_after));
    // Before a session server time is only a floor.
    let server_time = report.server_time.filter(|_| report.session.live.is_some());
    if let Some(said) = server_time.and_then(|time| clock_difference(time, wall_ms)) {
        row("clock", said);
    }
    for condition in &report.conditions {
        let since = span(report.age(condition.since_boot_ms));
        row("condition", format!("{} for {since}: {}", condition.token, condition.detail));
    }
    row("daemon", format!("bcd {}, pid {}, {}", report.version, report.pid, report.incarnation));
    out
}

fn session(report: &Report) -> String {
    let session = &report.session;
    let since = span(report.age(session.since_boot_ms));
    let endpoint = session.endpoint.as_deref().unwrap_or("a gateway");
    let next = session.until_boot_ms.map(|at| span(Duration::from_millis(at.saturating_sub(report.boot_ms))));
    match (session.state, &session.live) {
        (_, Some(live)) => {
            let acked = live
                .acked_boot_ms
                .map_or("no ack yet".into(), |at| format!("last ack {} ago", span(report.age(at))));
            format!(
                "live with {} at {endpoint} for {since}: epoch {}, protocol {}, {acked}",
                live.gateway_id, live.epoch, live.proto
            )
        }
        (SessionState::Waiting, _) => {
            format!(
                "none; next dial in {}, attempt {}",
                next.unwrap_or_else(|| "a moment".into()),
                session.attempt + 1
            )
        }
        (SessionState::Dialing, _) => format!("dialing {endpoint} for {since}, attempt {}", session.attempt),
        (SessionState::AwaitingWelcome | SessionState::Live, _) => {
            format!("waiting for {endpoint} to say Welcome for {since}")
        }
        (SessionState::Stopped, _) => "none; the daemon is stopping".into(),
    }
}

/// A duration for people: its two largest units.
fn span(time: Duration) -> String {
    let s = time.as_secs();
    match s {
        0..10 => format!("{:.1} s", time.as_secs_f32()),
        10..60 => format!("{s} s"),
        60..3600 => format!("{} m {} s", s / 60, s % 60),
        3600..86_400 => format!("{} h {} m", s / 3600, s % 3600 / 60),
        _ => format!("{} d {} h", s / 86_400, s % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_local_clock_is_said_with_its_direction() {
        let server = ServerTime(10_000_000);
        let said = |wall_ms| clock_difference(server, wall_ms).unwrap_or_default();
        assert_eq!(said(10_030_000), "");
        assert!(said(9_000_000).contains("1000 s behind"));
        assert!(said(11_000_000).contains("1000 s ahead of"));
    }

    #[test]
    fn a_span_is_told_in_its_two_largest_units() {
        let told = |s| span(Duration::from_secs(s));
        assert_eq!(told(12), "12 s");
        assert_eq!(told(125), "2 m 5 s");
        assert_eq!(told(86_399), "23 h 59 m");
        assert_eq!(told(90_000), "1 d 1 h");
    }
}
