//! The composition root of `bcd node`, and of every agent of `bcd sim`.
//!
//! [`Node::build`] blocks: identity, journal lock, programs of a dead daemon ended, recovery. [`Node::run`] is one
//! future that owns every task: session ⇄ executor, the status socket, the watch over the journal, the word to systemd. Dropping that
//! future is a crash: nothing is said, nothing is flushed, and the journal's lock is free once its last handle is
//! gone. There is nothing global here, no signal handler and no exit of the process, so that many nodes live in one.

mod build_error;
mod leaving;
mod metrics;
mod options;
mod renewal;
mod renewing;
mod reporting;
mod trusting;
mod waiting;

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rustls::sign::CertifiedKey;
use tokio::sync::{Notify, mpsc, oneshot, watch};

use crate::exec::{self, Executor, Lanes, Leftovers, ProbeFacts};
use crate::identity::{Identity, Mark, rejoins};
use crate::journal::{self, Durable, Failed, Journal, Locked, Reattached, Recovered};
use crate::model::{BootId, Exit, Incarnation, JournalId, NodeId};
use crate::ports::Connect;
use crate::session::{
    self, HelloFacts, Renewals, Session, SessionParts, SessionStatus, WorkingClock, outbox::outbox,
};
use crate::status::socket::Socket;
use crate::upkeep::{self, Audit, AuditLog, Conditions, Floors, Held, Hold, Upkeep, failed_sync};
use crate::wire::dsse::{Audience, CommandRoots};
use crate::wire::frames::Notice;
use crate::wire::grpc::GrpcDialer;
use crate::wire::link::Dialer;
use crate::wire::tls::{self, Roots};
pub use build_error::BuildError;
pub use leaving::LeaveError;
pub use options::{Options, WAL_BYTES};
use renewal::{Renewal, Tell};
use renewing::Renewing;
use reporting::{Reporter, answer};
use trusting::Trusting;
pub use waiting::build as build_when_the_disk_allows;

/// A clean stop is over within 10 s: this much for Goodbye and steps under way, the rest for audit.log and the journal.
const STOP: Duration = Duration::from_secs(6);
const LINES: Duration = Duration::from_secs(1);
const CLOSE: Duration = Duration::from_secs(2);

/// A node that has recovered and not dialed yet.
pub struct Node {
    options: Options,
    identity: Identity,
    /// Which identity.json that is; absent where the dialer is given, so that no other could be used.
    mark: Option<Mark>,
    incarnation: Incarnation,
    journal: Journal,
    reattached: Vec<Durable<Reattached>>,
    working: WorkingClock,
    floors: Floors,
    held: Option<Held>,
    dialer: Arc<dyn Dialer>,
}

impl Node {
    /// Loads the identity, takes the journal and settles what an earlier daemon left. Blocks.
    ///
    /// # Errors
    /// See [`BuildError`].
    pub fn build(mut options: Options) -> Result<Self, BuildError> {
        // Before the load: what replaces the file in between is found by the first look.
        let mark = Mark::of(&options.state).filter(|_| options.dialer.is_none());
        let identity = Identity::load(&options.state)?;
        // Before anything of the directory is touched: it may be put back where it belongs.
        if identity.machine.is_another_than(&options.machine) {
            return Err(BuildError::Copied { state: options.state, node_id: identity.node_id });
        }
        let incarnation = Incarnation::random(&mut options.rng);
        let locked = Locked::open(
            journal::Options {
                state: options.state.clone(),
                node_id: identity.node_id.clone(),
                incarnation: incarnation.clone(),
                boot_id: options.boot_id.clone(),
                wal_bytes: options.wal_bytes,
                mode: options.journal,
            },
            JournalId::random(&mut options.rng),
        )?
        .with_clock(Arc::clone(&options.clock))
        .with_event_limits(options.event_limits)
        .with_audit(options.audit.is_some())
        .with_limits(options.limits)
        .with_memory(options.memory);
        let facts = locked.facts();
        let floors = Floors::read(&options.state)?;
        // A lost journal takes its mark from there.
        let time_mark = facts.mark.max(floors.server_time_mark);
        // Before recovery calls their commands interrupted: nothing may run on behind such a word.
        let leftovers =
            Leftovers::settle(Arc::clone(&options.programs), &locked, &options.state, &options.boot_id)?;
        let working = WorkingClock::new(Arc::clone(&options.clock), time_mark, facts.signed);
        let (journal, recovered) =
            locked.recover_with(working.signed(), &mut |begun| leftovers.left(begun))?;
        log_start(&identity, &recovered, leftovers.ended());
        let dialer = match options.dialer.take() {
            Some(dialer) => dialer,
            None => grpc_dialer(&identity, &working, &options.connect, &options.state)?,
        };
        if let Some(mark) = time_mark {
            journal.note_time(mark, None);
        }
        let held = upkeep::hold::at_start(&options.state, &*options.clock);
        let reattached = recovered.reattached;
        Ok(Self { options, identity, mark, incarnation, journal, reattached, working, floors, held, dialer })
    }

