//! The operator's hold: while it stands no command is admitted, whatever the control plane signs.
//!
//! It is a file in the state directory, so that it outlives a restart, and `bcd hold` can put it there without a daemon.
//! Whoever cannot read it is held: a veto does not end by a fault.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::blocking;
use crate::clock::Clock;
use crate::exec::Lanes;
use crate::failpoint;
use crate::journal::Journal;
use crate::model::{EventType, NewEvent, Reason, ServerTime};
use crate::state_dir::{StateDir, StateError};

/// The file's name.
const NAME: &str = "hold";
/// Longest file: a text of [`WHY_BYTES`], its escapes, a time.
const FILE_BYTES: u64 = 4096;
/// Longest why, bytes.
pub const WHY_BYTES: usize = 200;

/// What the file says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Since when, by the wall clock of this machine.
    pub since: ServerTime,
    /// The operator's word; empty for none.
    pub why: String,
}

impl Held {
    /// From now on.
    pub fn now(clock: &dyn Clock, why: String) -> Self {
        Self { since: ServerTime(clock.wall_ms()), why }
    }

    /// For people.
    pub fn detail(&self) -> String {
        let why = if self.why.is_empty() { String::new() } else { format!(" ({})", self.why) };
        format!(
            "the operator holds this node since {}{why}: no command is admitted; bcd release ends it",
            self.since
        )
    }
}

/// What stands in a state directory. Blocks.
///
/// # Errors
/// Nobody knows.
pub fn read(state: &Path) -> Result<Option<Held>, StateError> {
    let Some(dir) = StateDir::open(state)? else { return Ok(None) };
    let Some(bytes) = dir.read(NAME, FILE_BYTES)? else { return Ok(None) };
    // A file that is there holds, whatever is in it: it may have been made by hand.
    Ok(Some(serde_json::from_slice(&bytes).unwrap_or(Held { since: ServerTime(0), why: String::new() })))
}

/// Puts a hold there; one that stands keeps its beginning and its why. Says whether one stood. Blocks.
///
/// # Errors
/// It is not kept.
pub fn keep(state: &Path, held: &Held) -> Result<bool, StateError> {
    let dir = existing(state)?;
    if dir.read(NAME, FILE_BYTES)?.is_some() {
        // Whoever put it there may have been killed before it was.
        dir.sync()?;
        return Ok(true);
    }
    dir.write(NAME, json!(held).to_string().as_bytes())?;
    Ok(false)
}

/// Takes it away; says whether there was one. Blocks.
///
/// # Errors
/// It stands.
pub fn end(state: &Path) -> Result<bool, StateError> {
    let dir = existing(state)?;
    let stood = dir.names()?.iter().any(|name| name == NAME);
    dir.remove(NAME)?;
    Ok(stood)
}

/// One that is not there is not made: it would belong to whoever holds, and not to the daemon.
fn existing(state: &Path) -> Result<StateDir, StateError> {
    StateDir::open(state)?.ok_or_else(|| StateError::none(state))
}

/// The hold of a running daemon. Clones are the same.
#[derive(Debug, Clone)]
pub struct Hold {
    state: PathBuf,
    clock: Arc<dyn Clock>,
    lanes: Lanes,
    journal: Journal,
    standing: Arc<Mutex<Option<Held>>>,
    /// Changes one after the other: a file and the lanes that do not agree would last.
    turn: Arc<tokio::sync::Mutex<()>>,
}

impl Hold {
    /// What `found` stands for, from now on.
    pub fn new(
        state: PathBuf,
        clock: Arc<dyn Clock>,
        lanes: Lanes,
        journal: Journal,
        found: Option<Held>,
    ) -> Self {
        let hold = Self { state, clock, lanes, journal, standing: Arc::default(), turn: Arc::default() };
        hold.set(found);
        hold
    }

    /// Tells of a hold that stood at the start. Once.
    pub async fn tell(&self) {
        if let Some(held) = self.standing() {
            tracing::warn!(detail = held.detail(), "the node is held");
            self.record(EventType::AdmissionHeld, json!({ "why": held.why })).await;
        }
    }

