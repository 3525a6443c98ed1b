//! A journal under measurement.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde_json::json;

use super::{JournalBenchError, timed};
use crate::admission::Context;
use crate::bench::{all, fill};
use crate::journal::{self, Accepted, Admission, Durable, EventLimits, Journal, Locked, Mode};
use crate::model::limits::TOMBSTONE_GRACE;
use crate::model::{
    BootId, Command, CommandId, Digest, Incarnation, JournalId, NodeId, Outcome, Reason, Role, ServerTime,
    Terminal,
};
use crate::node::WAL_BYTES;
use crate::wire::dsse::{Audience, COMMAND_TYPE, Envelope, Policy, Verified, verify_command};

const DOMAIN: &str = "bench.invalid";
/// When the first round's commands were signed; each round is an hour later than the one before it.
const FIRST: ServerTime = ServerTime(1_800_000_000_000);
const HOUR: Duration = Duration::from_secs(3600);
/// A journal, and what is needed to give it commands.
pub(super) struct Subject {
    journal: Journal,
    node_id: NodeId,
    size: usize,
    rng: StdRng,
    now: ServerTime,
    /// Its events stay, so that it stays full.
    full: bool,
    ready: Vec<Verified<Command>>,
    taken: Vec<Durable<Accepted>>,
}

impl Subject {
    /// A new journal as a join makes it, opened as a start does, with the log and the audit of a host.
    pub(super) fn create(state: &Path, size: usize, mode: Mode) -> Result<Self, JournalBenchError> {
        let (options, rng) = options(state, mode)?;
        Locked::create(&options, Some(FIRST), JournalId::random(&mut rng.clone()))?;
        let locked = Locked::open(options, JournalId::random(&mut rng.clone()))?;
        Self::over(locked, size, rng)
    }

    /// The same, with its syncs counted.
    #[cfg(feature = "fakehw")]
    pub(super) fn create_counted(
        state: &Path,
        size: usize,
    ) -> Result<(Self, journal::SyncCount), JournalBenchError> {
        let (options, rng) = options(state, Mode::Inline)?;
        Locked::create(&options, Some(FIRST), JournalId::random(&mut rng.clone()))?;
        let (locked, count) = Locked::open_counting(options, JournalId::random(&mut rng.clone()))?;
        Ok((Self::over(locked, size, rng)?, count))
    }

    fn over(locked: Locked, size: usize, rng: StdRng) -> Result<Self, JournalBenchError> {
        let (journal, _) = locked.with_event_limits(EventLimits::default()).with_audit(true).recover(None)?;
        let node_id = node_id()?;
        Ok(Self {
            journal,
            node_id,
            size,
            rng,
            now: FIRST,
            full: false,
            ready: Vec::new(),
            taken: Vec::new(),
        })
    }

    /// The same, filled with events up to its limits before it is opened: each event has an older one make room.
    pub(super) async fn create_full(state: &Path, size: usize) -> Result<Self, JournalBenchError> {
        // Many writers share a sync only where the writer has a thread.
        let filling = Self::create(state, size, Mode::Thread)?;
        fill::metrics(&filling.journal).await?;
        filling.journal.close().await;
        let (options, rng) = options(state, Mode::Inline)?;
        let locked = Locked::open(options, JournalId::random(&mut rng.clone()))?;
        Ok(Self { full: true, ..Self::over(locked, size, rng)? })
    }

    /// Makes commands for so many accepts.
    pub(super) fn prepare(&mut self, count: usize) -> Result<(), JournalBenchError> {
        self.ready = self.commands(count)?;
        Ok(())
    }

    /// The time of the next accept.
    pub(super) async fn accept(&mut self) -> Result<Duration, JournalBenchError> {
        let command = self.ready.pop().ok_or_else(|| JournalBenchError::Refused("none is left".into()))?;
        let (accepted, time) = timed(accept(&self.journal, command, self.now)).await?;
        self.taken.push(accepted);
        Ok(time)
    }

    /// How long so many accepts take that come from so many submitters, each with one at a time.
    pub(super) async fn accepts_at_once(
        &mut self,
        count: usize,
        submitters: usize,
    ) -> Result<Duration, JournalBenchError> {
        let mut commands = self.commands(count)?.into_iter();
        let mut work = Vec::with_capacity(submitters);
        for _ in 0..submitters {
            let share: Vec<_> = commands.by_ref().take(count / submitters).collect();
            let (journal, now) = (self.journal.clone(), self.now);
            work.push(async move {
                let mut taken = Vec::with_capacity(share.len());
                for command in share {
                    taken.push(accept(&journal, command, now).await?);
                }
                Ok::<_, JournalBenchError>(taken)
            });
        }
        let (taken, took) = timed(all(work.into_iter())).await?;
        self.taken.extend(taken.into_iter().flatten());
        self.forget().await?;
        Ok(took)
    }