    /// Whose node it is.
    pub fn node_id(&self) -> &NodeId {
        &self.identity.node_id
    }

    /// Runs until `stop` says true or its sender is gone, or until the journal can no longer be trusted.
    pub async fn run(self, stop: watch::Receiver<bool>) -> Exit {
        let (say, _) = watch::channel(SessionStatus::new(self.options.clock.boot()));
        let (use_identity, _) = watch::channel(self.identity.clone());
        // Large: whoever awaits it would carry it too.
        Box::pin(self.run_with(Lanes::default(), say, use_identity, stop)).await
    }

    async fn run_with(
        mut self,
        lanes: Lanes,
        say: watch::Sender<SessionStatus>,
        use_identity: watch::Sender<Identity>,
        stop: watch::Receiver<bool>,
    ) -> Exit {
        let journal = self.journal.clone();
        let socket = bind_status_socket(self.options.run_dir.as_deref());
        let hold = self.hold(&lanes);
        let status = say.subscribe();
        let conditions = Conditions::new(Arc::clone(&self.options.clock));
        let identity = use_identity.subscribe();
        let (use_roots, roots) = watch::channel(self.identity.trust.command_roots.clone());
        let (end, ending) = watch::channel(None);
        let replaced = Arc::new(Notify::new());
        let tell = Tell { identity: use_identity.clone(), roots: use_roots, ending: end };
        let renewals = self.renewals(tell, Arc::clone(&replaced));
        let (notices, noticed) = mpsc::channel(session::NOTICES);
        let trusting = Box::pin(self.trusting(use_identity, noticed, Arc::clone(&replaced)).run());
        let told = (conditions.clone(), notices.clone());
        let renewing = self.renewing(identity.clone(), status.clone(), told, replaced);
        let (end_audit, audit_ends) = oneshot::channel();
        let mut auditing = Box::pin(auditing(&self.options, &journal, hold.clone(), audit_ends)).fuse();
        let upkeep = self.upkeep(conditions.clone(), hold.clone(), status.clone(), identity.clone()).run();
        let notifier = Arc::clone(&self.options.notifier);
        let notified = status.clone();
        let reporter = Arc::new(self.reporter(lanes.clone(), hold, status, conditions, identity));
        let fatal = fatal(journal.clone(), self.options.run_dir.clone(), self.options.boot_id.clone());
        let (relayed, relay) = relay(stop, ending.clone());
        let work = self.start(lanes, say, (renewals, notices), roots, relayed.clone());
        let exit = tokio::select! {
            biased;
            failed = fatal => {
                tracing::error!("{}", failed.detail());
                return Exit::CannotWrite;
            }
            never = relay => match never {},
            () = upkeep => Exit::Failed,
            () = &mut auditing => Exit::Failed,
            () = renewing => Exit::Failed,
            () = trusting => Exit::Failed,
            () = work => Exit::Done,
            () = overdue(relayed.clone()) => {
                tracing::warn!("the stop took too long; what is unfinished is settled at the next start");
                Exit::Done
            }
            () = answer(socket, reporter) => Exit::Failed,
            () = notifier.follow(notified, relayed.clone()) => Exit::Failed,
        };
        drop(end_audit);
        // Boxed: what a stop needs is no part of every node's future.
        Box::pin(close(&journal, auditing)).await;
        (*ending.borrow()).unwrap_or(exit)
    }

    fn renewals(&self, tell: Tell, replaced: Arc<Notify>) -> Option<Box<dyn Renewals>> {
        let file = (self.options.state.clone(), self.mark?);
        let own = self.options.endpoints.clone();
        let connect = Arc::clone(&self.options.connect);
        Some(Box::new(Renewal::new(file, own, connect, self.working.clone(), tell, replaced)))
    }

    fn trusting(
        &self,
        identity: watch::Sender<Identity>,
        notices: mpsc::Receiver<Notice>,
        replaced: Arc<Notify>,
    ) -> Trusting {
        Trusting {
            state: self.options.state.clone(),
            identity,
            trust_floor: self.floors.trust_version,
            working: self.working.clone(),
            journal: self.journal.clone(),
            notices,
            replaced,
        }
    }

