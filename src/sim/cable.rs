//! What the links of one agent go through: a cable that is cut, goes half-open, slows down or stalls, under whatever
//! byte stream. Both worlds use it: a TCP stream is wrapped at the agent's end, a pipe in memory at both.
//!
//! Delays are charged where bytes come in, at least a millisecond each (the grain of tokio's timers) and by chance
//! from the seed, the end and the number of the read: never by how many bytes there are, which a signature's length
//! would change from run to run. Under TCP one end pays for both directions.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Debug;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::ports::{ByteStream, Connect, ConnectError};

/// What a dead link swallows before a writer waits, as a socket's buffer does, bytes.
const SWALLOWS: usize = 256 << 10;
/// Bytes that may be on their way in.
const UNDER_WAY: usize = 256 << 10;
/// Bytes of one read from below: the length of a TLS record.
const READ: usize = 16 << 10;
/// A lost packet is sent again after this.
const RETRANSMIT: Duration = Duration::from_millis(200);
/// The far end of a link that died is buried this much later: a peer's keep-alive has given it up by then.
const BURIED: Duration = Duration::from_secs(90);

/// How long bytes take. The default is no time at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Weather {
    /// At least.
    pub latency: Duration,
    /// Up to so much more, by chance.
    pub jitter: Duration,
    /// So many reads of a thousand wait for a packet that is sent again.
    pub lost_per_mille: u16,
}

impl Weather {
    /// Both together.
    fn and(self, other: Self) -> Self {
        Self {
            latency: self.latency + other.latency,
            jitter: self.jitter + other.jitter,
            lost_per_mille: self.lost_per_mille.saturating_add(other.lost_per_mille),
        }
    }
}

/// The links of one agent, one after the other or several at once. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Cable(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    seed: u64,
    climate: Weather,
    weather: Weather,
    stalled_until: Option<Instant>,
    ends: BTreeMap<u64, End>,
    /// Ends so far: the number of the next one.
    made: u64,
}

#[derive(Debug, Default)]
struct End {
    mode: Mode,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Mode {
    #[default]
    Up,
    /// Nothing comes, and what is sent goes nowhere. It stays so.
    HalfOpen,
    /// Reset.
    Cut,
}

impl Cable {
    /// A cable whose chance is fixed by the seed. `climate` is what bytes take on it at all times.
    pub fn new(seed: u64, climate: Weather) -> Self {
        let weather = Weather::default();
        let state = State { seed, climate, weather, stalled_until: None, ends: BTreeMap::new(), made: 0 };
        Self(Arc::new(Mutex::new(state)))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lays one end of a connection through it.
    pub fn wrap<T>(&self, inner: T) -> FaultyIo<T>
    where
        T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut state = self.state();
        let number = state.made;
        state.made += 1;
        state.ends.insert(number, End::default());
        drop(state);
        FaultyIo {
            inner: Some(inner),
            cable: self.clone(),
            number,
            inbox: Inbox::default(),
            reads: 0,
            swallowed: 0,
            read_timer: None,
            write_timer: None,
        }
    }

    /// Resets every connection; how many ends that hit.
    pub fn cut(&self) -> usize {
        self.set(Mode::Cut)
    }

    /// Lets every connection die without a word: what is sent from now on is swallowed, and nothing comes any more.
    /// How many ends that hit.
    pub fn half_open(&self) -> usize {
        self.set(Mode::HalfOpen)
    }

    fn set(&self, mode: Mode) -> usize {
        let mut state = self.state();
        let mut hit = 0;
        for end in state.ends.values_mut().filter(|end| end.mode == Mode::Up) {
            end.mode = mode;
            hit += 1;
            end.reader.take().into_iter().chain(end.writer.take()).for_each(Waker::wake);
        }
        hit
    }

    /// What bytes take from now on, above what they always do.
    pub fn weather(&self, weather: Weather) {
        self.state().weather = weather;
    }

