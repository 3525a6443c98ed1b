//! What a gateway must not be able to do: issue certificates, answer joins, sign commands. A gateway relays what is
//! said here and holds no key of it.
//!
//! One thread-safe object without a runtime: a process of its own ([`serve`]) hears it over two sockets, one for the
//! gateways ([`Ask`]: what they relay) and one for the operator ([`Order`]: what commands a fleet); in virtual time and
//! in tests it stands within theirs. Files of its directory, 0700: the keys, each 0600 from its creation, and
//! `worker.db` with tokens, nodes and certificates.

mod ca;
mod challenge;
mod child;
mod desk;
mod enrol;
mod facts;
mod keys;
mod link;
mod messages;
mod rejoin;
mod renew;
mod serve;
mod ticket;

use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde::Serialize;

use ca::CaError;
pub(super) use ca::{Ca, Csr, write_whole};
use challenge::Challenges;
pub use child::Child;
pub use desk::Desk;
pub(super) use enrol::Enrolled;
use enrol::{Enrolment, JoinTry};
use keys::{Keys, KeysError};
pub use link::Link;
pub use messages::{Ask, Claim, Draft, FactView, Judged, Noted, Order, TicketTerms, Told};
pub use serve::{ServeError, run};
use ticket::{Grant, Ticket};

use super::body::{self, CancelBody, CommandBody};
use super::state_dir::{Held, StateError};
use crate::failpoint;
use crate::model::limits::{COMMAND_BODY_BYTES, ID_BYTES, JOIN_FACTS, TICKET_BYTES};
use crate::model::strict::StrictMap;
use crate::model::{CommandId, Digest, NodeId, Reason, Role, ServerTime};
use crate::wire::bundle::{LIST, TrustBundle};
use crate::wire::der::Der;
use crate::wire::dsse::{self, Audience, CANCEL_TYPE, COMMAND_TYPE, Document, Envelope, SignError, sign};
use crate::wire::enroll::{Issued, JoinAnswer, X509POP, join_request_digest};
use crate::wire::link::Endpoint;
use crate::wire::report::Leave;
use crate::wire::revocation::Revocation;
use crate::wire::{pb, shape};

/// A command or ticket lives at most this long, ten years: its end must be a time that can be written.
const LONGEST_LIFE_S: u64 = 10 * 365 * 24 * 3600;
/// A proof of a renewal holds this long, either way.
const PROOF_AGE: Duration = Duration::from_secs(60);

/// The deployment's name, where none is given.
pub const TRUST_DOMAIN: &str = "lab.example";
/// Node certificates hold this long, where nothing is said.
const CERTIFICATE_LIFE: Duration = Duration::from_secs(24 * 3600);
/// A node whose certificate has run out may join again with its key so long, where nothing is said.
const REJOIN_WITHIN: Duration = Duration::from_secs(7 * 24 * 3600);

/// How a worker is to run.
#[derive(Debug, Clone)]
pub struct Options {
    /// Its directory; made 0700 when missing.
    pub state: PathBuf,
    /// The deployment's name.
    pub trust_domain: String,
    /// Node certificates hold this long.
    pub certificate_life: Duration,
    /// For so long after its certificate has run out a node may join again with its key; zero: never.
    pub rejoin_within: Duration,
}

impl Options {
    /// The defaults for a directory.
    pub fn new(state: PathBuf) -> Self {
        Self {
            state,
            trust_domain: TRUST_DOMAIN.into(),
            certificate_life: CERTIFICATE_LIFE,
            rejoin_within: REJOIN_WITHIN,
        }
    }
}

