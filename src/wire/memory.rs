//! An in-memory link for tests: the node's side is a real [`Link`], the other end is scripted by the test.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;

use super::link::{Dialer, EndKind, Endpoint, Link, LinkEnd, NotSent};
use super::pb;

/// Frames that may wait in either direction; small, so that tests can fill it.
pub const QUEUE: usize = 8;

/// A dialer whose attempts come out of [`Dials`].
#[derive(Debug, Clone)]
pub struct MemoryDialer {
    attempts: mpsc::UnboundedSender<Attempt>,
}

/// The attempts of a [`MemoryDialer`], in order.
#[derive(Debug)]
pub struct Dials {
    attempts: mpsc::UnboundedReceiver<Attempt>,
}

/// One attempt to dial: answer it, or drop it to leave the node waiting for ever.
#[derive(Debug)]
pub struct Attempt {
    /// Where to.
    pub endpoint: Endpoint,
    /// The frame that goes with the call.
    pub first: pb::NodeFrame,
    /// The keep-alive interval asked for.
    pub keep_alive: Duration,
    answer: tokio::sync::oneshot::Sender<Result<MemoryLink, LinkEnd>>,
}

/// The gateway's end of a link. Dropping it closes the stream in order.
#[derive(Debug)]
pub struct FarEnd {
    /// Frames from the node; ends when the node has closed.
    pub frames: mpsc::Receiver<pb::NodeFrame>,
    say: mpsc::UnboundedSender<Result<pb::GatewayFrame, LinkEnd>>,
}

#[derive(Debug)]
struct MemoryLink {
    queue: mpsc::Sender<pb::NodeFrame>,
    incoming: mpsc::UnboundedReceiver<Result<pb::GatewayFrame, LinkEnd>>,
}

/// A dialer and the attempts that it will make.
pub fn dialer() -> (Arc<MemoryDialer>, Dials) {
    let (sender, attempts) = mpsc::unbounded_channel();
    (Arc::new(MemoryDialer { attempts: sender }), Dials { attempts })
}

impl Dials {
    /// The next attempt.
    ///
    /// # Panics
    /// The dialer is gone.
    pub async fn next(&mut self) -> Attempt {
        self.attempts.recv().await.expect("the dialer is gone")
    }
}

impl Attempt {
    /// Opens the link.
    pub fn open(self) -> FarEnd {
        let (queue, frames) = mpsc::channel(QUEUE);
        let (say, incoming) = mpsc::unbounded_channel();
        let _ = self.answer.send(Ok(MemoryLink { queue, incoming }));
        FarEnd { frames, say }
    }

    /// Fails the dial.
    pub fn fail(self, end: LinkEnd) {
        let _ = self.answer.send(Err(end));
    }

    /// Never answers; the returned value must be kept.
    pub fn hang(self) -> impl Send {
        self.answer
    }
}

impl FarEnd {
    /// Sends a frame to the node.
    pub fn send(&self, frame: pb::gateway_frame::Frame) {
        let _ = self.say.send(Ok(pb::GatewayFrame { frame: Some(frame) }));
    }

    /// Ends the call.
    pub fn end(self, end: LinkEnd) {
        let _ = self.say.send(Err(end));
    }

    /// The next frame of the node; absent when it has closed.
    pub async fn next(&mut self) -> Option<pb::node_frame::Frame> {
        self.frames.recv().await?.frame
    }
}

impl Dialer for MemoryDialer {
    fn open(
        &self,
        endpoint: &Endpoint,
        first: pb::NodeFrame,
        keep_alive: Duration,
    ) -> BoxFuture<'_, Result<Box<dyn Link>, LinkEnd>> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let _ = self.attempts.send(Attempt { endpoint: endpoint.clone(), first, keep_alive, answer });
        async move {
            match answered.await {
                Ok(Ok(link)) => Ok(Box::new(link) as Box<dyn Link>),
                Ok(Err(end)) => Err(end),
                Err(_) => std::future::pending().await,
            }
        }
        .boxed()
    }
}

impl Link for MemoryLink {
    fn send(&mut self, frame: pb::NodeFrame) -> Result<(), NotSent> {
        self.queue.try_send(frame).map_err(|error| NotSent(Box::new(error.into_inner())))
    }

    fn room(&self) -> usize {
        self.queue.capacity()
    }

    fn receive(&mut self) -> BoxFuture<'_, Result<pb::GatewayFrame, LinkEnd>> {
        async move {
            self.incoming.recv().await.unwrap_or_else(|| {
                let detail = "the gateway closed the session".into();
                Err(LinkEnd { kind: EndKind::Closed, reason: None, pushback: None, revocation: None, detail })
            })
        }
        .boxed()
    }

    fn flushed(&self) -> BoxFuture<'static, ()> {
        let queue = self.queue.clone();
        async move { queue.reserve_many(queue.max_capacity()).await.map(drop).unwrap_or_default() }.boxed()
    }

    fn close(self: Box<Self>, within: Duration) -> BoxFuture<'static, ()> {
        async move {
            let _ = tokio::time::timeout(within, self.flushed()).await;
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Reason;
    use crate::wire::contract::{self, Opened, Reply, heartbeat};

    async fn open() -> Opened {
        let (dialer, mut dials) = dialer();
        let endpoint = Endpoint { host: "gw".into(), port: 443 };
        let attempt = async { dials.next().await.open() };
        let dialed = dialer.open(&endpoint, heartbeat(0), Duration::from_secs(20));
        let (link, mut far) = tokio::join!(dialed, attempt);
        let (say, seen) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(frame) = far.frames.recv().await {
                let reply = contract::reply(&frame);
                let _ = say.send(frame);
                match reply {
                    Some(Reply::Say(frame)) => far.send(frame),
                    Some(Reply::End) => {
                        far.end(LinkEnd::local(EndKind::Unavailable, Reason::Storm, "too many"));
                        return;
                    }
                    None => {}
                }
            }
        });
        (link.expect("a link"), seen)
    }

    #[tokio::test]
    async fn the_link_keeps_its_contract() {
        contract::holds(open).await;
    }
}
