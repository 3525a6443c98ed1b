//! The real program on a disk that fills, runs out of inodes, turns read-only or breaks, and with its journal taken
//! away: the session stays, nothing starts, the status says why, and all goes on when the cause is gone.
//!
//! The disks are real file systems, so these tests need the right to mount one. Without it they say so and pass.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use bcd::gateway::control::{CommandView, Response};
use bcd::gateway::worker::Draft;
use bcd::model::{CommandId, ServerTime};
use serde_json::json;
use serde_json::value::to_raw_value;

use crate::lab::{Lab, shown, until};

/// A mounted file system, taken away when this is dropped.
struct Mount(PathBuf);

impl Mount {
    /// A tmpfs at `path`, made where it is missing. None where this user may not mount.
    fn tmpfs(path: &Path, options: &str) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        Self::mounted(path, &["-t", "tmpfs", "-o", &format!("{options},mode=700"), "bcd-test"])
    }

    /// An ext4 of 48 MiB in a file at `image`. None where this user may not mount.
    fn ext4(path: &Path, image: &Path) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        std::fs::File::create(image).unwrap().set_len(48 << 20).unwrap();
        match Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0"]).arg(image).output() {
            Ok(made) => assert!(made.status.success(), "{}", shown(&made)),
            Err(error) => {
                eprintln!("SKIPPED: no mkfs.ext4 here: {error}");
                return None;
            }
        }
        let mount = Self::mounted(path, &["-o", "loop", &image.to_string_lossy()])?;
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        Some(mount)
    }

    fn mounted(path: &Path, arguments: &[&str]) -> Option<Self> {
        let output = Command::new("mount").args(arguments).arg(path).output().expect("mount(8)");
        if !output.status.success() {
            eprintln!("SKIPPED: no file system of its own for this test: {}", shown(&output));
            assert!(!nix::unistd::geteuid().is_root() || !may_mount(), "root may mount: {}", shown(&output));
            return None;
        }
        Some(Self(path.to_owned()))
    }
}

/// CAP_SYS_ADMIN, the 22nd capability: root in a container may lack it.
fn may_mount() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap().trim();
    u64::from_str_radix(effective, 16).unwrap() & (1 << 21) != 0
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: the node may still have files open there.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A lab whose node's state directory is a small tmpfs, with the node running.
fn lab_on(options: &str) -> Option<(Lab, Mount)> {
    lab_on_disk(|lab| Mount::tmpfs(&lab.path("node"), options))
}

/// A lab whose node's state directory is a disk, with the node running.
fn lab_on_disk(mount: impl FnOnce(&Lab) -> Option<Mount>) -> Option<(Lab, Mount)> {
    let mut lab = Lab::new();
    let mount = mount(&lab)?;
    let joined = lab.join(&lab.ticket(1));
    assert!(joined.status.success(), "{}", shown(&joined));
    lab.start_node(None);
    lab.probe();
    Some((lab, mount))
}

fn status(lab: &Lab) -> serde_json::Value {
    until("a status", || {
        let output = lab.bcd(&["status", "--json"], None).output().expect("bcd starts");
        serde_json::from_slice(&output.stdout).ok()
    })
}

fn conditions(lab: &Lab) -> Vec<String> {
    let conditions = status(lab)["conditions"].as_array().expect("a list").clone();
    conditions.iter().map(|condition| condition["token"].as_str().expect("a token").to_owned()).collect()
}

/// A program that the node must refuse; it runs out within seconds, with the last why.
pub fn refused_until_it_expires(lab: &Lab, name: &str) -> String {
    let witness = lab.path("witness");
    let argv = ["/bin/sh", "-c", "echo \"$1\" >> \"$2\"", "sh", name, &witness.to_string_lossy()];
    let args = to_raw_value(&json!({ "argv": argv })).unwrap();
    let draft = Draft { node: lab.node_id(), kind: "node.exec".into(), args, ttl_s: 2, id: None };
    let Response::Enqueued(id) = lab.ask(&lab.signed(draft)) else { panic!("not enqueued") };
    let view = lab.ended(&id);
    assert_eq!((view.state.as_str(), lab.runs(name)), ("expired", 0), "{view:?}\n{}", lab.logs());
    view.message
}