    /// Ends and acks what was accepted, and lets signed time pass their tombstones.
    pub(super) async fn forget(&mut self) -> Result<(), JournalBenchError> {
        let taken = std::mem::take(&mut self.taken);
        let count = taken.len();
        let (mut ids, mut work) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for accepted in taken {
            ids.push(accepted.command.command().header.id.clone());
            let journal = self.journal.clone();
            work.push(async move {
                let outcome = Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "measured");
                let ended = journal.finish_accepted(accepted, outcome).await;
                ended.map(drop).map_err(|(_, _, error)| JournalBenchError::from(error))
            });
        }
        all(work.into_iter()).await?;
        self.journal.acked(ids);
        if !self.full {
            // Copied first: an inline journal writes within the call, and publishes to who borrows.
            let last = self.journal.pending_events().borrow().last;
            self.journal.events_acked(self.journal.id(), last);
        }
        // As if they were in the file.
        let last = *self.journal.audit_lines_made().borrow();
        self.journal.audited(Ok(last));
        self.now = self.now.plus(HOUR);
        let passed = self.now.plus(TOMBSTONE_GRACE).plus(Duration::from_secs(1));
        // Each commit forgets a bounded number of them.
        for _ in 0..=count.div_ceil(128) {
            self.journal.note_time(passed, Some(passed));
            self.journal.look(true).await?;
        }
        Ok(())
    }

    /// Verified commands, as large as asked for.
    fn commands(&mut self, count: usize) -> Result<Vec<Verified<Command>>, JournalBenchError> {
        let (issued, not_after) = (self.now, self.now.plus(HOUR));
        let audience = Audience { trust_domain: DOMAIN.into(), node_id: self.node_id.clone() };
        let mut commands = Vec::with_capacity(count);
        for _ in 0..count {
            let id = CommandId::random(&mut self.rng);
            let mut payload = json!({
                "trust_domain": DOMAIN, "node_id": self.node_id.as_str(), "id": id.as_str(), "kind": "node.probe",
                "issued_at": issued.to_string(), "not_after": not_after.to_string(), "args": {},
            })
            .to_string();
            while payload.len() < self.size {
                payload.push(' ');
            }
            let payload_type = COMMAND_TYPE.into();
            let envelope = Envelope { payload_type, payload: Bytes::from(payload), signatures: Vec::new() };
            // A probe destroys nothing, so that this policy takes it unsigned in every build.
            let verified = verify_command(&envelope, &audience, &Policy::Destructive.into());
            commands.push(verified.map_err(|refusal| JournalBenchError::Refused(refusal.detail))?);
        }
        Ok(commands)
    }
}

async fn accept(
    journal: &Journal,
    command: Verified<Command>,
    now: ServerTime,
) -> Result<Durable<Accepted>, JournalBenchError> {
    let context = Context {
        upgrade_only: false,
        role: Role::Host,
        denied: std::sync::Arc::default(),
        now: Some(now),
        signed: None,
        applied_generation: 0,
        credit: true,
        stopping: false,
        held: false,
    };
    match journal.admit(command, context).await? {
        Admission::Accepted(accepted) => Ok(accepted),
        other => Err(JournalBenchError::Refused(format!("{other:?}"))),
    }
}

fn node_id() -> Result<NodeId, JournalBenchError> {
    NodeId::new("n-bench").map_err(|error| JournalBenchError::Refused(error.to_string()))
}

/// What makes and opens the journal, and a chance of its own.
fn options(state: &Path, mode: Mode) -> Result<(journal::Options, StdRng), JournalBenchError> {
    // Each journal its own ids, the same in every run.
    let mut rng = StdRng::from_seed(Digest::of(state.file_name().unwrap_or_default().as_encoded_bytes()).0);
    let options = journal::Options {
        state: state.to_owned(),
        node_id: node_id()?,
        incarnation: Incarnation::random(&mut rng),
        boot_id: BootId::random(&mut rng),
        wal_bytes: WAL_BYTES,
        mode,
    };
    Ok((options, rng))
}
