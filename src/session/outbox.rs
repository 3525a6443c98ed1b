//! What the executor has to say, on its way to the wire: one bounded queue that never makes the executor wait.
//!
//! A passing answer that finds the queue full is dropped (the next Hello settles it); a result that finds it full
//! is only noted, since it stands in the journal, and is read from there when there is room.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc;

use crate::journal::Durable;
use crate::model::{Answer, AnswerState, Done};
use crate::wire::frames::command_update;
use crate::wire::pb;

/// Answers that may wait for the wire: every command in flight (26 by default credits) with three answers each,
/// with room for ten times as many.
const CAPACITY: usize = 1024;

/// Something to say of a command.
#[derive(Debug)]
pub enum Outgoing {
    /// REFUSED, ACCEPTED or RUNNING: said once, to whom it concerns now.
    Passing(Answer),
    /// A result: said again at every Welcome until it is acked.
    Result(Durable<Done>),
}

/// The executor's end.
#[derive(Debug, Clone)]
pub struct OutboxSender {
    queue: mpsc::Sender<Box<Outgoing>>,
    missed: Arc<AtomicBool>,
}

/// The session's end.
#[derive(Debug)]
pub struct Outbox {
    queue: mpsc::Receiver<Box<Outgoing>>,
    missed: Arc<AtomicBool>,
}

/// A result as a frame: only what stands in the journal leaves.
pub fn result_frame(done: &Durable<Done>) -> pb::CommandUpdate {
    command_update(&Answer {
        id: Some(done.id.clone()),
        body_sha256: done.body_sha256,
        state: AnswerState::Done(Box::new(done.outcome.clone())),
    })
}

/// A new outbox.
pub fn outbox() -> (OutboxSender, Outbox) {
    let (sender, queue) = mpsc::channel(CAPACITY);
    let missed = Arc::new(AtomicBool::new(false));
    (OutboxSender { queue: sender, missed: Arc::clone(&missed) }, Outbox { queue, missed })
}

impl OutboxSender {
    /// Hands over; never waits.
    pub fn send(&self, outgoing: Outgoing) {
        if let Err(mpsc::error::TrySendError::Full(outgoing)) = self.queue.try_send(Box::new(outgoing))
            && matches!(*outgoing, Outgoing::Result(_))
        {
            self.missed.store(true, Ordering::Release);
        }
    }
}

impl Outbox {
    /// The next one; absent when the executor is gone. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Outgoing> {
        self.queue.recv().await.map(|outgoing| *outgoing)
    }

    /// Forgets everything queued: what matters of it stands in the journal. Called before a Hello is built, so that
    /// nothing is said twice in one session.
    pub fn drain(&mut self) {
        while self.queue.try_recv().is_ok() {}
        self.missed.store(false, Ordering::Release);
    }

    /// How many are queued now.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether nothing is queued now.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Whether a result found the queue full since the last call: then the journal must be read.
    pub fn take_missed(&self) -> bool {
        self.missed.swap(false, Ordering::AcqRel)
    }
}
