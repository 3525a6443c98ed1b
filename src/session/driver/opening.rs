//! A session's begin: the Hello that is said, and the Welcome that is applied.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use prost::Message as _;

use super::Driver;
use crate::model::limits::HELLO_RESULTS_BYTES;
use crate::model::{EventType, NewEvent, Reason};
use crate::session::hello::hello;
use crate::session::resend::Resend;
use crate::session::signing::sign_all;
use crate::wire::frames::Welcome;
use crate::wire::link::Endpoint;
use crate::wire::pb;

impl Driver {
    pub(super) fn open(&mut self, endpoint: Endpoint, attempt: u32, keep_alive: Duration) {
        // Before the journal is read: what is queued until now stands in it, and is said by Hello.
        self.parts.outbox.drain();
        tracing::debug!(%endpoint, attempt, "dialing");
        let (dialer, journal) = (Arc::clone(&self.parts.credentials.dialer), self.parts.journal.clone());
        let (facts, lanes) = (self.parts.hello.clone(), self.parts.lanes.clone());
        let refused = self.refused_epoch.take().zip(self.parts.working.now());
        let (last_epoch, trust_version) = (self.last_epoch, self.parts.credentials.trust_version);
        let (signer, now) = (self.parts.credentials.signer.clone(), self.working_now());
        let renaming = self.renaming.take();
        let open = async move {
            if let Some(renaming) = renaming {
                renaming.await;
            }
            if let Some((epoch, mark)) = refused
                && let Err(error) = journal.welcomed(epoch, mark).await
            {
                tracing::warn!(%error, epoch, "the epoch of a refused Welcome is not recorded");
            }
            // Before the results: a command that ends between the two is said twice rather than not at all.
            let running = lanes.running_ids();
            let (results, resend) = match journal.unacked(None, HELLO_RESULTS_BYTES).await {
                Ok(page) => match sign_all(signer, &page.results, now).await {
                    Ok(updates) => (updates, Resend::after_hello(&page.results, page.next)),
                    Err(error) => without_results(&error),
                },
                Err(error) => without_results(&error),
            };
            let count = results.len();
            let first = hello(&facts, &journal, &running, results, (last_epoch, attempt, trust_version));
            let (bytes, events) = (first.encoded_len(), journal.pending_events().borrow().count);
            let commits = journal.commits();
            tracing::debug!(bytes, results = count, events, commits, "saying Hello");
            let link = dialer.open(&endpoint, first, keep_alive).await?;
            Ok((link, resend))
        };
        self.opening = Some(open.boxed());
    }

    /// Opening, steps 2 and 3, in their order. The session goes on when the journal cannot be written.
    pub(super) fn apply(&mut self, welcome: &Welcome) {
        let (journal, working) = (self.parts.journal.clone(), self.parts.working.clone());
        let lanes = self.parts.lanes.clone();
        let (epoch, time) = (welcome.epoch, welcome.server_time);
        self.last_epoch = epoch;
        if welcome.journal_id.as_ref() == Some(&journal.id()) && welcome.acked_event_seq > 0 {
            self.events.acked(welcome.acked_event_seq);
            journal.events_acked(journal.id(), welcome.acked_event_seq);
        }
        let opened = self.opened(welcome);
        self.bundle = welcome.bundle();
        let (credits, upgrade_only) = (welcome.lane_credits.clone(), welcome.upgrade_required);
        let apply = async move {
            let mark = working.now().map_or(time, |now| now.max(time));
            // Handed over together, so that one commit takes both.
            let (welcomed, told) = tokio::join!(journal.welcomed(epoch, mark), journal.record(opened));
            if let Err(error) = welcomed {
                tracing::warn!(%error, epoch, "the Welcome is in force but not recorded");
            }
            if let Err(error) = told {
                tracing::debug!(%error, "the opening of the session is not told");
            }
            working.welcome(time);
            lanes.set_terms(&credits, upgrade_only);
        };
        self.applying = Some(apply.boxed());
    }

    fn opened(&self, welcome: &Welcome) -> NewEvent {
        let last_end = self.machine.last_end().map(|last| last.end.reason.map_or("-", Reason::token));
        let mut body = serde_json::json!({
            "gateway": welcome.gateway_id,
            "epoch": welcome.epoch,
            "attempt": self.machine.attempt().saturating_sub(1),
        });
        if let (Some(last_end), Some(fields)) = (last_end, body.as_object_mut()) {
            fields.insert("last_end".into(), last_end.into());
        }
        NewEvent::new(EventType::SessionOpened, body)
    }
}

/// What a Hello says that can say none, and what the session owes then.
fn without_results(error: &(dyn std::error::Error + 'static)) -> (Vec<pb::CommandUpdate>, Resend) {
    tracing::warn!(error, "Hello goes without results");
    let mut resend = Resend::default();
    resend.missed();
    (Vec::new(), resend)
}
