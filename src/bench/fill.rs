//! A journal that is as full as its limits allow.

use serde_json::json;

use super::all;
use crate::journal::{Journal, WriteError};
use crate::model::{EventType, NewEvent};

/// Metrics that fill a journal up to its limits of count and bytes.
const METRICS: usize = 10_000;
const METRIC_BYTES: usize = (64 << 20) / METRICS - 256;
/// Who write them: they share commits.
const WRITERS: usize = 256;

/// Fills it with events of the one class that gives way, so that from here on each event has an older one make room.
pub(super) async fn metrics(journal: &Journal) -> Result<(), WriteError> {
    let text = "x".repeat(METRIC_BYTES);
    let writers = (0..WRITERS).map(|_| {
        let (journal, body) = (journal.clone(), json!({ "text": text }));
        async move {
            for _ in 0..METRICS.div_ceil(WRITERS) {
                journal.record(NewEvent::new(EventType::NodeLoad, body.clone())).await?;
            }
            Ok::<_, WriteError>(())
        }
    });
    all(writers).await.map(drop)
}

#[cfg(feature = "fakehw")]
pub use of_a_node::{FillError, node};

#[cfg(feature = "fakehw")]
mod of_a_node {
    use std::path::Path;

    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use crate::clock;
    use crate::identity::{Identity, LoadError};
    use crate::journal::{self, EventLimits, Locked, Mode, OpenError, WriteError};
    use crate::model::{Incarnation, JournalId};
    use crate::node::WAL_BYTES;

    /// Why a node's journal could not be filled.
    #[derive(Debug, thiserror::Error)]
    pub enum FillError {
        /// Whose it is.
        #[error(transparent)]
        Identity(#[from] LoadError),
        /// It cannot be opened.
        #[error(transparent)]
        Open(#[from] OpenError),
        /// It took no write.
        #[error(transparent)]
        Write(#[from] WriteError),
        /// The kernel does not say which boot this is.
        #[error("cannot read the boot id")]
        BootId(#[from] std::io::Error),
    }

    /// Fills the journal of a joined node that does not run.
    ///
    /// # Errors
    /// See [`FillError`].
    pub async fn node(state: &Path) -> Result<(), FillError> {
        let mut rng = StdRng::from_os_rng();
        let options = journal::Options {
            state: state.to_owned(),
            node_id: Identity::load(state)?.node_id,
            incarnation: Incarnation::random(&mut rng),
            boot_id: clock::boot_id()?,
            wal_bytes: WAL_BYTES,
            mode: Mode::Inline,
        };
        let locked = Locked::open(options, JournalId::random(&mut rng))?;
        let (journal, _) = locked.with_event_limits(EventLimits::default()).recover(None)?;
        super::metrics(&journal).await?;
        journal.close().await;
        Ok(())
    }
}
