//! The network of a virtual world: gateways listen on ports of it, agents reach them by pipes through their cables.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc;
use tokio::time::sleep;

use super::super::cable::Cable;
use super::super::pipe::pipe;
use crate::ports::{ByteStream, Connect, ConnectError};

/// A connect takes this long, answered or refused.
const CONNECT: Duration = Duration::from_millis(2);
/// Connections that wait for a gateway to accept them, as in a listener's backlog.
const BACKLOG: usize = 1024;

/// Cheap to clone; its clones are the same.
#[derive(Debug, Clone, Default)]
pub struct Net(Arc<Mutex<BTreeMap<u16, Port>>>);

/// Who listens, and the cable that all of its connections go through behind the agent's own.
#[derive(Debug)]
struct Port {
    incoming: mpsc::Sender<ByteStream>,
    cable: Cable,
}

impl Net {
    fn ports(&self) -> MutexGuard<'_, BTreeMap<u16, Port>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens on a port, in the place of whoever did before. `cable` is what ends or stalls all of its connections.
    pub fn listen(&self, port: u16, cable: Cable) -> mpsc::Receiver<ByteStream> {
        let (incoming, accepted) = mpsc::channel(BACKLOG);
        self.ports().insert(port, Port { incoming, cable });
        accepted
    }

    /// The way of one agent into it.
    pub fn through(&self, cable: Cable) -> Arc<dyn Connect> {
        Arc::new(Way { net: self.clone(), cable })
    }

    /// The agent's end of a new connection; `cable` is the agent's.
    fn open(&self, port: u16, cable: &Cable) -> io::Result<ByteStream> {
        let ports = self.ports();
        let port = ports.get(&port).ok_or(io::ErrorKind::ConnectionRefused)?;
        let (near, far) = pipe();
        let far = port.cable.wrap(cable.wrap(far));
        port.incoming.try_send(Box::new(far)).map_err(|_| io::ErrorKind::ConnectionRefused)?;
        Ok(Box::new(cable.wrap(near)))
    }
}

#[derive(Debug)]
struct Way {
    net: Net,
    cable: Cable,
}

impl Connect for Way {
    fn connect(&self, host: &str, port: u16) -> BoxFuture<'static, Result<ByteStream, ConnectError>> {
        let (net, cable, host) = (self.net.clone(), self.cable.clone(), host.to_owned());
        async move {
            sleep(CONNECT).await;
            net.open(port, &cable).map_err(|source| ConnectError::Unreachable { host, port, source })
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::super::super::cable::Weather;
    use super::*;

    fn cable() -> Cable {
        Cable::new(1, Weather { latency: Duration::from_millis(1), ..Weather::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn who_listens_is_reached_until_it_is_gone_and_both_cables_end_a_connection() {
        let net = Net::default();
        let (agent, gateway) = (cable(), cable());
        let connect = net.through(agent.clone());
        let refused = connect.connect("gw", 7).await.expect_err("nobody listens");
        assert!(matches!(refused, ConnectError::Unreachable { .. }));
        for ended_by in [&agent, &gateway] {
            let mut accepted = net.listen(7, gateway.clone());
            let mut near = connect.connect("gw", 7).await.expect("a stream");
            let mut far = accepted.recv().await.expect("a stream");
            near.write_all(b"hello").await.expect("written");
            let mut bytes = [0; 5];
            far.read_exact(&mut bytes).await.expect("read");
            assert_eq!(&bytes, b"hello");
            ended_by.cut();
            let mut others = [0; 5];
            let (near, far) = tokio::join!(near.read(&mut bytes), far.read(&mut others));
            assert!(near.map_or(true, |length| length == 0) && far.map_or(true, |length| length == 0));
            drop(accepted);
            connect.connect("gw", 7).await.expect_err("nobody listens any more");
        }
    }
}
