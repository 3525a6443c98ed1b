//! The join: a ticket and a new key become a durable identity, or nothing changes.
//!
//! Order, each step durable before the next: key file, join-pending.json (names the key), the gateway's answer
//! (judged as a whole), the new journal, identity.json by rename. A join that is killed anywhere and repeated with
//! the same ticket goes on with the same key, for which the control plane answers with the same node id; so a ticket
//! for one machine is not used twice.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;
use rustls::pki_types::CertificateDer;
use tokio::time::Instant;

use super::accept::{Accepted, AnswerError, Asked, accept};
use super::keys::{self, KeyError, NodeKey};
use super::reset::{self, ResetError};
use super::stored::{self, FileError, Pending, Stored as _, StoredIdentity};
use super::ticket::Ticket;
use crate::blocking;
use crate::failpoint;
use crate::journal;
use crate::model::{Digest, Exit, JournalId, Machine, NodeId, Reason, ServerTime};
use crate::ports::Connect;
use crate::state_dir::{DirLock, StateDir, StateError};
use crate::wire::enroll::SealError;
use crate::wire::link::{EndKind, Endpoint, LinkEnd};
use crate::wire::version;

mod call;

/// Longest wait between two attempts that no gateway asked for.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// Dial and answer together.
const ATTEMPT: Duration = Duration::from_secs(20);

/// What a join needs.
#[derive(Debug)]
pub struct Options {
    /// The state directory; made where it is missing.
    pub state: PathBuf,
    /// The right to join, and what is pinned.
    pub ticket: Ticket,
    /// How long to keep trying; absent: for ever.
    pub patience: Option<Duration>,
    /// How the new journal is made; the node id and the directory are filled in here.
    pub journal: JournalOptions,
    /// Advisory facts of the machine, at most [`crate::model::limits::JOIN_FACTS`].
    pub facts: BTreeMap<String, String>,
    /// What ties the identity to this machine.
    pub machine: Machine,
    /// The way to the gateway.
    pub connect: Arc<dyn Connect>,
    /// For the waits and the journal's id. The key does not come from it.
    pub rng: StdRng,
}

/// What making a journal needs beside the identity.
#[derive(Debug, Clone)]
pub struct JournalOptions {
    /// This process.
    pub incarnation: crate::model::Incarnation,
    /// This boot.
    pub boot_id: crate::model::BootId,
    /// See [`journal::Options::wal_bytes`].
    pub wal_bytes: u64,
}

/// A join that is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Joined {
    /// Given by the control plane.
    pub node_id: NodeId,
    /// Identity generation.
    pub generation: u64,
    /// SHA-256 of the key's public half, for operators who compare.
    pub fingerprint: Digest,
    /// When the certificate runs out.
    pub not_after: ServerTime,
    /// The control plane's clock at the answer; absent when the answer came to an earlier, killed join.
    pub server_time: Option<ServerTime>,
}

/// One attempt failed, and another will follow.
#[derive(Debug)]
pub struct Retry<'a> {
    /// Who was asked.
    pub endpoint: &'a Endpoint,
    /// How it ended.
    pub end: &'a LinkEnd,
    /// The next attempt comes after this.
    pub wait: Duration,
}

