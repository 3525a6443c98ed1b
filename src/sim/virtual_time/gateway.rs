//! A gateway in virtual time: the same code over pipes, with its store written inline. A kill closes its store, cuts
//! its connections and drops it: nothing of it reaches a disk or a peer any more.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::sync::{Mutex, Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::sleep;
use tracing::Instrument as _;

use super::super::cable::{Cable, Weather};
use super::super::gateway_process::GatewayError;
use super::net::Net;
use crate::clock::Clock;
use crate::gateway::control::{ClientError, Request, Response};
use crate::gateway::worker::Link;
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
    /// That of the store, which all gateways share.
    pub store: PathBuf,
    /// Its seed; each start has its own chance.
    pub seed: u64,
    /// The worker of all of them.
    pub worker: Link,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
}

/// The gateways that run, by number: an outage of the store befalls all of them.
pub type Locals = Arc<std::sync::Mutex<BTreeMap<u16, Local>>>;

/// One of them.
#[derive(Debug)]
pub struct VirtualGateway {
    terms: Terms,
    number: u16,
    net: Net,
    clock: Arc<dyn Clock>,
    /// What all of its connections go through.
    cable: Cable,
    running: Mutex<Option<Running>>,
    all: Locals,
    starts: AtomicU64,
    up: Up,
}

/// False while a fault has it dead or standing still. Who waits for that hears of it in the order of the waits, which a
/// watch channel leaves to chance.
#[derive(Debug, Default)]
struct Up {
    up: AtomicBool,
    down: Notify,
}

impl Up {
    fn set(&self, up: bool) {
        self.up.store(up, Ordering::Relaxed);
        if !up {
            self.down.notify_waiters();
        }
    }

    fn is(&self) -> bool {
        self.up.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct Running {
    local: Local,
    task: JoinHandle<Result<(), gateway::GatewayError>>,
}

impl VirtualGateway {
    /// Starts the gateway of this number.
    ///
    /// # Errors
    /// It does not run.
    pub async fn start(
        terms: Terms,
        number: u16,
        (net, all): (Net, Locals),
        clock: Arc<dyn Clock>,
    ) -> Result<Self, GatewayError> {
        let gateway = Self {
            cable: Cable::new(terms.seed, Weather::default()),
            terms,
            number,
            net,
            clock,
            running: Mutex::new(None),
            all,
            starts: 0.into(),
            up: Up::default(),
        };
        gateway.restart().await?;
        Ok(gateway)
    }

    fn all(&self) -> std::sync::MutexGuard<'_, BTreeMap<u16, Local>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
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
            store: Some(self.terms.store.clone()),
            heartbeat_interval: self.terms.heartbeat,
            seed: Some(seed),
            ..Options::new(
                self.terms.state.clone(),
                SocketAddr::from((Ipv4Addr::LOCALHOST, PORT + self.number)),
                self.terms.worker.clone(),
            )
        }
    }

    /// Starts it again on its port and state.
    ///
    /// # Errors
    /// It does not run.
    pub async fn restart(&self) -> Result<(), GatewayError> {
        sleep(START).await;
        let starts = self.starts.fetch_add(1, Ordering::Relaxed);
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
        self.all().insert(self.number, local.clone());
        *self.running.lock().await = Some(Running { local, task });
        self.up.set(true);
        Ok(())
    }

    /// Kills it.
    pub async fn kill(&self) {
        self.up.set(false);
        self.all().remove(&self.number);
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
        self.up.set(false);
        if let Some(running) = &*self.running.lock().await {
            running.local.hold_store(time);
        }
        self.cable.stall(time);
        sleep(time).await;
        self.up.set(true);
    }

    /// Whether no fault has it dead or standing still.
    pub fn is_up(&self) -> bool {
        self.up.is()
    }

    /// Asks it.
    ///
    /// # Errors
    /// It is down, goes down meanwhile, or says no.
    pub async fn ask(&self, request: &Request) -> Result<Response, GatewayError> {
        let local = match &*self.running.lock().await {
            Some(running) if self.up.is() => running.local.clone(),
            Some(_) | None => return Err(GatewayError::Down),
        };
        if let Request::StopStore { ms } = request {
            let time = Duration::from_millis(*ms);
            self.all().values().for_each(|local| local.hold_store(time));
        }
        let answer = tokio::select! {
            biased;
            () = self.up.down.notified() => return Err(GatewayError::Down),
            answer = local.ask(request.clone()) => answer,
        };
        match answer {
            Response::Error(why) => Err(ClientError::Refused(why).into()),
            answer => Ok(answer),
        }
    }
}
