//! `bcd join` against a real gateway.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::time::Duration;

use bcd::failpoint;
use bcd::wire::version::Range;

use super::{Ended, Gateway, Machine};

fn node_id(joined: &str) -> String {
    let line = joined.lines().find(|line| line.starts_with("joined as ")).unwrap();
    line.split(' ').nth(2).unwrap().to_owned()
}

#[test]
fn a_join_prints_node_and_fingerprint_and_leaves_private_files_whatever_the_umask() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::new();
    let ticket = machine.write_ticket(&gateway.ticket(1, 3600));
    let mut command = machine.command(&["join", "--ticket", &ticket]);
    #[expect(unsafe_code, reason = "umask is async-signal-safe and the child's alone")]
    // SAFETY: umask cannot fail and touches nothing but the child's own mask.
    unsafe {
        command.pre_exec(|| {
            nix::sys::stat::umask(nix::sys::stat::Mode::empty());
            Ok(())
        })
    };
    let out = Ended(command.output().unwrap()).expect(0);
    let keys: Vec<_> = std::fs::read_dir(machine.state().join("keys")).unwrap().map(Result::unwrap).collect();
    assert_eq!(keys.len(), 1);
    let fingerprint = keys[0].file_name().into_string().unwrap();
    assert!(out.contains(fingerprint.trim_end_matches(".key")), "{out}");
    assert!(node_id(&out).starts_with("n-"));

    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    for (name, wanted) in [("", 0o700), ("keys", 0o700), ("identity.json", 0o600), ("journal.db", 0o600)] {
        assert_eq!(mode(&machine.state().join(name)), wanted, "{name}");
    }
    assert_eq!(mode(&keys[0].path()), 0o600);
    assert!(!machine.state().join("join-pending.json").exists());
}

#[test]
fn a_ticket_from_standard_input_is_as_good_as_one_from_a_file() {
    use std::io::Write as _;
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::new();
    let mut child =
        machine.command(&["join", "--ticket", "-"]).stdin(std::process::Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(gateway.ticket(1, 3600).as_bytes()).unwrap();
    Ended(child.wait_with_output().unwrap()).expect(0);
}

#[test]
fn a_machine_that_has_joined_says_so() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    machine
        .join(&gateway.ticket(1, 3600))
        .refused(73, &["has joined already, as n-", "join --state ", "--reset --yes"]);
}

/// What stands in the state directory, but for the journal's lock.
fn names(machine: &Machine) -> Vec<String> {
    let entries = std::fs::read_dir(machine.state()).unwrap().map(Result::unwrap);
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name != "journal.lock").collect();
    names.sort();
    names
}

#[test]
fn a_reset_moves_identity_and_journal_aside_and_the_machine_joins_as_another_node() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::new();
    let first = node_id(&machine.join(&gateway.ticket(1, 3600)).expect(0));
    let before = names(&machine);
    let identity = std::fs::read(machine.state().join("identity.json")).unwrap();

    let out = machine.run(&["join", "--reset", "--yes"]).expect(0);
    assert!(out.contains(&format!("this machine is {first} no more")), "{out}");
    let aside = names(&machine);
    assert!(aside.iter().all(|name| name.contains(".reset-")), "{aside:?}");
    assert_eq!(aside.len(), before.len(), "nothing is deleted: {before:?} {aside:?}");
    let kept = aside.iter().find(|name| name.starts_with("identity.json.reset-")).unwrap();
    assert_eq!(std::fs::read(machine.state().join(kept)).unwrap(), identity);
    machine.run(&["node"]).refused(78, &["has not joined"]);

    let second = node_id(&machine.join(&gateway.ticket(1, 3600)).expect(0));
    assert_ne!(first, second);
    let both = names(&machine);
    assert!(aside.iter().all(|name| both.contains(name)), "a join leaves what was moved aside: {both:?}");
}