/// Why a join failed.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// There is an identity.
    #[error("this machine has joined already, as {node_id} ({}); if it is to {}", .path.display(), super::join_again_beside(.path))]
    AlreadyJoined {
        /// Its node id.
        node_id: NodeId,
        /// identity.json.
        path: PathBuf,
    },
    /// A file or directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// identity.json or join-pending.json cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// A reset that was killed cannot be finished.
    #[error(transparent)]
    Reset(#[from] ResetError),
    /// The key cannot be made or used.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The journal cannot be made.
    #[error(transparent)]
    Journal(#[from] journal::OpenError),
    /// The token cannot be sealed to the ticket's key.
    #[error("the ticket cannot be used; ask the control plane for a new one")]
    Seal(#[from] SealError),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up for the join")]
    Tls(#[from] rustls::Error),
    /// Every gateway shows a certificate that the ticket does not pin.
    #[error(
        "{endpoint} is not the gateway of this ticket: {detail}; use a ticket of that gateway, or check the address"
    )]
    AnotherGateway {
        /// The last one asked.
        endpoint: Endpoint,
        /// What does not hold.
        detail: String,
    },
    /// There is nobody to ask.
    #[error("the ticket names no gateway endpoint; ask the control plane for a new one")]
    NoEndpoint,
    /// Nobody answered.
    #[error("no gateway was reached within {}; last {endpoint}: {detail}; check that it runs and that this machine may dial it, then join again with the same ticket", seconds(.tried))]
    NoGateway {
        /// The last one asked.
        endpoint: Endpoint,
        /// How that ended.
        detail: String,
        /// How long it was tried.
        tried: Duration,
    },
    /// The gateway asks to come back later.
    #[error("the gateway {endpoint} is busy ({detail}); join again in {} with the same ticket, or use --wait", seconds(.after))]
    Busy {
        /// The last one asked.
        endpoint: Endpoint,
        /// Why.
        detail: String,
        /// When to come back.
        after: Duration,
    },
    /// The gateway says no, and would again.
    #[error("{}", refusal(.endpoint, *.reason, .detail))]
    Refused {
        /// Who said so.
        endpoint: Endpoint,
        /// Its token.
        reason: Option<Reason>,
        /// Its words.
        detail: String,
    },
    /// The answer does not hold; nothing was written.
    #[error("the answer of {endpoint} to the join does not hold, and nothing of it was kept")]
    Answer {
        /// Who answered.
        endpoint: Endpoint,
        /// What does not hold.
        source: AnswerError,
    },
    /// A blocking step did not come to its end.
    #[error("a step of the join panicked")]
    Panicked(#[from] tokio::task::JoinError),
}

fn seconds(time: &Duration) -> String {
    format!("{} s", time.as_secs().max(1))
}

fn refusal(endpoint: &Endpoint, reason: Option<Reason>, detail: &str) -> String {
    if let Some(mend) = reason.and_then(|reason| version::mend(reason, endpoint)) {
        return mend;
    }
    match reason {
        Some(Reason::TicketInvalid) => format!(
            "the gateway {endpoint} does not know this ticket's token; ask its control plane for a new ticket"
        ),
        Some(Reason::TicketExpired) => {
            "the ticket has run out by the gateway's clock; ask the control plane for a new one".into()
        }
        Some(Reason::TicketUsed) => {
            "the ticket has been used up by other machines; ask the control plane for a new one".into()
        }
        Some(reason) => format!("the gateway {endpoint} refuses the join: {detail} ({reason})"),
        None => format!("the gateway {endpoint} refuses the join: {detail}"),
    }
}

impl JoinError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::AlreadyJoined { .. } => Exit::CannotWrite,
            Self::State(error) | Self::File(FileError::State(error)) | Self::Key(KeyError::State(error)) => {
                error.exit()
            }
            Self::File(FileError::Newer { .. }) => Exit::ForeignState,
            Self::File(_) | Self::Key(_) => Exit::CannotWrite,
            Self::Journal(error) => error.exit(),
            Self::Reset(error) => error.exit(),
            Self::AnotherGateway { .. } | Self::NoEndpoint | Self::Seal(_) => Exit::BadInput,
            Self::Answer { source: AnswerError::TrustDomain { .. }, .. } => Exit::BadInput,
            Self::Refused { reason: Some(reason), .. } if ticket_is_bad(*reason) => Exit::BadInput,
            Self::NoGateway { .. } => Exit::NoGateway,
            Self::Busy { .. } => Exit::TryLater,
            Self::Refused { .. } | Self::Answer { .. } | Self::Tls(_) | Self::Panicked(_) => Exit::Failed,
        }
    }
}

fn ticket_is_bad(reason: Reason) -> bool {
    matches!(reason, Reason::TicketInvalid | Reason::TicketExpired | Reason::TicketUsed)
}

