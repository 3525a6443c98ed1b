//! How a machine becomes a node, and how it ends being one: the real program with a real gateway.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use bcd::gateway::control::{Request, Response};

use crate::lab::{Lab, copy, shown, until};

const TWO_YEARS_S: i64 = 2 * 365 * 24 * 3600;

/// Runs `bcd` to its end, which must have this code; what it printed, and said on standard error.
#[track_caller]
fn run(lab: &Lab, arguments: &[&str], code: i32) -> String {
    let output = lab.bcd(arguments, None).output().expect("bcd starts");
    ended(lab, &output, code)
}

#[track_caller]
fn ended(lab: &Lab, output: &Output, code: i32) -> String {
    assert_eq!(output.status.code(), Some(code), "{}\n{}", shown(output), lab.logs());
    shown(output)
}

/// What stands in the node's state directory, but for the journal's lock.
fn names(lab: &Lab) -> Vec<String> {
    let entries = std::fs::read_dir(lab.path("node")).expect("a directory").map(Result::unwrap);
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name != "journal.lock").collect();
    names.sort();
    names
}

fn hellos(lab: &Lab) -> u64 {
    let Response::Stats(stats) = lab.ask(&Request::Stats) else { panic!("no counts") };
    stats.hellos
}

#[test]
fn a_join_that_waits_outlasts_a_gateway_that_is_not_there_yet_and_tells_of_every_attempt() {
    let mut lab = Lab::new();
    let ticket = lab.ticket(1);
    lab.kill_gateway();
    let told = lab.path("join.log");
    let log = std::fs::File::create(&told).expect("a log");
    let mut join = lab.join_command(&ticket, None);
    let mut join = join.arg("--wait").stdout(Stdio::null()).stderr(log).spawn().expect("bcd starts");
    let attempts = || std::fs::read_to_string(&told).expect("a log").matches("next attempt in").count();
    until("two attempts", || (attempts() >= 2).then_some(()));
    assert!(join.try_wait().expect("a child").is_none(), "it waits");
    lab.start_gateway(None);
    let status = join.wait().expect("a child to wait for");
    assert!(status.success(), "{status}\n{}", std::fs::read_to_string(&told).expect("a log"));
    lab.start_node(None);
    lab.probe();
}

#[test]
fn a_machine_whose_clock_is_two_years_off_either_way_joins_and_works_and_is_told_of_the_difference() {
    for (off, word) in [(-TWO_YEARS_S, "behind"), (TWO_YEARS_S, "ahead of")] {
        let mut lab = Lab::new();
        let ticket = lab.ticket(1);
        lab.variables.push(("BCD_FAKE_CLOCK_OFF_S", off.to_string()));
        let joined = ended(&lab, &lab.join(&ticket), 0);
        assert!(joined.contains(word) && joined.contains("timedatectl set-ntp true"), "{joined}");
        lab.start_node(None);
        lab.probe();
        let status = lab.status().expect("a daemon");
        let left = status["certificate"]["remaining_s"].as_u64().expect("server time is known");
        assert!((23 * 3600..=24 * 3600).contains(&left), "{status}");
        let program = lab.enqueue_program("one", "");
        assert_eq!(lab.ended(&program).state, "succeeded", "{}", lab.logs());
    }
}

#[test]
fn a_ticket_runs_out_by_the_control_planes_clock_whatever_the_machines_says() {
    let mut lab = Lab::new();
    let ticket = lab.ticket_for(1, 1, "lab");
    std::thread::sleep(Duration::from_millis(1_200));
    lab.variables.push(("BCD_FAKE_CLOCK_OFF_S", (-TWO_YEARS_S).to_string()));
    let refused = ended(&lab, &lab.join(&ticket), 65);
    assert!(refused.contains("the ticket has run out by the gateway's clock"), "{refused}");
    assert!(!lab.path("node/identity.json").exists());
}

