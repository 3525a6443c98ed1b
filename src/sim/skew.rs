//! Agents of an older build among the others: they speak only the versions whose numbers are a contract, and lack a
//! kind of command.

use crate::model::Kind;
use crate::wire::version::{MIN, NEWEST, Range};

/// What an older build cannot do.
pub const LACKS: Kind = Kind::InventoryBarrier;

/// What it speaks.
pub fn older() -> Range {
    Range::from_wire(MIN, NEWEST).unwrap_or(Range::OWN)
}

/// Whether the agent of this number is an older build, where `percent` of all are: spread evenly.
pub fn is_old(agent: usize, percent: u8) -> bool {
    let percent = usize::from(percent.min(100));
    agent * percent / 100 != (agent + 1) * percent / 100
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_that_is_asked_for_is_old_and_speaks_less_than_this_build() {
        let old = |percent| (0..200).filter(|agent| is_old(*agent, percent)).count();
        assert_eq!([0, 25, 100].map(old), [0, 50, 200]);
        assert!(older().max() < Range::OWN.max());
    }
}
