//! Cancellation: of what this process has in flight, and of what has not arrived yet.
//!
//! A cancellation can overtake its command, since deliveries are handled side by side. One lock decides: a command
//! that enters takes an early cancellation with it, and a cancellation that finds its command takes effect there.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use crate::model::CommandId;

/// How long a cancellation waits for its command.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Most cancellations that wait; more push out the oldest.
const REMEMBERED_MOST: usize = 1000;
/// Most that are tried again at once, since the journal cannot be asked: as many as may wait for their commands.
const UNDECIDED_MOST: usize = REMEMBERED_MOST;

/// What can be cancelled in this process. Cheap to clone; lost at a restart.
#[derive(Debug, Clone, Default)]
pub(super) struct Cancels(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    here: HashMap<CommandId, watch::Sender<bool>>,
    early: VecDeque<(CommandId, Duration)>,
    /// In effect as long as the journal cannot say what they meet, however long that takes.
    undecided: HashSet<CommandId>,
}

/// A cancellation that is tried again, until it is dropped.
#[derive(Debug)]
pub(super) struct Undecided {
    cancels: Cancels,
    id: CommandId,
}

/// A command that can be cancelled, until it is dropped.
#[derive(Debug)]
pub(super) struct Cancellable {
    cancels: Cancels,
    id: CommandId,
    /// Its own view.
    pub(super) cancelled: Cancelled,
}

/// Whether a cancellation has come.
#[derive(Debug, Clone)]
pub struct Cancelled(watch::Receiver<bool>);

impl Cancels {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in an accepted command; `boot` is now. An early cancellation of it is in effect at once.
    pub(super) fn enter(&self, id: CommandId, boot: Duration) -> Cancellable {
        let mut state = self.state();
        state.forget_old(boot);
        let early = state.forget(&id) || state.undecided.contains(&id);
        let (sender, receiver) = watch::channel(early);
        state.here.insert(id.clone(), sender);
        Cancellable { cancels: self.clone(), id, cancelled: Cancelled(receiver) }
    }

    /// Cancels a command that is here, or remembers that it is to be; `boot` is now. Whether it is here.
    pub(super) fn cancel(&self, id: &CommandId, boot: Duration) -> bool {
        let mut state = self.state();
        state.forget_old(boot);
        if let Some(here) = state.here.get(id) {
            here.send_replace(true);
            return true;
        }
        state.forget(id);
        if state.early.len() >= REMEMBERED_MOST {
            state.early.pop_front();
        }
        state.early.push_back((id.clone(), boot));
        false
    }

    /// Takes in a cancellation that is to be tried again; none when it is tried already, or too many are.
    pub(super) fn undecided(&self, id: &CommandId) -> Option<Undecided> {
        let mut state = self.state();
        if state.undecided.len() >= UNDECIDED_MOST || !state.undecided.insert(id.clone()) {
            return None;
        }
        Some(Undecided { cancels: self.clone(), id: id.clone() })
    }

    /// Forgets an early cancellation: its command is done.
    pub(super) fn forget(&self, id: &CommandId) {
        self.state().forget(id);
    }
}

impl State {
    fn forget_old(&mut self, boot: Duration) {
        while self.early.front().is_some_and(|(_, at)| boot.saturating_sub(*at) >= REMEMBERED) {
            self.early.pop_front();
        }
    }

    fn forget(&mut self, id: &CommandId) -> bool {
        let before = self.early.len();
        self.early.retain(|(early, _)| early != id);
        self.early.len() != before
    }
}

impl Cancelled {
    /// One that comes when true is sent; for tests of who runs programs.
    #[cfg(test)]
    pub fn pair() -> (watch::Sender<bool>, Self) {
        let (sender, receiver) = watch::channel(false);
        (sender, Self(receiver))
    }

    /// Whether it has come.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow()
    }

    /// Resolves when it comes; never without one. Dropping the future loses nothing.
    pub async fn requested(&mut self) {
        if self.0.wait_for(|cancelled| *cancelled).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Undecided {
    fn drop(&mut self) {
        self.cancels.state().undecided.remove(&self.id);
    }
}

impl Drop for Cancellable {
    fn drop(&mut self) {
        self.cancels.state().here.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1000);

    fn id(text: &str) -> CommandId {
        CommandId::new(text).expect("an id")
    }

    #[test]
    fn a_cancellation_that_overtakes_its_command_waits_a_minute_for_it() {
        let cancels = Cancels::default();
        assert!(!cancels.cancel(&id("c-1"), NOW));
        assert!(!cancels.cancel(&id("c-2"), NOW));
        assert!(cancels.enter(id("c-1"), NOW + Duration::from_secs(59)).cancelled.is_requested());
        assert!(!cancels.enter(id("c-1"), NOW + Duration::from_secs(59)).cancelled.is_requested());
        assert!(!cancels.enter(id("c-2"), NOW + REMEMBERED).cancelled.is_requested());
    }

    #[test]
    fn a_command_that_is_here_is_cancelled_here_and_nothing_is_remembered() {
        let cancels = Cancels::default();
        let here = cancels.enter(id("c-1"), NOW);
        assert!(cancels.cancel(&id("c-1"), NOW));
        assert!(here.cancelled.is_requested());
        drop(here);
        assert!(!cancels.enter(id("c-1"), NOW).cancelled.is_requested());
    }

    #[test]
    fn a_cancellation_that_the_journal_cannot_decide_is_in_effect_past_its_minute_and_tried_by_one_alone() {
        let cancels = Cancels::default();
        assert!(!cancels.cancel(&id("c-1"), NOW));
        let undecided = cancels.undecided(&id("c-1")).expect("the first");
        assert!(cancels.undecided(&id("c-1")).is_none(), "it is tried already");
        let later = NOW + 10 * REMEMBERED;
        assert!(cancels.enter(id("c-1"), later).cancelled.is_requested());
        drop(undecided);
        assert!(!cancels.enter(id("c-1"), later).cancelled.is_requested(), "decided, and a minute old");

        let many = (0..UNDECIDED_MOST).map(|n| cancels.undecided(&id(&format!("c-{n}"))));
        let many: Vec<_> = many.collect::<Option<_>>().expect("room");
        assert!(cancels.undecided(&id("c-more")).is_none(), "there are too many");
        drop(many);
        assert!(cancels.undecided(&id("c-more")).is_some());
    }

    #[test]
    fn at_most_a_thousand_cancellations_wait_and_the_oldest_makes_room() {
        let cancels = Cancels::default();
        for n in 0..=REMEMBERED_MOST {
            cancels.cancel(&id(&format!("c-{n}")), NOW);
        }
        assert!(!cancels.enter(id("c-0"), NOW).cancelled.is_requested());
        assert!(cancels.enter(id("c-1"), NOW).cancelled.is_requested());
    }
}