    /// Nothing moves for so long; then all comes that was under way.
    pub fn stall(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut state = self.state();
        state.stalled_until = state.stalled_until.max(Some(until));
    }
}

impl State {
    /// When what has come from below now reaches the reader.
    fn due(&self, end: u64, read: u64, now: Instant) -> Instant {
        let Weather { latency, jitter, lost_per_mille } = self.climate.and(self.weather);
        let chance = |salt| mix(self.seed ^ mix(end ^ mix(read ^ mix(salt))));
        let jitter_ms = u64::try_from(jitter.as_millis()).unwrap_or(u64::MAX);
        let mut delay = latency + Duration::from_millis(chance(0) % jitter_ms.saturating_add(1));
        if chance(1) % 1000 < u64::from(lost_per_mille) {
            delay += RETRANSMIT;
        }
        now + delay
    }
}

/// splitmix64's last step: every bit of the result depends on every bit of the number.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Reaches gateways through a cable.
#[derive(Debug)]
pub struct Cabled {
    /// Who opens the streams.
    pub connect: Arc<dyn Connect>,
    /// What they go through.
    pub cable: Cable,
}

impl Connect for Cabled {
    fn connect(&self, host: &str, port: u16) -> BoxFuture<'static, Result<ByteStream, ConnectError>> {
        let (connecting, cable) = (self.connect.connect(host, port), self.cable.clone());
        async move { Ok(Box::new(cable.wrap(connecting.await?)) as ByteStream) }.boxed()
    }
}

/// One end of a connection through a [`Cable`].
#[derive(Debug)]
pub struct FaultyIo<T: Send + 'static> {
    /// Absent once it is cut.
    inner: Option<T>,
    cable: Cable,
    number: u64,
    inbox: Inbox,
    reads: u64,
    swallowed: usize,
    read_timer: Option<Pin<Box<Sleep>>>,
    write_timer: Option<Pin<Box<Sleep>>>,
}

/// What has come from below and is still under way.
#[derive(Debug, Default)]
struct Inbox {
    reads: VecDeque<(Instant, Bytes)>,
    held: usize,
    /// What comes behind it all: the end of file, or an error.
    last: Option<(Instant, io::Result<()>)>,
}

impl Inbox {
    fn is_full(&self) -> bool {
        self.last.is_some() || self.held >= UNDER_WAY
    }

    fn is_empty(&self) -> bool {
        self.reads.is_empty() && self.last.is_none()
    }

    fn next_due(&self) -> Option<Instant> {
        self.reads.front().map(|(due, _)| *due).or(self.last.as_ref().map(|(due, _)| *due))
    }

    fn latest(&self) -> Option<Instant> {
        self.reads.back().map(|(due, _)| *due)
    }

    /// Gives out what is due.
    fn take(&mut self, buffer: &mut ReadBuf<'_>) -> io::Result<()> {
        let Some((_, first)) = self.reads.front_mut() else {
            let Some((due, last)) = self.last.take() else { return Ok(()) };
            // The end of file comes again; an error is told once.
            self.last = Some((due, Ok(())));
            return last;
        };
        let taken = first.len().min(buffer.remaining());
        buffer.put_slice(&first[..taken]);
        first.advance(taken);
        if first.is_empty() {
            self.reads.pop_front();
        }
        self.held -= taken;
        Ok(())
    }
}

fn reset() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "the link was cut")
}

