//! `bcd ctl`: tells a reference gateway what to do, over its control socket.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use data_encoding::BASE64;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use crate::gateway::control::{
    Client, ClientError, CommandView, EventView, NodeView, Request, Response, Stats,
};
use crate::model::{CommandId, Exit, NodeId};

/// One wait for a command's end; repeated until it has ended.
const WAIT_MS: u64 = 60_000;
/// One wait for events.
const EVENTS_WAIT_MS: u64 = 30_000;
/// A gateway that ends while a command is waited for may come back within this.
const GATEWAY_BACK: Duration = Duration::from_secs(60);
/// Between two looks for it.
const AGAIN: Duration = Duration::from_millis(250);
/// A program's standard input, bytes, at most: it travels within the command's body of 1 MiB, in base64.
const STDIN_BYTES: u64 = 700 << 10;

/// Tell a reference gateway what to do.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The gateway's directory (its --state).
    #[arg(long, value_name = "DIR")]
    gateway: PathBuf,
    /// Answers as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Ctl,
}

/// What to do. NODE may be `-` where only one node has joined.
#[derive(Debug, clap::Subcommand)]
enum Ctl {
    /// Run a program on a node and print its output.
    Exec(ExecArgs),
    /// Ask a node for its versions, load and free space.
    Probe {
        /// Which node.
        node: String,
        /// How long the command may wait for its node, seconds.
        #[arg(long, default_value_t = 300)]
        ttl: u64,
    },
    /// Ask a node for all that it holds: assignments, instances, processes, commands.
    Barrier {
        /// Which node.
        node: String,
        /// How long the command may wait for its node, seconds.
        #[arg(long, default_value_t = 300)]
        ttl: u64,
    },
    /// Restart a node's machine and wait until it is back.
    Reboot {
        /// Which node.
        node: String,
        /// Waits this long first, seconds.
        #[arg(long, value_name = "S", default_value_t = 0)]
        delay: u64,
        /// Then waits up to this long for the end of what runs, seconds.
        #[arg(long, value_name = "S")]
        drain: Option<u64>,
        /// How long the command may wait for its node, seconds.
        #[arg(long, value_name = "S", default_value_t = 300)]
        ttl: u64,
    },
    /// Show one command.
    Show {
        /// Which.
        #[arg(value_parser = command_id)]
        id: CommandId,
    },
    /// List commands, newest first.
    List {
        /// Of this node only.
        #[arg(long)]
        node: Option<String>,
        /// At most so many.
        #[arg(long, default_value_t = 50)]
        limit: u32,
    },
    /// List the nodes.
    Nodes,
    /// Print the gateway's events.
    Events {
        /// Goes on until it is stopped.
        #[arg(long)]
        follow: bool,
    },
    /// Cancel a command.
    Cancel {
        /// Which.
        #[arg(value_parser = command_id)]
        id: CommandId,
    },
    /// Print a new join ticket.
    Ticket {
        /// Machines that may use it.
        #[arg(long, default_value_t = 1)]
        uses: u32,
        /// How long it holds, seconds.
        #[arg(long, default_value_t = 24 * 3600)]
        ttl: u64,
        /// Where those machines stand.
        #[arg(long, default_value = "lab")]
        site: String,
    },
    /// Tell the nodes to redial elsewhere, and refuse new sessions.
    Drain {
        /// Spread over this long, ms.
        #[arg(long, default_value_t = 1_000)]
        max_delay_ms: u32,
    },
    /// End a drain.
    Undrain,
    /// Print counts.
    Stats,
}

#[derive(Debug, clap::Args)]
struct ExecArgs {
    /// Which node.
    node: String,
    /// Time limit of the program, seconds.
    #[arg(long, value_name = "S")]
    timeout: Option<u64>,
    /// User to run as; default: the daemon's own.
    #[arg(long)]
    user: Option<String>,
    /// Working directory.
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// A variable of its environment, K=V; may be given several times.
    #[arg(long = "env", value_name = "K=V", value_parser = variable)]
    env: Vec<(String, String)>,
    /// A file for its standard input; - is this command's own.
    #[arg(long, value_name = "FILE")]
    stdin: Option<PathBuf>,
    /// It may run twice.
    #[arg(long)]
    retry_safe: bool,
    /// How long the command may wait for its node, seconds.
    #[arg(long, value_name = "S", default_value_t = 3600)]
    ttl: u64,
    /// The program and its arguments, behind --.
    #[arg(last = true, required = true, value_name = "ARGV")]
    argv: Vec<String>,
}

