//! Load and chaos, side by side, for the duration of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::{LocalBoxFuture, join_all};
use futures_util::stream::FuturesUnordered;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};

use super::chaos;
use super::faults::{Blow, Fault, Tally, What};
use super::gateway_process::GatewayError;
use super::gateways::Gateways;
use super::history::{Handed, Moment, Struck};
use super::live::Counts;
use super::load::{Class, Load, Planned};
use super::spread::Agents;
use super::strikes::strike_agents;
use super::{Options, SimError, seed};
use crate::clock::Clock;
use crate::gateway::control::{ClientError, Request, Response};
use crate::gateway::worker::Draft;
use crate::model::{CommandId, NodeId};

/// Pause before a command is handed over again to gateways that are down.
const AGAIN: Duration = Duration::from_millis(50);

/// A clone is made a moment after its fault, and takes a moment to be taken away.
const CLONE_GONE: Duration = Duration::from_secs(2);

/// Commands in the middle of being handed over: what a gateway commits together.
const AT_ONCE: usize = 128;

/// What is driven, and by what.
pub struct Drive<'a> {
    /// What was asked for.
    pub options: &'a Options,
    /// The gateways.
    pub gateways: &'a Gateways,
    /// The agents.
    pub agents: &'a Agents,
    /// For the live line.
    pub counts: &'a Counts,
    /// Faults that were carried out.
    pub tally: &'a Tally,
    /// This machine's.
    pub clock: &'a dyn Clock,
    /// Node ids by agent number.
    pub nodes: &'a [NodeId],
    /// Where the programs append.
    pub witness: &'a Path,
}

/// What was done.
#[derive(Debug, Default)]
pub struct Driven {
    /// Every command that was tried to be handed over.
    pub handed: BTreeMap<CommandId, Handed>,
    /// Faults of gateways.
    pub moments: Vec<Moment>,
    /// Commands that the gateways refused to take.
    pub troubles: Vec<String>,
}

