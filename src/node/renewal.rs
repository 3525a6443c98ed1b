//! A join, a renewal or a trust bundle may replace identity.json while the daemon runs. Whoever waits to dial looks here
//! whether one did, and a live session when this process did it itself: there is one way from the disk into use.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::{Notify, watch};

use super::grpc_dialer;
use crate::blocking;
use crate::identity::{Identity, Mark, join_again, rejoins};
use crate::model::Exit;
use crate::ports::Connect;
use crate::session::{Credentials, Offered, Renewals, WorkingClock};
use crate::wire::dsse::CommandRoots;
use crate::wire::link::{Dialer, Endpoint};

/// What a session dials with, of `identity`.
pub(super) fn credentials(
    identity: &Identity,
    own_endpoints: &[Endpoint],
    state: &std::path::Path,
    dialer: Arc<dyn Dialer>,
) -> Credentials {
    let endpoints = if own_endpoints.is_empty() { &identity.trust.endpoints } else { own_endpoints };
    Credentials {
        dialer,
        endpoints: endpoints.to_vec(),
        offered: Offered {
            certificate: identity.certificate,
            validity: identity.leaf.validity,
            revoked: identity.revoked,
            mend: join_again(state),
            rejoins: rejoins(state),
        },
        trust_version: identity.trust.bundle.version,
        signer: identity.signer(),
    }
}

/// Looks at identity.json on the blocking pool.
pub(super) struct Renewal(Arc<Shared>);

struct Shared {
    state: PathBuf,
    own_endpoints: Vec<Endpoint>,
    connect: Arc<dyn Connect>,
    working: WorkingClock,
    tell: Tell,
    /// Held over a look at the disk.
    seen: Mutex<Seen>,
    /// The session knows that the identity in use is revoked.
    revocation_told: AtomicBool,
    replaced: Arc<Notify>,
}

/// Who hears of an identity that has taken the place of another.
pub(super) struct Tell {
    /// The identity in use.
    pub(super) identity: watch::Sender<Identity>,
    /// Who may sign commands, by its trust bundle.
    pub(super) roots: watch::Sender<CommandRoots>,
    /// Set when the new identity is not for this process to use.
    pub(super) ending: watch::Sender<Option<Exit>>,
}

struct Seen {
    used: Mark,
    /// Said already that it cannot be used.
    unusable: Option<Mark>,
    /// Taken from the file and not yet by the session, which may have given up a look at a slow disk.
    found: Option<Credentials>,
}

impl Renewal {
    /// `used` is the mark of the file whose identity is in use.
    pub(super) fn new(
        (state, used): (PathBuf, Mark),
        own_endpoints: Vec<Endpoint>,
        connect: Arc<dyn Connect>,
        working: WorkingClock,
        tell: Tell,
        replaced: Arc<Notify>,
    ) -> Self {
        let revocation_told = tell.identity.borrow().revoked.into();
        let seen = Mutex::new(Seen { used, unusable: None, found: None });
        let shared = Shared { state, own_endpoints, connect, working, tell, seen, revocation_told, replaced };
        Self(Arc::new(shared))
    }
}

impl Renewals for Renewal {
    fn look(&self) -> BoxFuture<'static, Option<Credentials>> {
        let shared = Arc::clone(&self.0);
        async move {
            // Needs no disk, which may hang.
            if let Some(revoked) = shared.revoked() {
                return Some(revoked);
            }
            let looking = Arc::clone(&shared);
            blocking::run(move || looking.look()).await.ok()?;
            shared.seen().found.take()
        }
        .boxed()
    }

    fn replaced(&self) -> BoxFuture<'static, ()> {
        let replaced = Arc::clone(&self.0.replaced);
        async move { replaced.notified().await }.boxed()
    }
}

impl Shared {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        let mut seen = self.seen();
        // A file that is gone has been moved away for a join that is under way; the old identity serves until then.
        let Some(mark) = Mark::of(&self.state).filter(|mark| *mark != seen.used) else { return };
        let taken = Identity::load(&self.state).map_err(super::BuildError::from).and_then(|identity| {
            let current = self.tell.identity.borrow().clone();
            Ok(match refusal(&current, &identity) {
                Some((exit, why)) => {
                    tracing::error!("{why}");
                    self.tell.ending.send_replace(Some(exit));
                    None
                }
                None => Some(self.take(identity)?),
            })
        });
        match taken {
            Ok(taken) => {
                let found = taken.or(seen.found.take());
                *seen = Seen { used: mark, unusable: None, found };
            }
            Err(error) => {
                if seen.unusable.replace(mark) != Some(mark) {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(
                        error,
                        "identity.json was replaced and cannot be used; the old identity stays"
                    );
                }
            }
        }
    }

    /// What has the session stop using an identity that was revoked in memory; the file says so later.
    fn revoked(&self) -> Option<Credentials> {
        let identity = self.tell.identity.borrow().clone();
        if !identity.revoked || self.revocation_told.swap(true, Ordering::Relaxed) {
            return None;
        }
        let offer = self.offer(&identity);
        if let Err(error) = &offer {
            self.revocation_told.store(false, Ordering::Relaxed);
            let error: &dyn std::error::Error = error;
            tracing::error!(error, "the session cannot be told that its certificate is revoked");
        }
        offer.ok()
    }

    fn offer(&self, identity: &Identity) -> Result<Credentials, super::BuildError> {
        let dialer = grpc_dialer(identity, &self.working, &self.connect, &self.state)?;
        Ok(credentials(identity, &self.own_endpoints, &self.state, dialer))
    }

    fn take(&self, mut identity: Identity) -> Result<Credentials, super::BuildError> {
        identity.revoked |= still_revoked(&self.tell.identity.borrow(), &identity);
        let credentials = self.offer(&identity)?;
        tracing::info!(
            generation = identity.generation,
            certificate_until = %identity.leaf.validity.not_after,
            trust_version = identity.trust.bundle.version,
            "identity.json was replaced and is in use"
        );
        self.tell.roots.send_replace(identity.trust.command_roots.clone());
        // One that came meanwhile is told by the next look.
        self.tell.identity.send_modify(|held| {
            identity.revoked |= still_revoked(held, &identity);
            *held = identity;
        });
        self.revocation_told.store(credentials.offered.revoked, Ordering::Relaxed);
        Ok(credentials)
    }
}

/// A disk that has not taken a revocation yet revokes nothing less.
fn still_revoked(held: &Identity, new: &Identity) -> bool {
    held.revoked && held.certificate == new.certificate
}

/// Why this process must not go on as `new`: its journal, or what it judges commands by, is another's.
fn refusal(current: &Identity, new: &Identity) -> Option<(Exit, String)> {
    if new.node_id != current.node_id {
        let why = format!(
            "identity.json is now that of {}, and this daemon runs {} with its journal; start bcd again to run the new node",
            new.node_id, current.node_id
        );
        return Some((Exit::ForeignState, why));
    }
    let same =
        new.role == current.role && new.site == current.site && new.trust_domain == current.trust_domain;
    (!same).then(|| {
        let why = "identity.json has another role, site or trust domain now; the daemon ends, so that its next start takes them";
        (Exit::Failed, why.into())
    })
}

#[cfg(test)]
mod tests;
