//! A gateway on a loopback socket, and nodes whose every frame the test decides.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use data_encoding::BASE64URL_NOPAD;
use rcgen::{CertificateParams, KeyPair};
use serde_json::json;
use serde_json::value::to_raw_value;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Status, Streaming};

use crate::clock::{Clock, SystemClock};
use crate::gateway::control::{Client, ClientError, CommandView, EventView, Operator, Request, Response};
use crate::gateway::worker::{self, Desk, Draft, Link, Order, TicketTerms, Told, Worker};
use crate::gateway::{GatewayError, Options, Ready, make_closed, run};
use crate::model::{CommandId, Digest, NodeId, ServerTime};
use crate::wire::bundle::TrustBundle;
use crate::wire::enroll::{Issued, JoinAnswer, SealingKey};
use crate::wire::pb;
use crate::wire::pb::gateway_frame::Frame as Out;
use crate::wire::pb::node_frame::Frame as In;

type NodeClient = pb::node_client::NodeClient<Channel>;

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Nothing in these tests takes this long.
const PATIENCE: Duration = Duration::from_secs(10);

pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what} did not come within {PATIENCE:?}"),
    }
}

pub(super) struct Gateway {
    pub dir: Arc<TempDir>,
    name: String,
    worker: Arc<Worker>,
    /// The worker's clock.
    pub works_at: Arc<Shifted>,
    desk: Desk,
    pub ready: Ready,
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<Result<(), GatewayError>>,
    tasks: Tasks,
}

/// The system's clock, off by what the test says.
#[derive(Debug, Default)]
pub(super) struct Shifted(AtomicI64);

impl Shifted {
    pub fn hours(&self, hours: i64) {
        self.0.store(hours * 3_600_000, Ordering::Relaxed);
    }
}

impl Clock for Shifted {
    fn boot(&self) -> Duration {
        SystemClock.boot()
    }

    fn wall_ms(&self) -> i64 {
        SystemClock.wall_ms() + self.0.load(Ordering::Relaxed)
    }
}

/// A gateway's runtime. Dropped, it ends all of the tasks at once and waits for none.
struct Tasks(Option<Runtime>);

impl Drop for Tasks {
    fn drop(&mut self) {
        self.0.take().expect("a runtime").shutdown_background();
    }
}

/// The worker of every gateway over one store, here in this process.
fn worker_in(dir: &TempDir, certificate_life: Duration) -> Arc<Worker> {
    let store = dir.path().join("gw");
    make_closed(&store).expect("the store's directory");
    let works = worker::Options { certificate_life, ..worker::Options::new(store.join("worker")) };
    Arc::new(Worker::open(&works, ServerTime(SystemClock.wall_ms())).expect("a worker"))
}

impl Gateway {
    pub async fn start() -> Self {
        Self::with(|_| {}).await
    }

    pub async fn with(change: impl FnOnce(&mut Options)) -> Self {
        Self::on(tempfile::tempdir().expect("a directory"), change).await
    }

    pub async fn on(dir: impl Into<Arc<TempDir>>, change: impl FnOnce(&mut Options)) -> Self {
        let dir = dir.into();
        let worker = worker_in(&dir, DAY);
        Self::named("gw", dir, worker, change).await
    }

    /// A gateway whose nodes' certificates hold so long.
    pub async fn certifying_for(life: Duration, change: impl FnOnce(&mut Options)) -> Self {
        let dir = Arc::new(tempfile::tempdir().expect("a directory"));
        let worker = worker_in(&dir, life);
        Self::named("gw", dir, worker, change).await
    }

    /// Another gateway over this one's store.
    pub async fn beside(&self, name: &str, change: impl FnOnce(&mut Options)) -> Self {
        let change = |options: &mut Options| {
            options.store = Some(self.dir.path().join("gw"));
            change(options);
        };
        Self::named(name, self.dir.clone(), self.worker.clone(), change).await
    }

    async fn named(
        name: &str,
        dir: Arc<TempDir>,
        worker: Arc<Worker>,
        change: impl FnOnce(&mut Options),
    ) -> Self {
        let clock = Arc::new(Shifted::default());
        let works_at = clock.clone();
        let desk = Desk::here(worker.clone(), clock.clone());
        let listen = "127.0.0.1:0".parse().expect("an address");
        let mut options = Options::new(dir.path().join(name), listen, Link::here(worker.clone(), clock));
        options.seed = Some(7);
        change(&mut options);
        let (stop, stopped) = oneshot::channel();
        let (tell, told) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let task = runtime.spawn(run(
            options,
            Arc::new(SystemClock),
            |ready| tell.send(ready).expect("somebody waits"),
            async {
                let _ = stopped.await;
            },
        ));
        let ready = within("the gateway's start", told).await.expect("it starts");
        let tasks = Tasks(Some(runtime));
        Self { dir, name: name.into(), worker, works_at, desk, ready, stop, task, tasks }
    }

