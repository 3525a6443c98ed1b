//! Carries out what a schedule has for the agents.

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::faults::{Blow, Fault, What};
use super::spread::Agents;

/// Many are broken at once, each for its own time; returns when all is mended. Reboots that the control plane is to ask
/// for go to `ask_reboot`, which has room for every fault.
pub async fn strike_agents(
    agents: &Agents,
    start: Instant,
    faults: &[Fault],
    ask_reboot: mpsc::Sender<usize>,
) {
    let mut under_way = FuturesUnordered::new();
    for fault in faults {
        let What::Agent(agent, blow) = fault.what else { continue };
        tokio::select! {
            biased;
            () = sleep_until(start + fault.at) => {}
            () = async { while under_way.next().await.is_some() {} std::future::pending().await } => {}
        }
        match blow {
            Blow::RebootCommand => drop(ask_reboot.try_send(agent)),
            blow => under_way.push(agents.strike(agent, blow, fault.lasts)),
        }
    }
    while under_way.next().await.is_some() {}
}