/// Joins. `progress` is told of every failed attempt that will be followed by another.
///
/// # Errors
/// See [`JoinError`]; the old state stays, and the same ticket can be used again.
pub async fn join(mut options: Options, progress: impl FnMut(Retry<'_>)) -> Result<Joined, JoinError> {
    let (state, token) = (options.state.clone(), options.ticket.token.digest());
    let prepared = blocking::run(move || prepare(&state, token)).await??;
    let prepared = match prepared {
        Prepared::Done(joined) => return Ok(joined),
        Prepared::Key(prepared) => prepared,
    };
    let call =
        call::Call::new(&options.ticket, prepared.key.signing_request()?, options.facts, options.connect)?;
    let (endpoint, answer) = ask(
        &options.ticket.endpoints,
        options.patience,
        &mut options.rng,
        async |endpoint: &Endpoint| call.attempt(endpoint).await,
        progress,
    )
    .await?;
    let asked = Asked { spki: &prepared.key.spki(), request: &call.digest() };
    let accepted = accept(&options.ticket, asked, &answer.gateway, &answer.answer)
        .map_err(|source| JoinError::Answer { endpoint, source })?;
    failpoint::hit(failpoint::JOIN_ANSWERED);
    let journal_id = JournalId::random(&mut options.rng);
    let journal = options.journal;
    let mut stored = StoredIdentity::new(&accepted, options.machine);
    stored.token_sha256 = Some(token);
    blocking::run(move || install(&prepared, &accepted, &journal, journal_id, &stored)).await?
}

enum Prepared {
    /// An earlier join was killed after its switch: nothing is left to ask.
    Done(Joined),
    Key(Box<Pledge>),
}

/// The state directory taken for this join, with the key that join-pending.json names.
struct Pledge {
    dir: StateDir,
    _lock: DirLock,
    key: NodeKey,
}

fn prepare(state: &Path, token: Digest) -> Result<Prepared, JoinError> {
    let dir = StateDir::ensure(state)?;
    let lock = dir.lock()?;
    let pending = Pending::read(&dir)?;
    if let Some(stored) = StoredIdentity::read(&dir)? {
        return match pending {
            Some(pending) if pending.key == stored.key => finish(&dir, &stored, None).map(Prepared::Done),
            _ => {
                let path = dir.path().join(stored::IDENTITY);
                Err(JoinError::AlreadyJoined { node_id: stored.node_id, path })
            }
        };
    }
    if pending.is_none() {
        reset::finish_killed(&dir)?;
    }
    if let Some(pending) = pending
        && pending.token_sha256 == token
        && let Some(key) = NodeKey::load(&dir, &pending.key.0)?
    {
        return Ok(Prepared::Key(Box::new(Pledge { dir, _lock: lock, key })));
    }
    let key = NodeKey::generate()?;
    key.store(&dir)?;
    failpoint::hit(failpoint::JOIN_KEY);
    Pending::new(key.spki(), token).write(&dir)?;
    failpoint::hit(failpoint::JOIN_PENDING);
    Ok(Prepared::Key(Box::new(Pledge { dir, _lock: lock, key })))
}

fn install(
    pledge: &Pledge,
    accepted: &Accepted,
    journal: &JournalOptions,
    journal_id: JournalId,
    stored: &StoredIdentity,
) -> Result<Joined, JoinError> {
    let options = journal::Options {
        state: pledge.dir.path().to_owned(),
        node_id: accepted.leaf.node_id.clone(),
        incarnation: journal.incarnation.clone(),
        boot_id: journal.boot_id.clone(),
        wal_bytes: journal.wal_bytes,
        mode: journal::Mode::Inline,
    };
    journal::Locked::create(&options, Some(accepted.server_time), journal_id)?;
    failpoint::hit(failpoint::JOIN_JOURNAL);
    stored.write(&pledge.dir)?;
    failpoint::hit(failpoint::JOIN_IDENTITY);
    finish(&pledge.dir, stored, Some(accepted.server_time))
}

/// What is left to do after the switch.
fn finish(
    dir: &StateDir,
    stored: &StoredIdentity,
    server_time: Option<ServerTime>,
) -> Result<Joined, JoinError> {
    keys::remove_unused(dir, &stored.key.0)?;
    dir.remove(stored::PENDING)?;
    let leaf = stored.chain.first().and_then(|der| super::Leaf::read(&CertificateDer::from(&*der.0)).ok());
    Ok(Joined {
        node_id: stored.node_id.clone(),
        generation: stored.generation,
        fingerprint: stored.key.0,
        not_after: leaf.map(|leaf| leaf.validity.not_after).unwrap_or_default(),
        server_time,
    })
}

/// Asks the endpoints in turn until one answers, one says no for good, or the time is over.
async fn ask<T>(
    endpoints: &[Endpoint],
    patience: Option<Duration>,
    rng: &mut StdRng,
    attempt: impl AsyncFn(&Endpoint) -> Result<T, LinkEnd>,
    mut progress: impl FnMut(Retry<'_>),
) -> Result<(Endpoint, T), JoinError> {
    let start = Instant::now();
    let mut doublings = 0_u32;
    let mut untrusted = 0_usize;
    for endpoint in endpoints.iter().cycle() {
        let left = patience.map(|patience| patience.saturating_sub(start.elapsed()));
        let limit = left.map_or(ATTEMPT, |left| left.clamp(Duration::from_secs(1), ATTEMPT));
        let end = match tokio::time::timeout(limit, attempt(endpoint)).await {
            Ok(Ok(answer)) => return Ok((endpoint.clone(), answer)),
            Ok(Err(end)) => end,
            Err(_) => no_answer(limit),
        };
        untrusted = if end.kind == EndKind::ServerUntrusted { untrusted + 1 } else { 0 };
        if let Some(error) = for_good(endpoint, &end, untrusted >= endpoints.len()) {
            return Err(error);
        }
        let wait = match end.pushback {
            Some(pushback) => {
                doublings = 0;
                pushback
            }
            None => {
                let most = MAX_WAIT.min(Duration::from_secs(1) * (1 << doublings.min(6)));
                doublings += 1;
                rng.random_range(Duration::ZERO..=most)
            }
        };
        if patience.is_some_and(|patience| start.elapsed() + wait >= patience) {
            return Err(out_of_patience(endpoint.clone(), end, wait, start.elapsed()));
        }
        progress(Retry { endpoint, end: &end, wait });
        tokio::time::sleep(wait).await;
    }
    Err(JoinError::NoEndpoint)
}

fn no_answer(within: Duration) -> LinkEnd {
    LinkEnd {
        kind: EndKind::Lost,
        reason: Some(Reason::DialTimeout),
        pushback: None,
        revocation: None,
        detail: format!("no answer within {}", seconds(&within)),
    }
}

fn for_good(endpoint: &Endpoint, end: &LinkEnd, all_untrusted: bool) -> Option<JoinError> {
    let endpoint = endpoint.clone();
    let detail = end.detail.clone();
    let said = end.reason.is_some_and(|reason| {
        ticket_is_bad(reason)
            || matches!(reason, Reason::ProtocolTooOld | Reason::ProtocolTooNew | Reason::ProtocolRange)
    });
    if said || end.kind == EndKind::Refused {
        return Some(JoinError::Refused { endpoint, reason: end.reason, detail });
    }
    all_untrusted.then_some(JoinError::AnotherGateway { endpoint, detail })
}

fn out_of_patience(endpoint: Endpoint, end: LinkEnd, wait: Duration, tried: Duration) -> JoinError {
    match end.kind {
        EndKind::Unavailable => JoinError::Busy { endpoint, detail: end.detail, after: wait },
        _ => JoinError::NoGateway { endpoint, detail: end.detail, tried },
    }
}

#[cfg(test)]
mod tests;
