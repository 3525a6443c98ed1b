//! What the join service has to say of this node's identity within a session: a newer trust bundle, or that its
//! certificate is revoked. A gateway only relays it. A bundle that holds is on the disk before anybody acts on it; a revocation is
//! acted on at once, and then kept for every process to come.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::sync::{Notify, mpsc, watch};

use crate::blocking;
use crate::identity::Identity;
use crate::identity::renew::{KeepError, keep_bundle, keep_revocation, take_newer};
use crate::journal::Journal;
use crate::model::{EventType, NewEvent};
use crate::session::WorkingClock;
use crate::waits::Waits;
use crate::wire::bundle::{BundleError, Trust};
use crate::wire::dsse::{Audience, Envelope};
use crate::wire::frames::Notice;
use crate::wire::revocation::Revocation;

/// A revocation that the disk refuses is kept again after this, then after twice as long each time, at last after this.
const KEEP_AGAIN: Duration = Duration::from_secs(1);
const KEEP_AT_LAST: Duration = Duration::from_secs(60);

/// What the task is made of.
pub(super) struct Trusting {
    pub(super) state: PathBuf,
    /// The identity in use, which a revocation revokes at once.
    pub(super) identity: watch::Sender<Identity>,
    /// The lowest version of a trust bundle that is taken.
    pub(super) trust_floor: u64,
    pub(super) working: WorkingClock,
    pub(super) journal: Journal,
    /// From the session.
    pub(super) notices: mpsc::Receiver<Notice>,
    /// Tells the session that identity.json was replaced.
    pub(super) replaced: Arc<Notify>,
}

impl Trusting {
    /// Runs for ever.
    pub(super) async fn run(mut self) {
        while let Some(notice) = self.notices.recv().await {
            // On the heap while it lasts, as it is rare.
            match notice {
                Notice::TrustBundle(envelope) => Box::pin(self.bundle(envelope)).await,
                Notice::Revocation(envelope) => Box::pin(self.revocation(envelope)).await,
            }
        }
        // The session has ended, and with it the node.
        std::future::pending().await
    }

    async fn bundle(&self, envelope: Envelope) {
        let held = self.identity.borrow().clone();
        // The one that is held, told once more, is nobody's fault.
        if envelope.payload == held.trust.envelope.payload {
            return;
        }
        let judged = Trust::verify(envelope, &held.join_signing_key, &held.trust_domain)
            .and_then(|offered| take_newer(offered, &held.trust, self.trust_floor));
        let trust = match judged {
            Ok(trust) => trust,
            Err(error) => return self.refused(EventType::TrustBundleRefused, &error).await,
        };
        let (version, issued_at) = (trust.bundle.version, trust.bundle.issued_at);
        let state = self.state.clone();
        match self.kept("trust bundle", blocking::run(move || keep_bundle(&state, &held, trust)).await) {
            Ok(true) => {
                self.working.document(issued_at);
                self.replaced.notify_one();
                self.tell(EventType::TrustBundleTaken, json!({ "version": version })).await;
            }
            Err(Some(KeepError::Bundle(error))) => self.refused(EventType::TrustBundleRefused, &error).await,
            Ok(false) | Err(_) => {}
        }
    }

    async fn revocation(&self, envelope: Envelope) {
        let held = self.identity.borrow().clone();
        let audience = Audience { trust_domain: held.trust_domain.clone(), node_id: held.node_id.clone() };
        let revocation = match Revocation::verify(&envelope, &held.join_signing_key, &audience) {
            Ok(revocation) => revocation,
            Err(error) => {
                return self.refused(EventType::RevocationRefused, &BundleError::Document(error)).await;
            }
        };
        self.working.document(revocation.issued_at);
        let serial = held.leaf.serial.clone();
        if held.revoked || !revocation.names(&serial) {
            tracing::debug!(serial, "a revocation does not name the certificate in use; ignored");
            return;
        }
        tracing::error!(serial, "the certificate of this node is revoked and is not used again");
        self.identity.send_if_modified(|identity| {
            let same = identity.certificate == held.certificate;
            identity.revoked |= same;
            same
        });
        self.replaced.notify_one();
        let mut waits = Waits::new(KEEP_AGAIN, KEEP_AT_LAST);
        loop {
            let (state, held, envelope) = (self.state.clone(), held.clone(), envelope.clone());
            let kept = blocking::run(move || keep_revocation(&state, &held, envelope)).await;
            match self.kept("revocation", kept) {
                Ok(_) => break,
                // It is another identity's turn: that one is looked at, and this one is not used again.
                Err(Some(KeepError::Replaced)) => return self.replaced.notify_one(),
                // The worker says it once. A full disk, or a renewal that has the directory, lets go of it some time.
                Err(_) => waits.next().await,
            }
        }
        // The file's mark has changed; and before the event, which waits for a journal.
        self.replaced.notify_one();
        self.tell(EventType::IdentityRevoked, json!({ "serial": serial })).await;
    }

    async fn refused(&self, event: EventType, error: &BundleError) {
        let detail = error.to_string();
        tracing::warn!(detail, "refused: {event}");
        self.tell(event, json!({ "detail": detail })).await;
    }

    /// What came of the write, which the gateway causes anew in the next session. No error: it did not come to its end.
    fn kept<T>(
        &self,
        what: &str,
        kept: Result<Result<T, KeepError>, tokio::task::JoinError>,
    ) -> Result<T, Option<KeepError>> {
        match kept {
            Ok(Ok(kept)) => Ok(kept),
            Ok(Err(failed)) => {
                let error: &dyn std::error::Error = &failed;
                tracing::error!(error, "a {what} holds and cannot be kept");
                Err(Some(failed))
            }
            Err(error) => {
                tracing::error!(%error, "keeping a {what} failed");
                Err(None)
            }
        }
    }

    async fn tell(&self, event: EventType, body: serde_json::Value) {
        if let Err(error) = self.journal.record(NewEvent::new(event, body)).await {
            tracing::warn!(%error, "an event is not told: {event}");
        }
    }
}

#[cfg(test)]
mod tests;
