//! The journal by its behaviour: a directory, processes one after another, deliveries.

mod admitting;
mod auditing;
mod events;
mod inspecting;
mod opening;
mod recovering;
mod trouble;
mod writing;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use rusqlite::Connection;

use super::*;
use crate::admission::Context;
use crate::model::{AnswerState, Command, Effect, Outcome, Reason, Role, Terminal};
use crate::wire::dsse::{Audience, COMMAND_TYPE, Envelope, Policy, Verified, verify_command};

const ISSUED: &str = "2026-11-29T10:00:00Z";
const NOW: &str = "2026-11-29T10:30:00Z";
const NOT_AFTER: &str = "2026-11-29T11:00:00Z";
/// Past not_after, within the life of a tombstone.
const LATER: &str = "2026-11-29T11:01:00Z";
/// Past the life of a tombstone.
const MUCH_LATER: &str = "2026-11-29T11:06:00Z";
const BIRTH: &str = "2026-11-01T00:00:00Z";

const ONCE: &str = r#"{"argv":["true"]}"#;
const OTHER_BYTES: &str = r#"{"argv":["false"]}"#;
const RETRY_SAFE: &str = r#"{"argv":["true"],"retry_safe":true}"#;

fn at(text: &str) -> ServerTime {
    ServerTime::parse(text).expect("a time")
}

fn id(text: &str) -> CommandId {
    CommandId::new(text).expect("an id")
}

/// A machine: one state directory, and a new incarnation for each process.
struct Machine {
    dir: tempfile::TempDir,
    incarnations: AtomicU32,
}

impl Machine {
    /// With a joined node's journal.
    fn new() -> Self {
        let machine = Self::bare();
        Locked::create(&machine.options(Mode::Inline), Some(at(BIRTH)), journal_id("j-1")).expect("created");
        machine
    }

    /// With an empty disk.
    fn bare() -> Self {
        Self { dir: tempfile::tempdir().expect("a directory"), incarnations: AtomicU32::new(0) }
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn boot_id(&self) -> BootId {
        BootId::new("b-1").expect("an id")
    }

    fn starter(&self, journal: &Journal) -> begun::Starter {
        begun::Starter {
            node_id: NodeId::new("n-1").expect("an id"),
            journal_id: journal.id(),
            boot_id: self.boot_id(),
        }
    }

    fn db(&self) -> PathBuf {
        self.state().join("journal.db")
    }

    fn options(&self, mode: Mode) -> Options {
        let n = self.incarnations.fetch_add(1, Ordering::Relaxed);
        Options {
            incarnation: Incarnation::new(format!("i-{n}")).expect("an id"),
            boot_id: self.boot_id(),
            ..Options::of_a_test(self.state(), mode)
        }
    }

    fn locked(&self) -> Locked {
        Locked::open(self.options(Mode::Inline), journal_id("j-2")).expect("opened")
    }

    /// A process that starts at the signed time; dropping the journal is its crash.
    fn start_at(&self, signed: &str) -> (Journal, Recovered) {
        self.locked().recover(Some(at(signed))).expect("recovered")
    }

    fn start(&self) -> Journal {
        self.start_at(ISSUED).0
    }

    fn start_faulty(&self) -> (Journal, Faults) {
        let faults = Faults::default();
        let (journal, _) = self.locked().with_faults(faults.clone()).recover(None).expect("recovered");
        (journal, faults)
    }

    fn start_thread(&self) -> Journal {
        self.start_in(Mode::Thread)
    }

    fn start_in(&self, mode: Mode) -> Journal {
        let locked = Locked::open(self.options(mode), journal_id("j-2")).expect("opened");
        locked.recover(Some(at(ISSUED))).expect("recovered").0
    }

    /// The database, while no process has it.
    fn sql(&self) -> Connection {
        Connection::open(self.db()).expect("a database")
    }

    fn records(&self) -> usize {
        std::fs::read_dir(self.state().join("begun")).expect("a directory").count()
    }
}

fn journal_id(text: &str) -> JournalId {
    JournalId::new(text).expect("an id")
}

fn command(id: &str, args: &str) -> Verified<Command> {
    kind_of_command(id, "node.exec", args)
}

fn kind_of_command(id: &str, kind: &str, args: &str) -> Verified<Command> {
    let payload = format!(
        r#"{{"trust_domain":"lab","node_id":"n-1","id":"{id}","kind":"{kind}","issued_at":"{ISSUED}",
        "not_after":"{NOT_AFTER}","args":{args}}}"#
    );
    let envelope =
        Envelope { payload_type: COMMAND_TYPE.into(), payload: Bytes::from(payload), signatures: Vec::new() };
    let audience = Audience { trust_domain: "lab".into(), node_id: NodeId::new("n-1").expect("an id") };
    verify_command(&envelope, &audience, &Policy::None.into()).expect("verified")
}

fn context() -> Context {
    Context {
        upgrade_only: false,
        role: Role::Host,
        denied: Arc::default(),
        now: Some(at(NOW)),
        signed: Some(at(ISSUED)),
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    }
}

async fn deliver(journal: &Journal, id: &str, args: &str) -> Admission {
    journal.admit(command(id, args), context()).await.expect("written")
}

async fn accepted(journal: &Journal, id: &str, args: &str) -> Durable<Accepted> {
    match deliver(journal, id, args).await {
        Admission::Accepted(accepted) => accepted,
        other => panic!("not accepted: {other:?}"),
    }
}

async fn running(journal: &Journal, id: &str, args: &str) -> Durable<Running> {
    journal.start(accepted(journal, id, args).await, Some(at(NOW))).await.expect("started")
}

async fn done(journal: &Journal, id: &str, args: &str) -> Durable<Done> {
    journal.finish(running(journal, id, args).await, success()).await.expect("finished")
}

fn success() -> Outcome {
    Outcome {
        state: Terminal::Succeeded,
        reason: None,
        message: String::new(),
        effect: Effect::Complete,
        attempt: 1,
        started: Some(at(NOW)),
        finished: Some(at(NOW)),
        duration_ms: 7,
        output: b"{\"exit\":0}".to_vec(),
    }
}

fn state_of(admission: Admission) -> AnswerState {
    match admission {
        Admission::Answered(answer) => answer.state,
        other => panic!("not merely answered: {other:?}"),
    }
}

fn ended(admission: Admission) -> Outcome {
    match admission {
        Admission::Ended(done) => done.into_inner().outcome,
        other => panic!("not ended: {other:?}"),
    }
}

async fn result(journal: &Journal, name: &str) -> Outcome {
    journal.result(id(name)).await.expect("read").expect("a result").into_inner().outcome
}