#[test]
fn a_ticket_for_many_gives_its_site_and_labels_to_each_machine_and_the_node_shows_them() {
    let mut lab = Lab::new();
    let gateway = lab.path("gateway").to_string_lossy().into_owned();
    let order =
        ["ctl", "--gateway", &gateway, "ticket", "--uses", "2", "--site", "fra1", "--label", "rack=r12"];
    let ticket = lab.path("many");
    let line = lab.bcd(&order, None).output().expect("bcd starts");
    assert!(line.status.success(), "{}", shown(&line));
    std::fs::write(&ticket, &line.stdout).expect("a file");
    for state in ["node", "second"] {
        let mut join = lab.join_command(&ticket, None);
        ended(&lab, &join.env("BCD_STATE", lab.path(state)).output().expect("bcd starts"), 0);
    }
    let mut third = lab.join_command(&ticket, None);
    let refused = third.env("BCD_STATE", lab.path("third")).output().expect("bcd starts");
    assert!(ended(&lab, &refused, 65).contains("has been used up by other machines"));
    let nodes = lab.nodes();
    assert_eq!(nodes.len(), 2, "{nodes:?}");
    for node in &nodes {
        assert_eq!((node.site.as_str(), node.labels["rack"].as_str()), ("fra1", "r12"), "{node:?}");
    }
    lab.start_node(None);
    let status = until("a status", || lab.status());
    assert_eq!((&status["node"]["site"], &status["node"]["labels"]["rack"]), (&"fra1".into(), &"r12".into()));
    assert!(run(&lab, &["status"], 0).contains("rack=r12"));
}

#[test]
fn a_machine_that_leaves_tells_the_results_that_it_owes_starts_nothing_more_and_is_no_node_any_more() {
    let mut lab = Lab::joined();
    let (first, go) = (lab.enqueue_program("one", &format!("; {}", waits_for(&lab))), lab.path("go"));
    lab.start_node(None);
    until("the program", || (lab.runs("one") == 1).then_some(()));
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    let second = lab.enqueue_program("two", "");
    let told = lab.path("leave.log");
    let log = std::fs::File::create(&told).expect("a log");
    let mut leave = lab.bcd(&["leave"], None);
    let mut leave = leave.stdout(log.try_clone().expect("a log")).stderr(log).spawn().expect("bcd starts");
    until("a session that admits nothing", || {
        let view = lab.show(&second)?;
        view.message.contains("stopping").then_some(())
    });
    assert!(leave.try_wait().expect("a child").is_none(), "it waits for what runs");
    std::fs::write(go, "").expect("a file");
    let status = leave.wait().expect("a child to wait for");
    let told = std::fs::read_to_string(&told).expect("a log");
    assert!(status.success() && told.contains("this machine is n-"), "{status}\n{told}\n{}", lab.logs());

    assert_eq!((lab.ended(&first).state.as_str(), lab.runs("one")), ("succeeded", 1));
    let view = lab.ended(&second);
    assert_eq!((view.state.as_str(), view.reason.as_str(), lab.runs("two")), ("failed", "node-deleted", 0));
    assert!(lab.nodes().is_empty(), "{}", lab.logs());
    // What the host has done, and room on its disk, are not the node's.
    let left = names(&lab).into_iter().filter(|name| !name.contains(".reset-"));
    let left: Vec<String> = left.filter(|name| name != "audit.log").collect();
    assert_eq!(left, ["reserve"]);
    assert!(lab.told().iter().any(|event| event.kind == "node.leaving"));
    run(&lab, &["node"], 78);
    run(&lab, &["leave"], 78);
}

/// A piece of a shell's program that ends when the file `go` is there.
fn waits_for(lab: &Lab) -> String {
    format!("while ! [ -e {} ]; do sleep 0.02; done", lab.path("go").display())
}

