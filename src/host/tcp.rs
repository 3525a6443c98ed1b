//! TCP to a gateway: the name is looked up, its address families race.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::net::TcpStream;

use crate::ports::{ByteStream, Connect, ConnectError};

/// The second address family starts this much later, unless the first has failed before.
const SECOND_FAMILY: Duration = Duration::from_millis(250);

/// Connects over this machine's network.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tcp;

impl Connect for Tcp {
    fn connect(&self, host: &str, port: u16) -> BoxFuture<'static, Result<ByteStream, ConnectError>> {
        let host = host.to_owned();
        async move {
            // tokio resolves on its blocking threads; an address is not looked up.
            let found = tokio::net::lookup_host((host.as_str(), port)).await.map(Iterator::collect);
            let addresses =
                found.map_err(|source| ConnectError::Unresolved { host: host.clone(), source })?;
            let opened = async {
                let stream = race(addresses).await?;
                // A frame is written whole; waiting for more would only delay it.
                stream.set_nodelay(true)?;
                Ok(Box::new(stream) as ByteStream)
            };
            opened.await.map_err(|source| ConnectError::Unreachable { host, port, source })
        }
        .boxed()
    }
}

/// Both address families race; within a family the addresses are tried in the resolver's order.
async fn race(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let first_family = addresses.first().map(SocketAddr::is_ipv6);
    let (first, second): (Vec<_>, Vec<_>) =
        addresses.into_iter().partition(|address| Some(address.is_ipv6()) == first_family);
    let mut first = Box::pin(in_turn(first));
    let early = tokio::time::timeout(SECOND_FAMILY, &mut first).await;
    if second.is_empty() {
        return match early {
            Ok(result) => result,
            Err(_) => first.await,
        };
    }
    let second = Box::pin(in_turn(second));
    match early {
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err(_)) => second.await,
        Err(_) => match futures_util::future::select_ok([first as ConnectFuture, second]).await {
            Ok((stream, _loser)) => Ok(stream),
            Err(error) => Err(error),
        },
    }
}

type ConnectFuture = Pin<Box<dyn Future<Output = io::Result<TcpStream>> + Send>>;

async fn in_turn(addresses: Vec<SocketAddr>) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = io::Error::new(error.kind(), format!("{address}: {error}")),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
