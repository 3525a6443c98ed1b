//! The round trip of a command: from its frame, written, to the frame of its result, read.
//!
//! The node is the composition root of `bcd node`; the other end is the least that speaks the protocol ([`peer`]), so that
//! nothing but the node, the wire and the disk is in the figure. Both are in this process, and so is the floor: an empty
//! call on the very connection that carries the session, and three syncs of a file beside the journal.

mod peer;

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rustls::ClientConfig;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use self::peer::{Peer, PeerError};
use super::lab::{Lab, LabError};
use super::raw::Raw;
use super::{Aim, Figure, Part};
use crate::blocking;
use crate::clock::{self, Clock, SystemClock};
use crate::config::Config;
use crate::host::fake_machine::FakeReboot;
use crate::host::tcp::Tcp;
use crate::identity::{Identity, LoadError};
use crate::journal::Limits;
use crate::node::{BuildError, Node, Options, WAL_BYTES};
use crate::wire::dsse::Policy;
use crate::wire::grpc::{self, Connection, Service};
use crate::wire::link::{Dialer, Endpoint, Link, LinkEnd};
use crate::wire::pb;
use crate::wire::pb::enrollment_client::EnrollmentClient;
use crate::wire::tls::{self, BuildTime, Roots};

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum SessionBenchError {
    /// The node's identity.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The node's identity cannot be loaded.
    #[error(transparent)]
    Identity(#[from] LoadError),
    /// The node cannot start.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The other end.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
    /// A file of the bench.
    #[error("cannot write the file that the round trip is compared with")]
    File(#[from] std::io::Error),
    /// The empty call.
    #[error("the empty call was not answered")]
    Call(#[from] Box<tonic::Status>),
    /// There is no session, or it does not answer any more.
    #[error("the node did not answer within {} s", PATIENCE.as_secs())]
    Silent,
}

/// Round trips of one round.
const TRIPS: usize = 100;
/// Record of the raw syncs, bytes.
const RECORD: usize = 512;
const PATIENCE: Duration = Duration::from_secs(30);
/// Longer than a commit of the journal takes.
const SETTLES: Duration = Duration::from_millis(3);

/// Measures.
///
/// # Errors
/// See [`SessionBenchError`].
pub async fn run(state: &Path, rounds: usize) -> Result<Vec<Figure>, SessionBenchError> {
    let lab = Lab::start(state, "10s").await?;
    lab.join("node", 1, WAL_BYTES).await?;
    let home = lab.at("node/0");
    let identity = Identity::load(&home)?;
    let mut raw = Raw::create(&lab.at("raw"), RECORD)?;
    let mut peer = Peer::listen(&identity).await?;
    let roots = Roots::Certificates(vec![peer.ca().clone()]);
    let tls = tls::client_config(&roots, Some(Arc::clone(&identity.key)), Arc::new(BuildTime))?;
    let dialer = Arc::new(Kept { tls: Arc::new(tls), service: Mutex::default() });
    let (_say_stop, stop) = watch::channel(false);
    let node = build(&home, peer.endpoint(), Arc::clone(&dialer)).await?;
    let running = tokio::spawn(node.run(stop));

    let measured = within(PATIENCE, peer.welcome()).await?;
    measured?;
    let mut call = dialer.client().ok_or(SessionBenchError::Silent)?;
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..=rounds {
        let (trip, empty) = within(PATIENCE, round(&mut peer, &identity, &mut call, &mut raw)).await??;
        ours.push(trip);
        floor.push(empty);
    }
    running.abort();
    // The first round warms up both.
    let part = |what, mut values: Vec<f64>| Part::new(what, "us", values.split_off(1));
    Ok(vec![
        Figure::new(
            "command round trip",
            part("p50, frame of a node.probe written to frame of its result read", ours),
            part("p50, empty call on the same connection and three raw syncs", floor),
            Aim::AtMost(2.0),
        )
        .without_margin(),
    ])
}

async fn within<T>(time: Duration, work: impl Future<Output = T>) -> Result<T, SessionBenchError> {
    timeout(time, work).await.map_err(|_| SessionBenchError::Silent)
}

async fn build(home: &Path, endpoint: Endpoint, dialer: Arc<Kept>) -> Result<Node, SessionBenchError> {
    let mut config = Config::defaults();
    config.state = home.to_owned();
    config.signatures = Policy::None;
    config.endpoints = vec![endpoint];
    let reboot = Arc::new(FakeReboot::none());
    let options = Options {
        run_dir: None,
        limits: Limits::NONE,
        dialer: Some(dialer),
        ..Options::new(&config, Arc::new(SystemClock), StdRng::from_os_rng(), clock::boot_id()?, reboot)
    };
    Ok(blocking::run_or_unwind(move || Node::build(options)).await?)
}

/// The median of a round, us.
fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times.get(times.len() / 2).map_or(f64::NAN, |time| time.as_secs_f64() * 1e6)
}

/// Round trips and their floor in turn, the medians of both.
async fn round(
    peer: &mut Peer,
    identity: &Identity,
    call: &mut EnrollmentClient<Service>,
    raw: &mut Raw,
) -> Result<(f64, f64), SessionBenchError> {
    let (mut trips, mut floors) = (Vec::with_capacity(TRIPS), Vec::with_capacity(TRIPS));
    for _ in 0..TRIPS {
        let command = peer.command(identity);
        let from = SystemClock.boot();
        peer.carry_out(command).await?;
        trips.push(SystemClock.boot().saturating_sub(from));
        peer.settle().await?;
        // The ack is a commit of its own, and part of neither.
        sleep(SETTLES).await;
        let from = SystemClock.boot();
        call.renew(pb::RenewRequest::default()).await.map_err(Box::new)?;
        for _ in 0..3 {
            raw.write(1)?;
        }
        floors.push(SystemClock.boot().saturating_sub(from));
    }
    Ok((median(trips), median(floors)))
}

/// Dials as a node does, and keeps the way to the connection for calls beside the session.
#[derive(Debug)]
struct Kept {
    tls: Arc<ClientConfig>,
    service: Mutex<Option<(Service, http::Uri)>>,
}

impl Kept {
    fn keep(&self, connection: &Connection) {
        let kept = (connection.service(), connection.origin());
        *self.service.lock().unwrap_or_else(PoisonError::into_inner) = Some(kept);
    }

    fn client(&self) -> Option<EnrollmentClient<Service>> {
        let kept = self.service.lock().unwrap_or_else(PoisonError::into_inner).clone();
        kept.map(|(service, origin)| EnrollmentClient::with_origin(service, origin))
    }
}

impl Dialer for Kept {
    fn open(
        &self,
        endpoint: &Endpoint,
        first: pb::NodeFrame,
        keep_alive: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Link>, LinkEnd>> {
        let endpoint = endpoint.clone();
        Box::pin(async move {
            let connection = grpc::connect(&endpoint, &self.tls, &Tcp, keep_alive).await?;
            self.keep(&connection);
            Ok(grpc::session(connection, first))
        })
    }
}
