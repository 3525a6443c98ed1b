//! The gateway of a run: a child process, so that a kill is a real one and no memory is shared.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::Rng;
use rand::rngs::StdRng;
use tokio::sync::{Mutex, watch};
use tokio::time::{Instant, sleep, timeout};

use super::gateways::WORKER;
use crate::gateway::Lies;
use crate::gateway::control::{Client, ClientError, Request, Response};
use crate::gateway::lies::Rate;

/// Why the gateway cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// It was not started.
    #[error("cannot start the gateway ({exe})")]
    Start {
        /// The program.
        exe: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It ended, or did not answer in time.
    #[error("the gateway did not answer within {}s of its start; its log is {log}", READY.as_secs())]
    NotReady {
        /// What it wrote.
        log: PathBuf,
    },
    /// One in this process ended by itself.
    #[error("the gateway has ended by itself")]
    Ended(#[source] crate::gateway::GatewayError),
    /// A question was not answered, or with a no.
    #[error(transparent)]
    Control(#[from] ClientError),
    /// A question was not answered in time.
    #[error("the gateway did not answer within {}s", ANSWER.as_secs())]
    Slow,
    /// It was ended or stopped by a fault before it answered.
    #[error("the gateway is down")]
    Down,
}

/// Longest wait for a started gateway's first answer.
const READY: Duration = Duration::from_secs(30);
/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);
/// What all gateways of a run are told.
#[derive(Debug)]
pub struct Shape {
    /// host:port of each.
    pub addresses: Vec<String>,
    /// Interval of heartbeats.
    pub heartbeat: Duration,
    /// What they do that honest ones do not.
    pub lies: Lies,
}

impl Shape {
    /// So many gateways on free ports of this machine.
    ///
    /// # Errors
    /// There is no free port.
    pub fn new(count: usize, heartbeat: Duration, lies: Lies, rng: &mut StdRng) -> io::Result<Self> {
        // All held until all are found, so that no two are the same.
        let held: Vec<TcpListener> = (0..count).map(|_| free_port(rng)).collect::<Result<_, _>>()?;
        let address = |listener: &TcpListener| Ok(listener.local_addr()?.to_string());
        Ok(Self { addresses: held.iter().map(address).collect::<io::Result<_>>()?, heartbeat, lies })
    }
}

/// Ports below the range from which the kernel takes clients' ports: a gateway that starts again must find its
/// own port free.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// The gateway's process and where it is found.
#[derive(Debug)]
pub struct GatewayProcess {
    exe: PathBuf,
    state: PathBuf,
    log: PathBuf,
    arguments: Vec<OsString>,
    child: Mutex<Option<Child>>,
    /// False while a fault has it dead or stopped: nobody waits for its answers then.
    up: watch::Sender<bool>,
}

impl GatewayProcess {
    /// Starts the gateway of this number, with its state and log below `work`.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn start(exe: &Path, work: &Path, number: usize, shape: &Shape) -> Result<Self, GatewayError> {
        let state = work.join(format!("gateway-{number}"));
        let mut arguments: Vec<OsString> = vec!["gateway".into(), "--state".into(), state.clone().into()];
        let mut more = |name: &str, value: OsString| arguments.extend([name.into(), value]);
        if let Some(address) = shape.addresses.get(number) {
            more("--listen", address.into());
        }
        if shape.addresses.len() > 1 {
            more("--store", work.join("store").into());
        }
        for address in &shape.addresses {
            more("--endpoint", address.into());
        }
        more("--worker", work.join(WORKER).into());
        more("--heartbeat-interval", format!("{}ms", shape.heartbeat.as_millis()).into());
        for Rate(lie, permille) in shape.lies.rates() {
            more("--lie", format!("{}={permille}", lie.name()).into());
        }
        let gateway = Self {
            exe: exe.to_owned(),
            state,
            log: work.join(format!("gateway-{number}.log")),
            arguments,
            child: Mutex::new(None),
            up: watch::Sender::new(false),
        };
        gateway.restart().await?;
        Ok(gateway)
    }

    /// Kills it: SIGKILL, nothing is flushed.
    pub async fn kill(&self) {
        self.up.send_replace(false);
        if let Some(mut child) = self.child.lock().await.take() {
            let _ = child.kill();
            let reaped = tokio::task::spawn_blocking(move || child.wait());
            let _ = reaped.await;
        }
    }

    /// Starts it again on its port and state, and waits until it answers.
    ///
    /// # Errors
    /// See [`GatewayError`].
    pub async fn restart(&self) -> Result<(), GatewayError> {
        let child = self.spawn().map_err(|source| GatewayError::Start { exe: self.exe.clone(), source })?;
        *self.child.lock().await = Some(child);
        self.up.send_replace(true);
        let until = Instant::now() + READY;
        while Instant::now() < until {
            if self.ask(&Request::Stats).await.is_ok() {
                return Ok(());
            }
            if self.has_ended().await {
                break;
            }
            sleep(Duration::from_millis(20)).await;
        }
        Err(GatewayError::NotReady { log: self.log.clone() })
    }

    /// Stops its process where it stands; it holds its connections, and the kernel answers for them.
    pub async fn stop(&self) {
        self.up.send_replace(false);
        self.signal(Signal::SIGSTOP).await;
    }

    /// Lets it go on as if nothing had been.
    pub async fn go_on(&self) {
        self.signal(Signal::SIGCONT).await;
        self.up.send_replace(true);
    }

    async fn signal(&self, signal: Signal) {
        let pid = self.child.lock().await.as_ref().and_then(|child| i32::try_from(child.id()).ok());
        if let Some(pid) = pid {
            // An unreaped child keeps its pid, so that no other process is meant.
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Whether no fault has it dead or stopped.
    pub fn is_up(&self) -> bool {
        *self.up.borrow()
    }

    async fn has_ended(&self) -> bool {
        let mut child = self.child.lock().await;
        child.as_mut().is_none_or(|child| !matches!(child.try_wait(), Ok(None)))
    }

    fn spawn(&self) -> io::Result<Child> {
        let log = || -> io::Result<File> { OpenOptions::new().append(true).create(true).open(&self.log) };
        Command::new(&self.exe)
            .args(&self.arguments)
            // Nothing is ever written: the pipe ends with this process, however it ends, and the gateway with it.
            .arg("--until-stdin-ends")
            .stdin(Stdio::piped())
            .stdout(log()?)
            .stderr(log()?)
            // Ctrl-C at the terminal is the simulator's to handle.
            .process_group(0)
            .spawn()
    }

    /// Asks once, on a connection of its own.
    ///
    /// # Errors
    /// It is not there, did not answer in time, or said no.
    pub async fn ask(&self, request: &Request) -> Result<Response, GatewayError> {
        let asked = async { Client::connect(&self.state).await?.call(request).await };
        let mut up = self.up.subscribe();
        tokio::select! {
            biased;
            answer = timeout(ANSWER, asked) => Ok(answer.map_err(|_| GatewayError::Slow)??),
            _ = up.wait_for(|up| !*up) => Err(GatewayError::Down),
        }
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        if let Some(child) = self.child.get_mut() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_port(rng: &mut StdRng) -> io::Result<TcpListener> {
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for _ in 0..100 {
        let port = rng.random_range(PORTS);
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}
