//! The answer to a renewal: the worker's, or a lie that a gateway which was taken over tells in its place.

use std::collections::BTreeMap;

use serde_json::json;

use super::hub::Hub;
use super::lies::{Lie, TOLD};
use super::store::StoreError;
use crate::model::NodeId;
use crate::wire::pb;

/// Answers that a lying gateway has relayed: the last one of each node.
pub type Relayed = BTreeMap<NodeId, pb::RenewResponse>;

/// What is handed on in the place of `truth`, which is remembered.
pub async fn answer(
    hub: &Hub,
    node: &NodeId,
    truth: pb::RenewResponse,
) -> Result<pb::RenewResponse, StoreError> {
    if !hub.lies() {
        return Ok(truth);
    }
    let (earlier, of_another) = hub.with_relayed(|relayed| {
        let of_another = relayed.iter().find(|(other, _)| *other != node).map(|(_, answer)| answer.clone());
        (relayed.insert(node.clone(), truth.clone()), of_another)
    });
    let forged = hub.forger.as_ref().and_then(|forger| forger.renewal(&truth, hub.now()));
    let lies = [(Lie::RenewForged, forged), (Lie::RenewStale, earlier), (Lie::RenewSwapped, of_another)];
    for (lie, answer) in lies {
        if let Some(answer) = answer
            && hub.draws(lie)
        {
            hub.store.note_lie(node.clone(), TOLD, json!({ "lie": lie.name() })).await?;
            hub.event_added();
            return Ok(answer);
        }
    }
    Ok(truth)
}
