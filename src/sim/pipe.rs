//! A connection in memory that keeps the bounds of writes: what one write gave is one read, or several where the
//! reader's buffer is smaller. A delay a read is then a delay a write, however long the bytes happen to be.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf as _, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes under way in one direction; a writer that finds so many waits.
const WINDOW: usize = 256 << 10;

/// One end; dropping it is the end of file for the other.
#[derive(Debug)]
pub struct Pipe {
    incoming: Way,
    outgoing: Way,
}

/// Two ends.
pub fn pipe() -> (Pipe, Pipe) {
    let (there, back) = (Way::default(), Way::default());
    let near = Pipe { incoming: back.clone(), outgoing: there.clone() };
    (near, Pipe { incoming: there, outgoing: back })
}

#[derive(Debug, Clone, Default)]
struct Way(Arc<Mutex<Flow>>);

#[derive(Debug, Default)]
struct Flow {
    writes: VecDeque<Bytes>,
    held: usize,
    /// Nothing follows.
    ended: bool,
    /// Nobody reads.
    unread: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

impl Way {
    fn flow(&self) -> MutexGuard<'_, Flow> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        let mut flow = self.flow();
        flow.ended = true;
        wake(&mut flow.reader);
    }
}

fn wake(waker: &mut Option<Waker>) {
    if let Some(waker) = waker.take() {
        waker.wake();
    }
}

impl AsyncRead for Pipe {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut flow = self.incoming.flow();
        let Some(first) = flow.writes.front_mut() else {
            if flow.ended {
                return Poll::Ready(Ok(()));
            }
            flow.reader = Some(context.waker().clone());
            return Poll::Pending;
        };
        let taken = first.len().min(buffer.remaining());
        buffer.put_slice(&first[..taken]);
        first.advance(taken);
        if first.is_empty() {
            flow.writes.pop_front();
        }
        flow.held -= taken;
        wake(&mut flow.writer);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Pipe {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut flow = self.outgoing.flow();
        if flow.unread || flow.ended {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let taken = bytes.len().min(WINDOW.saturating_sub(flow.held));
        if taken == 0 && !bytes.is_empty() {
            flow.writer = Some(context.waker().clone());
            return Poll::Pending;
        }
        if taken > 0 {
            flow.writes.push_back(Bytes::copy_from_slice(&bytes[..taken]));
            flow.held += taken;
            wake(&mut flow.reader);
        }
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.outgoing.end();
        Poll::Ready(Ok(()))
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.outgoing.end();
        let mut flow = self.incoming.flow();
        flow.unread = true;
        flow.writes.clear();
        wake(&mut flow.writer);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn what_one_write_gave_is_one_read_and_a_dropped_end_is_the_end_of_file() {
        let (mut near, mut far) = pipe();
        near.write_all(b"one").await.expect("written");
        near.write_all(b"two").await.expect("written");
        let mut buffer = [0; 16];
        assert_eq!(far.read(&mut buffer).await.expect("read"), 3);
        assert_eq!(far.read(&mut buffer[..2]).await.expect("read"), 2);
        drop(near);
        assert_eq!(
            far.read(&mut buffer).await.expect("read"),
            1,
            "what was written before the end still comes"
        );
        assert_eq!(far.read(&mut buffer).await.expect("read"), 0);
        assert_eq!(far.write(b"x").await.expect_err("nobody reads").kind(), io::ErrorKind::BrokenPipe);
    }

    #[tokio::test]
    async fn a_writer_waits_for_the_reader_once_the_window_is_full() {
        let (mut near, mut far) = pipe();
        let bytes = vec![7; WINDOW + 10];
        let mut writing = Box::pin(near.write_all(&bytes));
        assert!(writing.as_mut().now_or_never().is_none());
        let mut read = vec![0; WINDOW + 10];
        let (written, taken) = tokio::join!(writing, far.read_exact(&mut read));
        written.expect("written");
        assert_eq!((taken.expect("read"), read), (WINDOW + 10, bytes));
    }
}
