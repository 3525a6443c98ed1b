//! A node and a gateway that have no protocol version in common.

use crate::lab::{Lab, shown, until};

#[test]
fn a_joined_node_that_meets_a_newer_gateway_says_which_side_to_upgrade() {
    let mut lab = Lab::joined();
    lab.kill_gateway();
    lab.start_gateway_with(None, &["--proto-min", "90", "--proto-max", "99"]);
    lab.start_node(None);
    let told = until("a refusal in bcd status", || {
        let status = lab.bcd(&["status"], None).output().expect("bcd starts");
        Some(shown(&status)).filter(|text| text.contains("protocol-too-old"))
    });
    for words in
        ["this bcd is too old for the gateway 127.0.0.1:", "install a newer bcd", "the gateway 90 to 99"]
    {
        assert!(told.contains(words), "{words:?} is missing in: {told}");
    }
    assert!(lab.logs().contains("install a newer bcd"), "{}", lab.logs());
    // Nothing of the node's own was harmed. A new process, since the next dial of this one is up to a minute away.
    lab.kill_gateway();
    lab.start_gateway(None);
    lab.kill_node();
    lab.start_node(None);
    lab.probe();
}
