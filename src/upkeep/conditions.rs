//! Conditions: the faults that stand on this node, each with its token, since when, and words for people.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::model::Reason;

/// A standing local fault.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Condition {
    /// Which, as a reason token.
    pub token: Reason,
    /// Since when, boot time, ms.
    pub since_boot_ms: u64,
    /// For people.
    pub detail: String,
}

/// The conditions of one node. Clones are the same.
#[derive(Debug, Clone)]
pub struct Conditions {
    clock: Arc<dyn Clock>,
    standing: Arc<Mutex<BTreeMap<Reason, Condition>>>,
    /// Found by a task that nobody asks.
    kept: Arc<Mutex<Option<(Reason, String)>>>,
}

impl Conditions {
    /// None yet.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, standing: Arc::default(), kept: Arc::default() }
    }

    /// What stands beside everything that is observed, from the next observation on; nothing any more, where absent.
    pub fn keep(&self, found: Option<(Reason, String)>) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = found;
    }

    /// What stands now, each token once: a new one stands from now on, one that is no longer named is over, and one
    /// that goes on keeps its beginning. Its end and its beginning are logged.
    pub fn observe(&self, found: impl IntoIterator<Item = (Reason, String)>) {
        let now = u64::try_from(self.clock.boot().as_millis()).unwrap_or(u64::MAX);
        let mut standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut old = std::mem::take(&mut *standing);
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (token, detail) in found.into_iter().chain(kept) {
            if standing.contains_key(&token) {
                continue;
            }
            let since_boot_ms = match old.remove(&token) {
                Some(known) => known.since_boot_ms,
                None => {
                    tracing::warn!(condition = %token, detail, "a condition stands");
                    now
                }
            };
            standing.insert(token, Condition { token, since_boot_ms, detail });
        }
        for token in old.into_keys() {
            tracing::info!(condition = %token, "a condition is over");
        }
    }

    /// What stands, by token.
    pub fn all(&self) -> Vec<Condition> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::clock::TokioClock;

    #[tokio::test(start_paused = true)]
    async fn a_condition_keeps_its_beginning_while_it_stands_and_begins_anew_after_its_end() {
        let conditions = Conditions::new(Arc::new(TokioClock::starting_at(0)));
        let disk = |detail: &str| [(Reason::Disk, detail.to_owned())];
        conditions.observe(disk("full"));
        let first = conditions.all();
        tokio::time::advance(Duration::from_secs(60)).await;
        conditions.observe(disk("fuller"));
        let second = conditions.all();
        assert_eq!((second[0].since_boot_ms, second[0].detail.as_str()), (first[0].since_boot_ms, "fuller"));
        conditions.observe([]);
        assert_eq!(conditions.all(), []);
        conditions.observe(disk("full again"));
        assert_eq!(conditions.all()[0].since_boot_ms, first[0].since_boot_ms + 60_000);
    }
}
