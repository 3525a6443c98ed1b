//! A start on a state directory that takes no writes: the daemon stays, says why, tries again, and runs as soon as it
//! can, so that its supervisor neither hammers the disk nor gives up on the unit.
//!
//! There is no session meanwhile. A Hello names the journal, and one that named another would have the control plane
//! end what is in flight as lost (docs/decisions/0025-a-start-waits-for-its-disk.md).

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tokio::sync::watch;

use super::{BuildError, Node, Options, bind_status_socket};
use crate::blocking;
use crate::clock::Clock;
use crate::identity::Identity;
use crate::journal::Trouble;
use crate::model::Incarnation;
use crate::session::SessionStatus;
use crate::status::report::{self, Certificate, Report};
use crate::status::socket::{Question, Socket};
use crate::systemd::Notifier;
use crate::upkeep::Conditions;

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
    let (error, trouble) = match first {
        Ok(node) => return Ok(Some(node)),
        Err(error) => hindrance(error)?,
    };
    let waiting = Waiting::new(&mut options)?;
    waiting.look(&error, trouble);
    let socket = bind_status_socket(options.run_dir.as_deref());
    let tries = async {
        let mut pause = FIRST;
        loop {
            waiting.next_try(pause);
            tokio::time::sleep(pause).await;
            pause = LONGEST.min(pause * 2);
            match attempt(&mut options).await {
                Ok(node) => return Ok(Some(node)),
                Err(error) => {
                    let (error, trouble) = hindrance(error)?;
                    waiting.look(&error, trouble);
                }
            }
        }
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

/// An error that the disk is to blame for, with the condition that it makes; any other is the end.
fn hindrance(error: BuildError) -> Result<(BuildError, Trouble), BuildError> {
    match error.hindrance() {
        Some(trouble) => Ok((error, trouble)),
        None => Err(error),
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
    identity: Identity,
    incarnation: Incarnation,
    clock: Arc<dyn Clock>,
    conditions: Conditions,
    session: watch::Sender<SessionStatus>,
    why: watch::Receiver<String>,
}

impl Waiting {
    fn new(options: &mut Options) -> Result<Self, BuildError> {
        let (why, told) = watch::channel(String::new());
        let shared = Shared {
            identity: Identity::load(&options.state)?,
            incarnation: Incarnation::random(&mut options.rng),
            clock: Arc::clone(&options.clock),
            conditions: Conditions::new(Arc::clone(&options.clock)),
            session: watch::Sender::new(SessionStatus::new(options.clock.boot())),
            why: told,
        };
        Ok(Self {
            state: options.state.clone(),
            notifier: Arc::clone(&options.notifier),
            shared: Arc::new(shared),
            why,
        })
    }

    /// A try has failed.
    fn look(&self, error: &BuildError, trouble: Trouble) {
        let chain: &dyn std::error::Error = error;
        tracing::error!(error = chain, state = %self.state.display(), "the daemon cannot start yet; it waits for its disk");
        self.shared.conditions.observe([(trouble.why, trouble.detail.clone())]);
        self.why.send_replace(format!("waiting for its disk ({}): {}", trouble.why, trouble.detail));
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
            Question::Status => serde_json::to_vec(&self.report()),
            Question::Journal | Question::Export(_) | Question::Check => {
                serde_json::to_vec(&serde_json::json!({ "error": *self.why.borrow() }))
            }
        };
        // An empty answer is "did not answer" to whoever asked.
        document.unwrap_or_default()
    }

    fn report(&self) -> Report {
        Report {
            schema: report::SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            incarnation: self.incarnation.clone(),
            boot_ms: u64::try_from(self.clock.boot().as_millis()).unwrap_or(u64::MAX),
            server_time: None,
            node: report::Node::of(&self.identity),
            session: self.session.borrow().clone(),
            lanes: BTreeMap::new(),
            running: Vec::new(),
            journal: None,
            certificate: Certificate::at(self.identity.leaf.validity, None),
            conditions: self.conditions.all(),
        }
    }
}
