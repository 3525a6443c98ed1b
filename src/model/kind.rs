//! The kinds of commands: one table with every property of a kind.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A class of commands with its own credits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Lane {
    /// Short commands that must not wait behind work.
    Control,
    /// Programs and instance operations.
    Work,
    /// Long transfers.
    Bulk,
}

impl Lane {
    /// Every lane.
    pub const ALL: [Self; 3] = [Self::Control, Self::Work, Self::Bulk];

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Work => "work",
            Self::Bulk => "bulk",
        }
    }

    /// By its name on the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|lane| lane.name() == name)
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What kind of node this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// An installed host.
    Host,
    /// The provisioning environment.
    Ramdisk,
}

impl Role {
    /// Its name on the wire and in certificates.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Ramdisk => "ramdisk",
        }
    }

    /// By its name on the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Host, Self::Ramdisk].into_iter().find(|role| role.name() == name)
    }
}

/// Whether a command may run twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetrySafe {
    /// Always.
    Yes,
    /// Never.
    No,
    /// As its arguments say; without a word, no.
    AsArgumentsSay,
}

/// A kind of command that this build runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Answers with versions, boot id, load and free space.
    #[serde(rename = "node.probe")]
    NodeProbe,
    /// Runs a program.
    #[serde(rename = "node.exec")]
    NodeExec,
    /// Answers what this host holds.
    #[serde(rename = "inventory.barrier")]
    InventoryBarrier,
    /// Restarts the machine.
    #[serde(rename = "node.reboot")]
    NodeReboot,
}

/// Who carries a kind out where the node runs unprivileged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DoneBy {
    /// The node itself.
    Node,
    /// The privileged helper.
    Helper,
}

/// The properties of a kind. Units: run times are wall durations on the monotonic clock.
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    /// Name on the wire.
    pub name: &'static str,
    /// Whose credits it takes.
    pub lane: Lane,
    /// Whether it may run twice.
    pub retry_safe: RetrySafe,
    /// Needs a signature always.
    pub destructive: bool,
    /// Its success ends this process.
    pub self_terminating: bool,
    /// Roles that may run it.
    pub roles: &'static [Role],
    /// Run time when the arguments name none.
    pub default_run_time: Duration,
    /// Longest run time that the arguments may ask for.
    pub max_run_time: Duration,
    /// Who does it in the unprivileged mode.
    pub unprivileged: DoneBy,
    /// Its results are signed by the node.
    pub signed_result: bool,
    /// What it does, in one line, for `bcd kinds`.
    pub does: &'static str,
}

impl Kind {
    /// Every kind that this build runs, sorted by name.
    pub const ALL: [Self; 4] = [Self::InventoryBarrier, Self::NodeExec, Self::NodeProbe, Self::NodeReboot];

    /// The kind's row of the table.
    pub fn properties(self) -> Properties {
        match self {
            Self::NodeProbe => Properties {
                name: "node.probe",
                lane: Lane::Control,
                retry_safe: RetrySafe::Yes,
                destructive: false,
                self_terminating: false,
                roles: &[Role::Host, Role::Ramdisk],
                default_run_time: Duration::from_secs(10),
                max_run_time: Duration::from_secs(10),
                unprivileged: DoneBy::Node,
                signed_result: false,
                does: "answers with versions, boot id, load and free space",
            },
            Self::NodeReboot => Properties {
                name: "node.reboot",
                lane: Lane::Control,
                retry_safe: RetrySafe::No,
                destructive: true,
                self_terminating: true,
                roles: &[Role::Host, Role::Ramdisk],
                // Delay and drain are no run time: RUNNING comes after them.
                default_run_time: Duration::from_secs(600),
                max_run_time: Duration::from_secs(600),
                unprivileged: DoneBy::Helper,
                signed_result: true,
                does: "restarts the machine, after an optional delay and drain of work",
            },
            Self::InventoryBarrier => Properties {
                name: "inventory.barrier",
                lane: Lane::Control,
                retry_safe: RetrySafe::Yes,
                destructive: false,
                self_terminating: false,
                roles: &[Role::Host, Role::Ramdisk],
                default_run_time: Duration::from_secs(10),
                max_run_time: Duration::from_secs(10),
                unprivileged: DoneBy::Node,
                signed_result: true,
                does: "answers what this host holds: assignments, instances, processes, commands",
            },
            Self::NodeExec => Properties {
                name: "node.exec",
                lane: Lane::Work,
                retry_safe: RetrySafe::AsArgumentsSay,
                destructive: true,
                self_terminating: false,
                roles: &[Role::Host, Role::Ramdisk],
                default_run_time: Duration::from_secs(3600),
                max_run_time: Duration::from_secs(7 * 24 * 3600),
                unprivileged: DoneBy::Helper,
                signed_result: true,
                does: "runs a program: argv, env, stdin, working directory, user, limits",
            },
        }
    }

    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        self.properties().name
    }

    /// Whether results of a kind of this name are signed by the node: also of one that this build does not know, since
    /// absent knowledge relaxes nothing.
    pub fn signs_results(name: &str) -> bool {
        Self::from_name(name).is_none_or(|kind| kind.properties().signed_result)
    }

    /// Whether a new boot is its success.
    pub fn ends_in_a_new_boot(self) -> bool {
        match self {
            Self::NodeReboot => true,
            Self::InventoryBarrier | Self::NodeExec | Self::NodeProbe => false,
        }
    }

    /// By its name on the wire.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_sorted_and_found_by_name() {
        assert!(Kind::ALL.is_sorted_by_key(|kind| kind.name()));
        for kind in Kind::ALL {
            assert_eq!(Kind::from_name(kind.name()), Some(kind));
            assert!(kind.properties().default_run_time <= kind.properties().max_run_time);
        }
        assert_eq!(Kind::from_name("disk.wipe"), None);
    }

    #[test]
    fn results_of_what_destroys_of_a_barrier_and_of_an_unknown_kind_are_signed() {
        for kind in Kind::ALL {
            let properties = kind.properties();
            let asks = properties.destructive || kind == Kind::InventoryBarrier;
            assert_eq!(properties.signed_result, asks, "{kind}");
            assert_eq!(Kind::signs_results(kind.name()), asks, "{kind}");
        }
        assert!(Kind::signs_results("disk.wipe"));
    }
}