impl Drive<'_> {
    /// Runs for the duration; when it returns, faults have stopped and every gateway is there and honest.
    ///
    /// # Errors
    /// A gateway did not come back.
    pub async fn run(&self) -> Result<Driven, SimError> {
        let Options { seed, nodes, gateways, duration, chaos, .. } = *self.options;
        let rng = &mut seed::stream(seed, "chaos", 0);
        let faults = chaos::schedule(chaos, nodes, gateways, (duration, self.options.pace()), rng);
        let start = Instant::now();
        let (ask_reboot, reboots) = mpsc::channel(faults.len().max(1));
        let (loaded, (), struck, stopped, ()) = tokio::join!(
            self.load(start, reboots),
            strike_agents(self.agents, start, &faults, ask_reboot),
            join_all((0..gateways).map(|number| self.strike_gateway(start, number, &faults))),
            self.stop_store(start, &faults),
            self.mend_clones(start, &faults),
        );
        stopped?;
        let mut driven = loaded;
        for moments in struck {
            driven.moments.extend(moments?);
        }
        if chaos.lies().any() {
            self.gateways.reform().await?;
        }
        Ok(driven)
    }

    async fn strike_gateway(
        &self,
        start: Instant,
        number: usize,
        faults: &[Fault],
    ) -> Result<Vec<Moment>, GatewayError> {
        let mut moments = Vec::new();
        for fault in faults {
            let What::Gateway(victim, outage) = fault.what else { continue };
            // What would begin before the one before has ended is left out.
            if victim != number || start + fault.at < Instant::now() {
                continue;
            }
            sleep_until(start + fault.at).await;
            self.gateways.strike(number, outage, fault.lasts).await?;
            self.tally.add(fault.what.name());
            // From now on a node can come back to it; a gateway that starts takes a moment longer.
            moments.push(Moment { at_ms: self.clock.wall_ms(), what: Struck::Gateway(number, outage) });
        }
        Ok(moments)
    }

    async fn stop_store(&self, start: Instant, faults: &[Fault]) -> Result<(), SimError> {
        for fault in faults.iter().filter(|fault| fault.what == What::Store) {
            sleep_until(start + fault.at).await;
            let ms = u64::try_from(fault.lasts.as_millis()).unwrap_or(u64::MAX);
            // One that is lost with its gateway was no outage.
            if self.gateways.ask(&Request::StopStore { ms }).await.is_ok() {
                self.tally.add(fault.what.name());
            }
        }
        Ok(())
    }

    /// What an operator does once a clone is gone: takes back the quarantine that it may have earned its node, and
    /// restarts the daemon, which would try again only after a quarter of an hour.
    async fn mend_clones(&self, start: Instant, faults: &[Fault]) {
        for fault in faults {
            let What::Agent(agent, Blow::Clone) = fault.what else { continue };
            sleep_until(start + fault.at + fault.lasts + CLONE_GONE).await;
            let request = Request::Unrevoke { node: self.nodes[agent].clone() };
            while let Err(error) = self.gateways.ask(&request).await {
                if let GatewayError::Control(ClientError::Refused(why)) = error {
                    tracing::warn!(agent, why, "a quarantine was not taken back");
                    break;
                }
                sleep(AGAIN).await;
            }
            self.agents.strike(agent, Blow::Kill, Duration::ZERO).await;
        }
    }

    async fn load(&self, start: Instant, mut reboots: mpsc::Receiver<usize>) -> Driven {
        let Options { seed, nodes, duration, commands_per_second, .. } = *self.options;
        let mut load = Load::new(nodes, seed::stream(seed, "load", 0));
        let mut asked = Load::new(nodes, seed::stream(seed, "reboots", 0));
        let mut ticks = interval(Duration::from_secs_f64(1.0 / commands_per_second));
        // What could not be handed over while the gateways were down comes at once when one is back.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut driven = Driven::default();
        let mut asking = FuturesUnordered::<LocalBoxFuture<'_, Result<Handed, String>>>::new();
        let mut cancelling = FuturesUnordered::<LocalBoxFuture<'_, ()>>::new();
        let end = start + duration;
        loop {
            let now = Instant::now();
            if now >= end && asking.is_empty() && cancelling.is_empty() {
                return driven;
            }
            tokio::select! {
                biased;
                Some(asked) = asking.next() => match asked {
                    Ok(handed) => {
                        let Planned { id, agent, class, .. } = &handed.planned;
                        if let Class::Cancelled(after) = *class {
                            cancelling.push(Box::pin(self.cancel(&self.nodes[*agent], id.clone(), after, end)));
                        }
                        self.counts.command();
                        driven.handed.insert(id.clone(), handed);
                    }
                    Err(why) => driven.troubles.push(why),
                },
                Some(()) = cancelling.next() => {}
                Some(agent) = reboots.recv(), if now < end => {
                    self.tally.add(Blow::RebootCommand.name());
                    asking.push(Box::pin(self.hand_over(asked.planned(agent, Class::Reboot), end)));
                }
                _ = ticks.tick(), if now < end && asking.len() < AT_ONCE => {
                    asking.push(Box::pin(self.hand_over(load.draw(), end)));
                }
                () = sleep_until(end), if now < end => {}
            }
        }
    }

    /// Hands a command over until a gateway says that it has it, or the run is over. A gateway that dies in between,
    /// or is stopped and goes on later, may have it already, and then the id is in use.
    async fn hand_over(&self, planned: Planned, end: Instant) -> Result<Handed, String> {
        let signed_ms = self.clock.wall_ms();
        match self.acknowledged(&planned, end).await {
            Ok(acknowledged) => Ok(Handed { planned, acknowledged, signed_ms }),
            Err(why) => Err(format!("{} was not taken: {why}", planned.id)),
        }
    }

    async fn acknowledged(&self, planned: &Planned, end: Instant) -> Result<bool, String> {
        let draft = self.draft(planned).map_err(|error| error.to_string())?;
        let command = self.gateways.desk.command(draft).await.map_err(|error| error.to_string())?;
        let request = Request::Enqueue { command };
        loop {
            match self.gateways.ask(&request).await {
                Ok(Response::Enqueued(_)) => return Ok(true),
                Ok(_) => return Err("an answer of another kind".into()),
                Err(GatewayError::Control(ClientError::Refused(why))) => {
                    return if self.knows(planned).await { Ok(true) } else { Err(why) };
                }
                Err(_) => sleep(AGAIN).await,
            }
            if Instant::now() >= end {
                return Ok(false);
            }
        }
    }

    async fn knows(&self, planned: &Planned) -> bool {
        let known = Request::Show { id: planned.id.clone() };
        matches!(self.gateways.ask(&known).await, Ok(Response::Command(Some(_))))
    }

    /// Cancels a command; asked until a gateway has taken it, or the run is over.
    async fn cancel(&self, node: &NodeId, id: CommandId, after: Duration, end: Instant) {
        sleep(after).await;
        let Ok(cancellation) = self.gateways.desk.cancel(node.clone(), id.clone()).await else { return };
        let request = Request::Cancel { id, cancellation };
        while Instant::now() < end {
            match self.gateways.ask(&request).await {
                Ok(_) | Err(GatewayError::Control(ClientError::Refused(_))) => return,
                Err(_) => sleep(AGAIN).await,
            }
        }
    }

    fn draft(&self, planned: &Planned) -> serde_json::Result<Draft> {
        Ok(Draft {
            node: self.nodes[planned.agent].clone(),
            kind: planned.kind().to_owned(),
            args: planned.args(self.witness)?,
            ttl_s: planned.ttl_s(),
            id: Some(planned.id.clone()),
        })
    }
}
