//! Once faults have stopped: waits until all is done, and does what a control plane's worker would.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::SimError;
use super::gateways::Gateways;
use super::invariants::is_terminal;
use super::observe::{self, State};
use crate::gateway::control::{Request, Response};
use crate::model::NodeId;

const POLL: Duration = Duration::from_millis(250);
/// What waits only for its turn has ended by then.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks for commands to withdraw.
const WITHDRAW: Duration = Duration::from_secs(2);
/// Commands of one node that are looked through: more than any node has open.
const OF_ONE_NODE: u32 = 2000;

/// Waits until every node has a session and all its credits, and every command has ended; false when the time is over.
///
/// A journal that took a lost one's place does not know its age, and refuses what may not run twice until a signed
/// answer tells it: what waits for that on the nodes of `ageless` is withdrawn meanwhile.
pub async fn settled(
    gateways: &Gateways,
    nodes: usize,
    ageless: &BTreeSet<&NodeId>,
    patience: Duration,
) -> bool {
    let until = Instant::now() + patience;
    let mut withdraw = Instant::now() + PATIENCE;
    loop {
        if let Ok(State { connected, open, idle, .. }) = observe::state(gateways).await
            && connected == nodes
        {
            if open == 0 && idle == nodes {
                return true;
            }
            if open > 0 && Instant::now() >= withdraw {
                for node in ageless {
                    // What could not be asked for is asked for the next time.
                    if let Err(error) = withdraw_of(gateways, node).await {
                        tracing::warn!(%node, %error, "nothing could be withdrawn");
                    }
                }
                withdraw = Instant::now() + WITHDRAW;
            }
        }
        if Instant::now() >= until {
            return false;
        }
        sleep(POLL).await;
    }
}

async fn withdraw_of(gateways: &Gateways, node: &NodeId) -> Result<(), SimError> {
    let list = Request::List { node: Some(node.clone()), limit: OF_ONE_NODE };
    let Response::Commands(commands) = gateways.ask(&list).await? else {
        return Err(SimError::Answer("list"));
    };
    let refused = |state: &str| !is_terminal(state) && !matches!(state, "accepted" | "running");
    for command in commands.into_iter().filter(|command| refused(&command.state)) {
        gateways.ask(&Request::Cancel { id: command.id }).await?;
    }
    Ok(())
}