    /// Ends at once and writes nothing more.
    pub fn vanish(self) {
        drop(self.tasks);
    }

    pub async fn stop(self) -> Arc<TempDir> {
        let _ = self.stop.send(());
        within("the gateway's stop", self.task).await.expect("no panic").expect("no error");
        self.dir
    }

    /// What a kill would leave: the files as they are at this moment.
    pub fn killed(&self) -> TempDir {
        let copy = tempfile::tempdir().expect("a directory");
        let status = std::process::Command::new("cp")
            .arg("-a")
            .arg(self.dir.path().join("gw"))
            .arg(copy.path())
            .status();
        assert!(status.expect("cp runs").success());
        copy
    }

    pub async fn ask(&self, request: Request) -> Response {
        match self.ask_or_refused(request).await {
            Response::Error(why) => panic!("refused: {why}"),
            answer => answer,
        }
    }

    pub async fn ask_or_refused(&self, request: Request) -> Response {
        let mut client = Client::connect(&self.dir.path().join(&self.name)).await.expect("a control socket");
        match within("an answer", client.call(&request)).await {
            Err(ClientError::Refused(why)) => Response::Error(why),
            answer => answer.expect("answered"),
        }
    }

    /// What no gateway hears of.
    pub fn obey(&self, order: Order) {
        let now = ServerTime(self.works_at.wall_ms());
        assert!(matches!(self.worker.obey(order, now), Told::Done));
    }

    pub async fn operator(&self) -> Operator {
        let gateway = self.dir.path().join(&self.name);
        Operator::connect(&gateway, self.desk.clone()).await.expect("a control socket")
    }

    pub async fn cancel(&self, id: &CommandId) -> Result<(), ClientError> {
        self.operator().await.cancel(id.clone()).await
    }

    pub async fn ticket(&self, uses: u32, ttl_s: u64) -> serde_json::Value {
        let line = self.desk.ticket(TicketTerms::new(uses, ttl_s, "lab")).await.expect("a ticket");
        let json = BASE64URL_NOPAD.decode(line.strip_prefix("bcd1.").expect("a ticket").as_bytes());
        serde_json::from_slice(&json.expect("base64")).expect("json")
    }

    /// A new ticket, read: its token and the key that it is sealed to.
    pub async fn token(&self, uses: u32, ttl_s: u64) -> Token {
        let ticket = self.ticket(uses, ttl_s).await;
        let field = |name| ticket[name].as_str().expect("a string").to_owned();
        let seal = SealingKey::try_from(field("join_encryption_key")).expect("a key");
        Token { text: field("token"), seal }
    }

    /// A machine that has joined.
    pub async fn machine(&self) -> Machine {
        let token = self.token(1, 60).await;
        Machine::join(self, &token, KeyPair::generate().expect("a key")).await.expect("joined")
    }

    pub async fn enqueue(&self, machine: &Machine, kind: &str, args: serde_json::Value) -> CommandId {
        self.enqueue_for(machine, kind, args, 600).await
    }

    pub async fn enqueue_for(
        &self,
        machine: &Machine,
        kind: &str,
        args: serde_json::Value,
        ttl_s: u64,
    ) -> CommandId {
        let args = to_raw_value(&args).expect("json");
        let draft = Draft { node: machine.id(), kind: kind.into(), args, ttl_s, id: None };
        self.operator().await.enqueue(draft).await.expect("enqueued")
    }

    pub async fn program(&self, machine: &Machine) -> CommandId {
        self.enqueue(machine, "node.exec", json!({"argv": ["/bin/true"]})).await
    }

    pub async fn show(&self, id: &CommandId) -> CommandView {
        let Response::Command(Some(view)) = self.ask(Request::Show { id: id.clone() }).await else {
            panic!("{id} is not known")
        };
        *view
    }

