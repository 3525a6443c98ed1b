//! The gateways of a run, asked as one: whoever answers answers for all, since they share a store.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::sleep;

use super::faults::Outage;
use super::gateway_process::{GatewayError, GatewayProcess, Shape};
use crate::gateway::control::{ClientError, Request, Response};

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
                gateway.stop().await;
                sleep(lasts).await;
                gateway.go_on().await;
                Ok(())
            }
        }
    }
}
