//! Many nodes in one process, and bare sessions to compare them with: what runs in the children of `bcd bench agent`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::blocking;
use crate::clock::{self, SystemClock};
use crate::config::Config;
use crate::host::fake_machine::FakeReboot;
use crate::host::tcp::Tcp;
use crate::identity::{Identity, LoadError};
use crate::journal::{Limits, Memory, Mode};
use crate::model::{Incarnation, JournalId};
use crate::node::{BuildError, Node, Options};
use crate::wire::dsse::Policy;
use crate::wire::grpc::GrpcDialer;
use crate::wire::link::{Dialer as _, Endpoint, Link, LinkEnd};
use crate::wire::pb;
use crate::wire::pb::node_frame::Frame;
use crate::wire::tls::{self, BuildTime, Roots};
use crate::wire::version::Range;

/// The log of a journal of which a thousand stand in one directory.
pub(super) const WAL_BYTES: u64 = 256 << 10;
/// As a node asks for it by default.
const KEEP_ALIVE: Duration = Duration::from_secs(20);

/// Why a fleet does not run.
#[derive(Debug, thiserror::Error)]
pub enum FleetError {
    /// The kernel does not say which boot this is.
    #[error("cannot read the boot id")]
    BootId(#[from] std::io::Error),
    /// An identity cannot be loaded.
    #[error(transparent)]
    Identity(#[from] LoadError),
    /// A node cannot start.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
    /// A node's identity names no gateway.
    #[error("{} names no gateway", .0.display())]
    NoEndpoint(PathBuf),
    /// The bare client's database.
    #[error("cannot make a database")]
    Database(#[from] rusqlite::Error),
    /// A bare session ended.
    #[error("a bare session ended: {0}")]
    Ended(LinkEnd),
    /// A node ended, or its task died.
    #[error("a node ended by itself")]
    NodeEnded,
}

/// Runs `count` nodes whose state directories are `folder`/`first` and so on, until one of them ends.
///
/// # Errors
/// See [`FleetError`].
pub async fn nodes(folder: &Path, first: usize, count: usize) -> Result<(), FleetError> {
    let boot_id = clock::boot_id()?;
    let (_say_stop, stop) = watch::channel(false);
    let mut running = JoinSet::new();
    for index in first..first + count {
        let mut config = Config::defaults();
        config.state = folder.join(index.to_string());
        config.signatures = Policy::None;
        let rng = StdRng::seed_from_u64(u64::try_from(index).unwrap_or_default());
        let reboot = Arc::new(FakeReboot::none());
        let options = Options {
            run_dir: None,
            wal_bytes: WAL_BYTES,
            limits: Limits::NONE,
            journal: Mode::Pool,
            memory: Memory::ONE_OF_MANY,
            ..Options::new(&config, Arc::new(SystemClock), rng, boot_id.clone(), reboot)
        };
        let built = blocking::run(move || Node::build(options)).await;
        let node = built.map_err(|_| FleetError::NodeEnded)??;
        running.spawn(node.run(stop.clone()));
    }
    running.join_next().await;
    Err(FleetError::NodeEnded)
}

/// Holds a session for each of the nodes, and nothing else, until one of them ends; with a database open beside them
/// where one is named.
///
/// # Errors
/// See [`FleetError`].
pub async fn bare(folder: &Path, count: usize, database: Option<&Path>) -> Result<(), FleetError> {
    let _database = database.map(open_database).transpose()?;
    let mut running = JoinSet::new();
    for index in 0..count {
        let state = folder.join(index.to_string());
        let identity = Identity::load(&state)?;
        let held = Held::open(&state, &identity).await?;
        running.spawn(held.hold());
    }
    match running.join_next().await {
        Some(Ok(end)) => Err(FleetError::Ended(end)),
        _ => Err(FleetError::NodeEnded),
    }
}

/// A database as anybody would open it who writes durably.
fn open_database(path: &Path) -> rusqlite::Result<rusqlite::Connection> {
    let database = rusqlite::Connection::open(path)?;
    database.execute_batch(
        "PRAGMA journal_mode = WAL; CREATE TABLE things (id INTEGER PRIMARY KEY, thing TEXT);
        INSERT INTO things (thing) VALUES ('one');",
    )?;
    Ok(database)
}

/// A session that only lives.
struct Held {
    link: Box<dyn Link>,
    heartbeat: Duration,
}

impl Held {
    async fn open(state: &Path, identity: &Identity) -> Result<Self, FleetError> {
        let roots = Roots::Certificates(identity.trust.gateway_roots());
        let tls = tls::client_config(&roots, Some(Arc::clone(&identity.key)), Arc::new(BuildTime))?;
        let endpoint =
            identity.trust.endpoints.first().ok_or_else(|| FleetError::NoEndpoint(state.to_owned()))?;
        let hello = hello(identity, clock::boot_id()?.as_str());
        let dialer = GrpcDialer::new(Arc::new(tls), Arc::new(Tcp));
        loop {
            match Self::dial(&dialer, endpoint, hello.clone()).await {
                Err(LinkEnd { pushback: Some(wait), .. }) => tokio::time::sleep(wait).await,
                opened => return opened.map_err(FleetError::Ended),
            }
        }
    }

    async fn dial(dialer: &GrpcDialer, endpoint: &Endpoint, hello: pb::NodeFrame) -> Result<Self, LinkEnd> {
        let mut link = dialer.open(endpoint, hello, KEEP_ALIVE).await?;
        loop {
            if let Some(pb::gateway_frame::Frame::Welcome(welcome)) = link.receive().await?.frame {
                let heartbeat = Duration::from_millis(welcome.heartbeat_interval_ms.max(1000).into());
                return Ok(Self { link, heartbeat });
            }
        }
    }

    async fn hold(mut self) -> LinkEnd {
        let mut beat = tokio::time::interval(self.heartbeat);
        let mut seq = 0;
        loop {
            tokio::select! {
                biased;
                frame = self.link.receive() => if let Err(end) = frame { return end },
                _ = beat.tick() => {
                    seq += 1;
                    let beat = pb::Heartbeat { seq, ..Default::default() };
                    // A queue that is full belongs to a link that is about to end.
                    let _ = self.link.send(pb::NodeFrame { frame: Some(Frame::Heartbeat(beat)) });
                }
            }
        }
    }
}

fn hello(identity: &Identity, boot_id: &str) -> pb::NodeFrame {
    let mut rng = StdRng::from_os_rng();
    let hello = pb::Hello {
        node_id: identity.node_id.to_string(),
        role: identity.role.name().into(),
        boot_id: boot_id.into(),
        journal_id: JournalId::random(&mut rng).to_string(),
        incarnation: Incarnation::random(&mut rng).to_string(),
        proto_min: Range::OWN.min(),
        proto_max: Range::OWN.max(),
        ..Default::default()
    };
    pb::NodeFrame { frame: Some(Frame::Hello(hello)) }
}
