//! The task that renews the node's certificate: at 60 % of its life, at once for a journal without a birth, and after two
//! Welcomes in a row whose time lies before the mark, to learn which of the two is wrong. One that has run out is renewed no
//! more: its node joins again with the key of it.
//!
//! What an answer brings is in this order: the identity on the disk, the clock and the journal's mark, then the word to
//! the session, which takes the identity from the disk as it would one of a join.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;
use serde_json::json;
use tokio::sync::{Notify, mpsc, watch};

use super::{client_tls, tls_of};
use crate::blocking;
use crate::failpoint;
use crate::identity::join_again;
use crate::identity::renew::rejoin::{self, Rejoin};
use crate::identity::renew::{Caller, KeepError, RenewError, Renewal, Request, install, tidy};
use crate::identity::schedule::{Moment, Retries};
use crate::identity::{Accepted, Identity};
use crate::journal::Journal;
use crate::log::chain;
use crate::model::{Digest, EventType, Incarnation, NewEvent, Reason, ServerTime};
use crate::ports::Connect;
use crate::session::{SessionStatus, WorkingClock};
use crate::upkeep::Conditions;
use crate::wire::frames::Notice;
use crate::wire::link::Endpoint;

/// Longest sleep before the clocks are looked at anew: a machine that was suspended has slept longer than it knows.
const LOOK: Duration = Duration::from_secs(60);
/// So many Welcomes in a row that lie before the mark raise a doubt of the mark.
const DOUBTFUL: u32 = 2;
/// Between two renewals for such a doubt, and between two that a gateway's word alone has asked for: one that lies must not
/// make a node ask without end.
const DOUBT_EVERY: Duration = Duration::from_secs(600);
/// A node that is not let in again asks so often: an operator may have lifted a quarantine, and a gateway may have lied.
const REFUSED_EVERY: Duration = Duration::from_secs(15 * 60);

/// What the task is made of.
pub(super) struct Renewing {
    pub(super) state: PathBuf,
    /// The identity in use.
    pub(super) identity: watch::Receiver<Identity>,
    /// The lowest version of a trust bundle that is taken.
    pub(super) trust_floor: u64,
    /// Instead of the trust bundle's.
    pub(super) own_endpoints: Vec<Endpoint>,
    pub(super) connect: Arc<dyn Connect>,
    pub(super) working: WorkingClock,
    pub(super) journal: Journal,
    pub(super) conditions: Conditions,
    pub(super) session: watch::Receiver<SessionStatus>,
    pub(super) incarnation: Incarnation,
    /// To whoever keeps the identity.
    pub(super) notices: mpsc::Sender<Notice>,
    /// Tells the session that identity.json was replaced.
    pub(super) replaced: Arc<Notify>,
    pub(super) rng: StdRng,
}

/// Why the node asks for a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// Its time has come.
    Life,
    /// The journal has no birth.
    Birth,
    /// The mark and the gateways' time do not agree.
    Doubt,
    /// It has run out by the word of a gateway, or by a clock that gateways have moved, and by no signed time.
    RunOut,
    /// It has run out by signed time.
    Expired,
}

/// The moment of the certificate in use.
struct Planned {
    certificate: Digest,
    moment: Moment,
    got: Option<ServerTime>,
    /// There is no key beside its own any more.
    tidied: bool,
}

/// How a certificate is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Renew,
    Rejoin,
}

/// What the ends of sessions have raised: Welcomes that lay before the mark, and the word that the certificate has run out.
#[derive(Default)]
struct Doubt {
    in_a_row: u32,
    /// The newest end is `certificate-expired`.
    run_out: bool,
    /// The end that was counted last, boot time, ms.
    counted: Option<u64>,
    asked: Option<Duration>,
}

/// The time of an answer that the journal has not taken, and with it perhaps its birth.
struct Unrecorded {
    time: ServerTime,
    /// When it came, boot time.
    at: Duration,
    /// The next try, boot time.
    next: Duration,
    retries: Retries,
}

impl Why {
    fn has_run_out(self) -> bool {
        matches!(self, Self::RunOut | Self::Expired)
    }
}

impl Way {
    /// What to try instead within the same attempt: the join service's clock says on which side of the certificate's end it
    /// is.
    fn instead(self, why: Why, refusal: Option<Reason>) -> Option<Self> {
        match (self, why, refusal) {
            (Self::Renew, Why::RunOut, Some(Reason::CertificateExpired)) => Some(Self::Rejoin),
            (Self::Rejoin, _, Some(Reason::CertificateValid)) => Some(Self::Renew),
            _ => None,
        }
    }
}

