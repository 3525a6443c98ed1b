//! The gateways of a run, asked as one: whoever answers answers for all, since they share a store. Beside them stands
//! their worker, which signs what commands a node.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use super::faults::Outage;
use super::gateway_process::{GatewayError, GatewayProcess, Shape};
use super::virtual_time::VirtualGateway;
use crate::gateway::control::{ClientError, Request, Response};
use crate::gateway::worker::{self, Child, Desk};

/// The worker's directory in a run's own.
pub const WORKER: &str = "worker";
/// Tries to stop a gateway outside of a commit.
const STOPS: u32 = 20;
/// Longer than a commit of a gateway that goes on.
const COMMIT: Duration = Duration::from_secs(1);

/// One of them.
#[derive(Debug)]
pub enum Gateway {
    /// A child process.
    Process(GatewayProcess),
    /// In this thread, in virtual time.
    Virtual(VirtualGateway),
}

impl Gateway {
    async fn ask(&self, request: &Request) -> Result<Response, GatewayError> {
        match self {
            Self::Process(gateway) => gateway.ask(request).await,
            Self::Virtual(gateway) => gateway.ask(request).await,
        }
    }

    fn is_up(&self) -> bool {
        match self {
            Self::Process(gateway) => gateway.is_up(),
            Self::Virtual(gateway) => gateway.is_up(),
        }
    }

    async fn kill(&self) {
        match self {
            Self::Process(gateway) => gateway.kill().await,
            Self::Virtual(gateway) => gateway.kill().await,
        }
    }

    async fn restart(&self) -> Result<(), GatewayError> {
        match self {
            Self::Process(gateway) => gateway.restart().await,
            Self::Virtual(gateway) => gateway.restart().await,
        }
    }
}

/// All of them over one store.
#[derive(Debug)]
pub struct Gateways {
    each: Vec<Gateway>,
    /// Of the worker.
    pub desk: Desk,
    /// Its process, where it has one.
    _worker: Option<Child>,
    /// Questions so far: each goes to the next gateway first.
    asked: AtomicUsize,
}

impl Gateways {
    /// Those that are there already, with a worker in this process.
    pub fn of(each: Vec<Gateway>, desk: Desk) -> Self {
        Self { each, desk, _worker: None, asked: AtomicUsize::new(0) }
    }

    /// Starts the worker and so many gateways, one after the other: the first makes the store.
    ///
    /// # Errors
    /// The first that did not start.
    pub async fn start(exe: &Path, work: &Path, shape: &Shape) -> Result<Self, GatewayError> {
        let options = worker::Options::new(work.join(WORKER));
        let log = OpenOptions::new().append(true).create(true).open(work.join("worker.log"));
        let worker = log.and_then(|log| Child::start(exe, &options, log.into()));
        let worker = worker.map_err(|source| GatewayError::Start { exe: exe.to_owned(), source })?;
        let mut each = Vec::with_capacity(shape.addresses.len());
        for number in 0..shape.addresses.len() {
            each.push(Gateway::Process(GatewayProcess::start(exe, work, number, shape).await?));
        }
        let desk = Desk::at(&options.state);
        Ok(Self { each, desk, _worker: Some(worker), asked: AtomicUsize::new(0) })
    }

    /// Asks them in turn until one answers, with a yes or a no.
    ///
    /// # Errors
    /// The last one's reason.
    pub async fn ask(&self, request: &Request) -> Result<Response, GatewayError> {
        let first = self.asked.fetch_add(1, Ordering::Relaxed);
        let mut last = GatewayError::Down;
        for nth in 0..self.each.len() {
            let gateway = &self.each[(first + nth) % self.each.len()];
            if !gateway.is_up() {
                continue;
            }
            match gateway.ask(request).await {
                Err(GatewayError::Control(ClientError::Refused(why))) => {
                    return Err(ClientError::Refused(why).into());
                }
                Err(error) => last = error,
                answer => return answer,
            }
        }
        Err(last)
    }

    /// Asks each that is up, and gives back what came.
    pub async fn ask_each(&self, request: &Request) -> Vec<Response> {
        let up = self.each.iter().filter(|gateway| gateway.is_up());
        join_all(up.map(|gateway| gateway.ask(request))).await.into_iter().flatten().collect()
    }

    /// Ends their lies. All of them are up.
    ///
    /// # Errors
    /// One did not answer.
    pub async fn reform(&self) -> Result<(), GatewayError> {
        for gateway in &self.each {
            gateway.ask(&Request::Reform).await?;
        }
        Ok(())
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.each.len()
    }

    /// Breaks one and mends it after `lasts`.
    ///
    /// # Errors
    /// It did not come back.
    pub async fn strike(&self, number: usize, outage: Outage, lasts: Duration) -> Result<(), GatewayError> {
        let gateway = &self.each[number];
        match outage {
            Outage::Kill => {
                gateway.kill().await;
                sleep(lasts).await;
                gateway.restart().await
            }
            Outage::Stall | Outage::Zombie => {
                match gateway {
                    Gateway::Process(process) => {
                        self.stop(number, process).await;
                        sleep(lasts).await;
                        process.go_on().await;
                    }
                    Gateway::Virtual(gateway) => gateway.stand_still(lasts).await,
                }
                Ok(())
            }
        }
    }

    /// Stops one outside of its commits, where there are others to see that: in the middle of one it would hold the
    /// store's lock, an outage for all of them, which is a fault of its own.
    async fn stop(&self, number: usize, process: &GatewayProcess) {
        let others =
            || self.each.iter().enumerate().filter(|(other, gateway)| *other != number && gateway.is_up());
        for _ in 0..STOPS {
            process.stop().await;
            let free = others().map(|(_, gateway)| async move {
                timeout(COMMIT, gateway.ask(&Request::Stats)).await.is_ok_and(|answer| answer.is_ok())
            });
            let free: Vec<bool> = join_all(free).await;
            if free.is_empty() || free.contains(&true) {
                return;
            }
            process.go_on().await;
            sleep(COMMIT / 10).await;
        }
        process.stop().await;
    }
}
