//! Asks a gateway, and waits for what it is asked for.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use data_encoding::BASE64;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::{CtlError, ExecArgs, STDIN_BYTES, print};
use crate::gateway::control::{Client, ClientError, CommandView, NodeView, Operator, Request, Response};
use crate::gateway::worker::Draft;
use crate::model::{CommandId, Exit, NodeId};

/// One wait for a command's end; repeated until it has ended.
const WAIT_MS: u64 = 60_000;
/// One wait for events.
const EVENTS_WAIT_MS: u64 = 30_000;
/// A gateway that ends while a command is waited for may come back within this.
const GATEWAY_BACK: Duration = Duration::from_secs(60);
/// Between two looks for it.
const AGAIN: Duration = Duration::from_millis(250);

/// A conversation with one gateway.
pub(super) struct Session {
    pub(super) gateway: PathBuf,
    pub(super) operator: Operator,
    pub(super) json: bool,
}

impl Session {
    pub(super) async fn ask(&mut self, request: Request) -> Result<Response, CtlError> {
        Ok(self.operator.gateway.call(&request).await?)
    }

    pub(super) fn json_value(&self, value: &impl Serialize) -> Result<(), CtlError> {
        let text =
            if self.json { serde_json::to_string(value)? } else { serde_json::to_string_pretty(value)? };
        Ok(writeln!(std::io::stdout(), "{text}")?)
    }

    pub(super) async fn nodes(&mut self) -> Result<Vec<NodeView>, CtlError> {
        match self.ask(Request::Nodes).await? {
            Response::Nodes(nodes) => Ok(nodes),
            _ => Err(CtlError::otherwise()),
        }
    }

    /// A node by its id, or the only one.
    pub(super) async fn node(&mut self, name: &str) -> Result<NodeId, CtlError> {
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
        let draft = Draft { node, kind: kind.to_owned(), args, ttl_s, id: None };
        let id = self.operator.enqueue(draft).await?;
        self.wait(id).await
    }

    /// Waits for the end of a command, also over the end of a gateway that comes back.
    async fn wait(&mut self, id: CommandId) -> Result<CommandView, CtlError> {
        loop {
            let request = Request::Wait { id: id.clone(), timeout_ms: WAIT_MS };
            match self.operator.gateway.call(&request).await {
                Ok(Response::Command(Some(view))) if view.ended_ms != 0 => return Ok(*view),
                Ok(Response::Command(Some(_))) => {}
                Ok(Response::Command(None)) => return Err(CtlError::UnknownCommand(id)),
                Ok(_) => return Err(CtlError::otherwise()),
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
                Ok(gateway) => {
                    self.operator.gateway = gateway;
                    return Ok(());
                }
                Err(error) if tokio::time::Instant::now() >= until => return Err(error.into()),
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    pub(super) async fn exec(&mut self, exec: ExecArgs) -> Result<Exit, CtlError> {
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
        } else {
            print::program_output(&view.output)?;
        }
        Ok(print::end(&view))
    }

    /// Runs a command whose output is a document, and prints that.
    pub(super) async fn report(
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
        Ok(print::end(&view))
    }

    pub(super) async fn node_events(&mut self, node: &str) -> Result<(), CtlError> {
        let node = self.node(node).await?;
        let mut after = 0;
        loop {
            let request = Request::NodeEvents { node: Some(node.clone()), after };
            let Response::NodeEvents(events) = self.ask(request).await? else {
                return Err(CtlError::otherwise());
            };
            let Some(last) = events.last() else { return Ok(()) };
            after = last.number;
            for event in &events {
                if self.json { self.json_value(event)? } else { print::node_event(event)? }
            }
        }
    }

    pub(super) async fn events(&mut self, follow: bool) -> Result<(), CtlError> {
        let mut after = 0;
        loop {
            let wait_ms = if follow { EVENTS_WAIT_MS } else { 0 };
            let Response::Events(events) = self.ask(Request::Events { after, wait_ms }).await? else {
                return Err(CtlError::otherwise());
            };
            if events.is_empty() && !follow {
                return Ok(());
            }
            for event in events {
                after = event.seq;
                if self.json {
                    self.json_value(&event)?;
                } else {
                    print::event(&event)?;
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
