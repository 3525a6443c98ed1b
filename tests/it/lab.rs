//! A gateway and a node as the processes that an operator starts, in a directory of their own.

use std::fs::OpenOptions;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use bcd::gateway::control::{CommandView, EventView, NodeEventView, NodeView, Request, Response};
use bcd::gateway::worker::{Draft, FactView, Order, TicketTerms, Told};
use bcd::model::{CommandId, NodeId};
use nix::sys::signal::Signal;
use serde_json::json;
use serde_json::value::{RawValue, to_raw_value};

/// Longest wait for anything: a busy machine is slow, never this slow.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// A child that is killed and reaped when it is dropped.
pub struct Process(Child);

impl Process {
    pub fn id(&self) -> u32 {
        self.0.id()
    }

    pub fn kill(&mut self) -> ExitStatus {
        let _ = self.0.kill();
        self.0.wait().expect("a child to wait for")
    }

    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().expect("a child to wait for")
    }

    /// Waits until it ends by itself.
    pub fn wait(&mut self, what: &str) -> ExitStatus {
        until(what, || self.0.try_wait().expect("a child to wait for"))
    }

    /// Waits until the armed failpoint has killed it.
    pub fn wait_killed(&mut self, step: &str) {
        let status = self.wait(&format!("the kill at {step}"));
        assert_eq!(status.signal(), Some(9), "{step}: the process ended by itself: {status}");
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().expect("a child to ask").is_none()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(self.0.id()).expect("a pid"));
        nix::sys::signal::kill(pid, signal).expect("a running child");
    }

    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::SIGTERM);
        self.wait("a clean stop")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Asks whoever listens on a socket, one line for one line; absent: nobody answers.
pub fn say_to<A: serde::de::DeserializeOwned>(socket: &Path, request: &impl serde::Serialize) -> Option<A> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut line = serde_json::to_vec(request).expect("a request");
    line.push(b'\n');
    stream.write_all(&line).ok()?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).ok()?;
    serde_json::from_str(&answer).ok()
}

/// The children of a process that run `bcd worker`.
pub fn workers_of(parent: u32) -> Vec<i32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"));
    let spawned = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let by_threads = spawned.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let mut pids: Vec<i32> = children
        .into_iter()
        .chain(by_threads)
        .flat_map(|text| text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<i32>>())
        .collect();
    pids.sort_unstable();
    pids.dedup();
    pids.retain(|pid| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.split(|byte| *byte == 0).any(|word| word == b"worker"))
    });
    pids
}

/// Polls until there is a value.
pub fn until<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let mut waited = Duration::ZERO;
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(waited < PATIENCE, "waited {} s in vain for {what}", PATIENCE.as_secs());
        sleep(POLL);
        waited += POLL;
    }
}

pub struct Lab {
    dir: tempfile::TempDir,
    port: u16,
    /// The file that `bcd` is started from.
    pub program: PathBuf,
    pub gateway: Option<Process>,
    pub node: Option<Process>,
    /// Which commands the node wants signed.
    pub policy: &'static str,
    /// A worker that is apart from the gateway.
    worker: Option<Process>,
    /// Further variables of what is started from now on.
    pub variables: Vec<(&'static str, String)>,
}

impl Lab {
    /// A lab in which nothing runs.
    fn empty() -> Self {
        let dir = tempfile::Builder::new().prefix("bcd-lab-").tempdir().expect("a directory");
        let program = env!("CARGO_BIN_EXE_bcd").into();
        Self {
            dir,
            port: free_port(),
            program,
            gateway: None,
            node: None,
            policy: "none",
            worker: None,
            variables: Vec::new(),
        }
    }

    /// A lab with a running gateway.
    pub fn new() -> Self {
        let mut lab = Self::empty();
        lab.start_gateway(None);
        lab
    }

    /// A lab without a gateway, with a worker in the directory of that name.
    pub fn apart() -> Self {
        let mut lab = Self::empty();
        let state = lab.path("worker");
        lab.worker = Some(lab.daemon(&["worker", "--state", &state.to_string_lossy()], None, "worker.log"));
        lab
    }

    fn works(&self) -> PathBuf {
        self.path(if self.worker.is_some() { "worker" } else { "gateway/worker" })
    }

    /// A lab with a running gateway and a joined node that is not running.
    pub fn joined() -> Self {
        let lab = Self::new();
        lab.join_with_a_ticket();
        lab
    }