    /// Renews the certificate; a node whose dialer is given has none to renew.
    fn renewing(
        &mut self,
        identity: watch::Receiver<Identity>,
        session: watch::Receiver<SessionStatus>,
        (conditions, notices): (Conditions, mpsc::Sender<Notice>),
        replaced: Arc<Notify>,
    ) -> BoxFuture<'static, ()> {
        let renewing = self.mark.map(|_| Renewing {
            state: self.options.state.clone(),
            identity,
            trust_floor: self.floors.trust_version,
            own_endpoints: self.options.endpoints.clone(),
            connect: Arc::clone(&self.options.connect),
            working: self.working.clone(),
            journal: self.journal.clone(),
            conditions,
            session,
            incarnation: self.incarnation.clone(),
            notices,
            replaced,
            rng: StdRng::from_rng(&mut self.options.rng),
        });
        match renewing {
            Some(renewing) => Box::pin(renewing.run()),
            None => Box::pin(std::future::pending()),
        }
    }

    fn hold(&mut self, lanes: &Lanes) -> Hold {
        let (state, clock) = (self.options.state.clone(), Arc::clone(&self.options.clock));
        Hold::new(state, clock, lanes.clone(), self.journal.clone(), self.held.take())
    }

    fn upkeep(
        &self,
        conditions: Conditions,
        hold: Hold,
        session: watch::Receiver<SessionStatus>,
        identity: watch::Receiver<Identity>,
    ) -> Upkeep {
        Upkeep {
            state: self.options.state.clone(),
            journal: self.journal.clone(),
            working: self.working.clone(),
            session,
            identity,
            conditions,
            hold,
            floors: self.floors.clone(),
        }
    }

    fn reporter(
        &self,
        lanes: Lanes,
        hold: Hold,
        session: watch::Receiver<SessionStatus>,
        conditions: Conditions,
        identity: watch::Receiver<Identity>,
    ) -> Reporter {
        Reporter {
            conditions,
            identity,
            rejoins: rejoins(&self.options.state),
            incarnation: self.incarnation.clone(),
            journal: self.journal.clone(),
            working: self.working.clone(),
            lanes,
            hold,
            session,
        }
    }

    /// Session and executor, wired to each other. The session ends first; with it the deliveries end, and so the
    /// executor.
    fn start(
        mut self,
        lanes: Lanes,
        status: watch::Sender<SessionStatus>,
        (renewals, notices): (Option<Box<dyn Renewals>>, mpsc::Sender<Notice>),
        roots: watch::Receiver<CommandRoots>,
        stop: watch::Receiver<bool>,
    ) -> impl Future<Output = ()> {
        let metrics = metrics::run(self.journal.clone(), lanes.clone());
        let (deliver, deliveries) = mpsc::channel(session::DELIVERIES);
        let (answers, outbox) = outbox();
        let (own, state) = (&self.options.endpoints, &self.options.state);
        let credentials = renewal::credentials(&self.identity, own, state, self.dialer);
        let daemon_version = env!("CARGO_PKG_VERSION").to_owned();
        let executor = Executor::new(exec::Parts {
            journal: self.journal.clone(),
            working: self.working.clone(),
            lanes: lanes.clone(),
            outbox: answers,
            audience: Audience {
                trust_domain: self.identity.trust_domain.clone(),
                node_id: self.identity.node_id.clone(),
            },
            policy: self.options.policy,
            roots,
            role: self.identity.role,
            denied: self.options.denied,
            facts: ProbeFacts {
                node_id: self.identity.node_id.clone(),
                site: self.identity.site,
                role: self.identity.role,
                daemon_version: daemon_version.clone(),
                boot_id: self.options.boot_id.clone(),
            },
            state: self.options.state,
            reboot: self.options.reboot,
            programs: self.options.programs,
            reattached: self.reattached,
        });
        let session = Session::new(SessionParts {
            credentials,
            renewals,
            notices,
            hello: HelloFacts {
                node_id: self.identity.node_id,
                role: self.identity.role,
                boot_id: self.options.boot_id,
                incarnation: self.incarnation,
                daemon_version,
                protocol: self.options.protocol,
            },
            journal: self.journal,
            working: self.working,
            lanes,
            deliveries: deliver,
            outbox,
            status,
            rng: StdRng::from_rng(&mut self.options.rng),
        });
        async move {
            let work = async { tokio::join!(session.run(stop.clone()), executor.run(deliveries, stop)) };
            tokio::select! {
                biased;
                _ = work => {}
                () = metrics => {}
            }
        }
    }
}

