//! The gateway's lease, as its process holds it: renewed every quarter of its life, given up after half of it without a
//! renewal, which is long before another gateway may call it lost.

use std::sync::Arc;
use std::time::Duration;

use super::hub::{Hub, SessionEnd};
use super::session::chain;
use super::store::Lease;

/// After a try that the store answered with an error.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// A lease and when it was last renewed.
#[derive(Debug, Clone)]
pub struct Grant {
    lease: Lease,
    /// By the boot clock, when nothing may be routed any more.
    until: Duration,
}

impl Grant {
    /// A lease that the store was asked for at `asked`, to hold for `life`.
    pub fn new(lease: Lease, asked: Duration, life: Duration) -> Self {
        Self { lease, until: asked + life / 2 }
    }

    /// The lease, while it may be routed under.
    pub fn valid(&self, now: Duration) -> Option<&Lease> {
        (!self.left(now).is_zero()).then_some(&self.lease)
    }

    fn left(&self, now: Duration) -> Duration {
        self.until.saturating_sub(now)
    }
}

/// Keeps the lease. Ends when another process has taken it under this gateway's id.
pub async fn keep(hub: Arc<Hub>, mut grant: Grant) {
    loop {
        tokio::time::sleep(hub.settings.lease_life / 4).await;
        grant = match renew(&hub, &grant).await {
            Some(renewed) => renewed,
            None => {
                fence(&hub);
                let Some(again) = retake(&hub, &grant.lease).await else { return };
                again
            }
        };
        hub.set_grant(Some(grant.clone()));
    }
}

/// Renews while the grant is valid; absent: the lease is lost.
async fn renew(hub: &Hub, grant: &Grant) -> Option<Grant> {
    let life = hub.settings.lease_life;
    loop {
        let asked = hub.boot();
        let left = grant.left(asked);
        if left.is_zero() {
            return None;
        }
        let renewal = hub.store.renew_lease(grant.lease.clone(), life, hub.sessions().len());
        match tokio::time::timeout(left, renewal).await {
            Ok(Ok(true)) => return Some(Grant::new(grant.lease.clone(), asked, life)),
            Ok(Ok(false)) | Err(_) => return None,
            Ok(Err(error)) => {
                tracing::error!(error = %chain(&error), "the lease was not renewed");
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}

/// Ends every session: none of them may route, whatever the store says by now.
fn fence(hub: &Hub) {
    // Before the sessions are told: one that is opened from here on finds it.
    hub.set_grant(None);
    tracing::error!("the lease is lost; every session ends");
    for (_, live) in hub.sessions() {
        live.end(SessionEnd::fenced());
    }
}

/// Takes the lease anew as soon as the store can be reached; absent: another process has taken it.
async fn retake(hub: &Hub, last: &Lease) -> Option<Grant> {
    let life = hub.settings.lease_life;
    loop {
        let asked = hub.boot();
        match hub.store.take_lease(life, Some(last.clone()), "gateway-fenced").await {
            Ok(Some(lease)) => {
                tracing::info!(number = lease.number, "the lease was taken again");
                return Some(Grant::new(lease, asked, life));
            }
            Ok(None) => return None,
            Err(error) => {
                tracing::error!(error = %chain(&error), "the lease was not taken again");
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
    }
}
