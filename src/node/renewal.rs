//! A join may replace the identity while the daemon runs. Whoever waits to dial looks here whether it did.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

use super::grpc_dialer;
use crate::blocking;
use crate::identity::{Identity, Mark, join_again};
use crate::model::Exit;
use crate::ports::Connect;
use crate::session::{Credentials, Renewals, WorkingClock};
use crate::wire::link::{Dialer, Endpoint};

/// What a session dials with, of `identity`.
pub(super) fn credentials(
    identity: &Identity,
    own_endpoints: &[Endpoint],
    state: &std::path::Path,
    dialer: Arc<dyn Dialer>,
) -> Credentials {
    let endpoints = if own_endpoints.is_empty() { &identity.endpoints } else { own_endpoints };
    Credentials {
        dialer,
        endpoints: endpoints.to_vec(),
        cert_not_after: identity.not_after,
        mend: join_again(state),
    }
}

/// Looks at identity.json on the blocking pool.
pub(super) struct Renewal(Arc<Shared>);

struct Shared {
    state: PathBuf,
    own_endpoints: Vec<Endpoint>,
    connect: Arc<dyn Connect>,
    working: WorkingClock,
    /// The identity in use.
    current: watch::Sender<Identity>,
    /// Set when the new identity is not for this process to use.
    ending: watch::Sender<Option<Exit>>,
    seen: Mutex<Seen>,
}

struct Seen {
    used: Mark,
    /// Said already that it cannot be used.
    unusable: Option<Mark>,
}

impl Renewal {
    /// `used` is the mark of the file that `current` holds.
    pub(super) fn new(
        (state, used): (PathBuf, Mark),
        own_endpoints: Vec<Endpoint>,
        connect: Arc<dyn Connect>,
        working: WorkingClock,
        current: watch::Sender<Identity>,
        ending: watch::Sender<Option<Exit>>,
    ) -> Self {
        let seen = Mutex::new(Seen { used, unusable: None });
        Self(Arc::new(Shared { state, own_endpoints, connect, working, current, ending, seen }))
    }
}

impl Renewals for Renewal {
    fn look(&self) -> BoxFuture<'static, Option<Credentials>> {
        let shared = Arc::clone(&self.0);
        async move { blocking::run(move || shared.look()).await.ok().flatten() }.boxed()
    }
}

impl Shared {
    fn look(&self) -> Option<Credentials> {
        // A file that is gone has been moved away for a join that is under way; the old identity serves until then.
        let mark = Mark::of(&self.state)?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.used == mark {
            return None;
        }
        let taken = Identity::load(&self.state).map_err(super::BuildError::from).and_then(|identity| {
            let current = self.current.borrow().clone();
            Ok(match refusal(&current, &identity) {
                Some((exit, why)) => {
                    tracing::error!("{why}");
                    self.ending.send_replace(Some(exit));
                    None
                }
                None => Some(self.take(identity)?),
            })
        });
        match taken {
            Ok(taken) => {
                *seen = Seen { used: mark, unusable: None };
                taken
            }
            Err(error) => {
                if seen.unusable.replace(mark) != Some(mark) {
                    let error: &dyn std::error::Error = &error;
                    tracing::error!(
                        error,
                        "identity.json was replaced and cannot be used; the old identity stays"
                    );
                }
                None
            }
        }
    }

    fn take(&self, identity: Identity) -> Result<Credentials, super::BuildError> {
        let dialer = grpc_dialer(&identity, &self.working, &self.connect, &self.state)?;
        let credentials = credentials(&identity, &self.own_endpoints, &self.state, dialer);
        tracing::info!(
            generation = identity.generation,
            certificate_until = %identity.not_after,
            "a new identity of this node is in use"
        );
        self.current.send_replace(identity);
        Ok(credentials)
    }
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
