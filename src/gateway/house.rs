//! What a gateway does beside its sessions.

use std::sync::Arc;
use std::time::Duration;

use super::hub::{self, Hub};
use super::session::chain;
use super::{neighbours, store};

/// Expired commands are looked for this often.
const SWEEP: Duration = Duration::from_secs(1);
/// Last-seen times and refusal counts are flushed this often.
const FLUSH: Duration = Duration::from_secs(15);

/// The last writes of a gateway that stops.
pub async fn leave(hub: &Hub) {
    flush(hub).await;
    if let Some(lease) = hub.lease()
        && let Err(error) = hub.store.give_lease_back(lease).await
    {
        tracing::error!(error = %chain(&error), "the lease was not given back");
    }
}

/// Sweeps expired commands, lost gateways and silent nodes, and flushes what is kept in memory.
pub async fn keep(hub: Arc<Hub>) {
    let mut sweep = tokio::time::interval(SWEEP);
    let mut until_flush = FLUSH;
    loop {
        sweep.tick().await;
        let store = &hub.store;
        // Together they share a transaction.
        let (expired, lost, silent) =
            tokio::join!(store.expire(hub.now()), store.end_leases(), store.judge_silence());
        match expired {
            Ok(ended) => hub.commands_ended(&ended),
            Err(error) => tracing::error!(error = %chain(&error), "the expiry sweep failed"),
        }
        match lost.and_then(|lost| Ok(lost || silent? > 0)) {
            Ok(true) => hub.event_added(),
            Ok(false) => {}
            Err(error) => tracing::error!(error = %chain(&error), "the liveness sweep failed"),
        }
        until_flush = until_flush.saturating_sub(SWEEP);
        if until_flush.is_zero() {
            until_flush = FLUSH;
            flush(&hub).await;
            hub.sweep_waiting();
        }
    }
}

async fn flush(hub: &Hub) {
    let stored = async {
        let refused = hub.take_refused();
        if !refused.is_empty() {
            hub.store.count_refusals(refused).await?;
        }
        flush_seen(hub).await
    };
    if let Err(error) = stored.await {
        tracing::error!(error = %chain(&error), "last-seen times were not flushed");
    }
}

async fn flush_seen(hub: &Hub) -> Result<(), store::StoreError> {
    let Some(lease) = hub.lease() else { return Ok(()) };
    let now = hub.now();
    let seen = hub.sessions().into_iter().map(|(node, live)| {
        let credits = serde_json::to_string(&*hub::lock(&live.free_credits)).unwrap_or_default();
        (node, live.epoch, now.minus(live.silent_for()), credits)
    });
    // The end of the lease is its keeper's to act on.
    for node in hub.store.seen(lease, seen.collect()).await?.unwrap_or_default() {
        neighbours::look_at(hub, &node).await?;
    }
    Ok(())
}
