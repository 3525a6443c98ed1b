//! What the nodes have to do while they die: programs that write down their start and their end.

use std::collections::BTreeMap;
use std::time::Duration;

use bcd::clock::{Clock as _, SystemClock};
use bcd::model::CommandId;
use bcd::sim::load::{Class, Planned};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::json;
use serde_json::value::RawValue;

use crate::lab::Lab;

/// Names the lab in the environment of each of its programs, and so of all that they start.
const VARIABLE: &str = "CRASH_LAB";

pub(super) struct Programs {
    rng: StdRng,
}

impl Programs {
    pub(super) fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed ^ 0x6c6f_6164) }
    }

    /// The next one. A long one is in flight over several kills.
    pub(super) fn draw(&mut self) -> Planned {
        let rng = &mut self.rng;
        let millis = |rng: &mut StdRng, range| Class::Sleeps(Duration::from_millis(rng.random_range(range)));
        let class = match rng.random_range(0..100) {
            0..8 => Class::Probe,
            8..18 => Class::Fails,
            18..30 => Class::RetrySafe,
            30..33 => Class::Hurried,
            33..58 => millis(rng, 50..600),
            58..70 => millis(rng, 2000..5000),
            _ => Class::Succeeds,
        };
        Planned { id: CommandId::random(rng), agent: 0, class }
    }
}

/// A planned command's arguments: the program's first act is one appending write of its start, its last one of its
/// end, with the time since boot. Both are whole or not there at all.
pub(super) fn args(lab: &Lab, planned: &Planned) -> Box<RawValue> {
    let (rest, status) = match planned.class {
        Class::Probe => return RawValue::from_string("{}".into()).unwrap(),
        Class::Sleeps(time) => (format!("sleep {}", time.as_secs_f32()), 0),
        Class::Fails => (":".into(), 3),
        Class::Succeeds | Class::RetrySafe | Class::Hurried => (":".into(), 0),
        Class::Barrier | Class::Cancelled(_) | Class::Reboot => unreachable!("never drawn here"),
    };
    let script = format!(
        r#"echo "$1 ${{BCD_EXEC##*/}}" >> "$2"; {rest}; read up idle < /proc/uptime; echo "$1 ${{BCD_EXEC##*/}} $up" >> "$3"; exit {status}"#
    );
    let [lab, witness, ends] =
        ["", "witness", "ends"].map(|name| lab.path(name).to_string_lossy().into_owned());
    serde_json::value::to_raw_value(&json!({
        "argv": ["/bin/sh", "-c", script, "sh", planned.id.as_str(), witness, ends],
        "env": { VARIABLE: lab },
        "time_limit_s": 60,
        "retry_safe": planned.class.retry_safe(),
    }))
    .unwrap()
}

/// The ends that a command's programs wrote down: wall time in ms, by attempt.
pub(super) fn ends(lab: &Lab) -> BTreeMap<String, Vec<(u32, i64)>> {
    let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
    let booted = SystemClock.wall_ms() - millis(uptime.split(' ').next().unwrap());
    let mut ends = BTreeMap::<_, Vec<_>>::new();
    for line in std::fs::read_to_string(lab.path("ends")).unwrap_or_default().lines() {
        let parts: Vec<&str> = line.split(' ').collect();
        let [id, attempt, up] = parts[..] else { panic!("a torn end: {line:?}") };
        ends.entry(id.to_owned()).or_default().push((attempt.parse().unwrap(), booted + millis(up)));
    }
    ends
}

/// Of seconds with two places, as in /proc/uptime.
fn millis(seconds: &str) -> i64 {
    let (whole, hundredths) = seconds.split_once('.').unwrap();
    whole.parse::<i64>().unwrap() * 1000 + hundredths.parse::<i64>().unwrap() * 10
}

/// The supervisors of this lab's nodes.
pub(super) fn supervisors(lab: &Lab) -> Vec<Pid> {
    let own = format!("BCD_STATE={}", lab.path("node").display());
    let supervise = processes("cmdline", |words| words.get(1) == Some(&&b"supervise"[..]));
    let ours = processes("environ", |entries| entries.contains(&own.as_bytes()));
    let ours: Vec<Pid> = supervise.into_iter().filter(|pid| ours.contains(pid)).collect();
    // Between its fork and its exec a program still looks like its supervisor.
    ours.iter().filter(|pid| parent(**pid).is_none_or(|parent| !ours.contains(&parent))).copied().collect()
}

fn parent(pid: Pid) -> Option<Pid> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    parent.trim().parse().ok().map(Pid::from_raw)
}

/// The programs of this lab, and what they have started.
pub(super) fn running(lab: &Lab) -> Vec<Pid> {
    let own = format!("{VARIABLE}={}", lab.path("").display());
    processes("environ", |entries| entries.contains(&own.as_bytes()))
}

/// Processes with such a file of NUL-ended entries in /proc.
fn processes(file: &str, wanted: impl Fn(&[&[u8]]) -> bool) -> Vec<Pid> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(bytes) = std::fs::read(entry.path().join(file)) else { continue };
        let entries: Vec<&[u8]> = bytes.split(|byte| *byte == 0).collect();
        if wanted(&entries) {
            found.push(Pid::from_raw(pid));
        }
    }
    found
}
