//! Waits until all is done.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::gateways::Gateways;
use super::observe::{self, State};

const POLL: Duration = Duration::from_millis(250);

/// Waits until every node has a session and all its credits, and every command has ended; false when the time is over.
pub async fn settled(gateways: &Gateways, nodes: usize, patience: Duration) -> bool {
    let until = Instant::now() + patience;
    loop {
        if let Ok(State { connected, open: 0, idle, .. }) = observe::state(gateways).await
            && connected == nodes
            && idle == nodes
        {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        sleep(POLL).await;
    }
}