#[test]
fn a_leave_moves_nothing_while_the_daemon_or_a_program_runs_and_says_which() {
    let mut lab = Lab::joined();
    let id = lab.enqueue_program("one", &format!("; {}", waits_for(&lab)));
    lab.start_node(None);
    until("the program", || (lab.runs("one") == 1).then_some(()));
    assert!(run(&lab, &["leave", "--try-for", "1"], 75).contains("systemctl stop bcd"));
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    let refused = run(&lab, &["leave", "--try-for", "3"], 75);
    assert!(refused.contains("1 command still run") && refused.contains(id.as_str()), "{refused}");
    for name in ["identity.json", "keys", "journal.db", "begun"] {
        assert!(names(&lab).iter().any(|there| there == name), "{:?}", names(&lab));
    }
    std::fs::write(lab.path("go"), "").expect("a file");
    lab.start_node(None);
    assert_eq!(lab.ended(&id).state, "succeeded", "the node is what it was\n{}", lab.logs());
    lab.probe();
}

#[test]
fn a_leave_that_no_gateway_hears_of_moves_nothing_unless_it_is_forced() {
    let mut lab = Lab::joined();
    lab.kill_gateway();
    let refused = run(&lab, &["leave", "--try-for", "1"], 69);
    assert!(refused.contains("bcd leave --force"), "{refused}");
    assert!(lab.path("node/identity.json").exists());
    let forced = run(&lab, &["leave", "--force", "--try-for", "1"], 0);
    assert!(forced.contains("have it deleted") && forced.contains("identity.json.reset-"), "{forced}");
    assert!(!lab.path("node/identity.json").exists());
    // A forced leave that could move nothing asks for no deletion.
    assert!(!run(&lab, &["leave", "--force", "--try-for", "1"], 78).contains("have it deleted"));
}

#[test]
fn a_node_that_the_control_plane_knows_no_more_leaves_only_when_its_programs_have_ended() {
    let mut lab = Lab::joined();
    lab.enqueue_program("one", &format!("; {}", waits_for(&lab)));
    lab.start_node(None);
    until("the program", || (lab.runs("one") == 1).then_some(()));
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    lab.ask(&Request::Delete { node: lab.node_id() });
    assert!(lab.nodes().is_empty(), "{}", lab.logs());
    let refused = run(&lab, &["leave", "--try-for", "3"], 75);
    assert!(refused.contains("1 command still run"), "{refused}");
    assert!(lab.path("node/identity.json").exists());
    std::fs::write(lab.path("go"), "").expect("a file");
    run(&lab, &["leave"], 0);
    assert!(!lab.path("node/identity.json").exists());
}

