//! Renewal: a new certificate for a new key, proven by the old one, takes the place of the old one whole or not at all.
//! Where that has run out it is a re-join ([`rejoin`]), which ends in the same steps.
//!
//! Order, each step durable before the next: the answer, judged as a whole; the new key's file; identity.json by
//! rename, which is the switch; the old key's file is removed. Killed anywhere, the node has the old identity or the
//! new one.

pub(super) mod call;
pub mod rejoin;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;

use super::accept::{Accepted, Answer, AnswerError, Asked, judge};
use super::certificate::{CertificateError, chains_to};
use super::keys::{self, KeyError, NodeKey};
use super::stored::{FileError, Stored as _, StoredIdentity};
use super::{Identity, Leaf};
use crate::clock::Clock;
use crate::failpoint;
use crate::model::{Digest, Reason, ServerTime};
use crate::ports::Connect;
use crate::state_dir::{StateDir, StateError};
use crate::wire::bundle::{BundleError, Trust};
use crate::wire::dsse::{Document as _, Envelope, SignError, Verified, sign, verify_document};
use crate::wire::enroll::{Issued, RenewAnswer, RenewProof, renew_request_digest};
use crate::wire::link::{Endpoint, LinkEnd, Validity};
use crate::wire::pb;

pub use call::{Caller, Challenge, Refused};

/// An answer that took longer may be one that a gateway has kept back.
const FRESH: Duration = Duration::from_secs(60);

