//! `Node.Session` as a link.
//!
//! The call's future resolves only when the gateway's response headers come, and until it is polled nothing is sent:
//! so the first frame goes with the call, and the call is driven by whoever receives.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt as _, StreamExt as _};
use rustls::ClientConfig;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status, Streaming};

use super::{Connection, connect};
use crate::model::limits::FRAME_BYTES;
use crate::ports::Connect;
use crate::wire::link::{Dialer, EndKind, Endpoint, Link, LinkEnd, NotSent, Validity};
use crate::wire::pb;
use crate::wire::pb::node_client::NodeClient;

/// Frames that may wait for the transport. Every command in flight (26 by default credits) has two answers on the
/// way, beside a heartbeat and a Goodbye; what finds no room waits in the journal.
const QUEUE: usize = 64;

/// The channel has its places ready in blocks of 32, of which it keeps several: a frame of its own size each would be
/// 30 KiB of an idle node.
type Queue = mpsc::Sender<Box<pb::NodeFrame>>;

/// Dials gateways with one identity.
#[derive(Debug, Clone)]
pub struct GrpcDialer {
    tls: Arc<ClientConfig>,
    connect: Arc<dyn Connect>,
}

impl GrpcDialer {
    /// A dialer that offers the certificate of `tls` ([`crate::wire::tls::client_config`]) to whom `connect` reaches.
    pub fn new(tls: Arc<ClientConfig>, connect: Arc<dyn Connect>) -> Self {
        Self { tls, connect }
    }
}

impl Dialer for GrpcDialer {
    fn open(
        &self,
        endpoint: &Endpoint,
        first: pb::NodeFrame,
        keep_alive: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Link>, LinkEnd>> {
        let endpoint = endpoint.clone();
        Box::pin(async move {
            let connection = connect(&endpoint, &self.tls, &*self.connect, keep_alive).await?;
            Ok(session(connection, first))
        })
    }
}

/// Opens the session over a connection that is there, of which the caller may have kept the service for calls beside it.
pub fn session(connection: Connection, first: pb::NodeFrame) -> Box<dyn Link> {
    Box::new(GrpcLink::call(connection, first))
}

struct GrpcLink {
    // Declared before the connection: the call goes before what carries it.
    incoming: Incoming,
    queue: Queue,
    connection: Connection,
}

enum Incoming {
    WaitingForHeaders(BoxFuture<'static, Result<Response<Streaming<pb::GatewayFrame>>, Status>>),
    Open(Box<Streaming<pb::GatewayFrame>>),
    /// The call has failed; the connection is still to be asked why.
    Failed(Box<Status>),
    /// The gateway has closed its half in order.
    Closed,
}

impl GrpcLink {
    fn call(connection: Connection, first: pb::NodeFrame) -> Self {
        let (queue, frames): (Queue, _) = mpsc::channel(QUEUE);
        let first = tokio_stream::once(first);
        let frames = ReceiverStream::new(frames).map(|frame| *frame);
        let frames = tokio_stream::StreamExt::chain(first, frames);
        let mut client = NodeClient::with_origin(connection.service(), connection.origin())
            .max_decoding_message_size(FRAME_BYTES);
        let call = async move { client.session(frames).await };
        Self { incoming: Incoming::WaitingForHeaders(call.boxed()), queue, connection }
    }

    async fn next(&mut self) -> Result<pb::GatewayFrame, LinkEnd> {
        loop {
            // Every await may be the last of a dropped future: what it gave is in `incoming` before the next one.
            self.incoming = match &mut self.incoming {
                Incoming::WaitingForHeaders(call) => match call.await {
                    Ok(response) => Incoming::Open(Box::new(response.into_inner())),
                    Err(status) => Incoming::Failed(Box::new(status)),
                },
                Incoming::Open(frames) => match frames.message().await {
                    Ok(Some(frame)) => return Ok(frame),
                    Ok(None) => Incoming::Closed,
                    Err(status) => Incoming::Failed(Box::new(status)),
                },
                Incoming::Failed(status) => return Err(self.connection.end_of(status).await),
                Incoming::Closed => {
                    let detail = "the gateway closed the session".into();
                    return Err(LinkEnd {
                        kind: EndKind::Closed,
                        reason: None,
                        pushback: None,
                        revocation: None,
                        detail,
                    });
                }
            };
        }
    }
}

impl Link for GrpcLink {
    fn send(&mut self, frame: pb::NodeFrame) -> Result<(), NotSent> {
        self.queue.try_send(Box::new(frame)).map_err(|error| NotSent(error.into_inner()))
    }

    fn gateway_validity(&self) -> Option<Validity> {
        Some(self.connection.server_validity())
    }

    fn room(&self) -> usize {
        self.queue.capacity()
    }

    fn receive(&mut self) -> BoxFuture<'_, Result<pb::GatewayFrame, LinkEnd>> {
        self.next().boxed()
    }

    fn flushed(&self) -> BoxFuture<'static, ()> {
        let queue = self.queue.clone();
        // All permits are free when the transport has taken every frame; an error means that it is gone.
        async move { queue.reserve_many(queue.max_capacity()).await.map(drop).unwrap_or_default() }.boxed()
    }

    fn close(self: Box<Self>, within: Duration) -> BoxFuture<'static, ()> {
        async move {
            let Self { mut incoming, queue, connection } = *self;
            // The end of our half tells the gateway that nothing follows; it then ends the call.
            drop(queue);
            let drained = async {
                if let Incoming::WaitingForHeaders(call) = &mut incoming
                    && let Ok(response) = call.await
                {
                    incoming = Incoming::Open(Box::new(response.into_inner()));
                }
                if let Incoming::Open(frames) = &mut incoming {
                    while let Ok(Some(_)) = frames.message().await {}
                }
            };
            let _ = tokio::time::timeout(within, drained).await;
            drop(connection);
        }
        .boxed()
    }
}
