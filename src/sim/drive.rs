//! Load and chaos, side by side, for the duration of a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until};

use super::chaos::{self, Fault, Victim};
use super::fleet::{Blow, Fleet};
use super::gateway_process::{GatewayError, GatewayProcess};
use super::history::Handed;
use super::live::Counts;
use super::load::{Load, Planned};
use super::reconnect::Restart;
use super::{Options, SimError, seed};
use crate::clock::Clock;
use crate::gateway::control::{ClientError, Request, Response};
use crate::model::{CommandId, NodeId};

/// Pause before a command is handed over again to a gateway that is down.
const AGAIN: Duration = Duration::from_millis(50);

/// Commands in the middle of being handed over: what the gateway commits together.
const AT_ONCE: usize = 32;

/// What is driven, and by what.
pub struct Drive<'a> {
    /// What was asked for.
    pub options: &'a Options,
    /// The gateway.
    pub gateway: &'a Arc<GatewayProcess>,
    /// The agents.
    pub fleet: &'a Fleet,
    /// For the live line and the report.
    pub counts: &'a Counts,
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
    /// Starts of the gateway after a kill.
    pub gateway_restarts: Vec<Restart>,
    /// Commands that the gateway refused to take.
    pub troubles: Vec<String>,
}

impl Drive<'_> {
    /// Runs for the duration; when it returns, faults have stopped and the gateway is there.
    ///
    /// # Errors
    /// The gateway did not come back.
    pub async fn run(&self) -> Result<Driven, SimError> {
        let Options { seed, nodes, duration, chaos, .. } = *self.options;
        let faults = chaos::schedule(chaos, nodes, duration, &mut seed::stream(seed, "chaos", 0));
        let (gateway, agents): (Vec<Fault>, Vec<Fault>) =
            faults.into_iter().partition(|fault| fault.victim == Victim::Gateway);
        let start = Instant::now();
        let (loaded, (), restarts) = tokio::join!(
            self.load(start),
            self.kill_agents(start, &agents),
            self.kill_gateway(start, &gateway)
        );
        Ok(Driven { gateway_restarts: restarts?, ..loaded })
    }

    async fn kill_agents(&self, start: Instant, faults: &[Fault]) {
        for fault in faults {
            sleep_until(start + fault.at).await;
            let (agent, blow, count) = match fault.victim {
                Victim::Agent(agent) => (agent, Blow::Kill, &self.counts.agents_killed),
                Victim::Machine(agent) => (agent, Blow::Reboot, &self.counts.machines_rebooted),
                Victim::Gateway => continue,
            };
            self.fleet.strike(agent, blow, fault.down).await;
            Counts::add(count);
        }
    }

    async fn kill_gateway(&self, start: Instant, faults: &[Fault]) -> Result<Vec<Restart>, GatewayError> {
        let mut restarts = Vec::with_capacity(faults.len());
        for fault in faults {
            sleep_until(start + fault.at).await;
            self.gateway.kill().await;
            Counts::add(&self.counts.gateway_killed);
            sleep(fault.down).await;
            restarts.push(Restart::Gateway(self.clock.wall_ms()));
            self.gateway.restart().await?;
        }
        Ok(restarts)
    }

    async fn load(&self, start: Instant) -> Driven {
        let Options { seed, nodes, duration, commands_per_second, .. } = *self.options;
        let mut load = Load::new(nodes, seed::stream(seed, "load", 0));
        let mut ticks = interval(Duration::from_secs_f64(1.0 / commands_per_second));
        // What could not be handed over while the gateway was down comes at once when it is back.
        ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut driven = Driven::default();
        let mut asking = FuturesUnordered::new();
        let end = start + duration;
        loop {
            let now = Instant::now();
            if now >= end && asking.is_empty() {
                return driven;
            }
            tokio::select! {
                biased;
                Some((planned, answer)) = asking.next() => self.note(&mut driven, planned, answer),
                _ = ticks.tick(), if now < end && asking.len() < AT_ONCE => {
                    let planned = load.draw();
                    asking.push(async move {
                        let answer = self.hand_over(&planned, end).await;
                        (planned, answer)
                    });
                }
            }
        }
    }

    fn note(&self, driven: &mut Driven, planned: Planned, answer: Result<bool, String>) {
        match answer {
            Ok(acknowledged) => {
                Counts::add(&self.counts.commands);
                driven.handed.insert(planned.id.clone(), Handed { planned, acknowledged });
            }
            Err(why) => driven.troubles.push(format!("{} was not taken: {why}", planned.id)),
        }
    }

    /// Hands a command over until the gateway says that it has it, or the run is over. A gateway that dies in
    /// between may have it already: it is looked for before it is handed over again.
    async fn hand_over(&self, planned: &Planned, end: Instant) -> Result<bool, String> {
        let request = self.enqueue(planned).map_err(|error| error.to_string())?;
        let mut first = true;
        while first || Instant::now() < end {
            let known = Request::Show { id: planned.id.clone() };
            if !first && let Ok(Response::Command(Some(_))) = self.gateway.ask(&known).await {
                return Ok(true);
            }
            first = false;
            match self.gateway.ask(&request).await {
                Ok(Response::Enqueued(_)) => return Ok(true),
                Ok(_) => return Err("an answer of another kind".into()),
                Err(GatewayError::Control(ClientError::Refused(why))) => return Err(why),
                Err(_) => sleep(AGAIN).await,
            }
        }
        Ok(false)
    }

    fn enqueue(&self, planned: &Planned) -> serde_json::Result<Request> {
        Ok(Request::Enqueue {
            node: self.nodes[planned.agent].clone(),
            kind: planned.kind().to_owned(),
            args: planned.args(self.witness)?,
            ttl_s: planned.ttl_s(),
            id: Some(planned.id.clone()),
        })
    }
}