fn command_id(text: &str) -> Result<CommandId, String> {
    CommandId::new(text).map_err(|error| error.to_string())
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("not K=V: {text:?}"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Why `bcd ctl` fails.
#[derive(Debug, thiserror::Error)]
enum CtlError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the gateway answered another question; use the same bcd for both")]
    Answer,
    #[error("cannot read {0}")]
    Stdin(PathBuf, #[source] std::io::Error),
    #[error("{0} has more than {STDIN_BYTES} bytes, which a command cannot carry")]
    StdinSize(PathBuf),
    #[error(
        "{count} nodes have joined: name one instead of - (list them with: bcd ctl --gateway {gateway} nodes)"
    )]
    NotOneNode { count: usize, gateway: String },
    #[error("no node has joined yet; make a ticket with: bcd ctl --gateway {0} ticket")]
    NoNode(String),
    #[error("not a node id: {0:?}")]
    BadNode(String),
    #[error("no command {0} is known here")]
    UnknownCommand(CommandId),
    #[error("cannot write the answer")]
    Write(#[from] std::io::Error),
    #[error("cannot put the request into words")]
    Encode(#[from] serde_json::Error),
}

impl CtlError {
    fn exit(&self) -> Exit {
        match self {
            Self::Client(ClientError::Permission(_)) => Exit::Permission,
            Self::Client(ClientError::Unreachable { .. } | ClientError::Ended { .. }) => Exit::NoGateway,
            Self::Client(ClientError::Foreign { .. } | ClientError::Refused(_)) | Self::Answer => {
                Exit::Failed
            }
            Self::Stdin(..)
            | Self::StdinSize(_)
            | Self::NoNode(_)
            | Self::NotOneNode { .. }
            | Self::BadNode(_) => Exit::BadInput,
            Self::UnknownCommand(_) | Self::Write(_) | Self::Encode(_) => Exit::Failed,
        }
    }
}

/// Does what the command line says.
pub(super) fn run(args: Args) -> Exit {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("bcd ctl: cannot start: {error}");
            return Exit::Failed;
        }
    };
    match runtime.block_on(command(args)) {
        Ok(exit) => exit,
        // Whoever read the output has gone, as with `| head`.
        Err(CtlError::Write(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Exit::Done,
        Err(error) => super::fail(&error, error.exit()),
    }
}

struct Session {
    gateway: PathBuf,
    client: Client,
    json: bool,
}

async fn command(args: Args) -> Result<Exit, CtlError> {
    let client = Client::connect(&args.gateway).await?;
    let mut ctl = Session { gateway: args.gateway, client, json: args.json };
    match args.command {
        Ctl::Exec(exec) => return ctl.exec(exec).await,
        Ctl::Probe { node, ttl } => {
            return ctl.report(&node, "node.probe", &serde_json::json!({}), ttl).await;
        }
        Ctl::Reboot { node, delay, drain, ttl } => {
            let mut args = serde_json::json!({ "delay_s": delay });
            if let Some(drain) = drain {
                args["drain_s"] = drain.into();
            }
            return ctl.report(&node, "node.reboot", &args, ttl).await;
        }
        Ctl::Barrier { node, ttl } => {
            let barrier = format!("b-{:016x}", rand::Rng::random::<u64>(&mut StdRng::from_os_rng()));
            let args = serde_json::json!({ "barrier_id": barrier });
            return ctl.report(&node, "inventory.barrier", &args, ttl).await;
        }
        Ctl::Show { id } => {
            let shown = ctl.ask(Request::Show { id: id.clone() }).await?;
            let Response::Command(view) = shown else { return Err(CtlError::Answer) };
            ctl.json_value(&view.ok_or(CtlError::UnknownCommand(id))?)?;
        }
        Ctl::List { node, limit } => {
            let node = match node {
                Some(node) => Some(ctl.node(&node).await?),
                None => None,
            };
            let Response::Commands(commands) = ctl.ask(Request::List { node, limit }).await? else {
                return Err(CtlError::Answer);
            };
            if ctl.json { ctl.json_value(&commands)? } else { list(&commands)? }
        }
        Ctl::Nodes => {
            let nodes = ctl.nodes().await?;
            if ctl.json { ctl.json_value(&nodes)? } else { show_nodes(&nodes)? }
        }
        Ctl::Events { follow } => ctl.events(follow).await?,
        Ctl::Cancel { id } => ctl.done(Request::Cancel { id }).await?,
        Ctl::Ticket { uses, ttl, site } => {
            let Response::Ticket(line) = ctl.ask(Request::Ticket { uses, ttl_s: ttl, site }).await? else {
                return Err(CtlError::Answer);
            };
            writeln!(std::io::stdout(), "{line}")?;
        }
        Ctl::Drain { max_delay_ms } => ctl.done(Request::Drain { max_delay_ms }).await?,
        Ctl::Undrain => ctl.done(Request::Undrain).await?,
        Ctl::Stats => {
            let Response::Stats(stats) = ctl.ask(Request::Stats).await? else { return Err(CtlError::Answer) };
            if ctl.json { ctl.json_value(&stats)? } else { show_stats(&stats)? }
        }
    }
    Ok(Exit::Done)
}

impl Session {
    async fn ask(&mut self, request: Request) -> Result<Response, CtlError> {
        Ok(self.client.call(&request).await?)
    }

    async fn done(&mut self, request: Request) -> Result<(), CtlError> {
        match self.ask(request).await? {
            Response::Done => Ok(()),
            _ => Err(CtlError::Answer),
        }
    }

    fn json_value(&self, value: &impl Serialize) -> Result<(), CtlError> {
        let text =
            if self.json { serde_json::to_string(value)? } else { serde_json::to_string_pretty(value)? };
        Ok(writeln!(std::io::stdout(), "{text}")?)
    }

    async fn nodes(&mut self) -> Result<Vec<NodeView>, CtlError> {
        match self.ask(Request::Nodes).await? {
            Response::Nodes(nodes) => Ok(nodes),
            _ => Err(CtlError::Answer),
        }
    }

    /// A node by its id, or the only one.
    async fn node(&mut self, name: &str) -> Result<NodeId, CtlError> {
        if name != "-" {
            return NodeId::new(name).map_err(|_| CtlError::BadNode(name.to_owned()));
        }
        let mut nodes = self.nodes().await?;
        let gateway = self.gateway.display().to_string();
        match (nodes.pop(), nodes.len()) {
            (None, _) => Err(CtlError::NoNode(gateway)),
            (Some(only), 0) => Ok(only.node),
            (Some(_), others) => Err(CtlError::NotOneNode { count: others + 1, gateway }),
        }
    }

    async fn enqueue(
        &mut self,
        node: &str,
        kind: &str,
        args: Box<RawValue>,
        ttl_s: u64,
    ) -> Result<CommandView, CtlError> {
        let node = self.node(node).await?;
        let request = Request::Enqueue { node, kind: kind.to_owned(), args, ttl_s, id: None };
        let Response::Enqueued(id) = self.ask(request).await? else { return Err(CtlError::Answer) };
        self.wait(id).await
    }

    /// Waits for the end of a command, also over the end of a gateway that comes back.
    async fn wait(&mut self, id: CommandId) -> Result<CommandView, CtlError> {
        loop {
            let request = Request::Wait { id: id.clone(), timeout_ms: WAIT_MS };
            match self.client.call(&request).await {
                Ok(Response::Command(Some(view))) if view.ended_ms != 0 => return Ok(*view),
                Ok(Response::Command(Some(_))) => {}
                Ok(Response::Command(None)) => return Err(CtlError::UnknownCommand(id)),
                Ok(_) => return Err(CtlError::Answer),
                Err(ClientError::Ended { .. }) => {
                    eprintln!("bcd ctl: the gateway ended; command {id} is stored, waiting for the gateway");
                    self.reconnect().await?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn reconnect(&mut self) -> Result<(), CtlError> {
        let until = tokio::time::Instant::now() + GATEWAY_BACK;
        loop {
            match Client::connect(&self.gateway).await {
                Ok(client) => {
                    self.client = client;
                    return Ok(());
                }
                Err(error) if tokio::time::Instant::now() >= until => return Err(error.into()),
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    async fn exec(&mut self, exec: ExecArgs) -> Result<Exit, CtlError> {
        let stdin = match exec.stdin {
            Some(file) => BASE64.encode(&read_stdin(file)?),
            None => String::new(),
        };
        let args = ProgramArgs {
            argv: exec.argv,
            env: exec.env.into_iter().collect(),
            stdin_base64: stdin,
            cwd: exec.cwd,
            user: exec.user,
            time_limit_s: exec.timeout,
            retry_safe: exec.retry_safe,
        };
        let view = self.enqueue(&exec.node, "node.exec", to_raw_value(&args)?, exec.ttl).await?;
        if self.json {
            self.json_value(&view)?;
        } else if let Ok(output) = serde_json::from_str::<ProgramOutput>(&view.output) {
            print_stream("standard output", &output.stdout, &mut std::io::stdout())?;
            print_stream("standard error", &output.stderr, &mut std::io::stderr())?;
        }
        Ok(end(&view))
    }

    /// Runs a command whose output is a document, and prints that.
    async fn report(
        &mut self,
        node: &str,
        kind: &str,
        args: &serde_json::Value,
        ttl: u64,
    ) -> Result<Exit, CtlError> {
        let view = self.enqueue(node, kind, to_raw_value(args)?, ttl).await?;
        if self.json {
            self.json_value(&view)?;
        } else if let Ok(output) = serde_json::from_str::<serde_json::Value>(&view.output) {
            writeln!(std::io::stdout(), "{}", serde_json::to_string_pretty(&output)?)?;
        }
        Ok(end(&view))
    }

    async fn events(&mut self, follow: bool) -> Result<(), CtlError> {
        let mut after = 0;
        loop {
            let wait_ms = if follow { EVENTS_WAIT_MS } else { 0 };
            let Response::Events(events) = self.ask(Request::Events { after, wait_ms }).await? else {
                return Err(CtlError::Answer);
            };
            if events.is_empty() && !follow {
                return Ok(());
            }
            for event in events {
                after = event.seq;
                if self.json {
                    self.json_value(&event)?;
                } else {
                    show_event(&event)?;
                }
            }
        }
    }
}

/// The arguments of `node.exec`, as they stand in the body.
#[derive(Serialize)]
struct ProgramArgs {
    argv: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    env: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    stdin_base64: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cwd: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_limit_s: Option<u64>,
    retry_safe: bool,
}

/// The output of `node.exec`.
#[derive(Deserialize)]
struct ProgramOutput {
    stdout: StreamOutput,
    stderr: StreamOutput,
}

#[derive(Deserialize)]
struct StreamOutput {
    head: String,
    tail: String,
    size: u64,
    truncated: bool,
}

fn read_stdin(file: PathBuf) -> Result<Vec<u8>, CtlError> {
    use std::io::Read;
    let mut bytes = Vec::new();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().take(STDIN_BYTES + 1).read_to_end(&mut bytes)
    } else {
        std::fs::File::open(&file).and_then(|open| open.take(STDIN_BYTES + 1).read_to_end(&mut bytes))
    };
    read.map_err(|error| CtlError::Stdin(file.clone(), error))?;
    if bytes.len() as u64 > STDIN_BYTES { Err(CtlError::StdinSize(file)) } else { Ok(bytes) }
}

fn print_stream(name: &str, stream: &StreamOutput, out: &mut impl Write) -> Result<(), CtlError> {
    let decode = |text: &str| BASE64.decode(text.as_bytes()).unwrap_or_default();
    let (head, tail) = (decode(&stream.head), decode(&stream.tail));
    out.write_all(&head)?;
    out.write_all(&tail)?;
    out.flush()?;
    if stream.truncated {
        eprintln!(
            "bcd ctl: {name} was cut: its first {} and last {} of {} bytes are shown",
            head.len(),
            tail.len(),
            stream.size
        );
    }
    Ok(())
}

/// The exit code of an ended command; what is wrong goes to standard error.
fn end(view: &CommandView) -> Exit {
    if view.state == "succeeded" {
        return Exit::Done;
    }
    let mut text = format!("bcd ctl: {} {}", view.id, view.state);
    for part in [&view.reason, &view.message].into_iter().filter(|part| !part.is_empty()) {
        text.push_str(": ");
        text.push_str(part);
    }
    eprintln!("{text} (effect {})", if view.effect.is_empty() { "unknown" } else { &view.effect });
    Exit::Failed
}

fn list(commands: &[CommandView]) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{:<34}  {:<12}  {:<10}  {:<34}  REASON", "COMMAND", "KIND", "STATE", "NODE")?;
    for view in commands {
        let CommandView { id, kind, state, node, reason, .. } = view;
        writeln!(out, "{:<34}  {kind:<12}  {state:<10}  {:<34}  {reason}", id.as_str(), node.as_str())?;
    }
    Ok(())
}

fn show_nodes(nodes: &[NodeView]) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{:<34}  {:<12}  {:>6}  {:<8}  {:<10}  LAST SEEN",
        "NODE", "STATE", "EPOCH", "SITE", "VERSION"
    )?;
    for view in nodes {
        let NodeView { state, epoch, site, version, .. } = view;
        let seen = if *epoch == 0 { "never".into() } else { format!("{} ms ago", view.last_seen_age_ms) };
        writeln!(
            out,
            "{:<34}  {state:<12}  {epoch:>6}  {site:<8}  {version:<10}  {seen}",
            view.node.as_str()
        )?;
    }
    Ok(())
}

fn show_event(event: &EventView) -> Result<(), CtlError> {
    let at = crate::model::ServerTime(event.at_ms);
    Ok(writeln!(
        std::io::stdout(),
        "{:>6}  {at}  {}  {}  {}",
        event.seq,
        event.kind,
        event.node,
        event.detail
    )?)
}

fn show_stats(stats: &Stats) -> Result<(), CtlError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "sessions  {}\nnodes     {}\nhellos    {}", stats.sessions, stats.nodes, stats.hellos)?;
    for (state, count) in &stats.commands {
        writeln!(out, "commands  {state} {count}")?;
    }
    for (token, count) in &stats.refused {
        writeln!(out, "refused   {token} {count}")?;
    }
    Ok(())
}
