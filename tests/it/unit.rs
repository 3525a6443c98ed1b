//! The unit file, held against the arithmetic that its comments claim and against the program.
//!
//! What it does under a real systemd is tests/systemd (`make test-systemd`).

use bcd::model::Exit;

use crate::source::read;

fn values<'a>(unit: &'a str, key: &str) -> Vec<&'a str> {
    unit.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('=')).collect()
}

fn value<'a>(unit: &'a str, key: &str) -> &'a str {
    let all = values(unit, key);
    assert_eq!(all.len(), 1, "{key} stands once in the unit: {all:?}");
    all[0]
}

fn seconds(unit: &str, key: &str) -> u64 {
    value(unit, key).parse().unwrap_or_else(|_| panic!("{key} is a plain number of seconds"))
}

#[test]
fn the_limit_of_starts_sees_a_loop_of_the_slowest_failures() {
    let unit = read("systemd/bcd.service");
    // Each start may take all of its time, then hang until the watchdog, then need all of the time to stop.
    let slowest = seconds(&unit, "TimeoutStartSec")
        + seconds(&unit, "WatchdogSec")
        + seconds(&unit, "TimeoutStopSec")
        + seconds(&unit, "RestartSec");
    let needed = slowest * seconds(&unit, "StartLimitBurst");
    assert!(seconds(&unit, "StartLimitIntervalSec") > needed, "the interval has to be above {needed} s");
}

#[test]
fn a_clean_stop_has_more_time_than_it_needs() {
    assert!(seconds(&read("systemd/bcd.service"), "TimeoutStopSec") > 10);
}

#[test]
fn codes_that_no_restart_mends_are_the_programs_own() {
    let unit = read("systemd/bcd.service");
    let codes = [Exit::Configuration, Exit::ForeignState].map(|exit| exit.code().to_string());
    assert_eq!(value(&unit, "RestartPreventExitStatus").split(' ').collect::<Vec<_>>(), codes);
}

#[test]
fn the_units_directories_are_the_defaults_of_the_configuration() {
    let unit = read("systemd/bcd.service");
    let defaults = bcd::config::Config::defaults();
    assert_eq!(format!("/var/lib/{}", value(&unit, "StateDirectory")), defaults.state.display().to_string());
    assert_eq!(format!("/run/{}", value(&unit, "RuntimeDirectory")), defaults.run.display().to_string());
    let condition = value(&unit, "ConditionPathExists");
    assert_eq!(condition, defaults.state.join("identity.json").display().to_string());
}

#[test]
fn every_exception_and_figure_of_the_unit_has_its_reason_above_it() {
    let unit = read("systemd/bcd.service");
    for key in ["StartLimitIntervalSec", "KillMode", "RestartPreventExitStatus", "LimitCORE", "MemoryMax"] {
        let line = unit.lines().position(|line| line.starts_with(key)).expect(key);
        let above = unit.lines().take(line).last().unwrap_or_default();
        assert!(above.starts_with('#'), "{key} stands without a reason");
    }
}

#[test]
fn the_package_has_the_version_of_the_program() {
    let first = read("packaging/deb/changelog").lines().next().unwrap_or_default().to_owned();
    assert!(first.starts_with(&format!("bcd ({}-", env!("CARGO_PKG_VERSION"))), "{first}");
}
