//! Nothing here needs a gateway.

use std::os::unix::fs::PermissionsExt as _;

use super::Machine;

#[test]
fn a_ticket_cut_short_is_refused_and_says_so() {
    let machine = Machine::new();
    machine
        .join("bcd1.eyJ2IjoxLCJ0cnVzdF9kb21haW4iOiJsYWIu")
        .refused(65, &["cut short", "copy the whole line"]);
    assert!(!machine.state().exists(), "nothing was made");
}

#[test]
fn a_file_that_holds_no_ticket_is_refused_and_says_what_one_looks_like() {
    let machine = Machine::new();
    machine.join("[gateway]").refused(65, &["not a join ticket", "bcd1."]);
    machine.join("").refused(65, &["empty"]);
    machine.join("bcd9.AAAA").refused(65, &["version 9", "newer bcd"]);
    machine
        .run(&["join", "--ticket", "/nowhere/ticket"])
        .refused(65, &["/nowhere/ticket", "--ticket FILE", "--ticket -"]);
    assert!(!machine.state().exists(), "nothing was made");
}

#[test]
fn a_ticket_on_the_command_line_is_refused() {
    let ended = Machine::new().run(&["join", "--ticket", "bcd1.eyJ2IjoxfQ"]);
    ended.refused(64, &["file", "ask for a new one"]);
    assert!(!ended.stderr().contains("eyJ2IjoxfQ"));
}

#[test]
fn a_wrong_command_line_is_usage_and_help_is_not() {
    let machine = Machine::new();
    assert_eq!(machine.run(&["jion"]).0.status.code(), Some(64));
    assert_eq!(machine.run(&[]).0.status.code(), Some(64));
    assert!(machine.run(&["--version"]).expect(0).starts_with("bcd "));
    assert!(machine.run(&["join", "--help"]).expect(0).contains("--ticket"));
}

#[test]
fn a_typo_in_the_configuration_names_file_key_and_nearest_key() {
    let machine = Machine::new();
    let file = machine.path("typo.toml");
    std::fs::write(&file, "[gateway]\nendpoint = []\n").unwrap();
    let file = file.display().to_string();
    for args in [&["config", "check", "--config", &file][..], &["node", "--config", &file]] {
        machine.run(args).refused(78, &[&file, "gateway.endpoint;", "did you mean gateway.endpoints?"]);
    }
    machine.run(&["node", "--log-level", "loud"]).refused(78, &["--log-level", "error, warn, info"]);
}

#[test]
fn the_configuration_is_shown_with_its_sources_and_checked() {
    let machine = Machine::new();
    let text = machine.run(&["config", "show", "--log-level", "warn"]).expect(0);
    let line = |start: &str| text.lines().find(|line| line.starts_with(start)).unwrap().to_owned();
    assert!(line("state = ").ends_with("# environment BCD_STATE"), "{text}");
    assert!(line("level = \"warn\"").ends_with("# --log-level"), "{text}");
    assert!(line("format = ").ends_with("# default"), "{text}");
    machine.run(&["config", "check"]).expect(0);
    let mut strange = machine.command(&["config", "check"]);
    let ended = super::Ended(strange.env("BCD_KINDS_DENY", "node.exce").output().unwrap());
    ended.refused(2, &["node.exce", "did you mean node.exec?"]);
}

#[test]
fn a_machine_that_has_not_joined_is_told_how_to() {
    Machine::new().run(&["node"]).refused(78, &["has not joined", "bcd join --ticket FILE"]);
}

