//! A session of a compromised gateway: what it puts among the true frames, keeps back, and claims to have stored. A
//! gateway without lies passes through here and does nothing.
//!
//! What it remembers is this one session's: what was to be overtaken when it ends is delivered in the next one, as everything
//! that was in flight. What is withheld stands in the store, so that no other gateway delivers it in time.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Ended, Phase, Session, cancel_frame};
use crate::gateway::body;
use crate::gateway::forger::Signed;
use crate::gateway::lies::{AHEAD, ANSWERED, FORGED, Lie, TOLD};
use crate::gateway::node_events::Batch;
use crate::gateway::store::Deliver;
use crate::gateway::update::{Said, Update};
use crate::model::{CommandId, ServerTime};
use crate::wire::pb;
use crate::wire::pb::gateway_frame::Frame as Out;

/// A command that would live on for longer is not kept back until it has expired.
const WITHHELD_AT_MOST: Duration = Duration::from_secs(61);
/// A command waits so long for one that overtakes it.
const OVERTAKEN_WITHIN: Duration = Duration::from_secs(5);
/// Lies whose answers are waited for.
const OPEN: usize = 1000;

/// What a lying session remembers.
#[derive(Default)]
pub(super) struct Lying {
    /// The node's journal.
    journal: String,
    /// Commands that were lies, until the node says what it makes of them.
    open: BTreeMap<CommandId, Lie>,
    /// To be overtaken until then.
    overtaken: Option<(Instant, Deliver)>,
}

impl Lying {
    /// Of a session in which the node's events are those of this journal.
    pub(super) fn about(journal: String) -> Self {
        Self { journal, ..Self::default() }
    }

    /// When something that was kept back is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.overtaken.as_ref().map(|(at, _)| *at)
    }
}

impl Session {
    fn draws(&self, lie: Lie) -> bool {
        self.hub.draws(lie)
    }

    async fn tell(&self, lie: Lie, mut detail: Value) -> Result<(), Ended> {
        detail["lie"] = lie.name().into();
        self.note(TOLD, detail).await
    }

    async fn note(&self, kind: &'static str, detail: Value) -> Result<(), Ended> {
        self.hub.store.note_lie(self.opening.route.node.clone(), kind, detail).await?;
        self.hub.event_added();
        Ok(())
    }

    /// Tells a lie that is a command, and waits for its answer.
    async fn tell_command(&mut self, lie: Lie, deliver: Deliver) -> Result<(), Ended> {
        self.tell(lie, json!({ "command": deliver.id })).await?;
        if self.lying.open.len() < OPEN {
            self.lying.open.insert(deliver.id.clone(), lie);
        }
        self.send_command(Deliver { cancel: None, ..deliver }).await
    }

    /// What there is to tell at any time.
    pub(super) async fn lie_at_heartbeat(&mut self) -> Result<(), Ended> {
        if self.phase != Phase::Live || !self.hub.lies() {
            return Ok(());
        }
        for (lie, signed) in [
            (Lie::ForgeUnsigned, Signed::Not),
            (Lie::ForgeSigned, Signed::ByForger),
            (Lie::AlterBody, Signed::AsBefore),
        ] {
            if self.draws(lie) {
                self.forge_command(lie, signed).await?;
            }
        }
        let node = self.opening.route.node.clone();
        if self.draws(Lie::SwapNodes)
            && let Some(others) = self.hub.store.latest_program(node.clone(), true).await?
        {
            self.tell_command(Lie::SwapNodes, others).await?;
        }
        if self.draws(Lie::ReplayEnded) {
            for ended in self.hub.store.lately_ended(node).await? {
                self.tell_command(Lie::ReplayEnded, ended).await?;
            }
        }
        for late in self.hub.store.withheld(self.opening.route.node.clone()).await? {
            self.tell_command(Lie::Withhold, late).await?;
        }
        if self.draws(Lie::ForgeCancel)
            && let Some(id) = self.hub.store.running_program(self.opening.route.node.clone()).await?
        {
            self.forge_cancel(&id).await?;
        }
        if self.draws(Lie::AckAhead) {
            let journal_id = self.lying.journal.clone();
            self.tell(Lie::AckAhead, json!({ "journal": journal_id })).await?;
            self.send(Out::Ack(pb::Ack { journal_id, event_seq: AHEAD, ..Default::default() })).await?;
        }
        self.forge_documents().await
    }

    async fn forge_command(&mut self, lie: Lie, signed: Signed) -> Result<(), Ended> {
        let node = self.opening.route.node.clone();
        let Some(original) = self.hub.store.latest_program(node, false).await? else { return Ok(()) };
        let Some(forger) = &self.hub.forger else { return Ok(()) };
        let random = self.hub.with_rng(CommandId::random);
        let Ok(id) = CommandId::new(format!("{FORGED}{random}")) else { return Ok(()) };
        let forged = forger.command((&original.envelope, &original.id), &id, self.hub.now(), signed);
        let Some(envelope) = forged else { return Ok(()) };
        self.tell_command(lie, Deliver { id, envelope, ..original }).await
    }

