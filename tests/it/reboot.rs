//! `node.reboot` through the real binary: its machine is a file, the test starts the node again as the machine would.

use bcd::failpoint;
use serde_json::value::RawValue;

use crate::lab::{Lab, shown, until};

fn enqueue(lab: &Lab) -> bcd::model::CommandId {
    lab.enqueue("node.reboot", RawValue::from_string("{}".into()).expect("JSON"))
}

/// Starts the node again as often as it ends by itself, until the command has ended.
fn ended(lab: &mut Lab, id: &bcd::model::CommandId) -> bcd::gateway::control::CommandView {
    until("the end of the reboot", || {
        if let Some(status) = lab.node().ended() {
            assert!(status.success(), "{status}\n{}", lab.logs());
            lab.start_node(None);
        }
        lab.show(id).filter(|view| bcd::sim::invariants::is_terminal(&view.state))
    })
}

#[test]
fn a_reboot_ends_the_node_and_succeeds_when_it_comes_back_in_another_boot() {
    let mut lab = Lab::joined();
    lab.start_node(None);
    lab.probe();
    let gateway = lab.path("gateway");
    let mut ctl = lab.bcd(&["ctl", "--gateway", &gateway.to_string_lossy(), "--json", "reboot", "-"], None);
    let ctl = ctl.stdout(std::process::Stdio::piped()).spawn().expect("bcd starts");
    let status = lab.node().wait("the node's end");
    assert!(status.success(), "{status}\n{}", lab.logs());
    assert!(lab.nodes().iter().all(|node| node.state != "connected"));
    lab.start_node(None);
    let output = ctl.wait_with_output().expect("an end");
    assert!(output.status.success(), "{}", shown(&output));
    let view: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(
        (&view["state"], &view["reason"], &view["effect"]),
        (&"succeeded".into(), &"rebooted".into(), &"complete".into())
    );
    assert_eq!(lab.reboots(), 1);
    // Told at the session's first heartbeat; the result came with its Hello.
    let last = until("the second connection", || {
        let mut connected = lab.events().into_iter().filter(|event| event.kind == "node.connected");
        connected.nth(1).map(|event| event.detail)
    });
    assert_eq!((&last["bootChanged"], &last["journalChanged"]), (&true.into(), &false.into()), "{last}");
    lab.probe();
    let log = std::fs::read_to_string(lab.path("gateway.log")).expect("a log");
    assert!(log.contains("intent=rebooting"), "the gateway is told why the node goes\n{log}");
}

#[test]
fn a_node_killed_at_any_step_of_a_reboot_reboots_at_most_once_and_ends_it() {
    // The step, whether the machine has restarted when the command has ended, and the command's end.
    let cases = [
        (failpoint::ACCEPTED, true, "succeeded"),
        (failpoint::RUN_WRITTEN, true, "succeeded"),
        (failpoint::RUNNING, false, "failed"),
        (failpoint::BEGUN_CREATED, false, "failed"),
        (failpoint::BEGUN, false, "failed"),
        (failpoint::EFFECT_STARTED, true, "succeeded"),
    ];
    for (step, rebooted, end) in cases {
        let step = step.name();
        let mut lab = Lab::joined();
        let id = enqueue(&lab);
        lab.start_node(Some(step));
        lab.node().wait_killed(step);
        lab.start_node(None);
        let view = ended(&mut lab, &id);
        let place = format!("{step}: {view:?}\n{}", lab.logs());
        assert_eq!((view.state.as_str(), view.terminal_changes), (end, 1), "{place}");
        assert_eq!(lab.reboots(), usize::from(rebooted), "{place}");
        let reason = if rebooted { "rebooted" } else { "interrupted" };
        assert_eq!(view.reason, reason, "{place}");
        lab.probe();
    }
}
