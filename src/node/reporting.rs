//! What the status socket of a running node says.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::sync::watch;

use crate::exec::Lanes;
use crate::identity::Identity;
use crate::journal::{Journal, WriteError};
use crate::model::Incarnation;
use crate::session::{SessionStatus, WorkingClock};
use crate::state_dir::StateError;
use crate::status::report::{self, Certificate, Report};
use crate::status::socket::{Changed, Question, Socket};
use crate::upkeep::{self, Conditions, Hold};

/// Answers questions for ever; nobody asks where there is no socket.
pub(super) async fn answer(socket: Option<Socket>, reporter: Arc<Reporter>) {
    let answer = move |question| -> BoxFuture<'static, Vec<u8>> {
        let reporter = Arc::clone(&reporter);
        Box::pin(async move { reporter.answer(question).await })
    };
    match socket {
        Some(socket) => socket.serve(answer).await,
        None => std::future::pending().await,
    }
}

/// A document, or an object that says why there is none.
fn answered(found: &Result<impl serde::Serialize, WriteError>) -> serde_json::Result<Vec<u8>> {
    match found {
        Ok(document) => serde_json::to_vec(document),
        Err(error) => serde_json::to_vec(&serde_json::json!({ "error": error.to_string() })),
    }
}

/// Whether the node was held before, or why it cannot be changed.
fn changed(before: &Result<bool, StateError>) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&match before {
        Ok(before) => Changed::Before(*before),
        Err(error) => Changed::Error(error.to_string()),
    })
}

/// What the status socket is answered from.
pub(super) struct Reporter {
    pub(super) conditions: Conditions,
    pub(super) identity: watch::Receiver<Identity>,
    pub(super) rejoins: String,
    pub(super) incarnation: Incarnation,
    pub(super) journal: Journal,
    pub(super) working: WorkingClock,
    pub(super) lanes: Lanes,
    pub(super) hold: Hold,
    pub(super) session: watch::Receiver<SessionStatus>,
}

impl Reporter {
    async fn answer(&self, question: Question) -> Vec<u8> {
        let document = match question {
            Question::Status => serde_json::to_vec(&self.report().await),
            Question::Journal => answered(&self.journal.snapshot().await),
            Question::Hold(why) => changed(&self.hold.hold(why).await),
            Question::Release => changed(&self.hold.release().await),
            Question::Check => answered(&self.journal.check().await),
            Question::Export(cursor) => match self.journal.export(cursor).await {
                Ok(page) => {
                    let next = page.next.map(|next| next.to_string());
                    Ok(format!("{}\n{}", serde_json::json!({ "next": next }), page.lines).into_bytes())
                }
                error => answered(&error.map(drop)),
            },
        };
        // An empty answer is "did not answer" to whoever asked.
        document.unwrap_or_default()
    }

    async fn report(&self) -> Report {
        let journal = self.journal.snapshot().await.map(|snapshot| report::Journal::of(&snapshot));
        let server_time = self.working.now();
        let (node, validity) = {
            let identity = self.identity.borrow();
            (report::Node::of(&identity), identity.leaf.validity)
        };
        let certificate = Certificate::at(validity, server_time);
        upkeep::observe(&self.conditions, &self.journal, &self.working, &self.hold, validity, &self.rejoins);
        Report {
            schema: report::SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            incarnation: self.incarnation.clone(),
            boot_ms: u64::try_from(self.working.clock().boot().as_millis()).unwrap_or(u64::MAX),
            server_time,
            node,
            session: self.session.borrow().clone(),
            lanes: self.lanes.free(),
            running: self.lanes.running_ids(),
            conditions: self.conditions.all(),
            journal: journal.ok(),
            certificate,
        }
    }
}
