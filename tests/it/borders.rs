//! Holds the layers by reading the source: who may name whom (docs/architecture.md).

use crate::source::{Code, code};

/// The agent: what runs on a host in a production build.
const AGENT: &[&str] = &[
    "clock",
    "config",
    "log",
    "wire",
    "session",
    "admission",
    "journal",
    "host",
    "ports",
    "exec",
    "identity",
    "node",
    "status",
    "systemd",
    "waits",
];

/// Functions of their arguments: no clock, no I/O, no randomness of their own.
const PURE: &[&str] = &[
    "model/",
    "admission.rs",
    "session/machine",
    "session/backoff",
    "journal/recovery",
    "wire/version.rs",
    "wire/frames.rs",
];

/// What a pure file does not name.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::net",
    "std::io",
    "std::env",
    "std::process",
    "std::thread",
    "std::os",
    "tokio",
    "rusqlite",
    "rustix",
    "nix::",
    "SystemTime",
    "Instant",
    "rand::rng(",
    "thread_rng",
];

/// A vendor crate and the places that may name it.
const OWNERS: &[(&str, &[&str])] = &[
    ("tonic", &["wire/", "gateway/", "identity/join", "identity/renew", "bench/session"]),
    ("rusqlite", &["journal/", "gateway/store", "gateway/worker", "bench/fleet.rs"]),
    ("clap", &["cli/"]),
    ("hyper", &["wire/"]),
    ("h2", &["wire/"]),
    ("tracing_subscriber", &["log.rs"]),
    ("tracing_journald", &["log.rs"]),
    ("clap_mangen", &["cli/"]),
    ("clap_complete", &["cli/"]),
    ("toml", &["config"]),
];

fn lies_in(code: &Code, places: &[&str]) -> bool {
    places.iter().any(|place| code.path.starts_with(place))
}

fn names_crate(code: &Code, name: &str) -> bool {
    let starts_a_path = |(at, _): (usize, &str)| {
        let before = code.text[..at].chars().next_back();
        !before.is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '.'))
    };
    code.text.match_indices(&format!("{name}::")).any(starts_a_path)
}

/// Every (file, name) for which `from` holds and the file names a module that `to` forbids.
fn crossings(from: impl Fn(&Code) -> bool, to: impl Fn(&str) -> bool) -> Vec<String> {
    let mut found = Vec::new();
    for file in code().iter().filter(|file| from(file)) {
        let crossed = file.modules_named().into_iter().filter(|name| to(name));
        found.extend(crossed.map(|name| format!("src/{} names {name}", file.path)));
    }
    found
}

#[test]
fn the_agent_never_names_the_gateway_the_simulator_or_the_command_line() {
    let outer = |name: &str| ["gateway", "sim", "cli", "bench"].contains(&name);
    assert_eq!(crossings(|file| AGENT.contains(&file.module()), outer), Vec::<String>::new());
}

#[test]
fn the_gateway_never_names_the_agent() {
    let agent = |name: &str| {
        let shared = ["clock", "ports", "wire"];
        ["sim", "cli"].contains(&name) || (AGENT.contains(&name) && !shared.contains(&name))
    };
    assert_eq!(crossings(|file| file.module() == "gateway", agent), Vec::<String>::new());
}

#[test]
fn the_words_name_no_other_module() {
    let drivers =
        |name: &str| ["failpoint", "gateway", "sim", "cli"].contains(&name) || AGENT.contains(&name);
    assert_eq!(crossings(|file| file.module() == "model", drivers), Vec::<String>::new());
}

#[test]
fn pure_files_name_no_clock_no_io_and_no_runtime() {
    let mut found = Vec::new();
    for file in code().iter().filter(|file| lies_in(file, PURE)) {
        let named = IMPURE.iter().filter(|word| file.text.contains(*word));
        found.extend(named.map(|word| format!("src/{} names {word}", file.path)));
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn a_vendor_crate_has_one_owner() {
    let mut found = Vec::new();
    for file in &code() {
        let strays = OWNERS.iter().filter(|(name, places)| names_crate(file, name) && !lies_in(file, places));
        found.extend(strays.map(|(name, _)| format!("src/{} names {name}", file.path)));
    }
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn no_file_grows_past_700_lines() {
    let long = |file: &Code| (file.text.lines().count() > 700).then(|| file.path.clone());
    assert_eq!(code().iter().filter_map(long).collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn a_border_that_is_crossed_is_seen() {
    let stray =
        Code { path: "exec/x.rs".into(), text: "use rusqlite::Connection;\nuse crate::gateway;".into() };
    assert!(names_crate(&stray, "rusqlite"));
    assert!(!names_crate(&stray, "clap"));
    assert_eq!(stray.modules_named(), ["gateway"]);
}

/// Of one seed a virtual run gives one history: no part may toss a coin over what it does first.
#[test]
fn every_choice_between_futures_has_an_order() {
    let unordered = |file: &Code| {
        let choices = file.text.split("select! {").skip(1);
        let tossed = choices.filter(|choice| !choice.trim_start().starts_with("biased;")).count();
        (tossed > 0).then(|| format!("src/{} has {tossed} without `biased;`", file.path))
    };
    assert_eq!(code().iter().filter_map(unordered).collect::<Vec<_>>(), Vec::<String>::new());
}
