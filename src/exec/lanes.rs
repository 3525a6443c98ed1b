//! Credits a lane, and what this process has in flight. Shared by the session (which sets the terms and reports
//! what is free) and the executor (which reserves).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::model::{CommandId, Lane};

/// Most credits of a lane, whatever a gateway grants: a command in flight keeps its body of up to 1 MiB, so that three
/// lanes hold 384 MiB at worst.
pub const MOST_CREDITS: u32 = 128;

/// Shared state; cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Lanes(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    credits: BTreeMap<Lane, u32>,
    held: BTreeMap<Lane, u32>,
    running: BTreeSet<CommandId>,
    upgrade_only: bool,
    stopping: bool,
    /// The operator holds the node.
    on_hold: bool,
    /// How many keep a lane closed.
    closed: BTreeMap<Lane, u32>,
    rebooting: bool,
}

/// One credit, held until it is dropped.
#[derive(Debug)]
pub struct Credit {
    lanes: Lanes,
    lane: Lane,
}

/// A command that this process holds as accepted or running, until it is dropped.
#[derive(Debug)]
pub struct InFlight {
    lanes: Lanes,
    id: CommandId,
}

/// Lanes on which nothing is admitted, until it is dropped.
#[derive(Debug)]
pub struct Closed {
    lanes: Lanes,
    closed: Vec<Lane>,
}

/// The machine goes down, until it is dropped.
#[derive(Debug)]
pub struct Rebooting(Lanes);

impl Lanes {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The terms of a Welcome, up to [`MOST_CREDITS`] a lane. What is in flight already stays in flight.
    pub fn set_terms(&self, credits: &BTreeMap<Lane, u32>, upgrade_only: bool) {
        let mut state = self.state();
        state.credits = credits.iter().map(|(lane, most)| (*lane, (*most).min(MOST_CREDITS))).collect();
        state.upgrade_only = upgrade_only;
    }

    /// Free credits, a row for every lane, never negative.
    pub fn free(&self) -> BTreeMap<Lane, u32> {
        let state = self.state();
        Lane::ALL.into_iter().map(|lane| (lane, state.free(lane))).collect()
    }

    /// Takes a credit, if one is free.
    pub fn reserve(&self, lane: Lane) -> Option<Credit> {
        let mut state = self.state();
        if state.free(lane) == 0 {
            return None;
        }
        *state.held.entry(lane).or_default() += 1;
        Some(Credit { lanes: self.clone(), lane })
    }

    /// Takes a credit for what is in flight already, whether or not one is free.
    pub fn hold(&self, lane: Lane) -> Credit {
        *self.state().held.entry(lane).or_default() += 1;
        Credit { lanes: self.clone(), lane }
    }

    /// Names a command as running in this process.
    pub fn running(&self, id: CommandId) -> InFlight {
        self.state().running.insert(id.clone());
        InFlight { lanes: self.clone(), id }
    }

    /// The commands running in this process, sorted.
    pub fn running_ids(&self) -> Vec<CommandId> {
        self.state().running.iter().cloned().collect()
    }

    /// Admits nothing more on these lanes; what is in flight goes on.
    pub fn close(&self, lanes: &[Lane]) -> Closed {
        let mut state = self.state();
        for lane in lanes {
            *state.closed.entry(*lane).or_default() += 1;
        }
        Closed { lanes: self.clone(), closed: lanes.to_vec() }
    }

    /// Credits of a lane that are in use.
    pub fn held(&self, lane: Lane) -> u32 {
        self.state().held.get(&lane).copied().unwrap_or(0)
    }

    /// From now on an end of this process is a reboot's.
    pub fn rebooting(&self) -> Rebooting {
        self.state().rebooting = true;
        Rebooting(self.clone())
    }

    /// Whether the machine goes down.
    pub fn is_rebooting(&self) -> bool {
        self.state().rebooting
    }

    /// Whether only `daemon.upgrade` is admitted.
    pub fn upgrade_only(&self) -> bool {
        self.state().upgrade_only
    }

    /// Whether the operator holds the node: nothing new is admitted meanwhile, and what is in flight goes on.
    pub fn set_on_hold(&self, on_hold: bool) {
        self.state().on_hold = on_hold;
    }

