//! What goes to the executor and to the wire, as far as there is room.

use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::sync::mpsc;

use super::{Driver, LONGEST_REST, frame};
use crate::failpoint;
use crate::journal::{Durable, EventPage, Journal, Unacked};
use crate::model::limits::{EVENT_BATCH, EVENT_BATCH_BYTES, HELLO_RESULTS_BYTES};
use crate::model::{Answer, AnswerState, Command, Digest, Done, Reason};
use crate::session::load;
use crate::session::machine::Beat;
use crate::session::outbox::{Outgoing, result_frame};
use crate::session::signing::sign;
use crate::wire::frames::{Delivery, command_update, event_batch};
use crate::wire::pb;
use crate::wire::pb::node_frame::Frame;

/// Results of one page read after Welcome, bytes of output.
const PAGE_BYTES: usize = HELLO_RESULTS_BYTES;
/// Places of the link's queue that events leave to results.
const KEPT_FOR_RESULTS: usize = 2;
/// A journal that cannot be read is read again this often.
const READ_RETRY: Duration = Duration::from_secs(1);

impl Driver {
    pub(super) fn deliver(&mut self, delivery: Delivery) {
        if !matches!(delivery, Delivery::Cancel { .. }) {
            failpoint::hit(failpoint::RECEIVED);
        }
        let (delivery, why) = match self.parts.deliveries.try_send(delivery) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(delivery)) => (delivery, Reason::Credits),
            Err(mpsc::error::TrySendError::Closed(delivery)) => (delivery, Reason::Stopping),
        };
        // Only a gateway that sends beyond the credits fills the queue; it is told so rather than waited for.
        if let Some(answer) = refusal(&delivery, why) {
            self.send(Frame::CommandUpdate(command_update(&answer)));
        }
    }

    pub(super) fn say(&mut self, outgoing: Outgoing) {
        match outgoing {
            Outgoing::Passing(answer) => {
                self.resend.passed();
                if self.send(Frame::CommandUpdate(command_update(&answer))) {
                    match answer.state {
                        AnswerState::Accepted => failpoint::hit(failpoint::ACCEPTED_SENT),
                        AnswerState::Running { .. } => failpoint::hit(failpoint::RUNNING_SENT),
                        AnswerState::Refused { .. } | AnswerState::Done(_) => {}
                    }
                }
            }
            Outgoing::Result(done) if self.must_wait(&done) => {
                self.resend.passed();
                self.put_off = true;
            }
            Outgoing::Result(done) => {
                if self.resend.take(&done.id) {
                    self.say_result(done);
                }
            }
        }
    }

    /// Sends a result, once it is signed where its kind asks for it.
    fn say_result(&mut self, done: Durable<Done>) {
        if done.to_sign {
            let signer = self.parts.credentials.signer.clone();
            self.signing = Some(sign(signer, done, self.working_now()).boxed());
        } else {
            self.send_result(result_frame(&done));
        }
    }

    fn send_result(&mut self, update: pb::CommandUpdate) {
        if self.send(Frame::CommandUpdate(update)) {
            failpoint::hit(failpoint::RESULT_SENT);
        }
    }

    /// Whether a result is being signed, or is signed and waits for room.
    pub(super) fn signs(&self) -> bool {
        self.signing.is_some() || self.signed.is_some()
    }

    /// Whether a result needs the key while that rests.
    fn must_wait(&self, done: &Done) -> bool {
        done.to_sign && self.key_rests.is_some()
    }

    /// What needs the key waits in the journal; everything else goes on.
    pub(super) fn key_failed(&mut self, done: &Done) {
        self.resend.put_off(&done.id);
        self.put_off = true;
        self.key_rests = Some(tokio::time::sleep(self.rest).boxed());
        self.rest = self.rest.saturating_mul(2).min(LONGEST_REST);
    }

    fn ask_key_again(&mut self) {
        if self.put_off && self.key_rests.is_none() {
            self.put_off = false;
            self.resend.missed();
        }
    }

    fn results_wait(&self) -> bool {
        self.resend.rest_waits() || self.signs()
    }

    /// Queues a frame; a link that takes none has ended, which its next receive tells.
    fn send(&mut self, body: Frame) -> bool {
        self.link.as_mut().is_some_and(|link| link.send(frame(body)).is_ok())
    }

    /// Sends what waits for room, as far as there is room.
    pub(super) fn pump(&mut self) {
        if !self.live() {
            return;
        }
        if self.parts.outbox.take_missed() {
            self.resend.missed();
        }
        self.ask_key_again();
        self.say_heartbeat();
        if self.room() > 0
            && let Some(update) = self.signed.take()
        {
            self.send_result(update);
        }
        self.say_results();
        self.say_heartbeat();
        if self.reading.is_none()
            && let Some(position) = self.resend.begin_read()
        {
            self.reading = Some(read_page(self.parts.journal.clone(), position).boxed());
        }
        self.pump_events();
        if self.room() > 0 {
            self.flushed = None;
        } else if self.flushed.is_none() {
            self.flushed = self.link.as_ref().map(|link| link.flushed());
        }
    }

    /// Results go first, and keep places of the queue free for those that end while a batch is on its way.
    fn pump_events(&mut self) {
        if self.results_wait() {
            return;
        }
        while self.room() > KEPT_FOR_RESULTS
            && let Some(batch) = self.events.next_batch()
        {
            let boot = self.parts.working.clock().boot();
            let boot_ms = u64::try_from(boot.as_millis()).unwrap_or(u64::MAX);
            let frame = event_batch(&self.parts.journal.id(), batch.iter().map(|event| &**event), boot_ms);
            // Before it is sent: an ack of it must never look like one of what was not sent.
            if let Some(last) = batch.last() {
                self.parts.journal.events_sent(last.seq);
            }
            self.send(Frame::EventBatch(frame));
        }
        let last = self.pending.borrow_and_update().last;
        if self.reading_events.is_none()
            && let Some(after) = self.events.owed(last)
        {
            self.events.reads_up_to(last);
            self.reading_events = Some(read_events(self.parts.journal.clone(), after).boxed());
        }
    }

    /// The first heartbeat of a session ends the gateway's wait for results that this node still holds, so those that
    /// Hello had no room for go before it. They hold it for one interval at most: the second one replaces it.
    fn say_heartbeat(&mut self) {
        if let Some(beat) = self.heartbeat
            && !(beat.seq == 1 && (self.results_wait() || self.put_off))
            && self.link.as_ref().is_some_and(|link| link.room() > 0)
            && self.send(Frame::Heartbeat(self.heartbeat_frame(beat)))
        {
            self.heartbeat = None;
        }
    }

    fn say_results(&mut self) {
        while self.room() > 0
            && !self.signs()
            && let Some(done) = self.resend.next()
        {
            if self.must_wait(&done) {
                self.resend.put_off(&done.id);
                self.put_off = true;
            } else {
                self.say_result(done);
            }
        }
    }

    fn heartbeat_frame(&self, beat: Beat) -> pb::Heartbeat {
        let free = self.parts.lanes.free();
        pb::Heartbeat {
            seq: beat.seq,
            free_credits: free.into_iter().map(|(lane, free)| (lane.name().to_owned(), free)).collect(),
            commands_received: beat.commands_received,
            load: load::read(self.parts.lanes.running_ids().len(), self.pending.borrow().count),
            peer_proto_max: beat.peer_proto_max,
            ..Default::default()
        }
    }
}