    /// Joins the node.
    pub fn join_with_a_ticket(&self) {
        let joined = self.join(&self.ticket(1));
        assert!(joined.status.success(), "{}", shown(&joined));
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// host:port of the gateway.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// `bcd` with this lab's directories; `step` arms a failpoint.
    pub fn bcd(&self, arguments: &[&str], step: Option<&str>) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .env("BCD_STATE", self.path("node"))
            .env("BCD_RUN", self.path("run"))
            .env("BCD_SIGNATURES_COMMANDS", self.policy)
            .env("BCD_LOG", "debug")
            // A machine of its own: a reboot is a line in this file, and the node's end.
            .env("BCD_FAKE_BOOT", self.path("boots"))
            .env("BCD_WRITE_FAULTS", self.path("faults"))
            .env("BCD_FAILPOINT_HITS", self.path("hits"))
            .envs(self.variables.iter().map(|(name, value)| (*name, value)))
            .env_remove("BCD_FAILPOINT")
            .stdin(Stdio::null());
        if let Some(step) = step {
            command.env("BCD_FAILPOINT", step);
        }
        command
    }

    fn daemon(&self, arguments: &[&str], step: Option<&str>, log: &str) -> Process {
        let log = OpenOptions::new().create(true).append(true).open(self.path(log)).expect("a log");
        let mut command = self.bcd(arguments, step);
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        Process(command.spawn().expect("bcd starts"))
    }

    pub fn start_gateway(&mut self, step: Option<&str>) {
        self.start_gateway_with(step, &[]);
    }

    /// A gateway with further options.
    pub fn start_gateway_with(&mut self, step: Option<&str>, options: &[&str]) {
        let state = self.path("gateway");
        let state = state.to_string_lossy();
        let listen = format!("127.0.0.1:{}", self.port);
        let mut arguments =
            vec!["gateway", "--state", &*state, "--listen", &*listen, "--heartbeat-interval", "1s"];
        arguments.extend(options);
        self.gateway = Some(self.daemon(&arguments, step, "gateway.log"));
        until("the gateway's control socket", || self.try_ask(&Request::Stats));
    }

    /// Another gateway over the first one's store, with its own directory of that name.
    pub fn gateway_beside(&self, name: &str, options: &[&str]) -> Process {
        let (state, store) = (self.path(name), self.path("gateway"));
        let listen = format!("127.0.0.1:{}", free_port());
        let mut arguments = vec!["gateway", "--listen", &*listen, "--heartbeat-interval", "1s"];
        let (state, store) = (state.to_string_lossy(), store.to_string_lossy());
        arguments.extend(["--state", &*state, "--store", &*store]);
        arguments.extend(options);
        let process = self.daemon(&arguments, None, &format!("{name}.log"));
        until("the gateway's control socket", || self.try_ask_at(name, &Request::Stats));
        process
    }

    /// The steps at which processes of this lab have died, in order.
    pub fn hits(&self) -> Vec<String> {
        let hits = std::fs::read_to_string(self.path("hits")).unwrap_or_default();
        hits.lines().map(str::to_owned).collect()
    }

    /// Kills it; its worker's end follows.
    pub fn kill_gateway(&mut self) {
        self.gateway = None;
        self.await_worker_end();
    }

    /// Kills it where another gateway goes on, which may have a worker again before anybody sees that there was none.
    pub fn kill_gateway_beside(&mut self) {
        self.gateway = None;
    }

    /// A worker that belongs to a gateway closes its files once that is dead: whoever reads them waits for it.
    pub fn await_worker_end(&self) {
        let lock = std::fs::File::open(self.path("gateway/worker/lock"));
        if let (None, Ok(lock)) = (&self.worker, lock) {
            until("the worker's end", || lock.try_lock().ok());
        }
    }

    /// Keeps the files of a gateway that does not run, for [`Lab::restore_gateway`].
    pub fn keep_gateway(&self) {
        self.await_worker_end();
        copy(&self.path("gateway"), &self.path("gateway.kept"));
    }

    /// Puts the kept files back in place of the present ones.
    pub fn restore_gateway(&self) {
        self.await_worker_end();
        std::fs::remove_dir_all(self.path("gateway")).expect("the gateway's directory");
        copy(&self.path("gateway.kept"), &self.path("gateway"));
    }

    /// What a gateway that does not run has stored of a command, read from a copy: its own start finds its files
    /// as its death left them.
    pub fn stored_state(&self, id: &CommandId) -> String {
        self.await_worker_end();
        let read = self.path("gateway.read");
        let _ = std::fs::remove_dir_all(&read);
        copy(&self.path("gateway"), &read);
        let db = rusqlite::Connection::open(read.join("gateway.db")).expect("the gateway's store");
        let state = "SELECT state FROM commands WHERE id = ?";
        db.query_row(state, [id.as_str()], |row| row.get(0)).expect("the command")
    }

