//! Challenges for nodes whose clocks do not agree with the worker's: each is taken once, by the worker that gave it.

use std::collections::VecDeque;

use rand::Rng as _;
use rand::rngs::StdRng;

use super::PROOF_AGE;
use crate::model::ServerTime;

/// Those that wait for their answer; the oldest make room.
const WAITING: usize = 1024;

/// Given and not taken yet, oldest first.
#[derive(Debug, Default)]
pub struct Challenges(VecDeque<(String, ServerTime)>);

impl Challenges {
    /// A new one, of the time `now`.
    pub fn give(&mut self, now: ServerTime, rng: &mut StdRng) -> String {
        let text = data_encoding::HEXLOWER.encode(&rng.random::<[u8; 16]>());
        if self.0.len() >= WAITING {
            self.0.pop_front();
        }
        self.0.push_back((text.clone(), now));
        text
    }

    /// Whether it was given at `given`, not long before `now`. It is gone then.
    pub fn take(&mut self, text: &str, given: ServerTime, now: ServerTime) -> bool {
        let at = self.0.iter().position(|(known, time)| known == text && *time == given);
        let known = at.and_then(|at| self.0.remove(at)).is_some();
        known && now.since(given) <= PROOF_AGE
    }
}