async fn read_page(journal: Journal, position: Option<u64>) -> Unacked {
    loop {
        match journal.unacked(position, PAGE_BYTES).await {
            Ok(page) => return page,
            Err(error) => tracing::warn!(%error, "results wait: the journal cannot be read"),
        }
        tokio::time::sleep(READ_RETRY).await;
    }
}

async fn read_events(journal: Journal, after: u64) -> EventPage {
    loop {
        match journal.events(after, EVENT_BATCH, EVENT_BATCH_BYTES).await {
            Ok(page) => return page,
            Err(error) => tracing::warn!(%error, "events wait: the journal cannot be read"),
        }
        tokio::time::sleep(READ_RETRY).await;
    }
}

/// REFUSED `busy` for a command that could not be handed on; a cancellation has no answer and is sent again by
/// whoever wants it.
fn refusal(delivery: &Delivery, why: Reason) -> Option<Answer> {
    let (id, body_sha256) = match delivery {
        Delivery::Command(command) => {
            let payload = &command.envelope.payload;
            let parsed = Command::parse(payload.clone()).ok();
            (parsed.map(|command| command.header.id), Digest::of(payload))
        }
        Delivery::Malformed { body_sha256, .. } => (None, *body_sha256),
        Delivery::Cancel { .. } => return None,
    };
    let state = AnswerState::Refused { reason: Reason::Busy, detail: why.token().into() };
    Some(Answer { id, body_sha256, state })
}
