//! One session a node: a pure state machine, and the one driver that performs what it says.
//!
//! [`Session::run`] is one task. In: frames of the link, the executor's answers ([`Outbox`]), the stop signal. Out:
//! frames, deliveries to the executor, acks and times to the journal, and [`SessionStatus`] for whoever watches.

pub mod backoff;
mod driver;
mod events;
mod hello;
pub(crate) mod load;
pub mod machine;
pub mod outbox;
mod resend;
mod signing;
pub mod status;
pub mod working_clock;

use std::sync::Arc;

use futures_util::future::BoxFuture;
use rand::rngs::StdRng;
use tokio::sync::{mpsc, watch};

pub use hello::HelloFacts;
pub use machine::Offered;
pub use outbox::Outbox;
pub use status::{EndStatus, LiveStatus, SessionState, SessionStatus};
pub use working_clock::WorkingClock;

use crate::exec::Lanes;
use crate::journal::Journal;
use crate::wire::frames::{Delivery, Notice};
use crate::wire::link::{Dialer, Endpoint};
use crate::wire::report::Signer;

/// Capacity of the queue of deliveries. A gateway that keeps to the credits has at most 26 commands under way, each
/// with a Cancel beside it; a longer queue means one that does not, and is answered `busy`. 64 bodies of the largest
/// size are 64 MiB.
pub const DELIVERIES: usize = 64;

/// Capacity of the queue of the join service's documents: one of each kind, and one more. Each has at most 1 MiB, and one
/// that finds no room comes again with the next session.
pub const NOTICES: usize = 3;

/// What a session dials with; a join, a renewal or a trust bundle may replace it while the process runs.
#[derive(Clone)]
pub struct Credentials {
    /// Opens links with this node's identity.
    pub dialer: Arc<dyn Dialer>,
    /// Gateways, tried in turn.
    pub endpoints: Vec<Endpoint>,
    /// The certificate that is offered.
    pub offered: Offered,
    /// Version of the trust bundle that is held.
    pub trust_version: u64,
    /// Signs results.
    pub signer: Signer,
}

/// Where newer credentials of the same node come from.
pub trait Renewals: Send + Sync {
    /// Those that have replaced the last ones; absent when nothing has changed. Called while the session waits to
    /// dial, and after [`Renewals::replaced`]. One whose future is dropped leaves what it found to the next.
    fn look(&self) -> BoxFuture<'static, Option<Credentials>>;

    /// Resolves when this process has replaced them itself: a live session looks then, too.
    fn replaced(&self) -> BoxFuture<'static, ()>;
}

/// What a session is made of.
pub struct SessionParts {
    /// What it dials with first.
    pub credentials: Credentials,
    /// Absent: they stay as they are.
    pub renewals: Option<Box<dyn Renewals>>,
    /// To whoever keeps the identity; made with [`NOTICES`].
    pub notices: mpsc::Sender<Notice>,
    /// What every Hello says.
    pub hello: HelloFacts,
    /// Recovered.
    pub journal: Journal,
    /// Set by Welcome.
    pub working: WorkingClock,
    /// Set by Welcome, reported by heartbeats.
    pub lanes: Lanes,
    /// To the executor; made with [`DELIVERIES`].
    pub deliveries: mpsc::Sender<Delivery>,
    /// From the executor.
    pub outbox: Outbox,
    /// What `bcd status` shows.
    pub status: watch::Sender<SessionStatus>,
    /// For the jitter.
    pub rng: StdRng,
}

/// The node's session with the control plane, over as many links as it takes.
pub struct Session {
    driver: Box<driver::Driver>,
}

impl Session {
    /// A session that has not dialed yet. Must be made within a runtime.
    pub fn new(parts: SessionParts) -> Self {
        Self { driver: Box::new(driver::Driver::new(parts)) }
    }

    /// Runs until `stop` says true, or its sender is gone; then says Goodbye and returns within seconds.
    pub async fn run(self, stop: watch::Receiver<bool>) {
        self.driver.run(stop).await;
    }
}