/// A program that runs until the file `gate` is there, and then says much.
fn slow_program(lab: &Lab) -> CommandId {
    let gate = lab.path("gate");
    let rest = format!("; while [ ! -e {} ]; do sleep 0.05; done; head -c 40000 /dev/zero", gate.display());
    let id = lab.enqueue_program("slow", &rest);
    until("the slow program", || (lab.runs("slow") == 1).then_some(()));
    id
}

/// The true result of [`slow_program`].
fn check_slow(view: &CommandView) {
    assert_eq!(view.state, "succeeded", "no result is lost: {view:?}");
    let output: serde_json::Value = serde_json::from_str(&view.output).expect("JSON");
    assert_eq!((&output["exit_status"], &output["stdout"]["size"]), (&json!(0), &json!(40_000)), "{output}");
}

/// How the program fares that ends during a fault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Slow {
    /// It is told during the fault: its room was set aside.
    Told,
    /// It waits with the supervisor until the disk takes a write.
    Waits,
}

/// What holds during each of these faults, and after it: `begin` brings it about, `end` ends it.
fn survives(lab: &mut Lab, (why, slow_ends): (&str, Slow), begin: impl FnOnce(&Lab), end: impl FnOnce(&Lab)) {
    let pid = status(lab)["pid"].clone();
    let slow = slow_program(lab);
    begin(lab);
    let message = refused_until_it_expires(lab, "refused");
    assert!(message.contains(why), "{message}");
    let during = status(lab);
    assert_eq!(conditions(lab), [why], "{during}");
    assert!(during["conditions"][0]["since_boot_ms"].as_u64().is_some_and(|since| since > 0), "{during}");
    assert_eq!(during["session"]["state"], "live", "{during}");
    let text = shown(&lab.bcd(&["status"], None).output().unwrap());
    assert!(text.contains(&format!("condition    {why} for ")), "{text}");
    std::fs::write(lab.path("gate"), "").unwrap();
    if slow_ends == Slow::Told {
        check_slow(&lab.ended(&slow));
        assert_eq!(conditions(lab), [why], "the disk is as it was");
    }
    let waits = lab.enqueue_program("waits", "");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(lab.runs("waits"), 0);

    end(lab);
    check_slow(&lab.ended(&slow));
    let view = lab.ended(&waits);
    assert_eq!((view.state.as_str(), lab.runs("waits"), lab.runs("slow")), ("succeeded", 1, 1), "{view:?}");
    until("the end of the condition", || conditions(lab).is_empty().then_some(()));
    assert_eq!(status(lab)["pid"], pid, "without a restart");
    assert_eq!(lab.node().terminate().code(), Some(0));
    lab.start_node(None);
    lab.probe();
}

/// Writes zeros until the disk takes no more.
fn fill(path: &Path) {
    use std::io::Write as _;
    let mut file = std::fs::File::create(path).unwrap();
    for size in [64 << 10, 4096, 1] {
        while file.write_all(&vec![0; size]).is_ok() {}
    }
}

#[test]
fn a_full_disk_refuses_commands_loses_no_result_and_all_resumes_with_space() {
    let Some((mut lab, _mount)) = lab_on("size=40m") else { return };
    let filler = lab.path("node/filler");
    survives(&mut lab, ("disk", Slow::Told), |_| fill(&filler), |_| std::fs::remove_file(&filler).unwrap());
}

#[test]
fn a_full_ext4_refuses_commands_loses_no_result_and_all_resumes_with_space() {
    let disk = |lab: &Lab| Mount::ext4(&lab.path("node"), &lab.path("disk"));
    let Some((mut lab, _mount)) = lab_on_disk(disk) else { return };
    let filler = lab.path("node/filler");
    survives(&mut lab, ("disk", Slow::Told), |_| fill(&filler), |_| std::fs::remove_file(&filler).unwrap());
}

#[test]
fn a_disk_without_inodes_refuses_commands_and_all_resumes_with_some() {
    let Some((mut lab, _mount)) = lab_on("size=40m,nr_inodes=100") else { return };
    let many = lab.path("node/many");
    survives(
        &mut lab,
        ("disk", Slow::Told),
        |_| {
            std::fs::create_dir(&many).unwrap();
            let one = |n: u32| std::fs::File::create(many.join(n.to_string())).is_ok();
            assert!((0..200).any(|n| !one(n)), "the inodes never ran out");
        },
        |_| std::fs::remove_dir_all(&many).unwrap(),
    );
}

