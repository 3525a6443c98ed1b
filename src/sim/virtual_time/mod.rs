//! `bcd sim --virtual`: the same agents, gateways, TLS and gRPC over pipes in memory, in one thread whose clock jumps to
//! whatever comes next. One seed gives one history.
//!
//! What keeps it so: one paused runtime without sockets; journals and stores written inline, all other blocking work
//! where it is awaited ([`crate::blocking`]); every byte takes a millisecond at least; no delay depends on a length,
//! since signatures and keys differ from run to run; no hash map's order reaches an output; every `select!` is biased.

mod gateway;
pub mod log;
pub mod net;
pub mod programs;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use gateway::VirtualGateway;

use super::agent::{Ground, Means};
use super::cable::Weather;
use super::gateways::{Gateway, Gateways, WORKER};
use super::report::Report;
use super::run::{self, World};
use super::{Options, SimError, seed};
use crate::blocking::inline::Inline;
use crate::clock::{Clock, TokioClock};
use crate::gateway::worker::{self, Desk, Link, Worker};
use crate::journal::Mode;
use crate::model::ServerTime;
use crate::wire::tls::BUILD_TIME;
use gateway::{Locals, Terms};
use log::EventLog;
use net::Net;
use programs::VirtualPrograms;

/// What bytes take between an agent and a gateway.
const CLIMATE: Weather =
    Weather { latency: Duration::from_millis(1), jitter: Duration::from_millis(4), lost_per_mille: 0 };
/// Between two live lines, virtual.
const LIVE: Duration = Duration::from_secs(600);
/// Certificates outlive every run by so much: nothing renews them yet.
const SPARE: Duration = Duration::from_secs(24 * 3600);
/// The world begins so long after the build, ms: nothing can hold that ended before.
const BEGIN_MS: i64 = 24 * 3600 * 1000;

/// Runs it in virtual time, with all files below `work`; what happens is written into `log`.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub fn run(options: Options, work: &Path, log: File) -> Result<Report, SimError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.map_err(|source| SimError::Work { path: work.to_owned(), source })?;
    let _inline = Inline::here();
    let ended = runtime.block_on(async {
        let clock = Arc::new(TokioClock::starting_at(BUILD_TIME.0 + BEGIN_MS));
        let log = EventLog::new(log, work);
        let _logged = tracing::subscriber::set_default(log.subscriber());
        let world = world(&options, work, clock).await?;
        // No process is started: all agents stand in this one.
        let report = run::run_in(world, options, Path::new("bcd"), work).await?;
        log.close(&report);
        Ok(report)
    });
    drop(runtime);
    ended
}

async fn world(options: &Options, work: &Path, clock: Arc<dyn Clock>) -> Result<World, SimError> {
    let (net, all) = (Net::default(), Locals::default());
    let chance = |part, number| rand::RngCore::next_u64(&mut seed::stream(options.seed, part, number));
    let worker = worker(options, work, &clock)?;
    let mut gateways = Vec::with_capacity(options.gateways);
    for number in 0..options.gateways {
        let number = u16::try_from(number).unwrap_or(u16::MAX);
        let terms = Terms {
            state: work.join(format!("gateway-{number}")),
            store: work.join("gateways"),
            seed: chance("gateway", number.into()),
            worker: Link::here(Arc::clone(&worker), Arc::clone(&clock)),
            heartbeat: options.heartbeat,
            lies: options.chaos.lies(),
        };
        let gateway =
            VirtualGateway::start(terms, number, (net.clone(), all.clone()), Arc::clone(&clock)).await?;
        gateways.push(gateway);
    }
    let seed = options.seed;
    let addresses = gateways.iter().map(|gateway| gateway.address()).collect();
    let gateways = gateways.into_iter().map(Gateway::Virtual).collect();
    let means = move |index, cable: &super::cable::Cable| Means {
        connect: net.through(cable.clone()),
        programs: Arc::new(VirtualPrograms::new(seed::stream(
            seed,
            "programs",
            u64::try_from(index).unwrap_or(u64::MAX),
        ))),
        journal: Mode::Inline,
    };
    let ground = Ground { clock, climate: CLIMATE, means: Box::new(means) };
    let desk = Desk::here(worker, Arc::clone(&ground.clock));
    Ok(World { ground: Arc::new(ground), gateways: Gateways::of(gateways, desk), addresses, pause: LIVE })
}

/// The worker, which no fault befalls: a process of its own would go on while gateways die.
fn worker(options: &Options, work: &Path, clock: &Arc<dyn Clock>) -> Result<Arc<Worker>, SimError> {
    let terms = worker::Options {
        certificate_life: options.duration + SPARE,
        ..worker::Options::new(work.join(WORKER))
    };
    let worker = Worker::open(&terms, ServerTime(clock.wall_ms())).map_err(SimError::Worker)?;
    worker.draw_from(seed::stream(options.seed, "worker", 0));
    Ok(Arc::new(worker))
}