    /// The condition that it makes.
    pub fn condition(&self) -> Option<(Reason, String)> {
        self.standing().map(|held| (Reason::Held, held.detail()))
    }

    /// Admits nothing from now on; says whether it did so before.
    ///
    /// # Errors
    /// The hold is in force, and ends with this process.
    pub async fn hold(&self, why: String) -> Result<bool, StateError> {
        self.change(|hold| async move { hold.put_on(why).await }).await
    }

    /// Admits again; says whether it did not before.
    ///
    /// # Errors
    /// The hold stands.
    pub async fn release(&self) -> Result<bool, StateError> {
        self.change(|hold| async move { hold.take_off().await }).await
    }

    /// A change is made whole, also when whoever asked has given up: half of one would come behind the next.
    async fn change<F>(&self, change: impl FnOnce(Self) -> F) -> Result<bool, StateError>
    where
        F: Future<Output = Result<bool, StateError>> + Send + 'static,
    {
        let turn = Arc::clone(&self.turn).lock_owned().await;
        let change = change(self.clone());
        let changing = tokio::spawn(failpoint::carried(async move {
            let changed = change.await;
            drop(turn);
            changed
        }));
        changing.await.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
    }

    async fn put_on(self, why: String) -> Result<bool, StateError> {
        let held = Held::now(&*self.clock, why);
        let before = self.standing().is_some();
        if !before {
            self.set(Some(held.clone()));
            tracing::warn!(detail = held.detail(), "the node is held");
        }
        let (state, why) = (self.state.clone(), held.why.clone());
        let kept = blocking::run_or_unwind(move || keep(&state, &held)).await;
        if !before {
            self.record(EventType::AdmissionHeld, json!({ "why": why })).await;
        }
        kept.map(|_| before)
    }

    async fn take_off(self) -> Result<bool, StateError> {
        let state = self.state.clone();
        let stood = blocking::run_or_unwind(move || end(&state)).await?;
        let before = self.set(None).is_some() || stood;
        if before {
            tracing::info!("the hold is over");
            self.record(EventType::AdmissionReleased, json!({})).await;
        }
        Ok(before)
    }

    fn standing(&self) -> Option<Held> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, held: Option<Held>) -> Option<Held> {
        let mut standing = self.standing.lock().unwrap_or_else(PoisonError::into_inner);
        self.lanes.set_on_hold(held.is_some());
        std::mem::replace(&mut standing, held)
    }

    async fn record(&self, kind: EventType, body: serde_json::Value) {
        if let Err(error) = self.journal.record(NewEvent::new(kind, body)).await {
            tracing::warn!(%error, event = %kind, "the hold is in no event");
        }
    }
}