#[test]
fn a_state_directory_that_turns_read_only_refuses_commands_and_all_resumes_when_it_is_writable() {
    let Some((mut lab, _mount)) = lab_on("size=40m") else { return };
    let state = lab.path("node").to_string_lossy().into_owned();
    let over = std::cell::RefCell::new(None);
    survives(
        &mut lab,
        ("read-only", Slow::Waits),
        |_| {
            // The same files under a mount that takes no writes: what is open stays open, as after an error's remount.
            *over.borrow_mut() = Mount::mounted(Path::new(&state), &["--bind", &state]);
            let read_only = Command::new("mount").args(["-o", "remount,bind,ro", &state]).output().unwrap();
            assert!(read_only.status.success(), "{}", shown(&read_only));
        },
        |_| drop(over.borrow_mut().take()),
    );
}

#[test]
fn an_outcome_that_cannot_be_written_waits_with_its_supervisor_and_is_told_when_it_can_be() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    for (point, errno) in [("outcome.write", 122), ("outcome.sync", 5)] {
        let slow = slow_program(&lab);
        std::fs::write(lab.path("faults"), format!("{point} {errno}\n")).unwrap();
        std::fs::write(lab.path("gate"), "").unwrap();
        until(point, || {
            let log = std::fs::read_to_string(lab.path("node.log")).ok()?;
            log.contains(&format!("the outcome of {slow} cannot be written, and is tried again"))
                .then_some(())
        });
        let view = lab.show(&slow).unwrap();
        assert_eq!(view.state, "running", "{point}: {view:?}");
        std::fs::remove_file(lab.path("faults")).unwrap();
        check_slow(&lab.ended(&slow));
        for name in ["gate", "witness"] {
            std::fs::remove_file(lab.path(name)).unwrap();
        }
    }
}

#[test]
fn a_record_that_a_program_needs_and_that_cannot_be_made_starts_nothing_says_why_and_all_goes_on_after_it() {
    let mut lab = Lab::joined();
    let faults = lab.path("faults");
    lab.start_node(None);
    lab.probe();
    for (point, errno, why) in [
        ("begun.create", 28, "disk"),
        ("begun.write", 122, "disk"),
        ("begun.sync", 5, "io-error"),
        ("outcome.reserve", 122, "disk"),
    ] {
        std::fs::write(&faults, format!("{point} {errno}\n")).unwrap();
        let waits = lab.enqueue_program(point, "");
        until(&format!("{point}: the condition"), || (conditions(&lab) == [why]).then_some(()));
        assert_eq!(lab.runs(point), 0, "{point}: nothing has started");
        std::fs::remove_file(&faults).unwrap();
        let view = lab.ended(&waits);
        assert_eq!((view.state.as_str(), lab.runs(point)), ("succeeded", 1), "{point}: {view:?}");
        until(&format!("{point}: the end of it"), || conditions(&lab).is_empty().then_some(()));
    }
}

#[test]
fn a_failed_sync_ends_the_daemon_once_and_a_second_one_in_the_same_boot_runs_on_and_says_so() {
    let mut lab = Lab::joined();
    let faults = lab.path("faults");
    let arm = || std::fs::write(&faults, "journal.sync 5\n").unwrap();
    lab.start_node(None);
    lab.probe();
    arm();
    let waits = lab.enqueue_program("waits", "");
    assert_eq!(lab.node().wait("an end by itself").code(), Some(73), "{}", lab.logs());
    std::fs::remove_file(&faults).unwrap();
    assert!(lab.path("run/sync-failed").exists());

    lab.start_node(None);
    assert_eq!(lab.ended(&waits).state, "succeeded");
    assert_eq!(lab.runs("waits"), 1);
    arm();
    let message = refused_until_it_expires(&lab, "refused");
    assert!(message.contains("io-error"), "{message}");
    // Nothing that the disk says from now on is believed.
    std::fs::remove_file(&faults).unwrap();
    let message = refused_until_it_expires(&lab, "refused");
    assert!(message.contains("io-error"), "{message}");
    assert_eq!(conditions(&lab), ["io-error"]);
    assert_eq!(status(&lab)["session"]["state"], "live");
    assert!(lab.node().is_running());

    lab.node().terminate();
    lab.start_node(None);
    lab.probe();
}

