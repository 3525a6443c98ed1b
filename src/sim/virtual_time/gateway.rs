//! A gateway in virtual time: the same code over pipes, with its store written inline. A kill closes its store, cuts
//! its connections and drops it: nothing of it reaches a disk or a peer any more.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::Instrument as _;

use super::super::cable::{Cable, Weather};
use super::super::gateway_process::GatewayError;
use super::net::Net;
use crate::clock::Clock;
use crate::gateway::control::{ClientError, Request, Response};
use crate::gateway::{self, Local, Options};
use crate::wire::link::Endpoint;

/// The first gateway's port; each further one has the next.
const PORT: u16 = 7443;
/// A process takes so long to start.
const START: Duration = Duration::from_millis(40);

/// How a virtual gateway is to run.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Its state directory.
    pub state: PathBuf,
    /// Its seed; each start has its own chance.
    pub seed: u64,
    /// Node certificates hold this long.
    pub certificate_life: Duration,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
}

/// Its clones would be the same, but nobody needs one.
#[derive(Debug)]
pub struct VirtualGateway {
    terms: Terms,
    number: u16,
    net: Net,
    clock: Arc<dyn Clock>,
    /// What all of its connections go through.
    cable: Cable,
    running: Mutex<Option<Running>>,
    starts: std::sync::atomic::AtomicU64,
    up: watch::Sender<bool>,
}

struct Running {
    local: Local,
    task: JoinHandle<Result<(), gateway::GatewayError>>,
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running").finish_non_exhaustive()
    }
}

impl VirtualGateway {
    /// Starts the gateway of this number.
    ///
    /// # Errors
    /// It does not run.
    pub async fn start(
        terms: Terms,
        number: u16,
        net: Net,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, GatewayError> {
        let gateway = Self {
            cable: Cable::new(terms.seed, Weather::default()),
            terms,
            number,
            net,
            clock,
            running: Mutex::new(None),
            starts: 0.into(),
            up: watch::Sender::new(false),
        };
        gateway.restart().await?;
        Ok(gateway)
    }

    fn endpoint(&self) -> Endpoint {
        Endpoint { host: Ipv4Addr::LOCALHOST.to_string(), port: PORT + self.number }
    }

    /// host:port.
    pub fn address(&self) -> String {
        self.endpoint().to_string()
    }

    fn options(&self, seed: u64) -> Options {
        Options {
            endpoints: vec![self.endpoint()],
            certificate_life: self.terms.certificate_life,
            heartbeat_interval: self.terms.heartbeat,
            seed: Some(seed),
            ..Options::new(
                self.terms.state.clone(),
                SocketAddr::from((Ipv4Addr::LOCALHOST, PORT + self.number)),
            )
        }
    }

    /// Starts it again on its port and state.
    ///
    /// # Errors
    /// It does not run.
    pub async fn restart(&self) -> Result<(), GatewayError> {
        sleep(START).await;
        let starts = self.starts.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let options = self.options(self.terms.seed.wrapping_add(starts));
        let connections = self.net.listen(options.listen.port(), self.cable.clone());
        let (say, ready) = oneshot::channel();
        let run = gateway::run_in_memory(options, self.clock.clone(), connections, |local| {
            // Whoever waits for it is this very function.
            let _ = say.send(local);
        });
        let span = tracing::info_span!("gateway", number = self.number);
        let task = tokio::spawn(run.instrument(span));
        let Ok(local) = ready.await else {
            return Err(match task.await {
                Ok(Err(error)) => GatewayError::Ended(error),
                Ok(Ok(())) | Err(_) => GatewayError::Down,
            });
        };
        *self.running.lock().await = Some(Running { local, task });
        self.up.send_replace(true);
        Ok(())
    }

    /// Kills it.
    pub async fn kill(&self) {
        self.up.send_replace(false);
        if let Some(Running { local, task }) = self.running.lock().await.take() {
            local.close_store();
            self.cable.cut();
            task.abort();
            // It was aborted, or had ended: in both cases it is gone now.
            let _ = task.await;
        }
    }

    /// It does nothing for so long: its connections are held by whoever carries them, and answer nothing.
    pub async fn stand_still(&self, time: Duration) {
        self.up.send_replace(false);
        if let Some(running) = &*self.running.lock().await {
            running.local.hold_store(time);
        }
        self.cable.stall(time);
        sleep(time).await;
        self.up.send_replace(true);
    }

    /// Whether no fault has it dead or standing still.
    pub fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    /// Asks it.
    ///
    /// # Errors
    /// It is down, goes down meanwhile, or says no.
    pub async fn ask(&self, request: &Request) -> Result<Response, GatewayError> {
        let local = match &*self.running.lock().await {
            Some(running) => running.local.clone(),
            None => return Err(GatewayError::Down),
        };
        let mut up = self.up.subscribe();
        let answer = tokio::select! {
            biased;
            _ = up.wait_for(|up| !*up) => return Err(GatewayError::Down),
            answer = local.ask(request.clone()) => answer,
        };
        match answer {
            Response::Error(why) => Err(ClientError::Refused(why).into()),
            answer => Ok(answer),
        }
    }
}
