//! Where the operator gives orders.

use std::path::Path;
use std::sync::Arc;

use super::link::Where;
use super::serve::OPERATOR_SOCKET;
use super::{Draft, FactView, Order, TicketTerms, Told, Worker};
use crate::clock::Clock;
use crate::gateway::lines::{ClientError, Listener};
use crate::model::{CommandId, NodeId};
use crate::wire::dsse::Envelope;

/// The operator's way to the worker of a deployment.
#[derive(Debug, Clone)]
pub struct Desk(Where);

impl Desk {
    /// To a worker within this process.
    pub fn here(worker: Arc<Worker>, clock: Arc<dyn Clock>) -> Self {
        Self(Where::Here(worker, clock))
    }

    /// To the process that serves that directory.
    pub fn at(worker: &Path) -> Self {
        Self(Where::At(worker.join(OPERATOR_SOCKET)))
    }

    /// A new join ticket, one line.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn ticket(&self, terms: TicketTerms) -> Result<String, ClientError> {
        match self.order(Order::Ticket(terms)).await? {
            Told::Ticket(line) => Ok(line),
            _ => Err(ClientError::Otherwise(Listener::Worker)),
        }
    }

    /// A signed command.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn command(&self, draft: Draft) -> Result<Envelope, ClientError> {
        self.signed(Order::Command(draft)).await
    }

    /// The signed cancellation of a command.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cancel(&self, node: NodeId, id: CommandId) -> Result<Envelope, ClientError> {
        self.signed(Order::Cancel { node, id }).await
    }

    /// The signed revocation of a node's certificates.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revoke_for_good(&self, node: NodeId) -> Result<Envelope, ClientError> {
        self.signed(Order::RevokeForGood(node)).await
    }

    /// What the worker has made of results, behind a number: at most a thousand.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn facts(&self, after: u64) -> Result<Vec<FactView>, ClientError> {
        match self.order(Order::Facts { after }).await? {
            Told::Facts(facts) => Ok(facts),
            _ => Err(ClientError::Otherwise(Listener::Worker)),
        }
    }

    /// An order that is carried out there.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn done(&self, order: Order) -> Result<(), ClientError> {
        match self.order(order).await? {
            Told::Done => Ok(()),
            _ => Err(ClientError::Otherwise(Listener::Worker)),
        }
    }

    async fn signed(&self, order: Order) -> Result<Envelope, ClientError> {
        match self.order(order).await? {
            Told::Signed(envelope) => Ok(envelope),
            _ => Err(ClientError::Otherwise(Listener::Worker)),
        }
    }

    async fn order(&self, order: Order) -> Result<Told, ClientError> {
        match self.0.ask(order, Worker::obey).await? {
            Told::Failed(why) | Told::Refused { message: why, .. } => Err(ClientError::Refused(why)),
            told => Ok(told),
        }
    }
}