#[test]
fn a_state_directory_open_to_others_is_refused_with_the_mend() {
    let machine = Machine::new();
    std::fs::create_dir(machine.state()).unwrap();
    std::fs::set_permissions(machine.state(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let mend = format!("chmod 0700 {}", machine.state().display());
    machine.run(&["node"]).refused(77, &[&mend]);
    let ticket = ticket_of_nobody();
    machine.join(&ticket).refused(77, &[&mend]);
}

#[test]
fn a_state_directory_of_another_user_is_refused_with_the_mend() {
    let machine = Machine::new();
    std::fs::create_dir(machine.state()).unwrap();
    std::fs::set_permissions(machine.state(), std::fs::Permissions::from_mode(0o700)).unwrap();
    if nix::unistd::geteuid().is_root() {
        std::os::unix::fs::chown(machine.state(), Some(12_345), None).unwrap();
        let mend = format!("chown 0 {}", machine.state().display());
        machine.join(&ticket_of_nobody()).refused(77, &["belongs to uid 12345", &mend]);
    } else {
        // Only root can give a directory away. The root directory is another user's on every machine.
        let own = nix::unistd::geteuid();
        let mend = format!("chown {own} /");
        machine.run(&["node", "--state", "/"]).refused(77, &["belongs to uid 0", &mend]);
    }
}

#[test]
fn a_state_directory_that_cannot_be_made_is_refused_with_the_mend() {
    let machine = Machine::new();
    let ticket = machine.write_ticket(&ticket_of_nobody());
    let join = |state: &str| machine.run(&["join", "--ticket", &ticket, "--try-for", "1", "--state", state]);
    // In /proc nobody makes a directory, not even root.
    join("/proc/bcd").refused(73, &["cannot make the directory /proc/bcd", "--state DIR"]);
    if !nix::unistd::geteuid().is_root() {
        std::fs::create_dir(machine.path("closed")).unwrap();
        std::fs::set_permissions(machine.path("closed"), std::fs::Permissions::from_mode(0o500)).unwrap();
        let closed = machine.path("closed").join("state").display().to_string();
        join(&closed).refused(77, &["cannot make the directory", &closed, "--state DIR"]);
    }
}

#[test]
fn nothing_listening_is_told_apart_and_the_key_is_kept_for_the_next_try() {
    let machine = Machine::new();
    let ended = machine.join(&ticket_of_nobody());
    ended.refused(69, &["no gateway was reached", "127.0.0.1:1", "same ticket"]);
    let keys = || -> Vec<_> {
        let names = std::fs::read_dir(machine.state().join("keys")).unwrap();
        names.map(|entry| entry.unwrap().file_name()).collect()
    };
    let first = keys();
    assert_eq!(first.len(), 1);
    machine.join(&ticket_of_nobody()).expect(69);
    assert_eq!(keys(), first);
}

#[test]
fn no_daemon_is_unknown_and_says_how_to_start_one() {
    let machine = Machine::new();
    machine.run(&["status"]).refused(3, &["no bcd daemon answers", "bcd node"]);
    machine.run(&["status", "--brief"]).refused(3, &["no bcd daemon answers"]);
    machine.run(&["journal", "show"]).refused(78, &["does not exist", "has not joined"]);
}

#[test]
fn the_kinds_are_printed_as_a_table_and_as_json() {
    let machine = Machine::new();
    let table = machine.run(&["kinds"]).expect(0);
    let exec = table.lines().find(|line| line.starts_with("node.exec")).unwrap();
    assert!(table.lines().next().unwrap().contains("DEFAULT   MAXIMUM"), "{table}");
    assert!(exec.contains(" 604800 s"), "{exec}");
    let kinds: serde_json::Value =
        serde_json::from_str(&machine.run(&["kinds", "--json"]).expect(0)).unwrap();
    let exec = kinds.as_array().unwrap().iter().find(|kind| kind["name"] == "node.exec").unwrap();
    assert_eq!(exec["destructive"], true);
}

#[test]
fn a_closed_pipe_is_no_failure_and_a_full_disk_is_one() {
    let machine = Machine::new();
    let mut child = machine.command(&["kinds"]).spawn().unwrap();
    drop(child.stdout.take());
    let ended = super::Ended(child.wait_with_output().unwrap());
    ended.expect(0);
    assert_eq!(ended.stderr(), "");
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let ended = super::Ended(machine.command(&["kinds"]).stdout(full).output().unwrap());
    ended.refused(73, &["standard output"]);
}

/// A ticket of a gateway that is not there: nobody listens on port 1.
fn ticket_of_nobody() -> String {
    let json = serde_json::json!({
        "v": 1, "trust_domain": "lab.example", "endpoints": ["127.0.0.1:1"], "gateway_ca_sha256": "00".repeat(32),
        "join_signing_key": "p256:MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEaxfR8uEsQkf4vOblY6RA8ncDfYEt6zOg9KE5RdiYwpZP40Li_hp_m47n60p8D54WK84zV2sxXs7LtkBoN79R9Q",
        "join_encryption_key": "x25519:AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI",
        "token": "bt_x", "uses": 1, "expires_at": "2100-01-01T00:00:00Z", "site": "fra1", "labels": {},
        "attestors": ["token"],
    });
    format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(json.to_string().as_bytes()))
}