    pub fn start_node(&mut self, step: Option<&str>) {
        self.node = Some(self.daemon(&["node"], step, "node.log"));
    }

    /// A node with further variables.
    pub fn start_node_with(&mut self, step: Option<&str>, variables: &[(&str, &str)]) {
        let log = OpenOptions::new().create(true).append(true).open(self.path("node.log")).expect("a log");
        let mut command = self.bcd(&["node"], step);
        command.envs(variables.iter().copied()).stdout(log.try_clone().expect("a log")).stderr(log);
        self.node = Some(Process(command.spawn().expect("bcd starts")));
    }

    /// The node whose state directory has this name.
    pub fn start_other(&self, name: &str) -> Process {
        let log = OpenOptions::new().create(true).append(true).open(self.path("other.log")).expect("a log");
        let mut command = self.bcd(&["node"], None);
        command.env("BCD_STATE", self.path(name)).env("BCD_RUN", self.path(&format!("{name}-run")));
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        Process(command.spawn().expect("bcd starts"))
    }

    /// What `bcd status --json` says; absent while the node does not answer.
    pub fn status(&self) -> Option<serde_json::Value> {
        let output = self.bcd(&["status", "--json"], None).output().expect("bcd starts");
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Takes the journal of a node that is not running away.
    pub fn lose_journal(&self) {
        for file in ["journal.db", "journal.db-wal"] {
            match std::fs::remove_file(self.path("node").join(file)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{file}: {error}"),
                _ => {}
            }
        }
    }

    pub fn kill_node(&mut self) {
        self.node = None;
    }

    pub fn node(&mut self) -> &mut Process {
        self.node.as_mut().expect("a node was started")
    }

    /// A ticket's file, for so many machines.
    pub fn ticket(&self, uses: u32) -> PathBuf {
        self.ticket_for(uses, 3600, "lab")
    }

    /// A ticket's file for so many machines of a site, which holds so long.
    pub fn ticket_for(&self, uses: u32, ttl_s: u64, site: &str) -> PathBuf {
        let order = Order::Ticket(TicketTerms::new(uses, ttl_s, site));
        let Told::Ticket(ticket) = self.order(&order) else { panic!("no ticket") };
        let path = self.path("ticket");
        std::fs::write(&path, ticket).expect("the ticket's file");
        path
    }

    pub fn join(&self, ticket: &Path) -> Output {
        self.join_command(ticket, None).output().expect("bcd starts")
    }

    pub fn join_command(&self, ticket: &Path, step: Option<&str>) -> Command {
        self.bcd(&["join", "--ticket", &ticket.to_string_lossy()], step)
    }

    pub fn try_ask(&self, request: &Request) -> Option<Response> {
        self.try_ask_at("gateway", request)
    }

    /// Asks the gateway of that directory.
    pub fn try_ask_at(&self, name: &str, request: &Request) -> Option<Response> {
        say_to(&self.path(name).join("control.sock"), request)
    }

    /// Orders the worker; one that starts again with its gateway is waited for.
    pub fn order(&self, order: &Order) -> Told {
        let socket = self.works().join("operator.sock");
        until("the worker's answer", || say_to(&socket, order))
    }

    /// What the worker has made of results.
    pub fn facts(&self) -> Vec<FactView> {
        match self.order(&Order::Facts { after: 0 }) {
            Told::Facts(facts) => facts,
            other => panic!("{other:?}"),
        }
    }

    /// A signed command, for a gateway to relay.
    pub fn signed(&self, draft: Draft) -> Request {
        match self.order(&Order::Command(draft)) {
            Told::Signed(command) => Request::Enqueue { command },
            other => panic!("{other:?}"),
        }
    }

    pub fn ask(&self, request: &Request) -> Response {
        self.try_ask(request)
            .unwrap_or_else(|| panic!("the gateway did not answer {request:?}\n{}", self.logs()))
    }

    pub fn nodes(&self) -> Vec<NodeView> {
        match self.ask(&Request::Nodes) {
            Response::Nodes(nodes) => nodes,
            other => panic!("{other:?}"),
        }
    }

    pub fn node_id(&self) -> NodeId {
        let nodes = self.nodes();
        assert_eq!(nodes.len(), 1, "{nodes:?}");
        nodes[0].node.clone()
    }

    /// What the nodes told of themselves.
    pub fn told(&self) -> Vec<NodeEventView> {
        let mut events: Vec<NodeEventView> = Vec::new();
        loop {
            let after = events.last().map_or(0, |event| event.number);
            match self.ask(&Request::NodeEvents { node: None, after }) {
                Response::NodeEvents(page) if page.is_empty() => return events,
                Response::NodeEvents(page) => events.extend(page),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn events(&self) -> Vec<EventView> {
        let mut events: Vec<EventView> = Vec::new();
        loop {
            let after = events.last().map_or(0, |event| event.seq);
            match self.ask(&Request::Events { after, wait_ms: 0 }) {
                Response::Events(page) if page.is_empty() => return events,
                Response::Events(page) => events.extend(page),
                other => panic!("{other:?}"),
            }
        }
    }

    pub fn enqueue(&self, kind: &str, args: Box<RawValue>) -> CommandId {
        self.enqueue_for(self.node_id(), kind, args, 3600)
    }

    /// A command for one of several nodes, which may be accepted for so long.
    pub fn enqueue_for(&self, node: NodeId, kind: &str, args: Box<RawValue>, ttl_s: u64) -> CommandId {
        let draft = Draft { node, kind: kind.into(), args, ttl_s, id: None };
        match self.ask(&self.signed(draft)) {
            Response::Enqueued(id) => id,
            other => panic!("{other:?}"),
        }
    }

    /// A program's arguments: it appends `name` to the witness file, then does `rest`.
    pub fn program(&self, name: &str, rest: &str) -> Box<RawValue> {
        let witness = self.path("witness");
        let script = format!(r#"echo "$1" >> "$2"{rest}"#);
        let argv = ["/bin/sh", "-c", &script, "sh", name, &witness.to_string_lossy()];
        to_raw_value(&json!({ "argv": argv })).expect("arguments")
    }

    /// A program that may not run twice: it appends `name` to the witness file, then does `rest`.
    pub fn enqueue_program(&self, name: &str, rest: &str) -> CommandId {
        self.enqueue("node.exec", self.program(name, rest))
    }

    /// How often the program of that name ran.
    pub fn runs(&self, name: &str) -> usize {
        let witness = std::fs::read_to_string(self.path("witness")).unwrap_or_default();
        witness.lines().filter(|line| *line == name).count()
    }

    /// How often the node's machine was rebooted.
    pub fn reboots(&self) -> usize {
        std::fs::read_to_string(self.path("boots")).map_or(0, |text| text.lines().count())
    }

    pub fn show(&self, id: &CommandId) -> Option<CommandView> {
        match self.try_ask(&Request::Show { id: id.clone() })? {
            Response::Command(view) => view.map(|view| *view),
            other => panic!("{other:?}"),
        }
    }

    /// Waits until a command has ended.
    pub fn ended(&self, id: &CommandId) -> CommandView {
        let ended = |view: &CommandView| bcd::sim::invariants::is_terminal(&view.state);
        let mut waited = Duration::ZERO;
        loop {
            let view = self.show(id);
            if let Some(view) = view.clone().filter(ended) {
                return view;
            }
            assert!(waited < PATIENCE, "{id} did not end: {view:?}\n{}", self.logs());
            sleep(POLL);
            waited += POLL;
        }
    }

    /// Runs a probe to its end: the node works.
    pub fn probe(&self) {
        let id = self.enqueue("node.probe", RawValue::from_string("{}".into()).expect("JSON"));
        let view = self.ended(&id);
        assert_eq!(view.state, "succeeded", "{view:?}\n{}", self.logs());
    }

    /// What both logs say of a command.
    pub fn logs_about(&self, id: &CommandId) -> String {
        let about = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().filter(|line| line.contains(id.as_str())).collect();
            format!("--- {name} about {id}\n{}\n", lines[lines.len().saturating_sub(60)..].join("\n"))
        };
        about("gateway.log") + &about("node.log")
    }

    /// The ends of both logs, for a failure's message.
    pub fn logs(&self) -> String {
        let tail = |name: &str| {
            let text = std::fs::read_to_string(self.path(name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(40)..].join("\n"))
        };
        tail("gateway.log") + &tail("node.log")
    }
}

/// Copies a directory as it is.
pub fn copy(from: &Path, to: &Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status().expect("cp runs");
    assert!(copied.success(), "cp -a {} {}: {copied}", from.display(), to.display());
}

pub fn shown(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}\n{}{}", output.status, text(&output.stdout), text(&output.stderr))
}

/// A port below those that the kernel gives to clients: a restarted gateway must find it free.
fn free_port() -> u16 {
    use std::hash::{BuildHasher as _, Hasher as _};
    loop {
        // A new RandomState is keyed differently each time: chance enough for a port.
        let chance = std::hash::RandomState::new().build_hasher().finish() % 12_000;
        let port = 20_000 + u16::try_from(chance).expect("below 12,000");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
