//! What systemd is told of the daemon, as sd_notify(3) has it: one datagram a message, to the socket in NOTIFY_SOCKET.
//!
//! The watchdog is fed by the runtime that does the daemon's work, so that one which hangs stops feeding it. Nothing
//! here ever waits: a manager that does not read loses a message, and the next one says the same again.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd as _;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::net::{SendFlags, send};
use tokio::sync::watch;

use crate::session::{SessionState, SessionStatus};

/// The way to whoever supervises this process; without one, nothing is said.
#[derive(Debug, Default)]
pub struct Notifier {
    socket: Option<UnixDatagram>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// From this process's environment variables.
    ///
    /// # Errors
    /// The socket that is named cannot be reached: the unit would wait for READY until its start times out.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> io::Result<Self> {
        let Some(name) = variable("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Self::default());
        };
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&name)?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.connect_addr(&address)?;
        Ok(Self { socket: Some(socket), watchdog: watchdog(&variable) })
    }

    fn say(&self, message: &str) {
        if let Some(socket) = &self.socket {
            let _ = send(socket.as_fd(), message.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        }
    }

    /// Says READY though nothing runs yet, since a unit that is not ready in time is started again and again; feeds the
    /// watchdog and shows `why` as the unit's status. Never ends.
    pub async fn wait(&self, mut why: watch::Receiver<String>) -> Infallible {
        self.say(&format!("READY=1\nSTATUS={}", one_line(&why.borrow_and_update())));
        let mut feed = self.watchdog.map(|limit| tokio::time::interval(limit / 2));
        loop {
            tokio::select! {
                biased;
                () = tick(&mut feed) => self.say("WATCHDOG=1"),
                changed = why.changed() => match changed {
                    Ok(()) => self.say(&format!("STATUS={}", one_line(&why.borrow_and_update()))),
                    Err(_) => std::future::pending().await,
                }
            }
        }
    }

    /// Says READY, then feeds the watchdog, shows the session as the unit's status and tells of a stop. Never ends;
    /// a hung runtime no longer polls it, which is the point.
    pub async fn follow(&self, mut session: watch::Receiver<SessionStatus>, mut stop: watch::Receiver<bool>) {
        let mut shown = describe(&session.borrow_and_update());
        self.say(&format!("READY=1\nSTATUS={shown}"));
        // Half of what systemd waits, as its manual advises.
        let mut feed = self.watchdog.map(|limit| tokio::time::interval(limit / 2));
        let mut stopping = false;
        loop {
            tokio::select! {
                biased;
                () = tick(&mut feed) => self.say("WATCHDOG=1"),
                // A sender that is gone asks for the same.
                _ = stop.wait_for(|stop| *stop), if !stopping => {
                    stopping = true;
                    self.say("STOPPING=1\nSTATUS=stopping");
                }
                changed = session.changed(), if !stopping => {
                    if changed.is_err() {
                        // The session has ended; the journal is being closed.
                        stopping = true;
                        continue;
                    }
                    let now = describe(&session.borrow_and_update());
                    if now != shown {
                        self.say(&format!("STATUS={now}"));
                        shown = now;
                    }
                }
            }
        }
    }
}

async fn tick(feed: &mut Option<tokio::time::Interval>) {
    match feed {
        Some(feed) => drop(feed.tick().await),
        None => std::future::pending().await,
    }
}

/// The unit's WatchdogSec; absent when it has none, or when it is meant for another process.
fn watchdog(variable: &impl Fn(&str) -> Option<OsString>) -> Option<Duration> {
    let number = |name| variable(name)?.to_str()?.parse::<u64>().ok();
    let is_ours =
        variable("WATCHDOG_PID").is_none() || number("WATCHDOG_PID") == Some(std::process::id().into());
    number("WATCHDOG_USEC").filter(|usec| is_ours && *usec > 0).map(Duration::from_micros)
}

/// One line for `systemctl status`; no times in it, since nobody would move them on.
fn describe(session: &SessionStatus) -> String {
    let endpoint = session.endpoint.as_deref().unwrap_or("a gateway");
    match (session.state, &session.live) {
        (_, Some(live)) => format!("live with {} at {endpoint}, epoch {}", live.gateway_id, live.epoch),
        (SessionState::Dialing | SessionState::AwaitingWelcome | SessionState::Live, _) => {
            format!("dialing {endpoint}")
        }
        (SessionState::Stopped, _) => "stopping".into(),
        (SessionState::Waiting, _) => match &session.last_end {
            // A detail may be a peer's words: one line of it, so that it cannot say a variable of its own.
            Some(end) => format!("no session, will dial again; last: {}", one_line(&end.detail)),
            None => "about to dial".into(),
        },
    }
}

fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::EndStatus;
    use crate::wire::link::EndKind;

    struct Manager(UnixDatagram, tempfile::TempDir);

    impl Manager {
        fn new() -> Self {
            let temp = tempfile::tempdir().unwrap();
            let socket = UnixDatagram::bind(temp.path().join("notify")).unwrap();
            socket.set_nonblocking(true).unwrap();
            Self(socket, temp)
        }

        fn notifier(&self, more: &[(&str, &str)]) -> Notifier {
            let path = self.1.path().join("notify");
            Notifier::from_environment(|name| match name {
                "NOTIFY_SOCKET" => Some(path.clone().into()),
                name => more.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into()),
            })
            .unwrap()
        }

        fn heard(&self) -> Vec<String> {
            let mut buffer = [0; 4096];
            let next =
                || self.0.recv(&mut buffer).ok().map(|n| String::from_utf8_lossy(&buffer[..n]).into_owned());
            std::iter::from_fn(next).collect()
        }
    }

    fn spawn(
        notifier: Notifier,
        session: watch::Receiver<SessionStatus>,
        stop: watch::Receiver<bool>,
    ) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move { notifier.follow(session, stop).await })
    }

    fn waiting() -> SessionStatus {
        SessionStatus::new(Duration::ZERO)
    }

    fn live() -> SessionStatus {
        let live = crate::session::LiveStatus {
            session_id: "s-1".into(),
            gateway_id: "g-1".into(),
            epoch: 7,
            proto: 2,
            heartbeat_interval_ms: 1000,
            acked_boot_ms: None,
        };
        SessionStatus {
            state: SessionState::Live,
            endpoint: Some("gw:1".into()),
            live: Some(live),
            ..waiting()
        }
    }

    #[tokio::test(start_paused = true)]
    async fn ready_the_session_and_the_stop_are_told_each_once() {
        let manager = Manager::new();
        let (say, session) = watch::channel(waiting());
        let (ask, stop) = watch::channel(false);
        let follow = spawn(manager.notifier(&[]), session, stop);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(manager.heard(), ["READY=1\nSTATUS=about to dial"]);
        say.send_replace(live());
        tokio::time::sleep(Duration::from_millis(1)).await;
        // An ack changes the status, but nothing that is shown.
        say.send_modify(|status| status.live.as_mut().unwrap().acked_boot_ms = Some(9));
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(manager.heard(), ["STATUS=live with g-1 at gw:1, epoch 7"]);
        ask.send_replace(true);
        tokio::time::sleep(Duration::from_millis(1)).await;
        say.send_replace(waiting());
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(manager.heard(), ["STOPPING=1\nSTATUS=stopping"]);
        follow.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn the_watchdog_is_fed_at_half_its_time_and_through_a_stop_and_not_by_a_hung_runtime() {
        let manager = Manager::new();
        let (_say, session) = watch::channel(waiting());
        let (ask, stop) = watch::channel(false);
        let follow = spawn(manager.notifier(&[("WATCHDOG_USEC", "30000000")]), session, stop);
        let fed = |heard: Vec<String>| heard.iter().filter(|said| *said == "WATCHDOG=1").count();
        tokio::time::sleep(Duration::from_secs(61)).await;
        assert_eq!(fed(manager.heard()), 5, "at once, and then every 15 s");
        ask.send_replace(true);
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert_eq!(fed(manager.heard()), 2);
        // Whoever holds the only thread keeps the dog unfed: nothing else does it.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(fed(manager.heard()), 0);
        follow.abort();
    }

    #[test]
    fn a_watchdog_meant_for_another_process_is_not_fed() {
        let own = std::process::id().to_string();
        let manager = Manager::new();
        let limit = |pid: &str| manager.notifier(&[("WATCHDOG_USEC", "5"), ("WATCHDOG_PID", pid)]).watchdog;
        assert_eq!(limit("1"), None);
        assert_eq!(limit(&own), Some(Duration::from_micros(5)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_waits_for_its_disk_is_ready_and_feeds_the_watchdog_and_says_what_it_waits_for() {
        let manager = Manager::new();
        let notifier = manager.notifier(&[("WATCHDOG_USEC", "30000000")]);
        let (say, why) = watch::channel("waiting for its disk: full".to_owned());
        let waits = notifier.wait(why);
        tokio::pin!(waits);
        assert!(tokio::time::timeout(Duration::from_secs(20), &mut waits).await.is_err());
        say.send_replace("waiting for its disk: read-only\nREADY=0".into());
        assert!(tokio::time::timeout(Duration::from_secs(1), &mut waits).await.is_err());
        let heard = manager.heard();
        assert_eq!(heard[0], "READY=1\nSTATUS=waiting for its disk: full");
        assert_eq!(heard.iter().filter(|word| *word == "WATCHDOG=1").count(), 2, "{heard:?}");
        assert_eq!(heard.last().unwrap(), "STATUS=waiting for its disk: read-only READY=0");
    }

    #[test]
    fn without_a_supervisor_nothing_is_said_and_one_that_is_gone_is_an_error() {
        assert!(Notifier::from_environment(|_| None).unwrap().socket.is_none());
        let gone =
            Notifier::from_environment(|name| (name == "NOTIFY_SOCKET").then(|| "/nowhere/notify".into()));
        assert_eq!(gone.unwrap_err().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn an_abstract_socket_is_reached() {
        let name = format!("bcd-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        let notifier =
            Notifier::from_environment(|key| (key == "NOTIFY_SOCKET").then(|| format!("@{name}").into()));
        notifier.unwrap().say("WATCHDOG=1");
        let mut buffer = [0; 64];
        assert_eq!(socket.recv(&mut buffer).unwrap(), 10);
    }

    #[test]
    fn a_peers_words_cannot_say_a_variable() {
        let end =
            EndStatus { kind: EndKind::Refused, reason: None, detail: "no\nMAINPID=1".into(), at_boot_ms: 0 };
        let told = describe(&SessionStatus { last_end: Some(end), ..waiting() });
        assert_eq!(told.lines().count(), 1, "{told}");
    }
}