fn journal(lab: &Lab) -> serde_json::Value {
    let shown = lab.bcd(&["journal", "show", "--json"], None).output().unwrap();
    serde_json::from_slice(&shown.stdout).expect("a journal")
}

#[test]
fn a_journal_deleted_under_the_daemon_is_put_back_and_the_next_daemon_knows_everything() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    let before = lab.enqueue_program("before", "");
    assert_eq!(lab.ended(&before).state, "succeeded");
    let known = journal(&lab);
    std::fs::remove_file(lab.path("node/journal.db")).unwrap();
    // Whoever asks the journal for anything makes it look; who asks for nothing waits for upkeep.
    let _ = lab.bcd(&["journal", "show"], None).output().unwrap();
    assert_eq!(lab.node().wait("an end by itself").code(), Some(73), "{}", lab.logs());

    let after = lab.enqueue_program("after", "");
    lab.start_node(None);
    assert_eq!(lab.ended(&after).state, "succeeded");
    let now = journal(&lab);
    assert_eq!(now["journal_id"], known["journal_id"]);
    let ids = |journal: &serde_json::Value| {
        let lines = journal["commands"].as_array().unwrap().clone();
        lines.into_iter().map(|line| line["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert!(ids(&now).contains(&before.to_string()), "{now}");
    assert_eq!((lab.runs("before"), lab.runs("after")), (1, 1));
}

#[test]
fn of_daemons_started_at_once_one_runs_and_the_others_name_it_and_end() {
    let mut lab = Lab::joined();
    for round in 0..6 {
        let daemons: Vec<_> = (0..3)
            .map(|_| {
                let mut command = lab.bcd(&["node"], None);
                command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
                command.spawn().expect("bcd starts")
            })
            .collect();
        let mut daemons: Vec<Option<std::process::Child>> = daemons.into_iter().map(Some).collect();
        let mut ended = Vec::new();
        until("two that end", || {
            for slot in &mut daemons {
                if slot.as_mut().is_some_and(|child| child.try_wait().unwrap().is_some()) {
                    ended.push(slot.take().unwrap().wait_with_output().unwrap());
                }
            }
            (ended.len() >= 2).then_some(())
        });
        let mut one = daemons.into_iter().flatten().next().expect("one runs on");
        for output in &ended {
            let text = shown(output);
            assert_eq!(output.status.code(), Some(75), "round {round}: {text}");
            assert!(text.contains(&format!("pid {}", one.id())), "round {round}: {text}");
        }
        assert_eq!(status(&lab)["pid"], one.id());
        one.kill().unwrap();
        one.wait().unwrap();
    }
    lab.start_node(None);
    lab.probe();
}

fn floors(lab: &Lab) -> PathBuf {
    lab.path("node/floors.json")
}

#[test]
fn floors_that_cannot_be_written_end_no_session_and_are_written_when_they_can_be() {
    let mut lab = Lab::joined();
    std::fs::write(lab.path("faults"), "state.create 122\n").unwrap();
    lab.start_node(None);
    until("the condition", || (conditions(&lab) == ["disk"]).then_some(()));
    assert!(refused_until_it_expires(&lab, "refused").contains("disk"));
    assert_eq!(status(&lab)["session"]["state"], "live");
    assert!(!floors(&lab).exists());
    std::fs::remove_file(lab.path("faults")).unwrap();
    until("the floors", || floors(&lab).exists().then_some(()));
    until("the end of the condition", || conditions(&lab).is_empty().then_some(()));
    lab.probe();
}

#[test]
fn a_lost_journal_takes_its_mark_from_the_floors() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    until("the floors of a Welcome", || floors(&lab).exists().then_some(()));
    lab.kill_node();
    let mut known: serde_json::Value = serde_json::from_slice(&std::fs::read(floors(&lab)).unwrap()).unwrap();
    let time = |value: &serde_json::Value| serde_json::from_value::<ServerTime>(value.clone()).unwrap();
    let joined_mark = journal(&lab)["mark"].clone();
    assert!(time(&known["server_time_mark"]) >= time(&joined_mark), "{known} {joined_mark}");

    // A mark that no gateway of this year has: whoever heeds it refuses the Welcome.
    known["server_time_mark"] = "2100-01-01T00:00:00Z".into();
    std::fs::write(floors(&lab), known.to_string()).unwrap();
    lab.lose_journal();
    lab.start_node(None);
    // The certificate has run out by that mark, or the Welcome lies before it: either way it is heeded.
    let reason =
        until("a refusal", || status(&lab)["session"]["last_end"]["reason"].as_str().map(str::to_owned));
    assert!(["time-backwards", "identity-expired"].contains(&reason.as_str()), "{reason}");
    assert!(status(&lab)["server_time"].as_str().unwrap().starts_with("2100-"));
}

#[test]
fn a_daemon_starts_on_a_full_disk_says_so_and_resumes_with_space() {
    let Some((mut lab, _mount)) = lab_on("size=40m") else { return };
    assert_eq!(lab.node().terminate().code(), Some(0));
    let filler = lab.path("node/filler");
    fill(&filler);
    lab.start_node(None);
    until("a live session", || (status(&lab)["session"]["state"] == "live").then_some(()));
    assert!(refused_until_it_expires(&lab, "refused").contains("disk"));
    assert_eq!(conditions(&lab), ["disk"]);
    std::fs::remove_file(&filler).unwrap();
    lab.probe();
    until("the end of the condition", || conditions(&lab).is_empty().then_some(()));
}

/// What holds for a start on a disk that takes no writes: the daemon waits and says why, and runs when it can.
fn starts_when_it_can(lab: &mut Lab, why: &str, begin: impl FnOnce(&Lab), end: impl FnOnce(&Lab)) {
    assert_eq!(lab.node().terminate().code(), Some(0));
    begin(lab);
    lab.start_node(None);
    until("the condition", || (conditions(lab) == [why]).then_some(()));
    let asked = lab.bcd(&["journal", "show"], None).output().unwrap();
    assert!(!asked.status.success() && shown(&asked).contains(why), "{}", shown(&asked));
    assert_eq!(lab.node().terminate().code(), Some(0), "what waits stops at once");

    lab.start_node(None);
    let waits = lab.enqueue_program("waits", "");
    until("the condition", || (conditions(lab) == [why]).then_some(()));
    let during = status(lab);
    assert_eq!((&during["session"]["state"], &during["journal"]), (&json!("waiting"), &json!(null)));
    assert!(during["session"]["until_boot_ms"].as_u64() > during["boot_ms"].as_u64(), "{during}");
    assert_eq!(lab.runs("waits"), 0);
    end(lab);
    let view = lab.ended(&waits);
    assert_eq!((view.state.as_str(), lab.runs("waits")), ("succeeded", 1), "{view:?}\n{}", lab.logs());
    until("the end of the condition", || conditions(lab).is_empty().then_some(()));
    assert_eq!(status(lab)["pid"], during["pid"], "without a restart");
    lab.probe();
}

#[test]
fn a_start_in_a_read_only_state_directory_waits_and_says_so_and_runs_when_it_is_writable() {
    let Some((mut lab, _mount)) = lab_on("size=40m") else { return };
    let state = lab.path("node").to_string_lossy().into_owned();
    let over = std::cell::RefCell::new(None);
    starts_when_it_can(
        &mut lab,
        "read-only",
        |_| {
            *over.borrow_mut() = Mount::mounted(Path::new(&state), &["--bind", &state]);
            let read_only = Command::new("mount").args(["-o", "remount,bind,ro", &state]).output().unwrap();
            assert!(read_only.status.success(), "{}", shown(&read_only));
        },
        |_| drop(over.borrow_mut().take()),
    );
}

#[test]
fn a_start_on_a_disk_without_room_for_the_log_waits_and_says_so_and_runs_with_space() {
    let Some((mut lab, _mount)) = lab_on("size=40m") else { return };
    let filler = lab.path("node/filler");
    starts_when_it_can(
        &mut lab,
        "disk",
        |lab| {
            std::fs::remove_file(lab.path("node/reserve")).unwrap();
            fill(&filler);
        },
        |_| std::fs::remove_file(&filler).unwrap(),
    );
}

#[test]
fn a_start_whose_identity_the_disk_does_not_give_waits_and_says_so_and_runs_when_it_can_be_read() {
    let mut lab = Lab::joined();
    let faults = lab.path("faults");
    std::fs::write(&faults, "state.read 5\n").unwrap();
    lab.start_node(None);
    until("the condition", || (conditions(&lab) == ["io-error"]).then_some(()));
    let text = shown(&lab.bcd(&["status"], None).output().unwrap());
    assert!(text.contains("waiting for its disk (io-error)"), "{text}");
    let brief = lab.bcd(&["status", "--brief"], None).output().unwrap();
    assert_eq!(brief.status.code(), Some(1), "{}", shown(&brief));
    std::fs::remove_file(&faults).unwrap();
    lab.probe();
    assert!(lab.node().is_running(), "without a restart");
    until("the end of the condition", || conditions(&lab).is_empty().then_some(()));
}

#[test]
fn a_start_whose_recovery_cannot_be_synced_ends_once_and_the_boots_second_opens_the_journal_no_more() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    assert_eq!(lab.node().terminate().code(), Some(0));
    let faults = lab.path("faults");
    std::fs::write(&faults, "journal.sync 5\n").unwrap();
    lab.start_node(None);
    assert_eq!(lab.node().wait("an end by itself").code(), Some(73), "{}", lab.logs());
    assert!(lab.path("run/sync-failed").exists());

    lab.start_node(None);
    until("the condition", || (conditions(&lab) == ["io-error"]).then_some(()));
    // What this process would read now may be pages that never reached the disk.
    std::fs::remove_file(&faults).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let during = status(&lab);
    let session = &during["session"];
    assert_eq!((&session["state"], &during["journal"]), (&json!("waiting"), &json!(null)), "{during}");
    assert_eq!(session["until_boot_ms"], json!(null), "it tries no more: {during}");
    let asked = shown(&lab.bcd(&["journal", "show"], None).output().unwrap());
    assert!(asked.contains("only a new process may try"), "{asked}");
    assert_eq!(lab.node().terminate().code(), Some(0));

    lab.start_node(None);
    lab.probe();
    until("the end of the condition", || conditions(&lab).is_empty().then_some(()));
}