/// Why a worker cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The directory.
    #[error(transparent)]
    Directory(#[from] StateError),
    /// The CA.
    #[error(transparent)]
    Ca(#[from] CaError),
    /// A key.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// The database.
    #[error("cannot use the worker's database {path}")]
    Database {
        /// The file.
        path: PathBuf,
        /// SQLite's words.
        source: rusqlite::Error,
    },
}

/// Why one request failed: nothing that the one who asked could mend.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("the worker's database refused a statement")]
    Database(#[from] rusqlite::Error),
    #[error("a certificate could not be signed")]
    Ca(#[from] CaError),
    #[error("a key failed")]
    Sign(#[from] SignError),
}

/// The worker, open.
pub struct Worker {
    trust_domain: String,
    certificate_life: Duration,
    rejoin_within: Duration,
    ca: Ca,
    keys: Keys,
    rng: Mutex<StdRng>,
    enrolment: Mutex<Enrolment>,
    challenges: Mutex<Challenges>,
    /// Of joins, for which anybody may ask: they crowd out no renewal's.
    join_challenges: Mutex<Challenges>,
    /// Dropped last: another worker finds the files closed.
    held: Held,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("trust_domain", &self.trust_domain).finish_non_exhaustive()
    }
}

impl Worker {
    /// Opens or makes a worker's directory, which it has to itself. Blocks.
    ///
    /// # Errors
    /// See [`WorkerError`]; [`StateError::Held`] while another worker has the directory.
    pub fn open(options: &Options, now: ServerTime) -> Result<Self, WorkerError> {
        let dir: &Path = &options.state;
        let held = Held::take(dir)?;
        let ca = Ca::open(&dir.join("ca"), now)?;
        let keys = Keys::open(dir, now)?;
        let path = dir.join("worker.db");
        let enrolment = Enrolment::open(&path).map_err(|source| WorkerError::Database { path, source })?;
        Ok(Self {
            trust_domain: options.trust_domain.clone(),
            certificate_life: options.certificate_life,
            rejoin_within: options.rejoin_within,
            ca,
            keys,
            rng: Mutex::new(StdRng::from_os_rng()),
            enrolment: Mutex::new(enrolment),
            challenges: Mutex::default(),
            join_challenges: Mutex::default(),
            held,
        })
    }

    /// Answers a gateway. Blocks as long as a disk does.
    pub fn answer(&self, ask: Ask, now: ServerTime) -> Told {
        told(match ask {
            Ask::Serve { csr, gateway, endpoints } => self.serve(&csr.0, &gateway, &endpoints, now),
            Ask::Join(request) => self.join(&request.0, now),
            Ask::Rejoin { request, proof } => self.rejoin(&request.0, &proof, now),
            Ask::Renew { request, leaf } => self.renew(&request.0, &leaf.0, now),
            Ask::Bundle => self.newest_bundle(now),
            Ask::Leave { node, report } => self.leave(&node, &report, now),
            Ask::Facts(claims) => self.facts(&claims, now),
        })
    }

    /// Obeys the operator. Blocks as long as a disk does.
    pub fn obey(&self, order: Order, now: ServerTime) -> Told {
        told(match order {
            Order::Ticket(terms) => self.ticket(terms, now),
            Order::Command(draft) => self.command(&draft, now),
            Order::Cancel { node, id } => self.cancel(&node, &id, now),
            Order::Revoke(node) => self.set_revoked(&node, true),
            Order::RevokeForGood(node) => self.revocation(node, now),
            Order::Unrevoke(node) => self.set_revoked(&node, false),
            Order::Forget(node) => self.forget(&node),
            Order::Facts { after } => self.facts_after(after),
        })
    }

    /// Draws everything random but keys from `rng`, for a run that is to be repeated.
    pub fn draw_from(&self, rng: StdRng) {
        *self.rng.lock().unwrap_or_else(PoisonError::into_inner) = rng;
    }

    fn enrolment(&self) -> MutexGuard<'_, Enrolment> {
        self.enrolment.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with_rng<T>(&self, draw: impl FnOnce(&mut StdRng) -> T) -> T {
        draw(&mut self.rng.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn serve(
        &self,
        csr: &[u8],
        gateway: &str,
        endpoints: &[String],
        now: ServerTime,
    ) -> Result<Told, AskError> {
        let csr = match Csr::verify(csr) {
            Ok(csr) => csr,
            Err(error) => return Ok(Told::Failed(error.to_string())),
        };
        let Ok(places) = endpoints.iter().map(|text| text.parse()).collect::<Result<Vec<Endpoint>, _>>()
        else {
            return Ok(Told::Failed(format!("not host:port each: {endpoints:?}")));
        };
        if !self.enrolment().set_endpoints(gateway, endpoints)? {
            return Ok(Told::Failed(format!("a deployment has 1 to {LIST} endpoints of gateways")));
        }
        let hosts: Vec<String> = places.into_iter().map(|place| place.host).collect();
        let chain = self.with_rng(|rng| self.ca.serving(&csr, &hosts, now, rng))?;
        Ok(Told::Serving {
            chain: chain.iter().map(|der| (&**der).into()).collect(),
            node_root: (&**self.ca.certificate()).into(),
            trust_domain: self.trust_domain.clone(),
        })
    }

    /// The newest trust bundle: a new version whenever what it says has changed.
    fn bundle(&self, now: ServerTime) -> Result<Envelope, AskError> {
        let enrolment = self.enrolment();
        if let Ok(held) = self.next_bundle(&enrolment, now)? {
            return Ok(held);
        }
        enrolment.alone(|enrolment| {
            let next = match self.next_bundle(enrolment, now)? {
                Ok(held) => return Ok(held),
                Err(next) => next,
            };
            let envelope = self.sign_pinned::<TrustBundle>(&next)?;
            enrolment.keep_bundle(&envelope)?;
            Ok(envelope)
        })
    }

    /// The bundle that is held, if it says what is true now; else the body of the next one.
    fn next_bundle(
        &self,
        enrolment: &Enrolment,
        now: ServerTime,
    ) -> Result<Result<Envelope, TrustBundle>, AskError> {
        let mut bundle = TrustBundle {
            trust_domain: self.trust_domain.clone(),
            version: 0,
            issued_at: now,
            endpoints: enrolment.endpoints()?,
            node_roots: vec![(&**self.ca.certificate()).into()],
            gateway_roots: vec![(&**self.ca.certificate()).into()],
            command_roots: vec![self.keys.command_root()],
            broker_key: None,
            release_keys: Vec::new(),
            approvers: None,
        };
        let held = enrolment.bundle()?;
        let before: Option<TrustBundle> =
            held.as_ref().and_then(|held| serde_json::from_slice(&held.payload).ok());
        if let Some((held, before)) = held.zip(before) {
            (bundle.version, bundle.issued_at) = (before.version, before.issued_at);
            if before == bundle {
                return Ok(Ok(held));
            }
        }
        (bundle.version, bundle.issued_at) = (bundle.version + 1, now);
        Ok(Err(bundle))
    }

    fn newest_bundle(&self, now: ServerTime) -> Result<Told, AskError> {
        let envelope = self.bundle(now)?;
        let bundle = serde_json::from_slice::<TrustBundle>(&envelope.payload);
        Ok(match bundle {
            Ok(bundle) => Told::Bundle { version: bundle.version, envelope },
            Err(error) => Told::Failed(error.to_string()),
        })
    }

    /// Revokes the certificates of a node, and signs that for the node to keep.
    fn revocation(&self, node_id: NodeId, now: ServerTime) -> Result<Told, AskError> {
        if let failed @ Told::Failed(_) = self.set_revoked(&node_id, true)? {
            return Ok(failed);
        }
        let serials = self.enrolment().serials(&node_id, self.rejoin_within, now)?;
        if serials.is_empty() {
            let message = format!(
                "every certificate of {node_id} ran out so long ago that a signed revocation would name none; revoke it \
                 without --for-good"
            );
            return Ok(Told::Failed(message));
        }
        let trust_domain = self.trust_domain.clone();
        let body = Revocation { trust_domain, node_id, serials, issued_at: now };
        Ok(Told::Signed(self.sign_pinned::<Revocation>(&body)?))
    }

    fn sign_pinned<T: Document>(&self, body: &impl Serialize) -> Result<Envelope, AskError> {
        Ok(sign(T::TYPE, json(body), &*self.keys.join_signing, Vec::new())?)
    }

    fn ticket(&self, terms: TicketTerms, now: ServerTime) -> Result<Told, AskError> {
        let TicketTerms { uses, ttl_s, site, labels } = terms;
        let expires_at = now.plus(Duration::from_secs(ttl_s.min(LONGEST_LIFE_S)));
        let grant = Grant { uses, expires_at, site, labels };
        if let Err(why) = ticket::check(&grant) {
            return Ok(Told::Failed(why));
        }
        if grant.uses == 0 {
            return Ok(Told::Failed("a ticket needs at least one use".into()));
        }
        if ttl_s > LONGEST_LIFE_S {
            return Ok(too_long_lived());
        }
        let enrolment = self.enrolment();
        let endpoints = enrolment.endpoints()?;
        if endpoints.is_empty() {
            return Ok(Told::Failed("no gateway has started yet, so a ticket could name none".into()));
        }
        let ticket = self.with_rng(|rng| {
            Ticket::new(&grant, &self.trust_domain, &endpoints, &self.keys.pins(&self.ca), rng)
        });
        if ticket.line().len() > TICKET_BYTES {
            return Ok(Told::Failed(format!("the ticket would be longer than {TICKET_BYTES} bytes")));
        }
        enrolment.add_token(&ticket.token_sha256(), &grant)?;
        Ok(Told::Ticket(ticket.line()))
    }

    fn set_revoked(&self, node: &NodeId, revoked: bool) -> Result<Told, AskError> {
        Ok(match self.enrolment().set_revoked(node, revoked)? {
            0 => Told::Failed(format!("no node {node} has joined; list them with: bcd ctl nodes")),
            _ => Told::Done,
        })
    }

    /// Also of a node that is not known: what was begun is then finished by asking again.
    fn forget(&self, node: &NodeId) -> Result<Told, AskError> {
        self.enrolment().forget(node)?;
        Ok(Told::Done)
    }

    /// Forgets a node that says under its own key that its machine leaves. Of a certificate that is not known any more
    /// there is nothing left to forget, at whatever time: whoever was killed in between asks again.
    fn leave(&self, node: &NodeId, report: &Envelope, now: ServerTime) -> Result<Told, AskError> {
        let leaf = report.signatures.first().and_then(|signature| signature.chain.first());
        let holder = leaf.and_then(|leaf| self.ca.holder(leaf, &self.trust_domain));
        let Some(holder) = holder.filter(|holder| holder.node == *node) else {
            return Ok(invalid("the report comes with no certificate of this deployment and of this node"));
        };
        let audience = Audience { trust_domain: self.trust_domain.clone(), node_id: holder.node.clone() };
        let verified: Result<dsse::Verified<Leave>, _> =
            dsse::verify_document(report, &holder.key, Some(&audience));
        let until = match &verified {
            Ok(leave) => leave.get().not_after,
            Err(error) => return Ok(invalid(&format!("the report does not hold: {error}"))),
        };
        let mut enrolment = self.enrolment();
        match enrolment.renew(&holder)? {
            Ok(_) if holder.not_after <= now => {
                return Ok(invalid("the certificate of the report has run out"));
            }
            Ok(_) if until < now => {
                let message = format!("the machine was to have left by {until}, and has stayed");
                return Ok(Told::Refused { reason: Reason::Expired, message });
            }
            Ok(_) => enrolment.forget(&holder.node)?,
            Err(enrol::Refusal::UnknownCertificate) => {}
            Err(refused) => {
                return Ok(Told::Refused { reason: refused.reason(), message: refused.to_string() });
            }
        }
        tracing::info!(node = %holder.node, "node left");
        Ok(Told::Left(holder.node))
    }

    fn join(&self, request: &[u8], now: ServerTime) -> Result<Told, AskError> {
        let request = match shape::decode::<pb::JoinRequest>(request) {
            Ok(request) => request,
            Err(error) => return Ok(invalid(&error.to_string())),
        };
        if request.attestor == X509POP {
            return Ok(self.challenge(&request, now));
        }
        let (csr, role, token) = match self.check_join(&request) {
            Ok(checked) => checked,
            Err(refused) => return Ok(refused),
        };
        let fresh = self.with_rng(NodeId::random);
        let attempt = JoinTry { token, spki: csr.spki, role, fresh, now };
        let joins = |enrolment: &mut Enrolment| enrolment.join(&attempt);
        Ok(match self.issue(&csr, joins, join_request_digest(&request), now)? {
            Ok(issued) => self.joined(issued)?,
            Err(refused) => refused,
        })
    }

    fn joined(&self, (issued, bundle, noted): (Issued, Envelope, Noted)) -> Result<Told, AskError> {
        let signed = self.sign_pinned::<JoinAnswer>(&JoinAnswer(issued))?;
        let response =
            pb::JoinResponse { signed_response: Some(signed.into()), trust_bundle: Some(bundle.into()) };
        tracing::info!(node = %noted.node, site = %noted.site, generation = noted.generation, "node joined");
        Ok(Told::Joined(Der(response.encode_to_vec().into()), Box::new(noted)))
    }

    fn check_join(&self, request: &pb::JoinRequest) -> Result<(Csr, Role, Digest), Told> {
        if !matches!(request.attestor.as_str(), "" | "token") {
            return Err(invalid("this join service knows the attestors token and x509pop alone"));
        }
        if request.facts.len() > JOIN_FACTS {
            return Err(invalid("too many facts"));
        }
        let role = match request.role.as_str() {
            "" => Role::Host,
            name => Role::from_name(name).ok_or_else(|| invalid("the role is neither host nor ramdisk"))?,
        };
        let csr = Csr::verify(&request.csr).map_err(|error| invalid(&error.to_string()))?;
        let token = self.keys.open_token(&request.sealed_token, &request.csr);
        let token = token.map_err(|error| invalid(&error.to_string()))?;
        if token.is_empty() || token.len() > ID_BYTES {
            return Err(invalid("the token is empty or too long"));
        }
        Ok((csr, role, Digest::of(&token)))
    }

    /// Issues a certificate to the node that `whose` names. From its judgement to the record of the certificate nobody
    /// else changes the tables: a revocation finds either the old certificates or the new one too.
    fn issue(
        &self,
        csr: &Csr,
        whose: impl FnOnce(&mut Enrolment) -> rusqlite::Result<Result<Enrolled, enrol::Refusal>>,
        request_sha256: Digest,
        now: ServerTime,
    ) -> Result<Result<(Issued, Envelope, Noted), Told>, AskError> {
        let bundle = self.bundle(now)?;
        let life = self.certificate_life;
        let mut enrolment = self.enrolment();
        let node = match whose(&mut enrolment)? {
            Ok(node) => node,
            Err(refused) => {
                let (reason, message) = (refused.reason(), refused.to_string());
                return Ok(Err(Told::Refused { reason, message }));
            }
        };
        failpoint::hit(failpoint::WORKER_LETS_IN);
        let certificate =
            self.with_rng(|rng| self.ca.sign(csr, &node, &self.trust_domain, life, now, rng))?;
        enrolment.add_certificate(&certificate.serial, &node, &csr.key, certificate.not_after)?;
        failpoint::hit(failpoint::WORKER_ISSUED);
        drop(enrolment);
        let issued = Issued {
            trust_domain: self.trust_domain.clone(),
            request_sha256,
            node_id: node.node.clone(),
            role: node.role,
            site: node.site.clone(),
            labels: StrictMap(node.labels.clone()),
            identity_generation: node.generation,
            chain: certificate.chain.iter().map(|der| (&**der).into()).collect(),
            trust_bundle_sha256: Digest::of(&bundle.payload),
            issued_at: now,
        };
        let noted = Noted {
            node: node.node.clone(),
            site: node.site.clone(),
            labels: node.labels.clone(),
            role: node.role,
            generation: node.generation,
            serial: certificate.serial,
            not_after: certificate.not_after,
        };
        Ok(Ok((issued, bundle, noted)))
    }

    fn command(&self, draft: &Draft, now: ServerTime) -> Result<Told, AskError> {
        if draft.ttl_s > LONGEST_LIFE_S {
            return Ok(too_long_lived());
        }
        let id = draft.id.clone().unwrap_or_else(|| self.with_rng(CommandId::random));
        let body = body::text(&CommandBody {
            trust_domain: &self.trust_domain,
            node_id: &draft.node,
            id: &id,
            kind: &draft.kind,
            issued_at: now,
            not_after: now.plus(Duration::from_secs(draft.ttl_s)),
            min_generation: 0,
            args: &draft.args,
        });
        if body.len() > COMMAND_BODY_BYTES {
            let message =
                format!("the command's body has {} bytes, at most {COMMAND_BODY_BYTES}", body.len());
            return Ok(Told::Failed(message));
        }
        Ok(Told::Signed(self.keys.sign_as_worker(COMMAND_TYPE, body.into(), now)?))
    }

    fn cancel(&self, node: &NodeId, id: &CommandId, now: ServerTime) -> Result<Told, AskError> {
        let body =
            CancelBody { trust_domain: &self.trust_domain, node_id: node, command_id: id, issued_at: now };
        Ok(Told::Signed(self.keys.sign_as_worker(CANCEL_TYPE, json(&body), now)?))
    }
}

fn told(answer: Result<Told, AskError>) -> Told {
    answer.unwrap_or_else(|error| {
        tracing::error!(error = %super::session::chain(&error), "a request to the worker failed");
        Told::Failed(super::session::chain(&error))
    })
}

fn too_long_lived() -> Told {
    Told::Failed(format!("a life may have at most {LONGEST_LIFE_S} seconds"))
}

fn json(body: &impl Serialize) -> Bytes {
    // Ids, times and base64 cannot fail to serialise.
    serde_json::to_vec(body).unwrap_or_default().into()
}

fn invalid(message: &str) -> Told {
    Told::Refused { reason: Reason::JoinInvalid, message: message.to_owned() }
}

#[cfg(test)]
mod tests;
