//! `node.probe`: the smoke test of a node. What cannot be read is null, never zero.

use std::path::Path;

use serde::Serialize;

use super::kinds::Ended;
use crate::blocking;
use crate::failpoint;
use crate::model::{BootId, Effect, NodeId, Reason, Role, Terminal};

/// What a probe says of this process without looking.
#[derive(Debug, Clone, Serialize)]
pub struct ProbeFacts {
    /// This node.
    pub node_id: NodeId,
    /// Where it stands.
    pub site: String,
    /// What it is.
    pub role: Role,
    /// Version of this daemon.
    pub daemon_version: String,
    /// This boot.
    pub boot_id: BootId,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    #[serde(flatten)]
    facts: &'a ProbeFacts,
    /// Release of the kernel.
    kernel: Option<String>,
    /// Seconds since boot.
    uptime_s: Option<f64>,
    /// Load averages over 1, 5 and 15 minutes.
    load: Option<[f64; 3]>,
    state: State,
}

/// The state directory and its file system.
#[derive(Debug, Serialize)]
struct State {
    path: String,
    /// Bytes that the daemon may still write.
    free_bytes: Option<u64>,
    /// Bytes of the file system.
    total_bytes: Option<u64>,
    /// Inodes that the daemon may still use.
    free_inodes: Option<u64>,
    /// Inodes of the file system; 0 where it does not count them.
    total_inodes: Option<u64>,
}

/// Looks and answers.
pub(super) async fn run(facts: &ProbeFacts, state: &Path) -> Ended {
    failpoint::hit(failpoint::EFFECT_STARTED);
    let (facts, state) = (facts.clone(), state.to_owned());
    // statvfs waits for a disk or a network file system that does not answer.
    match blocking::run(move || look(&facts, &state)).await {
        Ok(output) => Ended {
            state: Terminal::Succeeded,
            reason: None,
            message: String::new(),
            effect: Effect::Complete,
            output,
        },
        Err(error) => Ended {
            state: Terminal::Failed,
            reason: Some(Reason::Interrupted),
            message: format!("the probe broke off: {error}"),
            effect: Effect::Unknown,
            output: Vec::new(),
        },
    }
}

fn look(facts: &ProbeFacts, state: &Path) -> Vec<u8> {
    let disk = rustix::fs::statvfs(state).ok();
    let disk = disk.as_ref();
    let report = Report {
        facts,
        kernel: read("/proc/sys/kernel/osrelease"),
        uptime_s: read("/proc/uptime").and_then(|text| numbers::<1>(&text)).map(|[uptime]| uptime),
        load: read("/proc/loadavg").and_then(|text| numbers(&text)),
        state: State {
            path: state.display().to_string(),
            free_bytes: disk.map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize)),
            total_bytes: disk.map(|disk| disk.f_blocks.saturating_mul(disk.f_frsize)),
            free_inodes: disk.map(|disk| disk.f_favail),
            total_inodes: disk.map(|disk| disk.f_files),
        },
    };
    // Strings and finite numbers always have a form in JSON.
    serde_json::to_vec(&report).unwrap_or_default()
}

fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

/// The first `N` numbers of a line; none where there are fewer.
fn numbers<const N: usize>(text: &str) -> Option<[f64; N]> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    let mut first = [0.0; N];
    for place in &mut first {
        *place = numbers.next()?.ok()?;
    }
    Some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> ProbeFacts {
        ProbeFacts {
            node_id: NodeId::new("n-1").expect("an id"),
            site: "fra1".into(),
            role: Role::Host,
            daemon_version: "0.1.0".into(),
            boot_id: BootId::new("b-1").expect("an id"),
        }
    }

    #[tokio::test]
    async fn a_probe_answers_with_versions_load_and_free_space() {
        let dir = tempfile::tempdir().expect("a directory");
        let ended = run(&facts(), dir.path()).await;
        assert_eq!(ended.state, Terminal::Succeeded);
        let report: serde_json::Value = serde_json::from_slice(&ended.output).expect("JSON");
        assert_eq!(report["daemon_version"], "0.1.0");
        assert_eq!(report["boot_id"], "b-1");
        assert_eq!(report["load"].as_array().map(Vec::len), Some(3));
        assert!(report["uptime_s"].as_f64().is_some_and(|uptime| uptime > 0.0));
        assert!(report["state"]["free_bytes"].as_u64().is_some());
    }

    #[tokio::test]
    async fn what_cannot_be_read_is_null_and_not_zero() {
        let ended = run(&facts(), Path::new("/nowhere/at/all")).await;
        let report: serde_json::Value = serde_json::from_slice(&ended.output).expect("JSON");
        assert!(report["state"]["free_bytes"].is_null());
        assert!(numbers::<3>("0.1 0.2").is_none());
    }
}
