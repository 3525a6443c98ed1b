//! What is measured while nobody asks: the load, now and then, so that a gap in contact has a history.

use std::time::Duration;

use serde_json::json;

use crate::exec::Lanes;
use crate::journal::Journal;
use crate::model::{EventType, NewEvent};
use crate::session::load;

/// Between two measurements: a sync of the journal each, and 288 events a day.
const EVERY: Duration = Duration::from_secs(300);

/// Measures for ever.
pub(super) async fn run(journal: Journal, lanes: Lanes) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(load) = load::read(lanes.running_ids().len(), 0) else { continue };
        let body = json!({
            "load": load.load_averages,
            "available_memory": load.available_memory,
            "running": load.running_commands,
        });
        // A disk that takes no metric takes no command either, and that is told elsewhere.
        if let Err(error) = journal.record(NewEvent::new(EventType::NodeLoad, body)).await {
            tracing::debug!(%error, "the load was not written");
        }
    }
}
