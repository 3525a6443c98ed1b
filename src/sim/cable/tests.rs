use futures_util::FutureExt as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::super::pipe::{Pipe, pipe};
use super::*;

const LATENCY: Duration = Duration::from_millis(5);

fn weather(latency: Duration) -> Weather {
    Weather { latency, ..Weather::default() }
}

/// Both ends of a connection through one cable.
fn wired(cable: &Cable) -> (FaultyIo<Pipe>, FaultyIo<Pipe>) {
    let (near, far) = pipe();
    (cable.wrap(near), cable.wrap(far))
}

async fn read(io: &mut (impl AsyncRead + Unpin)) -> io::Result<Vec<u8>> {
    let mut buffer = [0; 64];
    let length = io.read(&mut buffer).await?;
    Ok(buffer[..length].to_vec())
}

/// When each of `count` writes of `length` bytes comes out, ms.
async fn arrivals(seed: u64, length: usize, count: usize) -> Vec<u128> {
    let jittery = Weather { latency: LATENCY, jitter: Duration::from_millis(20), lost_per_mille: 100 };
    let (mut near, mut far) = wired(&Cable::new(seed, jittery));
    let start = Instant::now();
    let mut at = Vec::new();
    for _ in 0..count {
        near.write_all(&vec![1; length]).await.expect("written");
        far.read_exact(&mut vec![0; length]).await.expect("read");
        at.push(start.elapsed().as_millis());
    }
    at
}

#[tokio::test(start_paused = true)]
async fn a_delay_depends_on_the_seed_and_on_no_length() {
    let first = arrivals(1, 10, 50).await;
    assert_eq!(first, arrivals(1, 4000, 50).await);
    assert_ne!(first, arrivals(2, 10, 50).await);
    assert!(first[0] >= LATENCY.as_millis());
}

#[tokio::test(start_paused = true)]
async fn writes_travel_side_by_side_and_come_out_in_order() {
    let jittery = Weather { latency: LATENCY, jitter: Duration::from_millis(20), ..Weather::default() };
    let (mut near, mut far) = wired(&Cable::new(3, jittery));
    let start = Instant::now();
    for n in 0..100_u8 {
        near.write_all(&[n]).await.expect("written");
    }
    let mut bytes = [0; 100];
    far.read_exact(&mut bytes).await.expect("read");
    assert!(bytes.is_sorted(), "{bytes:?}");
    assert!(start.elapsed() <= Duration::from_millis(26), "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_cut_resets_both_ends_even_while_they_wait() {
    let cable = Cable::new(1, weather(LATENCY));
    let (mut near, mut far) = wired(&cable);
    let waiting = tokio::spawn(async move { read(&mut far).await });
    tokio::task::yield_now().await;
    assert_eq!(cable.cut(), 2);
    assert_eq!(waiting.await.expect("a task").expect_err("reset").kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(near.write(b"x").await.expect_err("reset").kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(cable.cut(), 0, "nothing is left to cut");
    let (mut near, mut far) = wired(&cable);
    near.write_all(b"new").await.expect("a later connection works");
    assert_eq!(read(&mut far).await.expect("read"), b"new");
}

#[tokio::test(start_paused = true)]
async fn a_half_open_link_swallows_a_window_of_writes_and_gives_neither_bytes_nor_an_end() {
    let cable = Cable::new(1, weather(LATENCY));
    let (mut near, mut far) = wired(&cable);
    far.write_all(b"under way").await.expect("written");
    assert_eq!(cable.half_open(), 2);
    near.write_all(&vec![0; SWALLOWS]).await.expect("swallowed");
    assert!(near.write(b"x").now_or_never().is_none(), "the window is full");
    assert!(tokio::time::timeout(Duration::from_secs(60), read(&mut near)).await.is_err());
    drop(near);
    assert!(
        tokio::time::timeout(Duration::from_secs(60), read(&mut far)).await.is_err(),
        "no end of file either"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stall_holds_both_directions_and_loses_nothing() {
    let cable = Cable::new(1, weather(LATENCY));
    let (mut near, mut far) = wired(&cable);
    near.write_all(b"before").await.expect("written");
    cable.stall(Duration::from_secs(3));
    let start = Instant::now();
    assert_eq!(read(&mut far).await.expect("read"), b"before");
    assert!(start.elapsed() >= Duration::from_secs(3));
    cable.stall(Duration::from_secs(3));
    far.write_all(b"after").await.expect("written");
    assert!(start.elapsed() >= Duration::from_secs(6));
    assert_eq!(read(&mut near).await.expect("read"), b"after");
}

async fn tcp() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("an address");
    let (near, far) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.expect("connected"), far.expect("accepted").0)
}

#[tokio::test]
async fn a_socket_is_delayed_cut_and_left_for_dead_in_the_same_way() {
    let cable = Cable::new(1, weather(Duration::from_millis(20)));
    let (near, mut far) = tcp().await;
    let mut near = cable.wrap(near);
    let start = Instant::now();
    far.write_all(b"slow").await.expect("written");
    assert_eq!(read(&mut near).await.expect("read"), b"slow");
    assert!(start.elapsed() >= Duration::from_millis(20));
    cable.cut();
    assert_eq!(read(&mut near).await.expect_err("reset").kind(), io::ErrorKind::ConnectionReset);
    assert_eq!(read(&mut far).await.unwrap_or_default(), b"", "the socket below is closed");

    let (near, mut far) = tcp().await;
    let mut near = cable.wrap(near);
    cable.half_open();
    near.write_all(b"lost").await.expect("swallowed");
    drop(near);
    let silence = tokio::time::timeout(Duration::from_millis(200), read(&mut far)).await;
    assert!(silence.is_err(), "{silence:?}");
}