    async fn forge_documents(&mut self) -> Result<(), Ended> {
        let hub = self.hub.clone();
        let Some(forger) = &hub.forger else { return Ok(()) };
        if self.draws(Lie::ForgeBundle)
            && let Some(envelope) = forger.bundle(hub.now())
        {
            self.tell(Lie::ForgeBundle, json!({})).await?;
            self.send(Out::TrustBundle(pb::TrustBundle { envelope: Some(envelope) })).await?;
        }
        if self.draws(Lie::ForgeRevocation)
            && let Some(envelope) = forger.revocation(&self.opening.route.node, &self.live.serial, hub.now())
        {
            self.tell(Lie::ForgeRevocation, json!({ "serial": self.live.serial })).await?;
            self.send(Out::RevocationNotice(pb::RevocationNotice { envelope: Some(envelope) })).await?;
        }
        Ok(())
    }

    /// Delivers a true command, unless it is kept back; another one may overtake it, and what cancels it is forged.
    pub(super) async fn deliver_or_lie(&mut self, deliver: Deliver) -> Result<(), Ended> {
        let left = expires(&deliver).since(self.hub.now());
        if deliver.attempt == 1 && left <= WITHHELD_AT_MOST && self.draws(Lie::Withhold) {
            return Ok(self.hub.store.withhold(deliver.id).await?);
        }
        if self.lying.overtaken.is_none() && self.draws(Lie::Reorder) {
            self.lying.overtaken = Some((Instant::now() + OVERTAKEN_WITHIN, deliver));
            return Ok(());
        }
        let id = deliver.id.clone();
        self.send_command(deliver).await?;
        if let Some((_, overtaken)) = self.lying.overtaken.take() {
            self.tell(Lie::Reorder, json!({ "command": overtaken.id, "behind": id })).await?;
            self.send_command(overtaken).await?;
        }
        if self.draws(Lie::ForgeCancel) { self.forge_cancel(&id).await } else { Ok(()) }
    }

    async fn forge_cancel(&mut self, id: &CommandId) -> Result<(), Ended> {
        let Some(forger) = &self.hub.forger else { return Ok(()) };
        let forged = forger.cancel(&self.opening.route.node, id, self.hub.now());
        let Some(forged) = forged else { return Ok(()) };
        self.tell(Lie::ForgeCancel, json!({ "command": id })).await?;
        self.send(Out::Cancel(cancel_frame(id, forged))).await
    }

    /// Delivers what was to be overtaken, and was not.
    pub(super) async fn deliver_late(&mut self) -> Result<(), Ended> {
        if let Some((_, deliver)) = self.lying.overtaken.take_if(|(at, _)| *at <= Instant::now()) {
            self.send_command(deliver).await?;
        }
        Ok(())
    }

    /// Takes the results out that are to be acked and not stored; their ids.
    pub(super) async fn swallow_results(
        &mut self,
        updates: &mut Vec<Update>,
    ) -> Result<Vec<CommandId>, Ended> {
        let mut swallowed = Vec::new();
        updates.retain(|update| match (&update.said, &update.id) {
            (Said::Ended(_), Some(id)) if self.draws(Lie::AckResult) => {
                swallowed.push(id.clone());
                false
            }
            _ => true,
        });
        for id in &swallowed {
            self.tell(Lie::AckResult, json!({ "command": id })).await?;
        }
        Ok(swallowed)
    }

    /// Whether a batch of events is acked and not stored.
    pub(super) async fn swallows_events(&self, batch: &Batch) -> Result<bool, Ended> {
        let (Some(first), Some(last)) = (batch.events.first(), batch.events.last()) else { return Ok(false) };
        if !self.draws(Lie::AckEvents) {
            return Ok(false);
        }
        let done = batch.events.iter().filter(|event| event.kind == "command.done");
        let ends: Vec<Value> = done
            .filter_map(|event| serde_json::from_str::<Value>(&event.body).ok()?.get("id").cloned())
            .collect();
        let detail = json!({ "journal": batch.journal, "from": first.seq, "to": last.seq, "ends": ends });
        self.tell(Lie::AckEvents, detail).await?;
        Ok(true)
    }

    /// Notes what a node says of a command that was a lie.
    pub(super) async fn note_answers(&mut self, updates: &[Update]) -> Result<(), Ended> {
        if self.lying.open.is_empty() {
            return Ok(());
        }
        for update in updates {
            let Some(id) = &update.id else { continue };
            let Some(lie) = self.lying.open.remove(id) else { continue };
            let answer = match &update.said {
                Said::Refused { reason, .. } => reason.as_str(),
                Said::Accepted => "accepted",
                Said::Running { .. } => "running",
                Said::Ended(end) if end.reason.is_empty() => end.state.name(),
                Said::Ended(end) => end.reason.as_str(),
            };
            self.note(ANSWERED, json!({ "lie": lie.name(), "command": id, "answer": answer })).await?;
        }
        Ok(())
    }
}

/// When a command's body says that it expires.
fn expires(deliver: &Deliver) -> ServerTime {
    let body: &Bytes = &deliver.envelope.payload;
    body::read(body).map_or(ServerTime(i64::MAX), |body| body.not_after)
}
