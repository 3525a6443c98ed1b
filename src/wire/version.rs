//! Version negotiation: a range on both sides, the highest common one wins.
//!
//! What a later version adds hides behind a gate: a constant here, which the sender compares with the negotiated
//! version. Its comment tells the reader of an older peer's frame what to make of the gap.

use std::fmt;

use crate::model::Reason;

/// The newest version whose numbers are a contract.
pub const NEWEST: u32 = 1;
/// The lowest version that this build speaks.
pub const MIN: u32 = 1;
/// The highest version that this build speaks. A simulation build goes one beyond the newest: a version that exists
/// to have gates with something behind them.
pub const MAX: u32 = if cfg!(feature = "fakehw") { NEWEST + 1 } else { NEWEST };

/// `Heartbeat.peer_proto_max`, a diagnostic of the test version: absent means "not said" and changes nothing.
pub const GATE_PEER_PROTO_MAX: u32 = 2;

/// A range of versions; never empty, never with zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    min: u32,
    max: u32,
}

impl Range {
    /// What this build speaks.
    pub const OWN: Self = Self { min: MIN, max: MAX };

    /// A range as a peer claims it. An absent (zero) minimum means exactly the maximum.
    ///
    /// # Errors
    /// The maximum is 0 or below the minimum: `protocol-range`.
    pub fn from_wire(min: u32, max: u32) -> Result<Self, Reason> {
        let min = if min == 0 { max } else { min };
        if max == 0 || min > max { Err(Reason::ProtocolRange) } else { Ok(Self { min, max }) }
    }

    /// The lowest version.
    pub fn min(self) -> u32 {
        self.min
    }

    /// The highest version.
    pub fn max(self) -> u32 {
        self.max
    }

    /// Whether `version` lies within.
    pub fn contains(self, version: u32) -> bool {
        (self.min..=self.max).contains(&version)
    }

    /// The gateway's choice for a node that speaks `node`.
    ///
    /// # Errors
    /// No overlap: which side to upgrade.
    pub fn choose(self, node: Self) -> Result<u32, Reason> {
        if node.max < self.min {
            Err(Reason::ProtocolTooOld)
        } else if node.min > self.max {
            Err(Reason::ProtocolTooNew)
        } else {
            Ok(node.max.min(self.max))
        }
    }
}

/// Why a gateway and a node without a common version do not talk, and which side is to be upgraded: the gateway's
/// words.
pub fn no_common(reason: Reason, node: Range, gateway: Range) -> String {
    let upgrade = if reason == Reason::ProtocolTooOld { "node" } else { "gateway" };
    format!(
        "the node speaks protocol versions {} to {}, the gateway {} to {}; upgrade the {upgrade}",
        node.min, node.max, gateway.min, gateway.max
    )
}

/// What the operator of a node does when `gateway` has refused its versions; absent for every other refusal.
pub fn mend(reason: Reason, gateway: &impl fmt::Display) -> Option<String> {
    let (old_or_new, mend) = match reason {
        Reason::ProtocolTooOld => ("old", "install a newer bcd"),
        Reason::ProtocolTooNew => ("new", "upgrade the gateway first"),
        _ => return None,
    };
    Some(format!(
        "this bcd is too {old_or_new} for the gateway {gateway}: it speaks protocol versions {MIN} to {MAX}; {mend}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(min: u32, max: u32) -> Range {
        Range::from_wire(min, max).expect("a range")
    }

    #[test]
    fn the_highest_common_version_is_chosen() {
        assert_eq!(range(1, 3).choose(range(2, 5)), Ok(3));
        assert_eq!(range(1, 3).choose(range(1, 2)), Ok(2));
    }

    #[test]
    fn every_pair_of_ranges_has_its_highest_common_version_or_a_side_to_upgrade() {
        let ranges = || (1..=5).flat_map(|min| (min..=5).map(move |max| range(min, max)));
        for (gateway, node) in ranges().flat_map(|gateway| ranges().map(move |node| (gateway, node))) {
            let common =
                (1..=5).filter(|version| gateway.contains(*version) && node.contains(*version)).max();
            let older = if node.max < gateway.min { Reason::ProtocolTooOld } else { Reason::ProtocolTooNew };
            assert_eq!(gateway.choose(node), common.ok_or(older), "{gateway:?} {node:?}");
        }
    }

    #[test]
    fn an_absent_minimum_means_exactly_the_maximum() {
        assert_eq!(range(0, 4), range(4, 4));
    }

    #[test]
    fn an_empty_or_zero_range_is_refused_protocol_range() {
        assert_eq!(Range::from_wire(0, 0), Err(Reason::ProtocolRange));
        assert_eq!(Range::from_wire(1, 0), Err(Reason::ProtocolRange));
        assert_eq!(Range::from_wire(3, 2), Err(Reason::ProtocolRange));
    }

    #[test]
    fn no_overlap_names_the_side_to_upgrade() {
        assert_eq!(range(3, 4).choose(range(1, 2)), Err(Reason::ProtocolTooOld));
        assert_eq!(range(1, 2).choose(range(3, 4)), Err(Reason::ProtocolTooNew));
    }
}