/// What stands at the start; where nobody can tell, a hold that says why.
pub fn at_start(state: &Path, clock: &dyn Clock) -> Option<Held> {
    read(state).unwrap_or_else(|error| Some(Held::now(clock, format!("nobody can tell: {error}"))))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;
    use crate::clock::SystemClock;
    use crate::journal::{Locked, Mode, Options};
    use crate::model::JournalId;
    use crate::write_fault::{self, Point};

    fn state() -> tempfile::TempDir {
        let own_alone = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        tempfile::Builder::new().permissions(own_alone).tempdir().unwrap()
    }

    fn held(why: &str) -> Held {
        Held { since: ServerTime(1_000), why: why.into() }
    }

    #[test]
    fn a_hold_is_kept_until_it_is_ended_and_a_second_one_changes_nothing() {
        let state = state();
        assert_eq!(at_start(state.path(), &SystemClock), None);
        assert!(!keep(state.path(), &held("disk swap")).unwrap());
        assert!(keep(state.path(), &held("another")).unwrap(), "it stood");
        assert_eq!(at_start(state.path(), &SystemClock), Some(held("disk swap")));
        assert!(end(state.path()).unwrap());
        assert!(!end(state.path()).unwrap());
        assert_eq!(at_start(state.path(), &SystemClock), None);
    }

    #[test]
    fn a_file_that_cannot_be_read_or_understood_holds() {
        let state = state();
        StateDir::open(state.path()).unwrap().unwrap().write(NAME, b"by hand").unwrap();
        assert!(at_start(state.path(), &SystemClock).is_some());
        std::fs::remove_file(state.path().join(NAME)).unwrap();
        std::os::unix::fs::symlink("/dev/null", state.path().join(NAME)).unwrap();
        let held = at_start(state.path(), &SystemClock).expect("a hold");
        assert!(held.detail().contains("nobody can tell"), "{}", held.detail());
        assert!(end(state.path()).unwrap(), "and is released all the same");
        assert_eq!(at_start(state.path(), &SystemClock), None);
    }

    #[test]
    fn a_state_directory_that_is_not_there_is_not_made() {
        let state = state();
        let missing = state.path().join("missing");
        assert!(keep(&missing, &held("")).is_err() && end(&missing).is_err());
        assert!(!missing.exists());
    }

    #[test]
    fn a_hold_that_is_found_counts_as_kept_only_when_its_name_is_on_the_disk() {
        let state = state();
        let fault = write_fault::arm(state.path(), Point::StateDirSync, 5);
        for _ in 0..2 {
            assert!(keep(state.path(), &held("")).is_err());
            assert!(state.path().join(NAME).exists(), "for this process it stands");
        }
        drop(fault);
        assert!(keep(state.path(), &held("")).unwrap());
    }

    fn of_a_daemon(state: &Path) -> Hold {
        let options = Options::of_a_test(state.to_owned(), Mode::Inline);
        let locked = Locked::open(options, JournalId::new("j-1").unwrap()).unwrap();
        let (journal, _) = locked.recover(None).unwrap();
        Hold::new(state.to_owned(), Arc::new(SystemClock), Lanes::default(), journal, None)
    }

    async fn told(hold: &Hold) -> Vec<String> {
        let events = hold.journal.events(0, 100, usize::MAX).await.unwrap().events;
        let of_hold = |kind: &str| kind.starts_with("admission.");
        events.iter().filter(|event| of_hold(&event.kind)).map(|event| event.kind.clone()).collect()
    }

    #[tokio::test]
    async fn a_hold_that_is_in_force_and_not_kept_is_told_and_told_once() {
        let state = state();
        let hold = of_a_daemon(state.path());
        let fault = write_fault::arm(state.path(), Point::StateCreate, 28);
        assert!(hold.hold("disk swap".into()).await.is_err());
        assert!(hold.lanes.on_hold() && hold.condition().is_some());
        assert_eq!(told(&hold).await, ["admission.held"]);
        drop(fault);
        assert!(hold.hold("disk swap".into()).await.unwrap(), "it was in force");
        assert_eq!(told(&hold).await, ["admission.held"]);
        assert!(at_start(state.path(), &SystemClock).is_some());
    }

    #[test]
    fn a_change_whose_asker_has_gone_is_made_whole_before_the_next_one() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let state = state();
            let hold = of_a_daemon(state.path());
            assert!(!hold.hold("first".into()).await.unwrap());
            // A disk that does not answer.
            let (answer, waits) = std::sync::mpsc::channel::<()>();
            let disk = tokio::task::spawn_blocking(move || waits.recv());
            let soon = Duration::from_millis(20);
            assert!(timeout(soon, hold.release()).await.is_err());
            assert!(timeout(soon, hold.hold("given up".into())).await.is_err());
            drop(answer);
            assert!(!hold.hold("second".into()).await.unwrap(), "the release has ended the first");
            assert!(disk.await.unwrap().is_err());
            assert_eq!(at_start(state.path(), &SystemClock).unwrap().why, "second");
            assert_eq!(told(&hold).await, ["admission.held", "admission.released", "admission.held"]);
        });
    }
}