/// The files that tell a machine: its board, and the disk that holds its root file system.
fn machine(lab: &Lab, name: &str, board: &str, disk: &str) -> PathBuf {
    let root = lab.path(name);
    let write = |file: &str, text: &str| {
        let path: &Path = &root.join(file);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
        std::fs::write(path, text).expect("a file");
    };
    write("sys/class/dmi/id/product_uuid", &format!("4c4c4544-0042-3510-8052-{board}\n"));
    write("etc/machine-id", "b08dfa6083e7567a1921a715000001fb\n");
    write("proc/self/mountinfo", "21 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
    write("sys/devices/sda/sda1/partition", "1\n");
    write("sys/devices/sda/device/wwid", &format!("naa.{disk}\n"));
    std::fs::create_dir_all(root.join("sys/dev/block")).expect("a directory");
    symlink("../../devices/sda/sda1", root.join("sys/dev/block/8:1")).expect("a link");
    root
}

#[test]
fn a_copied_state_directory_dials_nothing_on_another_machine_and_is_set_free_by_a_reset() {
    const FIRST: &str = "b4c04f4e3132";
    let mut lab = Lab::new();
    let on = |lab: &mut Lab, root: PathBuf| {
        lab.variables = vec![("BCD_FAKE_ROOT", root.to_string_lossy().into_owned())];
    };
    let first = machine(&lab, "first", FIRST, "5000");
    on(&mut lab, first);
    lab.join_with_a_ticket();
    copy(&lab.path("node"), &lab.path("original"));

    let another = machine(&lab, "another", "000000000002", "6000");
    on(&mut lab, another);
    let before = names(&lab);
    for arguments in [&["node"][..], &["leave"]] {
        let refused = run(&lab, arguments, 79);
        assert!(refused.contains("was copied from another machine"), "{refused}");
        assert!(refused.contains("join --state") && refused.contains("--reset --yes"), "{refused}");
    }
    assert_eq!((hellos(&lab), names(&lab)), (0, before), "nothing was dialed or written");
    copy(&lab.path("node"), &lab.path("forced"));
    let state = lab.path("forced");
    let forced = run(&lab, &["leave", "--force", "--state", &state.to_string_lossy()], 0);
    assert!(forced.contains("must not be deleted") && !forced.contains("have it deleted"), "{forced}");
    assert!(!state.join("identity.json").exists());
    assert_eq!((hellos(&lab), lab.nodes().len()), (0, 1), "the original goes on");

    // A board, or a disk, that was replaced is the same machine.
    for (board, disk) in [(FIRST, "6000"), ("000000000002", "5000")] {
        let mended = machine(&lab, &format!("mended-{disk}"), board, disk);
        on(&mut lab, mended);
        lab.start_node(None);
        until("a session", || lab.status()?["session"]["live"].as_object().map(drop));
        assert!(lab.node().terminate().success(), "{}", lab.logs());
    }

    let original = lab.node_id();
    let another = lab.path("another");
    on(&mut lab, another);
    let ticket = lab.ticket(1);
    let mut join = lab.join_command(&ticket, None);
    ended(&lab, &join.args(["--reset", "--yes"]).output().expect("bcd starts"), 0);
    lab.start_node(None);
    let own = until("a session of its own", || {
        let status = lab.status()?;
        status["session"]["live"].as_object()?;
        Some(status["node"]["id"].as_str()?.to_owned())
    });
    assert_ne!(own, original.as_str());
    assert_eq!(lab.nodes().len(), 2, "both are nodes now");
}

#[test]
fn a_sealed_image_holds_no_node_and_each_machine_made_from_it_joins_as_its_own() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    assert!(run(&lab, &["image", "seal", "--yes"], 75).contains("systemctl stop bcd"));
    assert!(lab.node().terminate().success(), "{}", lab.logs());
    run(&lab, &["image", "seal"], 64);
    assert!(lab.path("node/identity.json").exists());
    std::fs::write(lab.path("node/notes"), "theirs").expect("a file");
    let sealed = run(&lab, &["image", "seal", "--yes"], 0);
    assert!(sealed.contains("notes is not bcd's and was left"), "{sealed}");
    assert_eq!(names(&lab), ["notes"]);
    let ticket = lab.ticket(2);
    let before = lab.nodes().len();
    for copied in ["copy-1", "copy-2"] {
        copy(&lab.path("node"), &lab.path(copied));
        let mut join = lab.join_command(&ticket, None);
        ended(&lab, &join.env("BCD_STATE", lab.path(copied)).output().expect("bcd starts"), 0);
    }
    assert_eq!(lab.nodes().len(), before + 2);
}

#[test]
fn a_join_with_a_reset_that_is_done_is_told_apart_when_it_is_repeated_and_keeps_its_identity() {
    let lab = Lab::joined();
    let ticket = lab.ticket(1);
    let again = |ticket: &Path| {
        let mut join = lab.join_command(ticket, None);
        ended(&lab, &join.args(["--reset", "--yes"]).output().expect("bcd starts"), 0)
    };
    again(&ticket);
    let identity = || std::fs::read(lab.path("node/identity.json")).expect("an identity");
    let (joined, there) = (identity(), names(&lab));
    let told = again(&ticket);
    assert!(told.contains("has joined with this ticket already, as n-"), "{told}");
    assert_eq!((identity(), names(&lab)), (joined.clone(), there));
    // A ticket for many machines has another use.
    let many = lab.ticket(9);
    again(&many);
    assert_ne!(identity(), joined);
}
