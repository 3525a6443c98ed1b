//! The gateways of a run, asked as one: whoever answers answers for all, since they share a store.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{sleep, timeout};

use super::faults::Outage;
use super::gateway_process::{GatewayError, GatewayProcess, Shape};
use crate::gateway::control::{ClientError, Request, Response};

/// Tries to stop a gateway outside of a commit.
const STOPS: u32 = 20;
/// Longer than a commit of a gateway that goes on.
const COMMIT: Duration = Duration::from_secs(1);

/// Processes over one store.
#[derive(Debug)]
pub struct Gateways {
    each: Vec<GatewayProcess>,
    /// Questions so far: each goes to the next gateway first.
    asked: AtomicUsize,
}

impl Gateways {
    /// Starts so many, one after the other: the first makes the store.
    ///
    /// # Errors
    /// The first that did not start.
    pub async fn start(exe: &Path, work: &Path, shape: &Shape) -> Result<Self, GatewayError> {
        let mut each = Vec::with_capacity(shape.addresses.len());
        for number in 0..shape.addresses.len() {
            each.push(GatewayProcess::start(exe, work, number, shape).await?);
        }
        Ok(Self { each, asked: AtomicUsize::new(0) })
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
                self.stop(number).await;
                sleep(lasts).await;
                gateway.go_on().await;
                Ok(())
            }
        }
    }
    /// Stops one outside of its commits, where there are others to see that: in the middle of one it would hold the
    /// store's lock, an outage for all of them, which is a fault of its own.
    async fn stop(&self, number: usize) {
        let others = || self.each.iter().enumerate().filter(|(other, _)| *other != number);
        for _ in 0..STOPS {
            self.each[number].stop().await;
            let free = others().filter(|(_, gateway)| gateway.is_up()).map(|(_, gateway)| async move {
                timeout(COMMIT, gateway.ask(&Request::Stats)).await.is_ok_and(|answer| answer.is_ok())
            });
            let free: Vec<bool> = join_all(free).await;
            if free.is_empty() || free.contains(&true) {
                return;
            }
            self.each[number].go_on().await;
            sleep(COMMIT / 10).await;
        }
        self.each[number].stop().await;
    }
}
