//! A start on a state directory that takes no writes: the daemon stays, says why, tries again, and runs as soon as it
//! can, so that its supervisor neither hammers the disk nor gives up on the unit.
//!
//! There is no session meanwhile. A Hello names the journal, and one that named another would have the control plane
//! end what is in flight as lost (docs/decisions/0025-a-start-waits-for-its-disk.md).
//!
//! A sync that fails is not waited out: this process opens the journal no more. It ends, once a boot, and stays without a
//! journal after that (docs/decisions/0071-a-failed-sync-at-a-start-ends-the-process.md).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;

use super::{BuildError, Node, Options, bind_status_socket};
use crate::blocking;
use crate::clock::Clock;
use crate::identity::Identity;
use crate::journal::{Hindrance, Trouble};
use crate::model::Incarnation;
use crate::session::SessionStatus;
use crate::status::report::{self, Certificate, Report};
use crate::status::socket::{Changed, Question, Socket};
use crate::systemd::Notifier;
use crate::upkeep::{Conditions, failed_sync};
use crate::waits::Waits;

/// Between two tries: each reads the whole journal.
const FIRST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// Builds the node; while the disk is what hinders it, waits and tries again. None: `stop` said true first.
///
/// # Errors
/// What waiting would not mend.
pub async fn build(
    mut options: Options,
    mut stop: watch::Receiver<bool>,
) -> Result<Option<Node>, BuildError> {
    let first = tokio::select! {
        biased;
        // A sender that is gone asks for the same.
        _ = stop.wait_for(|stop| *stop) => return Ok(None),
        built = attempt(&mut options) => built,
    };
    let mut held = match first {
        Ok(node) => return Ok(Some(node)),
        Err(error) => Held::by(error, &options).await?,
    };
    let waiting = Waiting::new(&mut options);
    waiting.learn().await?;
    waiting.look(&held);
    let socket = bind_status_socket(options.run_dir.as_deref());
    let tries = async {
        let mut waits = Waits::new(FIRST, LONGEST);
        while !held.for_good {
            let pause = waits.take();
            waiting.next_try(pause);
            tokio::time::sleep(pause).await;
            held = match attempt(&mut options).await {
                Ok(node) => return Ok(Some(node)),
                Err(error) => Held::by(error, &options).await?,
            };
            waiting.learn().await?;
            waiting.look(&held);
        }
        std::future::pending().await
    };
    tokio::select! {
        biased;
        _ = stop.wait_for(|stop| *stop) => Ok(None),
        never = waiting.tell(socket) => match never {},
        built = tries => built,
    }
}

async fn attempt(options: &mut Options) -> Result<Node, BuildError> {
    let mut once = options.clone();
    once.rng = StdRng::from_rng(&mut options.rng);
    blocking::run_or_unwind(move || Node::build(once)).await
}

/// A start that the disk holds up.
struct Held {
    error: BuildError,
    /// The condition that it makes.
    trouble: Trouble,
    /// This process tries no more.
    for_good: bool,
}

impl Held {
    /// # Errors
    /// The disk is not to blame; or a sync has failed, and this process is to end.
    async fn by(error: BuildError, options: &Options) -> Result<Self, BuildError> {
        match error.hindrance() {
            None => Err(error),
            Some(Hindrance::Passing(trouble)) => Ok(Self { error, trouble, for_good: false }),
            Some(Hindrance::FailedSync(trouble)) => {
                if failed_sync::exits(options.run_dir.clone(), options.boot_id.clone()).await {
                    return Err(error);
                }
                Ok(Self { error, trouble, for_good: true })
            }
        }
    }

    /// For people.
    fn why(&self) -> String {
        let Trouble { why, detail } = &self.trouble;
        if self.for_good {
            format!("a sync failed again in this boot ({why}), so that only a new process may try: {detail}")
        } else {
            format!("waiting for its disk ({why}): {detail}")
        }
    }
}

/// A daemon that has no journal yet, as others see it.
struct Waiting {
    state: PathBuf,
    notifier: Arc<Notifier>,
    shared: Arc<Shared>,
    why: watch::Sender<String>,
}

