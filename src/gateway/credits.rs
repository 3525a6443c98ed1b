//! The gateway's count of a node's free lane credits. Pure.
//!
//! Between heartbeats the gateway counts by itself; each heartbeat sets the count anew: what the node says is free,
//! less the commands that were sent and had not reached the node when it said so.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::model::Lane;

/// The credits of one session.
#[derive(Debug)]
pub struct Credits {
    limits: BTreeMap<Lane, u32>,
    free: BTreeMap<Lane, u32>,
    /// Lanes of the Command frames that the node has not confirmed, oldest first.
    under_way: VecDeque<Lane>,
    /// Command frames confirmed by the node in this session.
    confirmed: u64,
}

impl Credits {
    /// Nothing is free before the first heartbeat.
    pub fn new(limits: BTreeMap<Lane, u32>) -> Self {
        Self { limits, free: BTreeMap::new(), under_way: VecDeque::new(), confirmed: 0 }
    }

    /// How many more commands of the lane may be sent.
    pub fn free(&self, lane: Lane) -> u32 {
        self.free.get(&lane).copied().unwrap_or(0)
    }

    /// A Command frame goes out.
    pub fn sent(&mut self, lane: Lane) {
        let free = self.free.entry(lane).or_default();
        *free = free.saturating_sub(1);
        self.under_way.push_back(lane);
    }

    /// A command of the lane holds its credit no longer.
    pub fn released(&mut self, lane: Lane) {
        let limit = self.limits.get(&lane).copied().unwrap_or(0);
        let free = self.free.entry(lane).or_default();
        *free = free.saturating_add(1).min(limit);
    }

    /// The node has none left, whatever we counted; the next heartbeat says more.
    pub fn exhausted(&mut self, lane: Lane) {
        self.free.insert(lane, 0);
    }

    /// A heartbeat came.
    pub fn heartbeat(&mut self, reported: &HashMap<String, u32>, commands_received: u64) {
        while self.confirmed < commands_received && self.under_way.pop_front().is_some() {
            self.confirmed += 1;
        }
        for lane in Lane::ALL {
            let limit = self.limits.get(&lane).copied().unwrap_or(0);
            let said = reported.get(lane.name()).copied().unwrap_or(0).min(limit);
            let under_way = self.under_way.iter().filter(|sent| **sent == lane).count();
            let under_way = u32::try_from(under_way).unwrap_or(u32::MAX);
            self.free.insert(lane, said.saturating_sub(under_way));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn credits() -> Credits {
        Credits::new(BTreeMap::from([(Lane::Control, 8), (Lane::Work, 16)]))
    }

    fn reported(work: u32) -> HashMap<String, u32> {
        HashMap::from([("control".into(), 8), ("work".into(), work), ("bulk".into(), 9)])
    }

    #[test]
    fn nothing_is_free_before_the_first_heartbeat_nor_in_a_lane_without_credits() {
        let mut credits = credits();
        assert_eq!(credits.free(Lane::Work), 0);
        credits.heartbeat(&reported(16), 0);
        assert_eq!(credits.free(Lane::Work), 16);
        assert_eq!(credits.free(Lane::Bulk), 0, "the node may not raise a limit");
    }

    #[test]
    fn a_heartbeat_counts_what_is_still_under_way() {
        let mut credits = credits();
        credits.heartbeat(&reported(16), 0);
        for _ in 0..3 {
            credits.sent(Lane::Work);
        }
        assert_eq!(credits.free(Lane::Work), 13);
        // The node had taken two of the three when it spoke, and both still run.
        credits.heartbeat(&reported(14), 2);
        assert_eq!(credits.free(Lane::Work), 13);
        credits.heartbeat(&reported(13), 3);
        assert_eq!(credits.free(Lane::Work), 13);
    }

    #[test]
    fn a_release_never_lifts_the_count_above_the_limit() {
        let mut credits = credits();
        credits.heartbeat(&reported(15), 0);
        credits.released(Lane::Work);
        credits.released(Lane::Work);
        assert_eq!(credits.free(Lane::Work), 16);
    }

    #[test]
    fn a_node_that_claims_more_frames_than_were_sent_gains_nothing() {
        let mut credits = credits();
        credits.heartbeat(&reported(16), u64::MAX);
        credits.sent(Lane::Work);
        credits.heartbeat(&reported(16), 0);
        assert_eq!(credits.free(Lane::Work), 15);
    }
}