    /// Whether the operator holds the node.
    pub fn on_hold(&self) -> bool {
        self.state().on_hold
    }

    /// From now on nothing new is admitted.
    pub fn stop(&self) {
        self.state().stopping = true;
    }

    /// Whether the daemon is stopping.
    pub fn stopping(&self) -> bool {
        self.state().stopping
    }
}

impl State {
    fn free(&self, lane: Lane) -> u32 {
        let count = |map: &BTreeMap<Lane, u32>| map.get(&lane).copied().unwrap_or(0);
        if self.on_hold || count(&self.closed) > 0 {
            0
        } else {
            count(&self.credits).saturating_sub(count(&self.held))
        }
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let mut state = self.lanes.state();
        for lane in &self.closed {
            if let Some(count) = state.closed.get_mut(lane) {
                *count = count.saturating_sub(1);
            }
        }
    }
}

impl Drop for Rebooting {
    fn drop(&mut self) {
        self.0.state().rebooting = false;
    }
}

impl Drop for Credit {
    fn drop(&mut self) {
        if let Some(held) = self.lanes.state().held.get_mut(&self.lane) {
            *held = held.saturating_sub(1);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.lanes.state().running.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_comes_back_when_it_is_dropped_and_free_is_never_negative() {
        let lanes = Lanes::default();
        assert!(lanes.reserve(Lane::Work).is_none(), "an absent lane has 0");
        lanes.set_terms(&BTreeMap::from([(Lane::Work, 2)]), false);
        let first = lanes.reserve(Lane::Work).expect("a credit");
        let second = lanes.reserve(Lane::Work).expect("a credit");
        assert!(lanes.reserve(Lane::Work).is_none());
        lanes.set_terms(&BTreeMap::from([(Lane::Work, 1)]), false);
        assert_eq!(lanes.free()[&Lane::Work], 0);
        drop(first);
        drop(second);
        assert_eq!(lanes.free()[&Lane::Work], 1);
    }

    #[test]
    fn a_held_node_has_no_credit_on_any_lane_and_has_all_again_when_it_is_released() {
        let lanes = Lanes::default();
        lanes.set_terms(&BTreeMap::from([(Lane::Work, 2), (Lane::Control, 1), (Lane::Bulk, 1)]), false);
        let in_flight = lanes.reserve(Lane::Work).expect("a credit");
        lanes.set_on_hold(true);
        assert!(Lane::ALL.iter().all(|lane| lanes.reserve(*lane).is_none()));
        assert_eq!((lanes.free()[&Lane::Work], lanes.held(Lane::Work)), (0, 1), "what is in flight goes on");
        lanes.set_on_hold(false);
        assert_eq!((lanes.free()[&Lane::Work], lanes.free()[&Lane::Bulk]), (1, 1));
        drop(in_flight);
    }

    #[test]
    fn a_gateway_that_grants_too_much_grants_what_the_node_can_hold() {
        let lanes = Lanes::default();
        lanes.set_terms(&BTreeMap::from([(Lane::Work, u32::MAX)]), false);
        assert_eq!(lanes.free()[&Lane::Work], MOST_CREDITS);
        let held: Vec<Credit> = std::iter::from_fn(|| lanes.reserve(Lane::Work)).take(1000).collect();
        assert_eq!(held.len(), 128);
    }

    #[test]
    fn a_closed_lane_has_no_credit_until_the_last_who_closed_it_opens_it() {
        let lanes = Lanes::default();
        lanes.set_terms(&BTreeMap::from([(Lane::Work, 2), (Lane::Control, 1)]), false);
        let held = lanes.reserve(Lane::Work).expect("a credit");
        let work = lanes.close(&[Lane::Work]);
        let all = lanes.close(&Lane::ALL);
        drop(work);
        assert!(lanes.reserve(Lane::Work).is_none() && lanes.reserve(Lane::Control).is_none());
        assert_eq!(lanes.held(Lane::Work), 1, "what is in flight goes on");
        drop(held);
        drop(all);
        assert_eq!((lanes.free()[&Lane::Work], lanes.free()[&Lane::Control]), (2, 1));
    }
}