#[test]
fn a_reset_with_a_ticket_joins_at_once_and_with_a_bad_ticket_or_without_yes_moves_nothing() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let machine = Machine::joined(&gateway);
    let before = names(&machine);
    let ticket = machine.write_ticket("bcd1.AAAA");
    machine.run(&["join", "--reset", "--yes", "--ticket", &ticket]).refused(65, &["ticket"]);
    machine.run(&["join", "--reset"]).expect(64);
    machine.run(&["join", "--yes"]).expect(64);
    assert_eq!(names(&machine), before);

    let ticket = machine.write_ticket(&gateway.ticket(1, 3600));
    let out = machine.run(&["join", "--reset", "--yes", "--ticket", &ticket]).expect(0);
    assert!(out.contains("moved aside") && node_id(&out).starts_with("n-"), "{out}");
    assert!(machine.state().join("identity.json").exists());
}

#[test]
fn another_gateways_ticket_is_told_apart_from_no_gateway() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [ours, other] = dirs.each_ref().map(|dir| Gateway::start(dir.path()));
    let line = other.ticket(1, 3600);
    let json = data_encoding::BASE64URL_NOPAD.decode(line.strip_prefix("bcd1.").unwrap().as_bytes()).unwrap();
    let mut ticket: serde_json::Value = serde_json::from_slice(&json).unwrap();
    ticket["endpoints"] = serde_json::json!([ours.ready.address.to_string()]);
    let line = format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(ticket.to_string().as_bytes()));
    let address = ours.ready.address.to_string();
    Machine::new().join(&line).refused(65, &[&address, "is not the gateway of this ticket"]);
}

#[test]
fn an_expired_a_used_and_an_unknown_ticket_each_say_so() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let gateway = Gateway::start(dirs[0].path());
    let expired = gateway.ticket(1, 1);
    let used = gateway.ticket(1, 3600);
    Machine::new().join(&used).expect(0);
    Machine::new().join(&used).refused(65, &["used up", "new one"]);

    let json = data_encoding::BASE64URL_NOPAD.decode(used.strip_prefix("bcd1.").unwrap().as_bytes()).unwrap();
    let mut ticket: serde_json::Value = serde_json::from_slice(&json).unwrap();
    ticket["token"] = "bt_unknown".into();
    let unknown = format!("bcd1.{}", data_encoding::BASE64URL_NOPAD.encode(ticket.to_string().as_bytes()));
    Machine::new().join(&unknown).refused(65, &["does not know this ticket's token"]);

    std::thread::sleep(Duration::from_millis(1_200));
    Machine::new().join(&expired).refused(65, &["the ticket has run out", "new one"]);
}

#[test]
fn a_gateway_of_another_version_names_the_side_to_upgrade() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let newer = Gateway::start_with(dirs[0].path(), |options| {
        options.protocol = Range::from_wire(90, 99).unwrap();
    });
    let machine = Machine::new();
    machine.join(&newer.ticket(1, 3600)).refused(1, &["too old for the gateway", "install a newer bcd"]);
    assert!(!machine.state().join("identity.json").exists());
}

#[test]
fn a_join_killed_at_any_step_is_repeated_with_its_key_and_its_single_use_ticket() {
    let gateway_dir = tempfile::tempdir().unwrap();
    let gateway = Gateway::start(gateway_dir.path());
    let steps = [
        failpoint::JOIN_KEY,
        failpoint::JOIN_PENDING,
        failpoint::JOIN_ANSWERED,
        failpoint::JOIN_JOURNAL,
        failpoint::JOIN_IDENTITY,
    ];
    for step in steps {
        let machine = Machine::new();
        let ticket = machine.write_ticket(&gateway.ticket(1, 3600));
        let arguments = ["join", "--ticket", &ticket, "--try-for", "5"];
        let killed = machine.command(&arguments).env("BCD_FAILPOINT", step.name()).output().unwrap();
        assert_eq!(
            killed.status.code(),
            None,
            "{}: {}",
            step.name(),
            String::from_utf8_lossy(&killed.stderr)
        );
        let out = machine.run(&arguments).expect(0);
        assert!(node_id(&out).starts_with("n-"));
        let left: Vec<_> = std::fs::read_dir(machine.state().join("keys")).unwrap().collect();
        assert_eq!(left.len(), 1, "{}: unused keys are gone", step.name());
        assert!(!machine.state().join("join-pending.json").exists());
        machine.run(&["journal", "show"]).expect(0);
    }
}