/// Polls a timer that ends at `until`.
fn wait(timer: &mut Option<Pin<Box<Sleep>>>, until: Instant, context: &mut Context<'_>) -> Poll<()> {
    let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(until)));
    if timer.deadline() != until {
        timer.as_mut().reset(until);
    }
    timer.as_mut().poll(context)
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> FaultyIo<T> {
    /// The mode, with the waker left where a fault finds it.
    fn look(&mut self, which: impl FnOnce(&mut End) -> &mut Option<Waker>, context: &Context<'_>) -> Mode {
        let mut state = self.cable.state();
        let mode = state.ends.get_mut(&self.number).map_or(Mode::Cut, |end| {
            *which(end) = Some(context.waker().clone());
            end.mode
        });
        drop(state);
        if mode == Mode::Cut {
            self.inner = None;
        }
        mode
    }

    /// Takes in what has come from below.
    fn pull(&mut self, context: &mut Context<'_>) {
        let Some(inner) = &mut self.inner else { return };
        while !self.inbox.is_full() {
            let mut bytes = [MaybeUninit::uninit(); READ];
            let mut buffer = ReadBuf::uninit(&mut bytes);
            let Poll::Ready(read) = Pin::new(&mut *inner).poll_read(context, &mut buffer) else { return };
            let bytes = Bytes::copy_from_slice(buffer.filled());
            let due = self.cable.state().due(self.number, self.reads, Instant::now());
            // What came later arrives later.
            let due = self.inbox.latest().map_or(due, |latest| latest.max(due));
            self.reads += 1;
            if read.is_err() || bytes.is_empty() {
                self.inbox.last = Some((due, read));
            } else {
                self.inbox.held += bytes.len();
                self.inbox.reads.push_back((due, bytes));
            }
        }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncRead for FaultyIo<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.look(|end| &mut end.reader, context) {
            Mode::Cut => return Poll::Ready(Err(reset())),
            Mode::HalfOpen => return Poll::Pending,
            Mode::Up => {}
        }
        self.pull(context);
        if self.inbox.is_empty() {
            return Poll::Pending;
        }
        let due = self.inbox.next_due().max(self.cable.state().stalled_until);
        if let Some(due) = due.filter(|due| *due > Instant::now()) {
            let this = &mut *self;
            if wait(&mut this.read_timer, due, context).is_pending() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.inbox.take(buffer))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + 'static> AsyncWrite for FaultyIo<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.look(|end| &mut end.writer, context) {
            Mode::Cut => return Poll::Ready(Err(reset())),
            Mode::HalfOpen => {
                let taken = bytes.len().min(SWALLOWS - self.swallowed);
                self.swallowed += taken;
                return if taken == 0 && !bytes.is_empty() { Poll::Pending } else { Poll::Ready(Ok(taken)) };
            }
            Mode::Up => {}
        }
        let stalled = self.cable.state().stalled_until.filter(|until| *until > Instant::now());
        if let Some(until) = stalled {
            let this = &mut *self;
            if wait(&mut this.write_timer, until, context).is_pending() {
                return Poll::Pending;
            }
        }
        match &mut self.inner {
            Some(inner) => Pin::new(inner).poll_write(context, bytes),
            None => Poll::Ready(Err(reset())),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match (self.look(|end| &mut end.writer, context), &mut self.inner) {
            (Mode::HalfOpen, _) => Poll::Ready(Ok(())),
            (Mode::Up, Some(inner)) => Pin::new(inner).poll_flush(context),
            (Mode::Cut, _) | (Mode::Up, None) => Poll::Ready(Err(reset())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match (self.look(|end| &mut end.writer, context), &mut self.inner) {
            (Mode::HalfOpen, _) => Poll::Ready(Ok(())),
            (Mode::Up, Some(inner)) => Pin::new(inner).poll_shutdown(context),
            (Mode::Cut, _) | (Mode::Up, None) => Poll::Ready(Err(reset())),
        }
    }
}

impl<T: Send + 'static> Drop for FaultyIo<T> {
    fn drop(&mut self) {
        let end = self.cable.state().ends.remove(&self.number);
        // A dead link carries no end of file either: the stream below stays open until its peer gives up.
        if end.is_some_and(|end| end.mode == Mode::HalfOpen)
            && let (Some(inner), Ok(runtime)) = (self.inner.take(), tokio::runtime::Handle::try_current())
        {
            runtime.spawn(async move {
                tokio::time::sleep(BURIED).await;
                drop(inner);
            });
        }
    }
}

#[cfg(test)]
mod tests;
