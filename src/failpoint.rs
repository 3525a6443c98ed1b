//! Named steps at which a simulation build can be killed, so that a test can crash the real program exactly
//! there. In a production build `hit` is empty.
//!
//! `BCD_FAILPOINT=<step>` kills the process (SIGKILL) when the step is reached; `<step>:<n>` the n-th time. A process
//! that dies so first appends the step's name to the file that `BCD_FAILPOINT_HITS` names: the death of a supervisor
//! is seen by nobody else. Of many agents in one process [`agent::Armed`] ends one: the task that comes to the step
//! unwinds, and takes its agent with it.

/// A step of a command's life, of a join, of its end or of a renewal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step(&'static str);

macro_rules! steps {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)+) => {
        $($(#[$doc])* pub const $name: Step = Step($text);)+
        /// Every step.
        pub const ALL: &[Step] = &[$($name,)+];
    };
}

steps! {
    /// The node has taken a Command frame.
    RECEIVED = "node.received";
    /// ACCEPTED is written, not yet committed.
    ACCEPT_WRITTEN = "node.accept-written";
    /// ACCEPTED is durable.
    ACCEPTED = "node.accepted";
    /// ACCEPTED was handed to the wire.
    ACCEPTED_SENT = "node.accepted-sent";
    /// RUNNING is written, not yet committed.
    RUN_WRITTEN = "node.run-written";
    /// RUNNING is durable.
    RUNNING = "node.running";
    /// The begun record exists, perhaps not yet durable.
    BEGUN_CREATED = "supervisor.begun-created";
    /// The begun record is durable.
    BEGUN = "supervisor.begun";
    /// The supervisor has taken its job; nothing is written.
    SUPERVISOR_STARTED = "supervisor.started";
    /// The node knows that a program's supervisor has made its record.
    SUPERVISED = "node.supervised";
    /// The program runs.
    PROGRAM_STARTED = "supervisor.program-started";
    /// The program, and all that it started, is gone; nothing is written.
    PROGRAM_ENDED = "supervisor.program-ended";
    /// The outcome is written, not yet sealed.
    OUTCOME_WRITTEN = "supervisor.outcome-written";
    /// The outcome is durable; the supervisor still lives.
    OUTCOME = "supervisor.outcome";
    /// RUNNING was handed to the wire.
    RUNNING_SENT = "node.running-sent";
    /// The effect has started.
    EFFECT_STARTED = "node.effect-started";
    /// The effect has ended.
    EFFECT_ENDED = "node.effect-ended";
    /// DONE is written, not yet committed.
    DONE_WRITTEN = "node.done-written";
    /// DONE is durable.
    DONE = "node.done";
    /// The result was handed to the wire.
    RESULT_SENT = "node.result-sent";
    /// The ack of a result came.
    ACK_RECEIVED = "node.ack-received";
    /// The tombstone is durable.
    TOMBSTONE = "node.tombstone";
    /// A corrupt journal is moved aside, and its log is not.
    JOURNAL_HALF_ASIDE = "journal.half-aside";
    /// The join's key file exists.
    JOIN_KEY = "join.key-written";
    /// The join's request is about to be sent.
    JOIN_PENDING = "join.pending-written";
    /// The join's answer came and was verified.
    JOIN_ANSWERED = "join.answered";
    /// The new journal exists.
    JOIN_JOURNAL = "join.journal-made";
    /// identity.json was renamed into place.
    JOIN_IDENTITY = "join.identity-written";
    /// A reset has moved identity.json aside.
    RESET_IDENTITY = "reset.identity-aside";
    /// A reset has moved everything aside but the journal.
    RESET_HALF = "reset.half-aside";
    /// A reset has moved everything aside.
    RESET_DONE = "reset.done";
    /// A seal has removed every identity.
    SEAL_IDENTITY = "seal.identity-removed";
    /// That the machine leaves is durable in its journal.
    LEAVE_RECORDED = "leave.recorded";
    /// The control plane has heard that the machine leaves; identity and journal are in their places.
    LEAVE_TOLD = "leave.told";
    /// The key that a re-join offers is in its file, and nobody was asked.
    REJOIN_KEY = "rejoin.key-written";
    /// The re-join's proof is about to be sent.
    REJOIN_PROVEN = "rejoin.proven";
    /// The answer to a renewal or re-join came and was verified.
    RENEW_ANSWERED = "renew.answered";
    /// The new key's file exists.
    RENEW_KEY = "renew.key-written";
    /// identity.json names the new key and certificate.
    RENEW_IDENTITY = "renew.identity-written";
    /// The old key is gone.
    RENEW_KEYS_REMOVED = "renew.keys-removed";
    /// The time of the answer is in the journal.
    RENEW_TIME = "renew.time-kept";
    /// A session with the new certificate is about to be opened.
    RENEW_MOVES = "renew.moves";
    /// The gateway has marked a command dispatched, durably.
    GATEWAY_DISPATCHED = "gateway.dispatched";
    /// The gateway handed a command to the wire.
    GATEWAY_SENT = "gateway.sent";
    /// An update came, nothing is written yet.
    GATEWAY_UPDATE = "gateway.update";
    /// An update is durable at the gateway.
    GATEWAY_STORED = "gateway.stored";
    /// An ack was handed to the wire.
    GATEWAY_ACKED = "gateway.acked";
    /// The Hello transaction is durable, no Welcome was sent.
    GATEWAY_HELLO = "gateway.hello";
    /// A node that leaves is gone at the worker, and not yet at the gateway.
    GATEWAY_LEAVES = "gateway.leaves";
    /// A node that leaves is gone at worker and gateway, and its word is not acked.
    GATEWAY_LEFT = "gateway.left";
    /// A certificate is durable at the gateway, no answer was sent.
    GATEWAY_JOINED = "gateway.joined";
    /// The worker has let a node in, and signed nothing yet.
    WORKER_LETS_IN = "worker.lets-in";
    /// A certificate is in the worker's tables, and nobody was answered.
    WORKER_ISSUED = "worker.issued";
}

impl Step {
    /// Its name in `BCD_FAILPOINT`.
    pub fn name(self) -> &'static str {
        self.0
    }
}

