//! An operator: has the worker sign what commands a node, and gives it to a gateway.

use std::path::Path;

use super::{Client, Request, Response};
use crate::gateway::lines::{ClientError, Listener};
use crate::gateway::worker::{Desk, Draft, FactView, Order, TicketTerms};
use crate::model::{CommandId, NodeId};

/// A gateway and the worker of its deployment.
#[derive(Debug)]
pub struct Operator {
    /// The gateway, for what needs no signature.
    pub gateway: Client,
    desk: Desk,
}

impl Operator {
    /// Connects to the gateway of a state directory; the worker is asked when it is needed.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn connect(gateway: &Path, desk: Desk) -> Result<Self, ClientError> {
        Ok(Self { gateway: Client::connect(gateway).await?, desk })
    }

    /// A new join ticket, one line.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn ticket(&self, terms: TicketTerms) -> Result<String, ClientError> {
        self.desk.ticket(terms).await
    }

    /// Puts a command into its node's queue.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn enqueue(&mut self, draft: Draft) -> Result<CommandId, ClientError> {
        let command = self.desk.command(draft).await?;
        match self.gateway.call(&Request::Enqueue { command }).await? {
            Response::Enqueued(id) => Ok(id),
            _ => Err(ClientError::Otherwise(Listener::Gateway)),
        }
    }

    /// Cancels a command.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn cancel(&mut self, id: CommandId) -> Result<(), ClientError> {
        let view = match self.gateway.call(&Request::Show { id: id.clone() }).await? {
            Response::Command(Some(view)) => view,
            Response::Command(None) => {
                return Err(ClientError::Refused(format!("no command {id} is known here")));
            }
            _ => return Err(ClientError::Otherwise(Listener::Gateway)),
        };
        let cancellation = self.desk.cancel(view.node, id.clone()).await?;
        self.done(&Request::Cancel { id, cancellation }).await
    }

    /// Revokes a node's certificates: first at the worker, so that none is renewed any more. For good: a connected node is
    /// told so by the worker, and keeps it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn revoke(&mut self, node: NodeId, for_good: bool) -> Result<(), ClientError> {
        let revocation = if for_good {
            Some(self.desk.revoke_for_good(node.clone()).await?)
        } else {
            self.desk.done(Order::Revoke(node.clone())).await?;
            None
        };
        self.done(&Request::Revoke { node, revocation }).await
    }

    /// Takes that back; ends a quarantine too.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn unrevoke(&mut self, node: NodeId) -> Result<(), ClientError> {
        self.desk.done(Order::Unrevoke(node.clone())).await?;
        self.done(&Request::Unrevoke { node }).await
    }

    /// Deletes a node: first at the worker, so that no ticket that it has used lets it in again.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete(&mut self, node: NodeId) -> Result<(), ClientError> {
        self.desk.done(Order::Forget(node.clone())).await?;
        self.done(&Request::Delete { node }).await
    }

    /// What the worker has made of results, oldest first. No gateway is asked.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn results(&self) -> Result<Vec<FactView>, ClientError> {
        let mut facts = Vec::<FactView>::new();
        loop {
            let page = self.desk.facts(facts.last().map_or(0, |fact| fact.number)).await?;
            if page.is_empty() {
                return Ok(facts);
            }
            facts.extend(page);
        }
    }

    async fn done(&mut self, request: &Request) -> Result<(), ClientError> {
        match self.gateway.call(request).await? {
            Response::Done => Ok(()),
            _ => Err(ClientError::Otherwise(Listener::Gateway)),
        }
    }
}
