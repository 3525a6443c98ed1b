//! A gateway's start: its directories, its lease, and a certificate of the worker's to serve with.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::forger::Forger;
use super::hub::Hub;
use super::lease::Grant;
use super::serving::Serving;
use super::store::{self, Lease, Store};
use super::{GatewayError, HEARTBEAT, Options, ServingFiles, Settings, state_dir, tls, worker};
use crate::blocking;
use crate::clock::Clock;
use crate::model::Digest;
use crate::wire::link::Endpoint;

/// Everything before the first connection.
pub async fn prepare(
    options: Options,
    address: SocketAddr,
    store: Store,
    clock: Arc<dyn Clock>,
) -> Result<(Arc<Hub>, Keeping), GatewayError> {
    let endpoints = match options.endpoints.as_slice() {
        [] => vec![Endpoint { host: address.ip().to_string(), port: address.port() }],
        named => named.to_vec(),
    };
    let asked = clock.boot();
    let named: Vec<String> = endpoints.iter().map(ToString::to_string).collect();
    let lease = store.take_lease(options.lease_life, None, "gateway-restarted").await?;
    let lease = lease.ok_or_else(|| GatewayError::Replaced(store.gateway().clone()))?;
    let rng = randomness(options.seed, &lease);
    let worker = options.worker;
    let (gateway, domain) = (store.gateway().to_string(), &options.trust_domain);
    let (chain, key, node_root) = certificate(&worker, gateway, named, domain).await?;
    let serving = Arc::new(Serving::new(chain, key)?);
    if let Some(files) = &options.serving {
        let (files, serving) = (files.clone(), serving.clone());
        blocking::run_or_unwind(move || serving.load(&files)).await?;
    }
    let tls = Arc::new(tls::server_config(serving.clone(), &node_root, clock.clone())?);

    let settings = Settings {
        gateway_id: store.gateway().to_string(),
        trust_domain: options.trust_domain,
        heartbeat_interval: options.heartbeat_interval.clamp(HEARTBEAT.0, HEARTBEAT.1),
        lane_credits: options.lane_credits,
        lease_life: options.lease_life,
        limits: options.limits,
        protocol: options.protocol,
        upgrade_only: options.upgrade_only,
        lies: options.lies,
    };
    let last_notice = store.last_notice().await?;
    let grant = Grant::new(lease, asked, options.lease_life);
    let forger = settings.lies.any().then(|| Forger::new(settings.trust_domain.clone())).transpose()?;
    let hub = Hub::new((settings, forger), store, (worker, tls), grant.clone(), clock, rng);
    let serving = options.serving.map(|files| (serving, files));
    Ok((Arc::new(hub), Keeping { grant, last_notice, serving }))
}

/// A key of this gateway's own, with the certificate that the worker gives for it.
async fn certificate(
    worker: &worker::Link,
    gateway: String,
    endpoints: Vec<String>,
    own_domain: &str,
) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>, CertificateDer<'static>), GatewayError> {
    let failed = |why: &dyn std::fmt::Display| GatewayError::Unserved(why.to_string());
    let key = rcgen::KeyPair::generate().map_err(|error| failed(&error))?;
    let csr = rcgen::CertificateParams::default().serialize_request(&key).map_err(|error| failed(&error))?;
    let ask = worker::Ask::Serve { csr: csr.der().as_ref().into(), gateway, endpoints };
    let (chain, node_root, domain) = match worker.ask(ask).await {
        worker::Told::Serving { chain, node_root, trust_domain } => (chain, node_root, trust_domain),
        worker::Told::Failed(why) => return Err(failed(&why)),
        other => return Err(failed(&format!("{other:?}"))),
    };
    if domain != own_domain {
        let why =
            format!("its trust domain is {domain}, not {own_domain}; start with --trust-domain {domain}");
        return Err(failed(&why));
    }
    let chain = chain.into_iter().map(|der| der.0.to_vec().into()).collect();
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    Ok((chain, key, node_root.0.to_vec().into()))
}

/// Each grant of each gateway draws numbers of its own, also where one seed is given to all of them: a node id or a
/// serial must not come twice.
fn randomness(seed: Option<u64>, lease: &Lease) -> StdRng {
    match seed {
        Some(seed) => StdRng::from_seed(Digest::of(format!("{seed} {lease:?}").as_bytes()).0),
        None => StdRng::from_os_rng(),
    }
}

/// Where a gateway's files lie.
struct Directories {
    state: PathBuf,
    store: PathBuf,
    fresh_id: String,
}

/// What lies there, opened.
pub struct Opened {
    /// The gateway's own directory.
    pub held: state_dir::Held,
    /// The store.
    pub store: Store,
}

impl Directories {
    fn of(options: &Options) -> Self {
        let number = match options.seed {
            // The name tells gateways of one seed apart; where they lie may differ from run to run.
            Some(seed) => {
                let name = options.state.file_name().unwrap_or_default().to_string_lossy();
                Digest::of(format!("{seed} {name}").as_bytes()).hex()
            }
            None => format!("{:016x}", StdRng::from_os_rng().next_u64()),
        };
        let store = options.store.clone().unwrap_or_else(|| options.state.clone());
        Self { state: options.state.clone(), store, fresh_id: format!("g-{}", &number[..16]) }
    }

    /// Blocks.
    fn open(self, clock: Arc<dyn Clock>, mode: store::Mode) -> Result<Opened, GatewayError> {
        let held = state_dir::Held::take(&self.state)?;
        let id = held.id(&self.fresh_id)?;
        let opening = state_dir::Opening::wait(&self.store)?;
        let store = Store::open(&self.store.join("gateway.db"), mode, id.into(), clock)?;
        drop(opening);
        Ok(Opened { held, store })
    }
}

/// What the loops beside the sessions begin with.
pub struct Keeping {
    /// The lease.
    pub grant: Grant,
    /// The last notice to a neighbour that is none of this gateway's any more.
    pub last_notice: u64,
    /// The serving certificate, where its files are watched.
    pub serving: Option<(Arc<Serving>, ServingFiles)>,
}

/// Opens the directories.
pub async fn open(
    options: &Options,
    clock: &Arc<dyn Clock>,
    mode: store::Mode,
) -> Result<Opened, GatewayError> {
    let (directories, judge) = (Directories::of(options), clock.clone());
    blocking::run_or_unwind(move || directories.open(judge, mode)).await
}
