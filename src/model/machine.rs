//! What ties a state directory to its machine, as digests: kept at the join, looked at at every start.

use serde::{Deserialize, Serialize};

use super::Digest;

/// Traces of a machine; absent: it has none, or this process may not read it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Of the UUID that the firmware gives (DMI).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dmi_uuid: Option<Digest>,
    /// Of the name of the disk that holds the root file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_disk: Option<Digest>,
    /// Of /etc/machine-id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<Digest>,
}

impl Machine {
    /// Whether what was kept here cannot be `now`'s: both the machine and its root disk are others. One alone is a part
    /// that was replaced. The machine id stands for a firmware's UUID that was not readable at the join or is not now.
    /// Where no disk had a name, then or now, the firmware's UUID decides.
    pub fn is_another_than(&self, now: &Self) -> bool {
        let differ = |kept: Option<Digest>, now: Option<Digest>| Some(kept? != now?);
        let board = differ(self.dmi_uuid, now.dmi_uuid);
        if self.root_disk.is_none() && now.root_disk.is_none() {
            return board == Some(true);
        }
        board.or(differ(self.machine_id, now.machine_id)) == Some(true)
            && differ(self.root_disk, now.root_disk) == Some(true)
    }

    /// Whether nothing tells it from others.
    pub fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(dmi: &str, disk: &str, id: &str) -> Machine {
        let digest = |text: &str| (!text.is_empty()).then(|| Digest::of(text.as_bytes()));
        Machine { dmi_uuid: digest(dmi), root_disk: digest(disk), machine_id: digest(id) }
    }

    #[test]
    fn a_machine_is_another_only_if_board_and_root_disk_both_differ() {
        let kept = machine("board", "disk", "id");
        for (now, another) in [
            (machine("board", "disk", "id"), false),
            (machine("board", "new", "id"), false),
            (machine("new", "disk", "new"), false),
            (machine("board", "new", "new"), false),
            (machine("new", "new", "id"), true),
            (machine("new", "new", "new"), true),
        ] {
            assert_eq!(kept.is_another_than(&now), another, "{now:?}");
        }
    }

    #[test]
    fn what_cannot_be_read_tells_nothing_and_the_machine_id_stands_for_the_board() {
        let kept = machine("board", "disk", "id");
        assert!(!kept.is_another_than(&Machine::default()));
        assert!(!Machine::default().is_another_than(&kept));
        assert!(!kept.is_another_than(&machine("new", "", "new")));
        assert!(kept.is_another_than(&machine("", "new", "new")));
        assert!(!kept.is_another_than(&machine("", "new", "id")));
        assert!(machine("", "disk", "id").is_another_than(&machine("new", "new", "new")));
    }

    #[test]
    fn where_no_disk_has_a_name_another_board_is_another_machine_and_another_machine_id_is_not() {
        let kept = machine("board", "", "id");
        assert!(kept.is_another_than(&machine("new", "", "id")));
        assert!(!kept.is_another_than(&machine("board", "", "new")));
        assert!(!kept.is_another_than(&machine("", "", "new")));
        assert!(!kept.is_another_than(&machine("new", "disk", "new")));
    }
}