/// Tells of a hold that stands, and writes audit.log, where there is one, until `end` is told or given up.
fn auditing(
    options: &Options,
    journal: &Journal,
    hold: Hold,
    end: oneshot::Receiver<()>,
) -> impl Future<Output = ()> + use<> {
    let log = options.audit.map(|retention| AuditLog { state: options.state.clone(), retention });
    let journal = journal.clone();
    async move {
        hold.tell().await;
        match log {
            Some(log) => Audit { journal, log }.run(end).await,
            None => drop(end.await),
        }
    }
}

/// What is ready for audit.log is written, so that nothing waits in a journal that is moved aside; then the journal is
/// closed. Each has its time.
async fn close(journal: &Journal, audited: impl Future<Output = ()>) {
    if tokio::time::timeout(LINES, audited).await.is_err() {
        tracing::warn!("audit.log takes its last lines too slowly; they wait in the journal");
    }
    if tokio::time::timeout(CLOSE, journal.close()).await.is_err() {
        tracing::warn!("the journal could not be closed in time; the next start reads it all the same");
    }
}

fn bind_status_socket(run: Option<&Path>) -> Option<Socket> {
    Socket::bind(run?)
        .inspect_err(|error| {
            let error: &dyn std::error::Error = error;
            tracing::error!(error, "there is no status socket; bcd status cannot ask this daemon");
        })
        .ok()
}

fn log_start(identity: &Identity, recovered: &Recovered, ended: usize) {
    let Identity { node_id, leaf, .. } = identity;
    tracing::info!(
        %node_id,
        certificate_until = %leaf.validity.not_after,
        waiting = recovered.waiting.len(),
        unacked = recovered.unacked,
        foreign = recovered.foreign,
        "the node has recovered"
    );
    for command in &recovered.reattached {
        tracing::info!(id = %command.begun.id, "the program that an earlier daemon started is still running");
    }
    if ended > 0 {
        tracing::warn!(ended, "programs that an earlier daemon had started were ended");
    }
    for id in &recovered.interrupted {
        tracing::warn!(%id, "the command was running when an earlier daemon ended: interrupted");
    }
}

fn grpc_dialer(
    identity: &Identity,
    working: &WorkingClock,
    connect: &Arc<dyn Connect>,
    state: &Path,
) -> Result<Arc<dyn Dialer>, BuildError> {
    let tls = client_tls(identity, working)
        .map_err(|source| BuildError::Tls { state: state.to_owned(), source })?;
    Ok(Arc::new(GrpcDialer::new(tls, Arc::clone(connect))))
}

fn client_tls(
    identity: &Identity,
    working: &WorkingClock,
) -> Result<Arc<rustls::ClientConfig>, rustls::Error> {
    tls_of(identity, Some(Arc::clone(&identity.key)), working)
}

/// Believes the gateways that `identity` believes; `offered` is shown to them.
fn tls_of(
    identity: &Identity,
    offered: Option<Arc<CertifiedKey>>,
    working: &WorkingClock,
) -> Result<Arc<rustls::ClientConfig>, rustls::Error> {
    let roots = Roots::Certificates(identity.trust.gateway_roots());
    // Certificates of gateways are judged by the working clock.
    let time = Arc::new(working.clone());
    Ok(Arc::new(tls::client_config(&roots, offered, time)?))
}

/// One stop signal of two: asked for from outside, or the identity is no longer this process's.
fn relay(
    mut stop: watch::Receiver<bool>,
    mut ending: watch::Receiver<Option<Exit>>,
) -> (watch::Receiver<bool>, impl Future<Output = Infallible>) {
    let (say, relayed) = watch::channel(false);
    let relay = async move {
        let foreign = async {
            if ending.wait_for(Option::is_some).await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            biased;
            // A sender that is gone asks for the same.
            _ = stop.wait_for(|stop| *stop) => {}
            () = foreign => {}
        }
        say.send_replace(true);
        std::future::pending().await
    };
    (relayed, relay)
}

/// Resolves when the time for a clean stop is over.
async fn overdue(mut stop: watch::Receiver<bool>) {
    // A sender that is gone asks for the same.
    let _ = stop.wait_for(|stop| *stop).await;
    tokio::time::sleep(STOP).await;
}

/// Resolves when the process is to end because of its journal.
async fn fatal(journal: Journal, run: Option<PathBuf>, boot: BootId) -> Failed {
    let failed = journal.failed().await;
    if failed == Failed::Sync && !failed_sync::exits(run, boot).await {
        tracing::error!(
            "a sync of the journal failed again in this boot: the daemon runs on, admits nothing, and says so"
        );
        std::future::pending::<()>().await;
    }
    failed
}
