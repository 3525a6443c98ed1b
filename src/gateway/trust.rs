//! The newest trust bundle, handed to the nodes: with Welcome to one that holds an older one, and to every live session
//! when it becomes known.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;

use super::hub::Hub;
use super::worker::{Ask, Told};
use crate::wire::pb;

/// Between two looks.
const EVERY: Duration = Duration::from_secs(2);

/// A bundle as it is relayed.
#[derive(Debug, Clone, Default)]
pub struct Bundle {
    /// Its version; 0 before the first was asked for.
    pub version: u64,
    envelope: pb::Envelope,
}

impl Bundle {
    /// For the Welcome of a node that holds the version `held`; empty: nothing newer.
    pub fn for_welcome(&self, held: u64) -> Bytes {
        if self.version > held { self.envelope.encode_to_vec().into() } else { Bytes::new() }
    }
}

/// Asks the worker for ever.
pub async fn follow(hub: Arc<Hub>) {
    loop {
        if let Told::Bundle { version, envelope } = hub.worker.ask(Ask::Bundle).await {
            let bundle = Bundle { version, envelope: envelope.into() };
            if let Some(newer) = hub.keep_bundle(bundle) {
                tell(&hub, &newer);
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

fn tell(hub: &Hub, bundle: &Bundle) {
    let frame = pb::TrustBundle { envelope: Some(bundle.envelope.clone()) };
    let frame = pb::gateway_frame::Frame::TrustBundle(frame);
    for (_, live) in hub.sessions() {
        // A session that cannot take it has it with its next Welcome.
        let _ = live.orders.try_send(pb::GatewayFrame { frame: Some(frame.clone()) });
    }
}