impl Doubt {
    fn look(&mut self, session: &SessionStatus) {
        if let Some(end) = &session.last_end
            && self.counted.replace(end.at_boot_ms) != Some(end.at_boot_ms)
        {
            let backwards = end.reason == Some(Reason::TimeBackwards);
            self.in_a_row = if backwards { self.in_a_row.saturating_add(1) } else { 0 };
            self.run_out = end.reason == Some(Reason::CertificateExpired);
        }
        // The end may be seen with the session that came after it, which has settled it.
        if session.live.is_some() {
            (self.in_a_row, self.run_out) = (0, false);
        }
    }

    fn stands(&self, now: Duration) -> Option<Why> {
        let why = match self {
            Self { run_out: true, .. } => Why::RunOut,
            Self { in_a_row: DOUBTFUL.., .. } => Why::Doubt,
            _ => return None,
        };
        self.asked.is_none_or(|asked| now.saturating_sub(asked) >= DOUBT_EVERY).then_some(why)
    }
}

impl Renewing {
    /// Runs for ever.
    pub(super) async fn run(mut self) {
        let mut retries = Retries::default();
        let mut doubt = Doubt::default();
        let mut planned = self.plan(None);
        let mut unrecorded = None;
        loop {
            let why = self.due(&mut planned, &mut doubt, &mut unrecorded).await;
            if why == Why::Doubt {
                doubt = Doubt { asked: Some(self.working.clock().boot()), ..doubt };
            }
            // On the heap while it lasts: a node that waits for weeks is to be small.
            match Box::pin(self.attempt(why)).await {
                Ok((got, left)) => {
                    unrecorded = left;
                    retries = Retries::default();
                    self.conditions.keep(None);
                    if std::mem::take(&mut doubt.run_out) {
                        doubt.asked = Some(self.working.clock().boot());
                    }
                    // The session takes it from the disk; until then nothing is due again.
                    let _ = tokio::time::timeout(LOOK, self.identity.changed()).await;
                    planned = self.plan(Some(got));
                    if self.is_over() {
                        // Signed time is ahead by more than a certificate's life: another one would be no better.
                        self.sleep(DOUBT_EVERY, &planned).await;
                    }
                }
                Err(error) => {
                    let mut wait = retries.failed(error.pushback(), &mut self.rng);
                    if let Some(reason) = rejoin::refuses(&error).filter(|_| why.has_run_out()) {
                        wait = wait.max(REFUSED_EVERY);
                        self.refused(reason, &error);
                    }
                    self.log(&error, retries.failures(), wait);
                    self.sleep(wait, &planned).await;
                }
            }
        }
    }

    /// Unless another join has replaced the identity: that is not to wait for what its predecessor was refused.
    async fn sleep(&mut self, wait: Duration, planned: &Planned) {
        let replaced = self.identity.wait_for(|identity| identity.certificate != planned.certificate);
        if matches!(tokio::time::timeout(wait, replaced).await, Ok(Err(_))) {
            // The node ends.
            std::future::pending::<()>().await;
        }
    }

    fn refused(&self, reason: Reason, error: &RenewError) {
        let not_after = self.identity.borrow().leaf.validity.not_after;
        let words = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
        let detail = format!(
            "the node certificate ran out at {not_after}, and the join service does not let this node join again with its \
             key: {words} ({reason}); {}",
            join_again(&self.state)
        );
        self.conditions.keep(Some((Reason::RejoinRefused, detail)));
    }

    fn plan(&mut self, got: Option<ServerTime>) -> Planned {
        let certificate = self.identity.borrow_and_update().certificate;
        Planned { certificate, moment: Moment::draw(&mut self.rng), got, tidied: false }
    }

    /// By signed time.
    fn is_over(&self) -> bool {
        let not_after = self.identity.borrow().leaf.validity.not_after;
        self.working.signed().is_some_and(|signed| signed >= not_after)
    }

