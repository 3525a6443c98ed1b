//! Credits a lane, and what this process has in flight. Shared by the session (which sets the terms and reports
//! what is free) and the executor (which reserves).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::model::{CommandId, Lane};

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

impl Lanes {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The terms of a Welcome. What is in flight already stays in flight.
    pub fn set_terms(&self, credits: &BTreeMap<Lane, u32>, upgrade_only: bool) {
        let mut state = self.state();
        state.credits = credits.clone();
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

    /// Whether only `daemon.upgrade` is admitted.
    pub fn upgrade_only(&self) -> bool {
        self.state().upgrade_only
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
        count(&self.credits).saturating_sub(count(&self.held))
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
}
