use tokio::net::TcpListener;

use super::*;

/// A listener of that family whose queue is full: a connect to it waits.
async fn deaf(address: &str) -> (TcpListener, Vec<tokio::task::JoinHandle<()>>) {
    let address: std::net::SocketAddr = address.parse().expect("an address");
    let v6 = address.is_ipv6();
    let socket = if v6 { tokio::net::TcpSocket::new_v6() } else { tokio::net::TcpSocket::new_v4() };
    let socket = socket.expect("a socket");
    socket.bind(address).expect("bound");
    let listener = socket.listen(1).expect("listens");
    let address = listener.local_addr().expect("an address");
    let mut fillers = Vec::new();
    for _ in 0..8 {
        fillers.push(tokio::spawn(async move {
            let _held = tokio::net::TcpStream::connect(address).await;
            std::future::pending::<()>().await;
        }));
    }
    // The kernel drops what has no place in the queue; the queue is full once a connect does not come back.
    for _ in 0..50 {
        let connect = tokio::net::TcpStream::connect(address);
        if tokio::time::timeout(Duration::from_millis(100), connect).await.is_err() {
            return (listener, fillers);
        }
    }
    panic!("the queue of {address} does not fill");
}

#[tokio::test]
async fn the_second_address_family_starts_a_quarter_of_a_second_after_a_first_that_is_silent() {
    for (silent, answers) in [("[::1]:0", "127.0.0.1:0"), ("127.0.0.1:0", "[::1]:0")] {
        let (deaf, fillers) = deaf(silent).await;
        let listener = TcpListener::bind(answers).await.expect("a listener");
        let good = listener.local_addr().expect("an address");
        let start = tokio::time::Instant::now();
        let race = race(vec![deaf.local_addr().expect("an address"), good]);
        let stream =
            tokio::time::timeout(Duration::from_secs(10), race).await.expect("in time").expect("connected");
        assert_eq!(stream.peer_addr().expect("an address"), good);
        assert!(start.elapsed() >= Duration::from_millis(250), "{:?}", start.elapsed());
        fillers.iter().for_each(tokio::task::JoinHandle::abort);
    }
}

#[tokio::test]
async fn the_first_address_family_wins_where_it_answers_and_ipv6_alone_works() {
    let first = TcpListener::bind("[::1]:0").await.expect("a listener");
    let second = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let (v6, v4) = (first.local_addr().expect("an address"), second.local_addr().expect("an address"));
    for addresses in [vec![v6, v4], vec![v6]] {
        let stream = race(addresses).await.expect("connected");
        assert_eq!(stream.peer_addr().expect("an address"), v6);
    }
    let stream = race(vec![v4, v6]).await.expect("connected");
    assert_eq!(stream.peer_addr().expect("an address"), v4);
}

#[tokio::test]
async fn a_second_address_is_tried_when_the_first_refuses() {
    let live = TcpListener::bind("127.0.0.1:0").await.expect("a socket");
    let dead = TcpListener::bind("127.0.0.1:0").await.expect("a socket").local_addr().expect("an address");
    let live_at = live.local_addr().expect("an address");
    let stream = race(vec![dead, live_at]).await.expect("the second");
    assert_eq!(stream.peer_addr().expect("an address"), live_at);
    let error = race(vec![dead]).await.expect_err("nobody listens");
    assert!(error.to_string().contains(&dead.to_string()), "{error}");
}