/// Marks that the program is at `step`.
#[cfg(not(feature = "fakehw"))]
pub fn hit(_step: Step) {}

/// A task of an agent, for a spawn: it stops at the steps at which its agent is to stop.
#[cfg(not(feature = "fakehw"))]
pub fn carried<T>(task: T) -> T {
    task
}

/// For whoever catches a panic of an agent's task: one that stands for a kill goes on.
#[cfg(not(feature = "fakehw"))]
pub fn pass_on(_panic: Box<dyn std::any::Any + Send>) {}

#[cfg(feature = "fakehw")]
pub use agent::{carried, pass_on};

/// Marks that the program is at `step`; dies here when it was told to.
#[cfg(feature = "fakehw")]
pub fn hit(step: Step) {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU32, Ordering};
    static ARMED: OnceLock<Option<(String, AtomicU32)>> = OnceLock::new();
    agent::hit(step);
    let armed = ARMED.get_or_init(|| {
        let text = std::env::var("BCD_FAILPOINT").ok()?;
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name.to_owned(), count.parse().ok()?),
            None => (text, 1),
        };
        Some((name, AtomicU32::new(count)))
    });
    if let Some((name, left)) = armed
        && name == step.name()
        && left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        note(step);
        let _ = nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL);
    }
}

/// One line for who counts the deaths; the write is in the page cache before the signal is sent.
#[cfg(feature = "fakehw")]
fn note(step: Step) {
    use std::io::Write as _;
    let Some(path) = std::env::var_os("BCD_FAILPOINT_HITS") else { return };
    if let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(path) {
        let _ = file.write_all(format!("{}\n", step.name()).as_bytes());
    }
}

/// Kills of one agent among many in one process.
#[cfg(feature = "fakehw")]
pub mod agent {
    use std::any::Any;
    use std::sync::{Arc, Mutex, PoisonError};

    use super::Step;

    tokio::task_local! {
        static ARMED: Armed;
    }

    /// The step at which an agent dies; its clones are the same.
    #[derive(Debug, Clone, Default)]
    pub struct Armed(Arc<Mutex<Option<Step>>>);

    /// What the agent's task unwinds with: the step.
    #[derive(Debug)]
    pub struct Killed(pub Step);

    impl Armed {
        /// The agent dies the next time that it comes to `step`.
        pub fn at(&self, step: Step) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(step);
        }

        /// It dies at no step.
        pub fn disarm(&self) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }

        /// Runs an agent. At the step its task unwinds with [`Killed`].
        pub async fn over<T>(self, agent: impl Future<Output = T>) -> T {
            ARMED.scope(self, agent).await
        }
    }

    pub(super) fn hit(step: Step) {
        let strikes = ARMED.try_with(|armed| {
            let mut armed = armed.0.lock().unwrap_or_else(PoisonError::into_inner);
            armed.take_if(|at| *at == step).is_some()
        });
        if strikes == Ok(true) {
            // Not `panic!`: a kill is nothing to print a backtrace about.
            std::panic::resume_unwind(Box::new(Killed(step)));
        }
    }

    /// A task of an agent, for a spawn: it stops at the steps at which its agent is to stop.
    pub fn carried<T>(task: impl Future<Output = T>) -> impl Future<Output = T> {
        let armed = ARMED.try_with(Clone::clone).unwrap_or_default();
        ARMED.scope(armed, task)
    }

    /// For whoever catches a panic of an agent's task: one that stands for a kill goes on.
    pub fn pass_on(panic: Box<dyn Any + Send>) {
        if panic.is::<Killed>() {
            std::panic::resume_unwind(panic);
        }
    }

    #[cfg(test)]
    mod tests {
        use super::super::{DONE, RUNNING, hit};
        use super::*;

        #[tokio::test]
        async fn an_armed_agent_unwinds_at_its_step_alone_and_once_and_so_does_a_task_that_it_spawned() {
            let armed = Armed::default();
            let agent = || {
                tokio::spawn(armed.clone().over(async {
                    hit(RUNNING);
                    let step = tokio::spawn(carried(async { hit(DONE) })).await;
                    if let Err(error) = step {
                        pass_on(error.into_panic());
                    }
                }))
            };
            agent().await.expect("nothing is armed");
            armed.at(DONE);
            let killed = agent().await.expect_err("killed").into_panic();
            assert!(killed.is::<Killed>());
            agent().await.expect("a kill happens once");
            armed.at(RUNNING);
            hit(RUNNING);
            agent().await.expect_err("another task's steps are not the agent's");
        }
    }
}