    /// What a killed attempt has left beside the key in use is worth nothing once a gateway has welcomed that: had one let
    /// the node in again, this identity would be superseded. A retired key must not be offered as a new one.
    async fn tidy(&self) {
        let (state, held) = (self.state.clone(), self.identity.borrow().clone());
        match blocking::run(move || tidy(&state, &held)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(error, "keys that are not in use stay until the next renewal");
            }
            Err(error) => tracing::error!(%error, "removing keys that are not in use failed"),
        }
    }

    /// Waits until there is a reason to ask.
    async fn due(
        &mut self,
        planned: &mut Planned,
        doubt: &mut Doubt,
        unrecorded: &mut Option<Unrecorded>,
    ) -> Why {
        loop {
            let record = self.record_again(unrecorded).await;
            if self.identity.borrow_and_update().certificate != planned.certificate {
                *planned = self.plan(None);
                doubt.run_out = false;
                self.conditions.keep(None);
            }
            doubt.look(&self.session.borrow_and_update());
            let live = self.session.borrow().live.is_some();
            if live {
                // Whoever said otherwise was wrong, or has been put right.
                self.conditions.keep(None);
                if !std::mem::replace(&mut planned.tidied, true) {
                    self.tidy().await;
                }
            }
            let wait = match self.reason(planned, doubt) {
                // The answer that gives it one is here already.
                Ok(Why::Birth) if unrecorded.is_some() => record,
                Ok(why) => return why,
                Err(wait) => wait.min(record),
            };
            let changed = tokio::select! {
                biased;
                changed = self.identity.changed() => changed,
                changed = self.session.changed() => changed,
                () = tokio::time::sleep(wait) => Ok(()),
            };
            if changed.is_err() {
                // The node ends.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Why to ask now, or how long to sleep before looking again.
    fn reason(&self, planned: &Planned, doubt: &Doubt) -> Result<Why, Duration> {
        let (validity, revoked) = {
            let identity = self.identity.borrow();
            (identity.leaf.validity, identity.revoked)
        };
        // What was revoked proves nothing; the session says so.
        if revoked {
            return Err(LOOK);
        }
        if self.is_over() {
            return Ok(Why::Expired);
        }
        // One Welcome that lies may have moved the clock so far, and no session would ever move it back. The gateway's
        // challenge dates the proof.
        if self.working.now().is_some_and(|now| now >= validity.not_after) {
            return Ok(Why::RunOut);
        }
        if let Some(why) = doubt.stands(self.working.clock().boot()) {
            return Ok(why);
        }
        let Some(now) = self.working.now() else { return Err(LOOK) };
        // A mark alone may be long past: a proof with its time would be refused.
        if !self.working.heard() {
            return Err(LOOK);
        }
        if self.journal.birth().is_none() {
            return Ok(Why::Birth);
        }
        let left = planned.moment.of(validity, planned.got).since(now);
        if left.is_zero() { Ok(Why::Life) } else { Err(left.min(LOOK)) }
    }

    /// Asks, and puts what came into force. The time that came, once more if the journal did not take it.
    async fn attempt(&mut self, why: Why) -> Result<(ServerTime, Option<Unrecorded>), RenewError> {
        let held = self.identity.borrow().clone();
        tracing::info!(?why, until = %held.leaf.validity.not_after, "renewing the certificate");
        // Where signed time does not say so it is still offered: the word, or the clock, may be wrong.
        let way = if why == Why::Expired { Way::Rejoin } else { Way::Renew };
        let asked = match self.ask(way, &held).await {
            Err(error) => match way.instead(why, error.refusal()) {
                Some(other) => self.ask(other, &held).await,
                None => Err(error),
            },
            asked => asked,
        };
        let (request, accepted) = asked?;
        failpoint::hit(failpoint::RENEW_ANSWERED);
        let (time, until) = (accepted.server_time, accepted.leaf.validity.not_after);
        let state = self.state.clone();
        let installed = blocking::run(move || install(&state, &held, &request, &accepted)).await?;
        if installed.is_err() {
            // The file may be another join's by now, or the new one in spite of the error: the session looks.
            self.replaced.notify_one();
        }
        installed?;
        self.working.answered(time);
        let unrecorded = self.record(time).await;
        failpoint::hit(failpoint::RENEW_TIME);
        tracing::info!(%until, "the certificate is renewed");
        self.replaced.notify_one();
        Ok((time, unrecorded))
    }

    fn endpoints(&self, held: &Identity) -> Vec<Endpoint> {
        let own = &self.own_endpoints;
        if own.is_empty() { held.trust.endpoints.clone() } else { own.clone() }
    }

    async fn ask(&mut self, way: Way, held: &Identity) -> Result<(Request, Accepted), RenewError> {
        match way {
            Way::Renew => self.renew(held).await,
            Way::Rejoin => self.rejoin(held).await,
        }
    }

    async fn renew(&mut self, held: &Identity) -> Result<(Request, Accepted), RenewError> {
        let request = blocking::run(Request::new).await?.map_err(KeepError::from)?;
        let session = self.session.borrow().live.as_ref().map(|live| live.session_id.clone());
        let renewal = Renewal {
            held,
            trust_floor: self.trust_floor,
            endpoints: &self.endpoints(held),
            tls: client_tls(held, &self.working)?,
            connect: Arc::clone(&self.connect),
            clock: Arc::clone(self.working.clock()),
            caller: Caller { incarnation: self.incarnation.clone(), session },
            heard: self.working.heard(),
        };
        let now = self.working.now().unwrap_or_default();
        let mut refused = Vec::new();
        let notices = self.notices.clone();
        let tell = |error: &mut RenewError| refused.extend(told(error, &notices));
        let accepted = renewal.ask(&request, now, || nonce(&mut self.rng), tell).await;
        self.tell_refused(refused).await;
        Ok((request, accepted?))
    }

    async fn rejoin(&self, held: &Identity) -> Result<(Request, Accepted), RenewError> {
        tracing::info!(until = %held.leaf.validity.not_after, "the certificate has run out: joining again with its key");
        let (state, whose) = (self.state.clone(), held.clone());
        let request = blocking::run(move || rejoin::offer(&state, &whose)).await??;
        failpoint::hit(failpoint::REJOIN_KEY);
        let rejoin = Rejoin {
            held,
            trust_floor: self.trust_floor,
            endpoints: &self.endpoints(held),
            tls: tls_of(held, None, &self.working)?,
            connect: Arc::clone(&self.connect),
            clock: Arc::clone(self.working.clock()),
            heard: self.working.heard(),
        };
        let mut refused = Vec::new();
        let tell = |error: &mut RenewError| refused.extend(told(error, &self.notices));
        let accepted = rejoin.ask(&request, tell).await;
        self.tell_refused(refused).await;
        Ok((request, accepted?))
    }

    /// Gateways have given answers that nobody whom this node believes has given them.
    async fn tell_refused(&self, answers: Vec<String>) {
        let event = EventType::RenewalRefused;
        for detail in answers {
            tracing::warn!(detail, "refused: {event}");
            if let Err(error) = self.journal.record(NewEvent::new(event, json!({ "detail": detail }))).await {
                tracing::warn!(%error, "an event is not told: {event}");
            }
        }
    }

    async fn record(&mut self, time: ServerTime) -> Option<Unrecorded> {
        let at = self.working.clock().boot();
        let mut unrecorded = Some(Unrecorded { time, at, next: at, retries: Retries::default() });
        self.record_again(&mut unrecorded).await;
        unrecorded
    }

    /// Has the journal take what it did not take, when that is due. How long to sleep before the next try.
    async fn record_again(&mut self, unrecorded: &mut Option<Unrecorded>) -> Duration {
        let Some(left) = unrecorded else { return LOOK };
        let now = self.working.clock().boot();
        if left.next <= now {
            let time = left.time.plus(now.saturating_sub(left.at));
            let Err(error) = self.journal.answered(time).await else {
                *unrecorded = None;
                return LOOK;
            };
            let wait = left.retries.failed(None, &mut self.rng);
            tracing::warn!(%error, next = wait.as_secs(), "the time of the renewal's answer is in force but not recorded");
            left.next = now + wait;
        }
        left.next.saturating_sub(now).min(LOOK)
    }

    fn log(&self, error: &RenewError, attempt: u32, wait: Duration) {
        let chain: &dyn std::error::Error = error;
        let not_after = self.identity.borrow().leaf.validity.not_after;
        let expires_in = self.working.now().map_or(0, |now| not_after.since(now).as_secs());
        tracing::warn!(
            error = chain,
            attempt,
            expiresIn = expires_in,
            next = wait.as_secs(),
            "the certificate was not renewed"
        );
    }
}

/// Hands on the revocation that came with a gateway's no. What is to be told of an answer that does not hold.
fn told(error: &mut RenewError, notices: &mpsc::Sender<Notice>) -> Option<String> {
    if let Some(envelope) = error.take_revocation() {
        // One that finds no room comes again with the next refusal.
        let _ = notices.try_send(Notice::Revocation(envelope));
    }
    matches!(error, RenewError::Answer { .. }).then(|| chain(error))
}

/// 128 bits in hex.
fn nonce(rng: &mut StdRng) -> String {
    data_encoding::HEXLOWER.encode(&rng.random::<[u8; 16]>())
}

#[cfg(test)]
mod tests;
