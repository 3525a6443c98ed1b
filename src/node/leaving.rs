//! The end of a node: what runs comes to its end, what is owed is told, the control plane hears that the machine leaves.
//!
//! It is the node itself, with its session, that admits nothing any more. The word is an event of the journal. An ack says
//! that it came; that it held says the gateway that knows the node no more. A leave that was given up counts for nothing
//! later, when the journal tells of it all the same: the word names the end of its time.

use std::convert::Infallible;
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
use crate::wire::dsse::{Envelope, SignError, sign};
use crate::wire::report::{self, Leave, LeaveKind};

/// Between two looks at what runs and what is owed.
const LOOK: Duration = Duration::from_millis(100);

/// Why a node did not leave.
#[derive(Debug, thiserror::Error)]
pub enum LeaveError {
    /// Programs have not come to their end.
    #[error("{} still run ({}); wait for their ends or cancel them, or leave them running with: bcd leave --force", count(.0), names(.0))]
    Running(Vec<CommandId>),
    /// The control plane has not heard of it.
    #[error(
        "no gateway has taken the word that this machine leaves ({0}); the node is what it was; try again later, or leave with: bcd leave --force, and have the node deleted at the control plane"
    )]
    Untold(String),
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
            Self::Running(_) => Exit::TryLater,
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
        let leaving = Leaving {
            journal: self.journal.clone(),
            lanes: lanes.clone(),
            status,
            identity: self.identity.clone(),
            working: self.working.clone(),
        };
        let run = self.run_with(lanes, say, stop);
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

struct Leaving {
    journal: Journal,
    lanes: Lanes,
    status: watch::Receiver<SessionStatus>,
    identity: Identity,
    working: WorkingClock,
}

impl Leaving {
    async fn tell(mut self, patience: Duration) -> Result<(), LeaveError> {
        let until = self.working.clock().boot() + patience;
        match tokio::time::timeout(patience, self.told(until)).await {
            Ok(told) => told,
            Err(_) => {
                let running = self.lanes.running_ids();
                Err(if running.is_empty() {
                    LeaveError::Untold(self.why())
                } else {
                    LeaveError::Running(running)
                })
            }
        }
    }

    async fn told(&mut self, until: Duration) -> Result<(), LeaveError> {
        let mut unknown = self.status.clone();
        // The control plane knows the node no more: an earlier leave came so far, or an operator has deleted it.
        let unknown = unknown.wait_for(|status| {
            status.last_end.as_ref().is_some_and(|end| end.reason == Some(Reason::UnknownNode))
        });
        tokio::select! {
            biased;
            told = self.say(until) => match told? {},
            _ = unknown => Ok(()),
        }
    }

    /// Says it, and waits for ever: what came of it says the end of the session.
    async fn say(&self, until: Duration) -> Result<Infallible, LeaveError> {
        self.settled().await;
        let report = self.report(until).await?;
        let event = NewEvent::new(EventType::NodeLeaving, json!({ "report": report }));
        self.journal.record(event).await?;
        failpoint::hit(failpoint::LEAVE_RECORDED);
        std::future::pending().await
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

    async fn report(&self, until: Duration) -> Result<Envelope, LeaveError> {
        let Identity { trust_domain, node_id, key, chain, .. } = self.identity.clone();
        let issued_at = self.working.now().unwrap_or_default();
        let not_after = issued_at.plus(until.saturating_sub(self.working.clock().boot()));
        let body = Leave { kind: LeaveKind::Leave, trust_domain, node_id, issued_at, not_after };
        // Ids and times cannot fail to serialise.
        let body = serde_json::to_vec(&body).unwrap_or_default();
        // The certificate says whose key it is; its root is the worker's own.
        let leaf = chain.first().map(|leaf| bytes::Bytes::copy_from_slice(leaf)).into_iter().collect();
        Ok(blocking::run(move || sign(report::TYPE, body, &*key.key, leaf)).await??)
    }

    /// Why nobody has heard, for people.
    fn why(&self) -> String {
        let status = self.status.borrow();
        match (&status.live, &status.last_end) {
            (Some(live), _) => format!("the session with {} is live and has not acked it", live.gateway_id),
            (None, Some(end)) => end.detail.clone(),
            (None, None) => "no gateway has answered yet".into(),
        }
    }
}
