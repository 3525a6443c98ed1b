//! The end of a node: what runs comes to its end, what is owed is told, the control plane hears that the machine leaves.
//!
//! It is the node itself, with its session, that admits nothing any more. The word is an event of the journal. An ack says
//! that it came; that it held says the gateway that knows the node no more. A leave that was given up counts for nothing
//! later, when the journal tells of it all the same: the word names the end of its time, which lies before the end of the
//! patience, and another is said where patience lasts longer.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;

use super::Node;
use crate::blocking;
use crate::exec::Lanes;
use crate::failpoint;
use crate::identity::Identity;
use crate::journal::{Journal, WriteError};
use crate::model::{CommandId, EventType, Exit, NewEvent, Reason};
use crate::session::{SessionStatus, WorkingClock};
use crate::wire::dsse::{Envelope, SignError};
use crate::wire::report::{Leave, LeaveKind};

/// Between two looks at what runs and what is owed.
const LOOK: Duration = Duration::from_millis(100);
/// A word counts this long at most: whoever is killed behind it may be a node again, and a word outlives a kill.
const WORD: Duration = Duration::from_secs(5 * 60);
/// A word counts no more this long before it is given up, so that the two ends' clocks may differ by that.
const MARGIN: Duration = Duration::from_secs(5);

/// Why a node did not leave.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// Programs have not come to their end.
    #[error("{} still run ({}); wait for their ends or cancel them, or leave them running with: bcd leave --force", count(.0), names(.0))]
    Running(Vec<CommandId>),
    /// The control plane has not heard of it.
    #[error(
        "no gateway was told that this machine leaves ({0}); the node is what it was; try again later, or leave with: bcd leave --force, and have the node deleted at the control plane"
    )]
    Untold(String),
    /// It was said, and nobody has said that it held.
    #[error(
        "that this machine leaves was said, and no gateway has answered that it holds ({0}); it may have been heard, so run bcd leave again; nothing was moved aside"
    )]
    Unanswered(String),
    /// The node ended by itself.
    #[error("the node ended while it was leaving (exit code {}); its log says why", .0.code())]
    Ended(Exit),
    /// The word cannot be written down.
    #[error("that this machine leaves cannot be written down")]
    Write(#[from] WriteError),
    /// The word cannot be signed.
    #[error("the key of the certificate cannot sign that this machine leaves")]
    Sign(#[from] SignError),
    /// A blocking step did not come to its end.
    #[error("a step of the leave panicked")]
    Panicked(#[from] tokio::task::JoinError),
}

fn count(ids: &[CommandId]) -> String {
    if ids.len() == 1 { "1 command".into() } else { format!("{} commands", ids.len()) }
}

fn names(ids: &[CommandId]) -> String {
    let names: Vec<&str> = ids.iter().take(3).map(CommandId::as_str).collect();
    format!("{}{}", names.join(", "), if ids.len() > names.len() { ", …" } else { "" })
}

impl LeaveError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Running(_) | Self::Unanswered(_) => Exit::TryLater,
            Self::Untold(_) => Exit::NoGateway,
            Self::Ended(exit) => *exit,
            Self::Write(_) => Exit::CannotWrite,
            Self::Sign(_) | Self::Panicked(_) => Exit::Failed,
        }
    }
}

impl Node {
    /// Runs until nothing runs here any more and the control plane has heard that the machine leaves, or `patience` is
    /// over. The identity stays where it is: the caller moves it.
    ///
    /// # Errors
    /// See [`LeaveError`]; the node is what it was, and may be started again.
    pub async fn leave(self, patience: Duration) -> Result<(), LeaveError> {
        let lanes = Lanes::default();
        // What is delivered from here on is refused, and what has not started does not start.
        lanes.stop();
        let (say_stop, stop) = watch::channel(false);
        let (say, status) = watch::channel(SessionStatus::new(self.options.clock.boot()));
        let (use_identity, identity) = watch::channel(self.identity.clone());
        let leaving = Leaving {
            journal: self.journal.clone(),
            lanes: lanes.clone(),
            status,
            identity,
            working: self.working.clone(),
            said: AtomicBool::new(false),
        };
        let run = self.run_with(lanes, say, use_identity, stop);
        tokio::pin!(run);
        let told = tokio::select! {
            biased;
            exit = &mut run => return Err(LeaveError::Ended(exit)),
            told = leaving.tell(patience) => told,
        };
        say_stop.send_replace(true);
        run.await;
        told
    }
}

/// How long a word counts where so much patience is left.
fn counts(left: Duration) -> Duration {
    left.saturating_sub(MARGIN.min(left / 2)).min(WORD)
}

struct Leaving {
    journal: Journal,
    lanes: Lanes,
    status: watch::Receiver<SessionStatus>,
    /// A leave may outlast a certificate.
    identity: watch::Receiver<Identity>,
    working: WorkingClock,
    /// Whether the word is in the journal.
    said: AtomicBool,
}

impl Leaving {
    async fn tell(self, patience: Duration) -> Result<(), LeaveError> {
        let until = self.working.clock().boot().saturating_add(patience);
        match tokio::time::timeout(patience, self.told(until)).await {
            Ok(told) => told,
            Err(_) => Err(self.given_up()),
        }
    }

    fn given_up(&self) -> LeaveError {
        let running = self.lanes.running_ids();
        if !running.is_empty() {
            return LeaveError::Running(running);
        }
        let why = self.why();
        if self.said.load(Ordering::Relaxed) { LeaveError::Unanswered(why) } else { LeaveError::Untold(why) }
    }