/// Why no new certificate came.
#[derive(Debug, thiserror::Error)]
pub enum RenewError {
    /// The gateway did not answer, or said no.
    #[error("{endpoint} gave no certificate")]
    Ended {
        /// Who was asked last.
        endpoint: Endpoint,
        /// How it ended.
        source: LinkEnd,
    },
    /// There is nobody to ask.
    #[error("no gateway is known to this node")]
    NoEndpoint,
    /// The answer does not hold; nothing was written.
    #[error("the answer of {endpoint} does not hold, and nothing of it was kept")]
    Answer {
        /// Who answered.
        endpoint: Endpoint,
        /// What does not hold.
        source: AnswerError,
    },
    /// The answer is old.
    #[error("the answer of {endpoint} took {} s, over {} s, so it says nothing of the time now", .took.as_secs(), FRESH.as_secs())]
    Late {
        /// Who answered.
        endpoint: Endpoint,
        /// How long it took.
        took: Duration,
    },
    /// TLS cannot be set up with the identity.
    #[error("TLS cannot be set up to ask for a certificate")]
    Tls(#[from] rustls::Error),
    /// The proof cannot be signed.
    #[error("the key of the certificate cannot prove itself")]
    Proof(#[from] SignError),
    /// The answer cannot be kept.
    #[error(transparent)]
    Keep(#[from] KeepError),
    /// A blocking step did not come to its end.
    #[error("a step of the renewal panicked")]
    Panicked(#[from] tokio::task::JoinError),
}

/// Why something that was verified cannot take its place in the identity.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// A file or directory cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// identity.json cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The new key cannot be made or kept.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A join or a revocation came in between.
    #[error("identity.json was replaced meanwhile; the new one is left as it is")]
    Replaced,
    /// The bundle that is offered, or the one in identity.json.
    #[error("the trust bundle does not hold beside the one in identity.json")]
    Bundle(#[from] BundleError),
    /// A newer bundle came in between, and its roots do not know the new certificate.
    #[error("the trust bundle that came meanwhile does not vouch for the new certificate")]
    Unvouched(#[source] CertificateError),
}

impl RenewError {
    /// Takes the revocation that came with a gateway's no; it is not verified.
    pub fn take_revocation(&mut self) -> Option<Envelope> {
        match self {
            Self::Ended { source, .. } => source.revocation.take().map(|envelope| *envelope),
            _ => None,
        }
    }

    /// When the gateway wants to be asked again.
    pub fn pushback(&self) -> Option<Duration> {
        match self {
            Self::Ended { source, .. } => source.pushback,
            _ => None,
        }
    }

    /// The token of a gateway that said no.
    pub fn refusal(&self) -> Option<Reason> {
        match self {
            Self::Ended { source, .. } => source.reason,
            _ => None,
        }
    }
}

/// What an attempt sends, and what its answer is held against.
pub struct Request {
    key: NodeKey,
    csr: Vec<u8>,
    csr_sha256: Digest,
}

impl Request {
    /// A new key and the certificate request for it. Blocks as long as the key does.
    ///
    /// # Errors
    /// See [`KeyError`].
    pub fn new() -> Result<Self, KeyError> {
        Self::of(NodeKey::generate()?)
    }

    fn of(key: NodeKey) -> Result<Self, KeyError> {
        let csr = key.signing_request()?;
        Ok(Self { csr_sha256: Digest::of(&csr), csr, key })
    }

    /// The request with its proof, signed by the key of `held` at server time `now`; over the gateway's challenge, when it
    /// has given one. Blocks as long as the key does.
    ///
    /// # Errors
    /// See [`SignError`].
    pub fn prove(
        &self,
        held: &Identity,
        nonce: String,
        now: ServerTime,
        challenge: Option<&Challenge>,
    ) -> Result<pb::RenewRequest, SignError> {
        let proof = RenewProof {
            trust_domain: held.trust_domain.clone(),
            node_id: held.node_id.clone(),
            csr_sha256: self.csr_sha256,
            nonce,
            issued_at: challenge.map_or(now, |challenge| challenge.time),
            challenge: challenge.map(|challenge| challenge.text.clone()),
        };
        // Ids, times and hex cannot fail to serialise.
        let body = serde_json::to_vec(&proof).unwrap_or_default();
        let proof = sign(RenewProof::TYPE, body, &*held.key.key, Vec::new())?;
        Ok(pb::RenewRequest { csr: self.csr.clone().into(), proof: Some(proof.into()) })
    }
}

/// A renewal of one identity.
pub struct Renewal<'a> {
    /// The identity.
    pub held: &'a Identity,
    /// The lowest version of a trust bundle that is taken.
    pub trust_floor: u64,
    /// Gateways, asked in turn, once each.
    pub endpoints: &'a [Endpoint],
    /// Offers the identity's certificate.
    pub tls: Arc<ClientConfig>,
    /// The way to the gateways.
    pub connect: Arc<dyn Connect>,
    /// Measures how long an answer takes, a suspended machine's too.
    pub clock: Arc<dyn Clock>,
    /// Who calls.
    pub caller: Caller,
    /// Whether server time has been heard; else the gateway's certificate is held against the answer's time.
    pub heard: bool,
}

impl Renewal<'_> {
    /// Asks each gateway once, until one gives an answer that holds; `failed` is told of each error, and may take what came
    /// with it.
    ///
    /// # Errors
    /// See [`RenewError`]; of the last one asked.
    pub async fn ask(
        &self,
        request: &Request,
        now: ServerTime,
        mut nonce: impl FnMut() -> String,
        mut failed: impl FnMut(&mut RenewError),
    ) -> Result<Accepted, RenewError> {
        let mut last = RenewError::NoEndpoint;
        for endpoint in self.endpoints {
            match self.ask_one(endpoint, request, now, &mut nonce).await {
                Ok(accepted) => return Ok(accepted),
                Err(error @ RenewError::Proof(_)) => return Err(error),
                Err(mut error) => {
                    failed(&mut error);
                    // What another that is down does not make unsaid.
                    if last.refusal() != Some(Reason::CertificateExpired) {
                        last = error;
                    }
                }
            }
        }
        Err(last)
    }

    async fn ask_one(
        &self,
        endpoint: &Endpoint,
        request: &Request,
        now: ServerTime,
        nonce: &mut impl FnMut() -> String,
    ) -> Result<Accepted, RenewError> {
        let mut proven = request.prove(self.held, nonce(), now, None)?;
        let began = self.clock.boot();
        let mut answered = self.call(endpoint, &proven).await;
        let challenge = answered.as_mut().err().and_then(|refused| refused.challenge.take());
        if let Some(challenge) = challenge {
            proven = request.prove(self.held, nonce(), now, Some(&challenge))?;
            answered = self.call(endpoint, &proven).await;
        }
        let ended = |refused: Refused| RenewError::Ended { endpoint: endpoint.clone(), source: refused.end };
        let (answer, gateway) = answered.map_err(ended)?;
        let took = self.clock.boot().saturating_sub(began);
        taken(endpoint, took, self.heard, gateway, || {
            let asked = Asked { spki: &request.key.spki(), request: &renew_request_digest(&proven) };
            accept_renewal(self.held, self.trust_floor, asked, &answer)
        })
    }

    async fn call(&self, endpoint: &Endpoint, request: &pb::RenewRequest) -> Result<call::Answered, Refused> {
        call::call(endpoint, &self.tls, &*self.connect, &self.caller, request.clone()).await
    }
}

/// An answer that took so long, if it came in time, holds as `judge` has it, and is dated within the certificate of the gateway
/// where server time has not been heard.
fn taken(
    endpoint: &Endpoint,
    took: Duration,
    heard: bool,
    gateway: Validity,
    judge: impl FnOnce() -> Result<Accepted, AnswerError>,
) -> Result<Accepted, RenewError> {
    if took > FRESH {
        return Err(RenewError::Late { endpoint: endpoint.clone(), took });
    }
    let accepted = judge().and_then(|accepted| {
        let vouched = heard || gateway.holds_at(accepted.server_time);
        if vouched { Ok(accepted) } else { Err(AnswerError::GatewayValidity(accepted.server_time)) }
    });
    accepted.map_err(|source| RenewError::Answer { endpoint: endpoint.clone(), source })
}

/// Judges the answer to a renewal of `held`: nothing that makes the node who it is may have changed.
///
/// # Errors
/// See [`AnswerError`].
pub fn accept_renewal(
    held: &Identity,
    trust_floor: u64,
    asked: Asked<'_>,
    answer: &Answer,
) -> Result<Accepted, AnswerError> {
    let key = &held.join_signing_key;
    let issued: Verified<RenewAnswer> =
        verify_document(&answer.response, key, None).map_err(AnswerError::Response)?;
    accept_again(held, trust_floor, asked, &issued.get().0, answer, |generation| {
        generation == held.generation
    })
}

/// What holds for every certificate that takes the place of that of `held`.
fn accept_again(
    held: &Identity,
    trust_floor: u64,
    asked: Asked<'_>,
    issued: &Issued,
    answer: &Answer,
    is_next: impl FnOnce(u64) -> bool,
) -> Result<Accepted, AnswerError> {
    let mut accepted = judge(&held.trust_domain, &held.join_signing_key, asked, issued, answer)?;
    let (old, new): (&Leaf, &Leaf) = (&held.leaf, &accepted.leaf);
    for (what, same) in [
        ("node id", new.node_id == old.node_id),
        ("role", new.role == old.role),
        ("site", new.site == old.site),
        ("identity generation", is_next(accepted.generation)),
        ("attestation key", new.ak_name == old.ak_name),
        ("tenancy", new.tenant == old.tenant),
    ] {
        if !same {
            return Err(AnswerError::Changed(what));
        }
    }
    // An answer carries the newest bundle that its service knows, which need not be the newest that this node knows.
    accepted.trust = match take_newer(accepted.trust, &held.trust, trust_floor) {
        Ok(newer) => newer,
        Err(_) => Trust::clone(&held.trust),
    };
    chains_to(&accepted.chain, &accepted.trust.bundle.node_roots, accepted.server_time)
        .map_err(AnswerError::Certificate)?;
    Ok(accepted)
}

/// A bundle that may take the place of `held`: it is newer, and not older than one that was held once.
///
/// # Errors
/// It is not.
pub fn take_newer(offered: Trust, held: &Trust, floor: u64) -> Result<Trust, BundleError> {
    let version = offered.bundle.version;
    if version < floor {
        return Err(BundleError::NotNewer { offered: version, held: floor });
    }
    offered.newer_than(held)
}

/// Puts a renewed certificate in the place of that of `held`. Blocks.
///
/// # Errors
/// See [`KeepError`]; before the switch the old identity stays.
pub fn install(
    state: &Path,
    held: &Identity,
    request: &Request,
    accepted: &Accepted,
) -> Result<(), KeepError> {
    change(state, held, |dir, stored| {
        // What was kept while the gateway was asked is not in `held`, and stays.
        if stored.revocation.is_some() {
            return Err(KeepError::Replaced);
        }
        let kept = stored.trust()?;
        let mut renewed = stored.renewed(accepted);
        if kept.bundle.version >= accepted.trust.bundle.version {
            chains_to(&accepted.chain, &kept.bundle.node_roots, accepted.server_time)
                .map_err(KeepError::Unvouched)?;
            renewed = renewed.with_bundle(&kept);
        }
        // That of a re-join is there before it is offered.
        if NodeKey::load(dir, &request.key.spki())?.is_none() {
            request.key.store(dir)?;
        }
        failpoint::hit(failpoint::RENEW_KEY);
        renewed.write(dir)?;
        failpoint::hit(failpoint::RENEW_IDENTITY);
        // The switch is made: a key that stays is removed by the next renewal.
        if let Err(error) = keys::remove_unused(dir, &accepted.leaf.spki) {
            let error: &dyn std::error::Error = &error;
            tracing::warn!(error, "the key of the certificate before cannot be removed yet");
        }
        failpoint::hit(failpoint::RENEW_KEYS_REMOVED);
        Ok(())
    })
}

/// Removes what is in `keys/` beside the key of `held`. Blocks.
///
/// # Errors
/// See [`KeepError`].
pub fn tidy(state: &Path, held: &Identity) -> Result<(), KeepError> {
    change(state, held, |dir, _| Ok(keys::remove_unused(dir, &held.fingerprint)?))
}

/// Keeps a newer trust bundle in the identity; false when it is kept already. Blocks.
///
/// # Errors
/// See [`KeepError`]; the old bundle stays.
pub fn keep_bundle(state: &Path, held: &Identity, trust: Trust) -> Result<bool, KeepError> {
    change(state, held, |dir, stored| {
        // `held` may be older than the file: the bundle before this one is perhaps not in use yet.
        let kept = stored.trust()?;
        if kept.sha256 == trust.sha256 {
            return Ok(false);
        }
        stored.with_bundle(&trust.newer_than(&kept)?).write(dir)?;
        Ok(true)
    })
}

/// Keeps that the certificate of `held` is revoked: it is not used again, by no process. Blocks.
///
/// # Errors
/// See [`KeepError`].
pub fn keep_revocation(state: &Path, held: &Identity, revocation: Envelope) -> Result<(), KeepError> {
    change(state, held, |dir, stored| Ok(stored.with_revocation(revocation).write(dir)?))
}

/// Changes identity.json, if it is still that of `held`, with the state directory taken meanwhile.
fn change<T>(
    state: &Path,
    held: &Identity,
    change: impl FnOnce(&StateDir, StoredIdentity) -> Result<T, KeepError>,
) -> Result<T, KeepError> {
    let dir = StateDir::open(state)?.ok_or(KeepError::Replaced)?;
    let _lock = dir.lock()?;
    let stored = StoredIdentity::read(&dir)?.filter(|stored| stored.is_of(held));
    change(&dir, stored.ok_or(KeepError::Replaced)?)
}

#[cfg(test)]
mod tests;