/// What questions are answered from.
struct Shared {
    /// Absent while the disk does not give it.
    identity: OnceLock<Identity>,
    incarnation: Incarnation,
    clock: Arc<dyn Clock>,
    conditions: Conditions,
    session: watch::Sender<SessionStatus>,
    why: watch::Receiver<String>,
}

impl Waiting {
    fn new(options: &mut Options) -> Self {
        let (why, told) = watch::channel(String::new());
        let shared = Shared {
            identity: OnceLock::new(),
            incarnation: Incarnation::random(&mut options.rng),
            clock: Arc::clone(&options.clock),
            conditions: Conditions::new(Arc::clone(&options.clock)),
            session: watch::Sender::new(SessionStatus::new(options.clock.boot())),
            why: told,
        };
        Self {
            state: options.state.clone(),
            notifier: Arc::clone(&options.notifier),
            shared: Arc::new(shared),
            why,
        }
    }

    /// Whose daemon it is, as soon as the disk tells.
    ///
    /// # Errors
    /// The disk is not what hinders it.
    async fn learn(&self) -> Result<(), BuildError> {
        if self.shared.identity.get().is_some() {
            return Ok(());
        }
        let state = self.state.clone();
        match blocking::run_or_unwind(move || Identity::load(&state)).await.map_err(BuildError::from) {
            Ok(identity) => {
                self.shared.identity.get_or_init(|| identity);
                Ok(())
            }
            Err(error) => error.hindrance().map(drop).ok_or(error),
        }
    }

    /// A try has failed.
    fn look(&self, held: &Held) {
        let (chain, state): (&dyn std::error::Error, _) = (&held.error, self.state.display());
        if held.for_good {
            tracing::error!(error = chain, %state, "a sync failed again in this boot: the daemon stays without its journal until it is restarted");
            self.shared.session.send_modify(|session| session.until_boot_ms = None);
        } else {
            tracing::error!(error = chain, %state, "the daemon cannot start yet; it waits for its disk");
        }
        self.shared.conditions.observe([(held.trouble.why, held.trouble.detail.clone())]);
        self.why.send_replace(held.why());
    }

    fn next_try(&self, pause: Duration) {
        let at = u64::try_from((self.shared.clock.boot() + pause).as_millis()).unwrap_or(u64::MAX);
        self.shared.session.send_modify(|session| session.until_boot_ms = Some(at));
    }

    /// Answers questions, and keeps the word to systemd.
    async fn tell(&self, socket: Option<Socket>) -> Infallible {
        let shared = Arc::clone(&self.shared);
        let answer = move |question| -> BoxFuture<'static, Vec<u8>> {
            let answer = shared.answer(&question);
            Box::pin(std::future::ready(answer))
        };
        let serve = async {
            if let Some(socket) = socket {
                socket.serve(answer).await;
            }
        };
        tokio::join!(self.notifier.wait(self.why.subscribe()), serve).0
    }
}

impl Shared {
    fn answer(&self, question: &Question) -> Vec<u8> {
        let document = match question {
            Question::Status => match self.identity.get() {
                Some(identity) => serde_json::to_vec(&self.report(identity)),
                None => serde_json::to_vec(&serde_json::json!({
                    "error": *self.why.borrow(),
                    "conditions": self.conditions.all(),
                })),
            },
            Question::Hold(_) | Question::Release => serde_json::to_vec(&Changed::Waiting),
            Question::Journal | Question::Export(_) | Question::Check => {
                serde_json::to_vec(&serde_json::json!({ "error": *self.why.borrow() }))
            }
        };
        // An empty answer is "did not answer" to whoever asked.
        document.unwrap_or_default()
    }

    fn report(&self, identity: &Identity) -> Report {
        Report {
            schema: report::SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            incarnation: self.incarnation.clone(),
            boot_ms: u64::try_from(self.clock.boot().as_millis()).unwrap_or(u64::MAX),
            server_time: None,
            node: report::Node::of(identity),
            session: self.session.borrow().clone(),
            lanes: BTreeMap::new(),
            running: Vec::new(),
            journal: None,
            certificate: Certificate::at(identity.leaf.validity, None),
            conditions: self.conditions.all(),
        }
    }
}