    /// Waits until the command is in a state.
    pub async fn reaches(&self, id: &CommandId, state: &str) -> CommandView {
        within(&format!("{id} {state}"), async {
            loop {
                let view = self.show(id).await;
                if view.state == state {
                    return view;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    pub async fn events(&self, kind: &str) -> Vec<EventView> {
        let Response::Events(events) = self.ask(Request::Events { after: 0, wait_ms: 0 }).await else {
            panic!("no events")
        };
        events.into_iter().filter(|event| event.kind == kind).collect()
    }

    fn ca_pem(&self) -> String {
        let der = std::fs::read(self.dir.path().join("gw/worker/ca/ca.der")).expect("the CA");
        pem(&der)
    }

    pub async fn channel(&self, identity: Option<Identity>) -> Result<Channel, tonic::transport::Error> {
        let mut tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(self.ca_pem()))
            .domain_name("localhost");
        if let Some(identity) = identity {
            tls = tls.identity(identity);
        }
        let address = format!("https://{}", self.ready.address);
        Endpoint::from_shared(address).expect("an address").tls_config(tls)?.connect().await
    }
}

fn pem(der: &[u8]) -> String {
    let body = data_encoding::BASE64.encode(der);
    format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
}

/// The right to join.
pub(super) struct Token {
    pub text: String,
    pub seal: SealingKey,
}

pub(super) struct Machine {
    pub node: String,
    pub issued: Issued,
    pub bundle: TrustBundle,
    pub key: KeyPair,
}

impl Machine {
    pub async fn join(gateway: &Gateway, token: &Token, key: KeyPair) -> Result<Self, Status> {
        Self::join_with(gateway, token, key, |_| {}).await
    }

    pub async fn join_with(
        gateway: &Gateway,
        token: &Token,
        key: KeyPair,
        change: impl FnOnce(&mut pb::JoinRequest),
    ) -> Result<Self, Status> {
        let csr = CertificateParams::default().serialize_request(&key).expect("a CSR");
        let mut request = pb::JoinRequest {
            csr: csr.der().to_vec().into(),
            sealed_token: token.seal.seal(&token.text, csr.der()).expect("sealed").into(),
            proto_min: 1,
            proto_max: 1,
            ..Default::default()
        };
        change(&mut request);
        let channel = gateway.channel(None).await.expect("connected");
        let mut client = pb::enrollment_client::EnrollmentClient::new(channel);
        let frame = pb::JoinFrame { frame: Some(pb::join_frame::Frame::Request(request)) };
        let mut answers = within("a join", client.join(tokio_stream::once(frame))).await?.into_inner();
        let answer = within("a join's answer", answers.message()).await?.expect("an answer");
        let Some(pb::join_answer::Frame::Response(response)) = answer.frame else { panic!("no response") };
        let body = |envelope: Option<pb::Envelope>| envelope.expect("an envelope").payload;
        let JoinAnswer(issued) =
            serde_json::from_slice(&body(response.signed_response)).expect("what was issued");
        let bundle = serde_json::from_slice(&body(response.trust_bundle)).expect("a bundle");
        Ok(Self { node: issued.node_id.to_string(), issued, bundle, key })
    }

    pub fn id(&self) -> NodeId {
        NodeId::new(&*self.node).expect("an id")
    }

    pub fn hello(&self) -> pb::Hello {
        pb::Hello {
            node_id: self.node.clone(),
            role: "host".into(),
            boot_id: "b-1".into(),
            journal_id: "j-1".into(),
            incarnation: "i-1".into(),
            proto_min: 1,
            proto_max: 1,
            ..Default::default()
        }
    }

    pub fn identity(&self) -> Identity {
        let chain: String = self.issued.chain.iter().map(|der| pem(&der.0)).collect();
        Identity::from_pem(chain, self.key.serialize_pem())
    }

    /// What calls with the node's certificate.
    pub async fn client(&self, gateway: &Gateway) -> NodeClient {
        NodeClient::new(gateway.channel(Some(self.identity())).await.expect("connected"))
    }

    /// A session as far as its first frame, if there is one.
    pub async fn call(
        &self,
        gateway: &Gateway,
        first: impl Into<Option<pb::NodeFrame>>,
    ) -> Result<Session, Status> {
        let (send, frames) = mpsc::channel(64);
        if let Some(first) = first.into() {
            send.send(first).await.expect("room");
        }
        let mut client = self.client(gateway).await;
        let call = client.session(ReceiverStream::new(frames));
        let receive = within("a session's opening", call).await?.into_inner();
        Ok(Session { send, receive, taken: 0, beats: 0, free: HashMap::new() })
    }

    pub async fn open(&self, gateway: &Gateway, hello: pb::Hello) -> Result<Session, Status> {
        self.call(gateway, pb::NodeFrame { frame: Some(In::Hello(hello)) }).await
    }

    /// A session that has had its Welcome and its first heartbeat.
    pub async fn live(&self, gateway: &Gateway) -> Session {
        self.live_with(gateway, self.hello()).await
    }

    pub async fn live_with(&self, gateway: &Gateway, hello: pb::Hello) -> Session {
        let mut session = self.open(gateway, hello).await.expect("opened");
        session.welcome().await;
        session.heartbeat().await;
        session
    }
}

pub(super) struct Session {
    send: mpsc::Sender<pb::NodeFrame>,
    receive: Streaming<pb::GatewayFrame>,
    taken: u64,
    beats: u64,
    free: HashMap<String, u32>,
}

impl Session {
    pub async fn send(&self, frame: In) {
        self.send.send(pb::NodeFrame { frame: Some(frame) }).await.expect("the session is open");
    }

    /// The next frame; trust bundles, which come when they come, are passed over.
    pub async fn next(&mut self) -> Result<Out, Status> {
        let frame = loop {
            let frame = within("a frame", self.receive.message()).await?;
            match frame.expect("the stream goes on").frame.expect("a frame that is known") {
                Out::TrustBundle(_) => {}
                frame => break frame,
            }
        };
        if matches!(frame, Out::Command(_)) {
            self.taken += 1;
        }
        Ok(frame)
    }

    pub async fn welcome(&mut self) -> pb::Welcome {
        let Out::Welcome(welcome) = self.next().await.expect("a frame") else { panic!("no Welcome") };
        self.free = welcome.lane_credits.clone();
        welcome
    }

    /// Sends a heartbeat with all credits free, and waits for its ack.
    pub async fn heartbeat(&mut self) {
        self.beats += 1;
        let beat = pb::Heartbeat {
            seq: self.beats,
            free_credits: self.free.clone(),
            commands_received: self.taken,
            ..Default::default()
        };
        self.send(In::Heartbeat(beat)).await;
    }

    /// The next command; acks of heartbeats are passed over.
    pub async fn command(&mut self) -> pb::Command {
        loop {
            match self.next().await.expect("a frame") {
                Out::Command(command) => return command,
                Out::Ack(ack) if ack.heartbeat_seq != 0 => {}
                other => panic!("not a command: {other:?}"),
            }
        }
    }

    /// The next acked results; acks of heartbeats are passed over.
    pub async fn acked(&mut self) -> Vec<String> {
        loop {
            match self.next().await.expect("a frame") {
                Out::Ack(ack) if ack.heartbeat_seq != 0 => {}
                Out::Ack(ack) => return ack.result_ids,
                other => panic!("not an ack: {other:?}"),
            }
        }
    }

    /// That nothing but acks of heartbeats comes for a while.
    pub async fn quiet(&mut self, how_long: Duration) {
        let until = tokio::time::Instant::now() + how_long;
        while let Ok(frame) = tokio::time::timeout_at(until, self.receive.message()).await {
            match frame.expect("the session lives").and_then(|frame| frame.frame) {
                Some(Out::Ack(ack)) if ack.heartbeat_seq != 0 => {}
                Some(Out::TrustBundle(_)) => {}
                other => panic!("not quiet: {other:?}"),
            }
        }
    }

    /// How the session ends; frames before it are passed over.
    pub async fn end(&mut self) -> Status {
        within("the session's end", async {
            loop {
                match self.receive.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => panic!("the stream ended without a status"),
                    Err(status) => return status,
                }
            }
        })
        .await
    }

    pub async fn say(&self, command: &pb::Command, state: pb::CommandState) {
        self.send(In::CommandUpdate(update(command, state))).await;
    }

    pub async fn refuse(&self, command: &pb::Command, reason: &str, detail: &str) {
        let mut refused = update(command, pb::CommandState::Refused);
        refused.reason = reason.into();
        refused.message = detail.into();
        self.send(In::CommandUpdate(refused)).await;
    }
}

pub(super) fn id_of(command: &pb::Command) -> CommandId {
    let payload = command.envelope.as_ref().expect("an envelope").payload.clone();
    crate::model::Command::parse(payload).expect("a body").header.id
}

pub(super) fn update(command: &pb::Command, state: pb::CommandState) -> pb::CommandUpdate {
    let payload = &command.envelope.as_ref().expect("an envelope").payload;
    pb::CommandUpdate {
        command_id: id_of(command).to_string(),
        body_sha256: Digest::of(payload).0.to_vec().into(),
        state: state.into(),
        attempt: 1,
        effect: pb::Effect::Complete.into(),
        ..Default::default()
    }
}
