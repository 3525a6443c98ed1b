//! `bcd ctl`: tells a reference gateway what to do, over its control socket; what commands a node is signed by the
//! worker first.

mod ask;
mod print;

use std::io::Write;
use std::path::PathBuf;

use ask::Session;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use serde_json::json;

use crate::gateway::control::{Client, ClientError, Operator, Request, Response};
use crate::gateway::lines::Listener;
use crate::gateway::worker::{Desk, TicketTerms};
use crate::model::{CommandId, Exit};

/// A program's standard input, bytes, at most: it travels within the command's body of 1 MiB, in base64.
const STDIN_BYTES: u64 = 700 << 10;

/// Tell a reference gateway what to do.
#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The gateway's directory (its --state).
    #[arg(long, value_name = "DIR")]
    gateway: PathBuf,
    /// The directory of the worker that signs commands and makes tickets. Default: the one that the gateway names.
    #[arg(long, value_name = "DIR")]
    worker: Option<PathBuf>,
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
    /// Print what the worker has made of the results that nodes have signed.
    Results,
    /// Print the events of a node.
    NodeEvents {
        /// Which node.
        node: String,
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
        /// What they are called, K=V; may be given several times.
        #[arg(long = "label", value_name = "K=V", value_parser = variable)]
        labels: Vec<(String, String)>,
    },
    /// Revoke a node's certificates and end its session.
    Revoke {
        /// Which node.
        node: String,
        /// Tell a connected node so, signed by the join service: it keeps that, and `unrevoke` does not bring it back.
        #[arg(long)]
        for_good: bool,
    },
    /// Take the revocation of a node's certificates back; also ends a quarantine.
    Unrevoke {
        /// Which node.
        node: String,
    },
    /// Delete a node: its open commands end, and its machine has to join anew.
    Delete {
        /// Which node.
        node: String,
    },
    /// Tell the nodes of this gateway to redial elsewhere, and refuse new sessions.
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
    /// The gateway has answered another question.
    fn otherwise() -> Self {
        ClientError::Otherwise(Listener::Gateway).into()
    }

    fn exit(&self) -> Exit {
        match self {
            Self::Client(ClientError::Permission { .. }) => Exit::Permission,
            Self::Client(ClientError::Unreachable { .. } | ClientError::Ended { .. }) => Exit::NoGateway,
            Self::Client(
                ClientError::Foreign { .. } | ClientError::Otherwise(_) | ClientError::Refused(_),
            ) => Exit::Failed,
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

async fn command(args: Args) -> Result<Exit, CtlError> {
    let worker = match args.worker {
        Some(worker) => worker,
        None => match Client::connect(&args.gateway).await?.call(&Request::Worker).await? {
            Response::Worker(Some(worker)) => worker,
            _ => return Err(CtlError::otherwise()),
        },
    };
    let desk = Desk::at(&worker);
    let operator = Operator::connect(&args.gateway, desk).await?;
    let mut ctl = Session { gateway: args.gateway, operator, json: args.json };
    match args.command {
        Ctl::Exec(exec) => return ctl.exec(exec).await,
        Ctl::Probe { node, ttl } => return ctl.report(&node, "node.probe", &json!({}), ttl).await,
        Ctl::Barrier { node, ttl } => {
            let barrier = format!("b-{:016x}", rand::Rng::random::<u64>(&mut StdRng::from_os_rng()));
            return ctl.report(&node, "inventory.barrier", &json!({ "barrier_id": barrier }), ttl).await;
        }
        Ctl::Reboot { node, delay, drain, ttl } => {
            let mut args = json!({ "delay_s": delay });
            if let Some(drain) = drain {
                args["drain_s"] = drain.into();
            }
            return ctl.report(&node, "node.reboot", &args, ttl).await;
        }
        Ctl::Show { id } => {
            let shown = ctl.ask(Request::Show { id: id.clone() }).await?;
            let Response::Command(view) = shown else { return Err(CtlError::otherwise()) };
            ctl.json_value(&view.ok_or(CtlError::UnknownCommand(id))?)?;
        }
        Ctl::List { node, limit } => {
            let node = match node {
                Some(node) => Some(ctl.node(&node).await?),
                None => None,
            };
            let Response::Commands(commands) = ctl.ask(Request::List { node, limit }).await? else {
                return Err(CtlError::otherwise());
            };
            if ctl.json { ctl.json_value(&commands)? } else { print::list(&commands)? }
        }
        Ctl::Nodes => {
            let nodes = ctl.nodes().await?;
            if ctl.json { ctl.json_value(&nodes)? } else { print::nodes(&nodes)? }
        }
        Ctl::Events { follow } => ctl.events(follow).await?,
        Ctl::NodeEvents { node } => ctl.node_events(&node).await?,
        Ctl::Results => {
            let facts = ctl.operator.results().await?;
            if ctl.json { ctl.json_value(&facts)? } else { print::results(&facts)? }
        }
        Ctl::Cancel { id } => ctl.operator.cancel(id).await?,
        Ctl::Ticket { uses, ttl, site, labels } => {
            let labels = labels.into_iter().collect();
            let line = ctl.operator.ticket(TicketTerms { uses, ttl_s: ttl, site, labels }).await?;
            writeln!(std::io::stdout(), "{line}")?;
        }
        Ctl::Revoke { node, for_good } => {
            let node = ctl.node(&node).await?;
            ctl.operator.revoke(node, for_good).await?;
        }
        Ctl::Unrevoke { node } => {
            let node = ctl.node(&node).await?;
            ctl.operator.unrevoke(node).await?;
        }
        Ctl::Delete { node } => {
            let node = ctl.node(&node).await?;
            ctl.operator.delete(node).await?;
        }
        Ctl::Drain { max_delay_ms } => drop(ctl.ask(Request::Drain { max_delay_ms }).await?),
        Ctl::Undrain => drop(ctl.ask(Request::Undrain).await?),
        Ctl::Stats => {
            let Response::Stats(stats) = ctl.ask(Request::Stats).await? else {
                return Err(CtlError::otherwise());
            };
            if ctl.json { ctl.json_value(&stats)? } else { print::stats(&stats)? }
        }
    }
    Ok(Exit::Done)
}