    async fn told(&self, until: Duration) -> Result<(), LeaveError> {
        tokio::select! {
            biased;
            told = self.say(until) => match told? {},
            () = self.unknown() => Ok(()),
        }
    }

    /// The control plane knows the node no more: this leave or an earlier one has held, or an operator has deleted it.
    /// What runs here runs on for all that, and is waited for.
    async fn unknown(&self) {
        let mut status = self.status.clone();
        let unknown = status.wait_for(|status| {
            status.last_end.as_ref().is_some_and(|end| end.reason == Some(Reason::UnknownNode))
        });
        if unknown.await.is_err() {
            // The node has ended, which whoever runs it sees.
            std::future::pending::<()>().await;
        }
        while !self.lanes.running_ids().is_empty() {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Says it, and says it again when a word's time is over: what came of it says the end of the session.
    async fn say(&self, until: Duration) -> Result<Infallible, LeaveError> {
        loop {
            self.settled().await;
            let counts = counts(until.saturating_sub(self.working.clock().boot()));
            let report = self.report(counts).await?;
            let event = NewEvent::new(EventType::NodeLeaving, json!({ "report": report }));
            // Before: a write that is given up may be durable.
            self.said.store(true, Ordering::Relaxed);
            self.journal.record(event).await?;
            failpoint::hit(failpoint::LEAVE_RECORDED);
            tokio::time::sleep(counts + MARGIN).await;
        }
    }

    /// A session is live, nothing runs, and no result is owed.
    async fn settled(&self) {
        loop {
            let live = self.status.borrow().live.is_some();
            if live && self.lanes.running_ids().is_empty() {
                let owed = self.journal.unacked(None, 1).await;
                if owed.is_ok_and(|unacked| unacked.results.is_empty()) {
                    return;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    async fn report(&self, counts: Duration) -> Result<Envelope, LeaveError> {
        let identity = self.identity.borrow().clone();
        let (signer, Identity { trust_domain, node_id, chain, .. }) = (identity.signer(), identity);
        let issued_at = self.working.now().unwrap_or_default();
        let not_after = issued_at.plus(counts);
        let body = Leave { kind: LeaveKind::Leave, trust_domain, node_id, issued_at, not_after };
        // The certificate says whose key it is; its root is the worker's own.
        let leaf = chain.first().map(|leaf| bytes::Bytes::copy_from_slice(leaf)).into_iter().collect();
        Ok(blocking::run(move || signer.sign(&body, leaf)).await??)
    }

    /// What is known of the gateways, for people.
    fn why(&self) -> String {
        let status = self.status.borrow();
        match (&status.live, &status.last_end) {
            (Some(live), _) => format!("the session with {} is live", live.gateway_id),
            (None, Some(end)) => end.detail.clone(),
            (None, None) => "no gateway has answered yet".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::TokioClock;
    use crate::identity::tests::joined;
    use crate::journal::{Locked, Mode, Options};
    use crate::model::{JournalId, ServerTime};

    #[test]
    fn a_word_counts_for_five_minutes_at_most_and_no_more_before_it_is_given_up() {
        let seconds = Duration::from_secs;
        for (left, counted) in [(3600, 300), (305, 300), (304, 299), (60, 55), (10, 5), (4, 2), (0, 0)] {
            assert_eq!(counts(seconds(left)), seconds(counted), "{left} s of patience");
        }
    }

    #[tokio::test]
    async fn a_word_is_signed_by_the_identity_of_its_moment_and_names_its_own_end() {
        let (before, renewed) = (joined(), joined());
        let options = Options::of_a_test(before.state(), Mode::Inline);
        let locked = Locked::open(options, JournalId::new("j-1").unwrap()).unwrap();
        let now = ServerTime(1_790_000_000_000);
        let working = WorkingClock::new(Arc::new(TokioClock::starting_at(0)), Some(now), None);
        let (use_identity, identity) = watch::channel(before.load().unwrap());
        let (_session, status) = watch::channel(SessionStatus::new(Duration::ZERO));
        let leaving = Leaving {
            journal: locked.recover(None).unwrap().0,
            lanes: Lanes::default(),
            status,
            identity,
            working,
            said: AtomicBool::new(false),
        };
        for held in [before.load().unwrap(), renewed.load().unwrap()] {
            use_identity.send_replace(held.clone());
            let report = leaving.report(WORD).await.unwrap();
            let signature = &report.signatures[0];
            assert_eq!(signature.key_id[..], held.fingerprint.0[..]);
            assert_eq!(signature.chain[0][..], held.chain[0][..]);
            let word: Leave = serde_json::from_slice(&report.payload).unwrap();
            assert!(word.issued_at >= now && word.not_after == word.issued_at.plus(WORD), "{word:?}");
        }
    }

    #[test]
    fn a_leave_that_was_said_may_have_been_heard_and_one_that_was_not_has_not() {
        let said = LeaveError::Unanswered("the session with gw1 is live".into());
        assert!(said.to_string().contains("may have been heard, so run bcd leave again"), "{said}");
        let untold = LeaveError::Untold("no gateway has answered yet".into());
        assert!(untold.to_string().contains("the node is what it was"), "{untold}");
        for error in [said, untold] {
            assert!(!error.to_string().contains("ack"), "an ack says nothing of a leave: {error}");
        }
    }
}