#[test]
fn the_journal_is_exported_and_checked_with_and_without_a_daemon() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    let id = lab.enqueue_program("one", "");
    lab.ended(&id);
    let run = |arguments: &[&str]| lab.bcd(arguments, None).output().unwrap();
    let export = || {
        let output = run(&["journal", "export"]);
        assert_eq!(output.status.code(), Some(0), "{}", shown(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let live = export();
    assert!(
        live.contains(r#"{"type":"journal","#)
            && live.lines().any(|line| {
                line.starts_with(r#"{"type":"begun""#) && line.contains(&format!(r#""id":"{id}""#))
            }),
        "{live}"
    );
    let sound = run(&["journal", "check"]);
    assert_eq!(sound.status.code(), Some(0), "{}", shown(&sound));
    assert!(shown(&sound).contains("sound\n"), "{}", shown(&sound));
    lab.node.as_mut().unwrap().terminate();
    lab.node = None;

    let run = |arguments: &[&str]| lab.bcd(arguments, None).output().unwrap();
    let dead = String::from_utf8(run(&["journal", "export"]).stdout).unwrap();
    let rows = |text: &str| text.lines().filter(|line| !line.starts_with(r#"{"type":"event""#)).count();
    assert_eq!(rows(&dead), rows(&live));
    assert_eq!(run(&["journal", "check"]).status.code(), Some(0));
    std::fs::write(lab.path("node/begun/c-broken.json"), "{").unwrap();
    let broken = run(&["journal", "check"]);
    assert_eq!(broken.status.code(), Some(1), "{}", shown(&broken));
    std::fs::remove_file(lab.path("node/journal.db")).unwrap();
    assert_eq!(run(&["journal", "check"]).status.code(), Some(3));
}
