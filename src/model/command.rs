//! A command's signed body, read in two steps: the header first (what admission needs to answer at all), the
//! whole body strictly later, so that an unknown field ends as REJECTED with the command's id.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::ids::{BarrierId, CommandId, Digest, NodeId};
use super::kind::Kind;
use super::limits::{ARG_BYTES, ARGV, COMMAND_BODY_BYTES, STREAM_BYTES};
use super::strict::{self, Object, StrictError, StrictMap};
use super::time::ServerTime;

/// What a body says of itself before it is read strictly.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct CommandHeader {
    /// The deployment's name.
    pub trust_domain: String,
    /// The node that it is for.
    pub node_id: NodeId,
    /// The command.
    pub id: CommandId,
    /// The kind's name; may be one that this build does not run.
    pub kind: String,
    /// When it was signed.
    pub issued_at: ServerTime,
    /// Until when it may be accepted.
    pub not_after: ServerTime,
}

/// A command whose header could be read. Its bytes stay as received.
#[derive(Debug, Clone)]
pub struct Command {
    /// The header.
    pub header: CommandHeader,
    /// The body as received; what was verified is what is parsed.
    pub payload: Bytes,
    /// SHA-256 of the payload.
    pub body_sha256: Digest,
}

/// A body from which no header can be read: there is no id to answer with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the command's body has no readable header: {0}")]
pub struct BadHeader(String);

/// An argument whose value cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadArgument(String);

impl From<BadArgument> for StrictError {
    fn from(error: BadArgument) -> Self {
        Self::Invalid(error.0)
    }
}

/// A body that cannot be run as it stands.
pub type ArgsError = StrictError;

#[derive(Deserialize)]
struct WholeBody<'a> {
    // The header's fields are known here too; serde_ignored reports an IgnoredAny as unknown, so they have a type.
    #[serde(rename = "trust_domain")]
    _trust_domain: String,
    #[serde(rename = "node_id")]
    _node_id: String,
    #[serde(rename = "id")]
    _id: String,
    #[serde(rename = "kind")]
    _kind: String,
    #[serde(rename = "issued_at")]
    _issued_at: String,
    #[serde(rename = "not_after")]
    _not_after: String,
    #[serde(default)]
    min_generation: u64,
    #[serde(borrow)]
    args: &'a RawValue,
}

/// The whole body, read strictly.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Body {
    /// The generation of desired state that must be applied first.
    pub min_generation: u64,
    /// The kind's arguments.
    pub args: Args,
}

impl Command {
    /// Reads the header of a body.
    ///
    /// # Errors
    /// The body is over the limit, not JSON, or a header field is missing, doubled or malformed.
    pub fn parse(payload: Bytes) -> Result<Self, BadHeader> {
        if payload.len() > COMMAND_BODY_BYTES {
            return Err(BadHeader(format!(
                "{} bytes are over the limit of {COMMAND_BODY_BYTES}",
                payload.len()
            )));
        }
        let header: Object<_> =
            serde_json::from_slice(&payload).map_err(|error| BadHeader(error.to_string()))?;
        let body_sha256 = Digest::of(&payload);
        Ok(Self { header: header.0, payload, body_sha256 })
    }

    /// Reads the whole body strictly, with the arguments of `kind`.
    ///
    /// # Errors
    /// An unknown field anywhere, or anything else that is wrong.
    pub fn body(&self, kind: Kind) -> Result<Body, ArgsError> {
        let invalid = |error: serde_json::Error| StrictError::Invalid(error.to_string());
        let mut unknown = None;
        let mut json = serde_json::Deserializer::from_slice(&self.payload);
        let Object::<WholeBody<'_>>(whole) = serde_ignored::deserialize(&mut json, |path| {
            unknown.get_or_insert_with(|| path.to_string());
        })
        .map_err(invalid)?;
        json.end().map_err(invalid)?;
        let args = Args::parse(kind, whole.args.get().as_bytes())?;
        match unknown {
            Some(path) => Err(StrictError::UnsupportedField(path)),
            None => Ok(Body { min_generation: whole.min_generation, args }),
        }
    }
}

/// The arguments of a kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Args {
    /// `node.probe`.
    Probe(ProbeArgs),
    /// `node.exec`.
    Exec(Box<ExecArgs>),
    /// `inventory.barrier`.
    Barrier(BarrierArgs),
    /// `node.reboot`.
    Reboot(RebootArgs),
}

impl Args {
    fn parse(kind: Kind, json: &[u8]) -> Result<Self, ArgsError> {
        match kind {
            Kind::NodeProbe => strict::parse(json).map(Self::Probe),
            Kind::InventoryBarrier => strict::parse(json).map(Self::Barrier),
            Kind::NodeReboot => {
                let args: RebootArgs = strict::parse(json)?;
                args.check().map_err(StrictError::Invalid)?;
                Ok(Self::Reboot(args))
            }
            Kind::NodeExec => {
                let args: ExecArgs = strict::parse(json)?;
                args.check()?;
                Ok(Self::Exec(Box::new(args)))
            }
        }
    }

    /// The kind that they belong to.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Probe(_) => Kind::NodeProbe,
            Self::Exec(_) => Kind::NodeExec,
            Self::Barrier(_) => Kind::InventoryBarrier,
            Self::Reboot(_) => Kind::NodeReboot,
        }
    }

    /// Whether this very command may run twice.
    pub fn retry_safe(&self) -> bool {
        match self {
            Self::Probe(_) | Self::Barrier(_) => true,
            Self::Exec(exec) => exec.retry_safe,
            Self::Reboot(_) => false,
        }
    }
}

/// `node.probe` takes none.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProbeArgs {}

/// What a barrier is called by whoever asks.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct BarrierArgs {
    /// Comes back in the answer.
    pub barrier_id: BarrierId,
}

/// When to restart the machine.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct RebootArgs {
    /// Waits this long first, seconds; work goes on.
    #[serde(default)]
    pub delay_s: u64,
    /// Then takes no more work and waits up to this long for what runs on the lanes work and bulk, seconds. Absent:
    /// does not wait.
    #[serde(default)]
    pub drain_s: Option<u64>,
}

/// Longest delay, and longest drain, of a reboot, seconds.
const MAX_REBOOT_WAIT_S: u64 = 24 * 3600;

impl RebootArgs {
    fn check(&self) -> Result<(), String> {
        if self.delay_s.max(self.drain_s.unwrap_or(0)) > MAX_REBOOT_WAIT_S {
            return Err(format!("delay_s and drain_s may be at most {MAX_REBOOT_WAIT_S}"));
        }
        Ok(())
    }
}

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecArgs {
    /// The program (an absolute path, or a name found in PATH) and its arguments. Never a shell unless it
    /// names one.
    pub argv: Vec<String>,
    /// The environment, beside a PATH and what bcd needs to find the program again.
    #[serde(default)]
    pub env: StrictMap<String>,
    /// Bytes for standard input, base64. Empty: /dev/null.
    #[serde(default)]
    pub stdin_base64: String,
    /// Working directory, absolute. Absent: `/`.
    #[serde(default)]
    pub cwd: Option<String>,
    /// User to run as. Absent: the daemon's own.
    #[serde(default)]
    pub user: Option<String>,
    /// Time limit, seconds. Absent: the kind's default.
    #[serde(default)]
    pub time_limit_s: Option<u64>,
    /// SIGTERM comes this long before SIGKILL, seconds. Absent: 10.
    #[serde(default)]
    pub grace_s: Option<u64>,
    /// Most memory of the program and all that it starts, bytes. Absent: no limit of its own.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Most CPU time of all of it together, in whole CPUs. Absent: no limit of its own.
    #[serde(default)]
    pub cpus: Option<u32>,
    /// Most processes and threads of all of it together. Absent: no limit of its own.
    #[serde(default)]
    pub tasks: Option<u32>,
    /// Head and tail kept of each output stream, bytes together. Absent: 64 KiB, which is also the most.
    #[serde(default)]
    pub output_limit: Option<u64>,
    /// Whether it may run twice.
    #[serde(default)]
    pub retry_safe: bool,
}

/// Least memory limit, bytes: below it no program gets as far as its first line.
const MIN_MEMORY_BYTES: u64 = 1 << 20;

/// Longest grace between SIGTERM and SIGKILL, seconds.
const MAX_GRACE_S: u64 = 600;

impl ExecArgs {
    fn check(&self) -> Result<(), BadArgument> {
        let bad = |text: String| Err(BadArgument(text));
        let nul = |text: &str| text.contains('\0');
        let program = self.argv.first().map(String::as_str).unwrap_or_default();
        if program.is_empty() {
            return bad("argv must name a program".into());
        }
        if self.argv.len() > ARGV || self.env.0.len() > ARGV {
            return bad(format!("argv and env may have at most {ARGV} entries each"));
        }
        if self.argv.iter().any(|arg| nul(arg) || arg.len() >= ARG_BYTES) {
            return bad(format!("an argument holds a NUL or has {ARG_BYTES} bytes or more"));
        }
        for (name, value) in &self.env.0 {
            if name.is_empty() || name.contains('=') || nul(name) || nul(value) {
                return bad(format!("the environment variable {name:?} cannot be passed on"));
            }
            if name.starts_with("BCD_") {
                return bad(format!("the environment variable {name:?} is bcd's own"));
            }
            if name.len() + value.len() + 1 >= ARG_BYTES {
                return bad(format!("the environment variable {name:?} has {ARG_BYTES} bytes or more"));
            }
        }
        if self.cwd.as_deref().is_some_and(|dir| !dir.starts_with('/') || nul(dir)) {
            return bad("cwd must be an absolute path".into());
        }
        if self.user.as_deref().is_some_and(|user| user.is_empty() || nul(user)) {
            return bad("user must be a name".into());
        }
        let longest = Kind::NodeExec.properties().max_run_time.as_secs();
        if self.time_limit_s.is_some_and(|limit| limit == 0 || limit > longest) {
            return bad(format!("time_limit_s must lie within 1 and {longest}"));
        }
        if self.grace_s.is_some_and(|grace| grace > MAX_GRACE_S) {
            return bad(format!("grace_s may be at most {MAX_GRACE_S}"));
        }
        if self.memory_bytes.is_some_and(|bytes| bytes < MIN_MEMORY_BYTES) {
            return bad(format!("memory_bytes must be at least {MIN_MEMORY_BYTES}"));
        }
        if self.cpus == Some(0) || self.tasks == Some(0) {
            return bad("cpus and tasks must be at least 1".into());
        }
        if self.output_limit.is_some_and(|limit| limit > STREAM_BYTES as u64) {
            return bad(format!("output_limit may be at most {STREAM_BYTES}"));
        }
        self.stdin().map(|_| ())
    }

    /// The bytes for standard input.
    ///
    /// # Errors
    /// They are not base64.
    pub fn stdin(&self) -> Result<Vec<u8>, BadArgument> {
        data_encoding::BASE64
            .decode(self.stdin_base64.as_bytes())
            .map_err(|error| BadArgument(format!("stdin_base64 is not base64: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(extra: &str, args: &str) -> Bytes {
        Bytes::from(format!(
            r#"{{"trust_domain":"lab.example","node_id":"n-1","id":"c-1","kind":"node.exec",
            "issued_at":"2026-11-29T10:00:00Z","not_after":"2026-11-29T11:00:00Z"{extra},"args":{args}}}"#
        ))
    }

    const ARGS: &str = r#"{"argv":["/usr/bin/uname","-a"],"env":{},"user":"root","time_limit_s":30,
        "output_limit":65536,"retry_safe":false}"#;

    #[test]
    fn the_example_of_the_specification_is_read() {
        let command = Command::parse(body(r#","min_generation":0"#, ARGS)).expect("a header");
        assert_eq!(command.header.id.as_str(), "c-1");
        let body = command.body(Kind::NodeExec).expect("a body");
        assert!(!body.args.retry_safe());
    }

    #[test]
    fn a_doubled_header_field_gives_no_command() {
        assert!(Command::parse(body(r#","id":"c-2""#, ARGS)).is_err());
        assert!(Command::parse(Bytes::from_static(b"{}")).is_err());
        assert!(Command::parse(Bytes::from(vec![b' '; COMMAND_BODY_BYTES + 1])).is_err());
    }

    #[test]
    fn an_unknown_field_is_unsupported_wherever_it_stands() {
        let outer = Command::parse(body(r#","limit":1"#, ARGS)).expect("a header").body(Kind::NodeExec);
        let inner = Command::parse(body("", r#"{"argv":["x"],"memory":1}"#)).expect("a header");
        assert!(matches!(outer, Err(StrictError::UnsupportedField(_))), "{outer:?}");
        assert!(matches!(inner.body(Kind::NodeExec), Err(StrictError::UnsupportedField(_))));
    }

    #[test]
    fn arguments_that_cannot_be_run_are_invalid() {
        for args in [
            "{}",
            r#"{"argv":[]}"#,
            r#"{"argv":[""]}"#,
            r#"{"argv":["x"],"argv":["y"]}"#,
            r#"{"argv":["x"],"env":{"A":"1","A":"2"}}"#,
            r#"{"argv":["x"],"env":{"A=B":"1"}}"#,
            r#"{"argv":["x"],"env":{"BCD_COMMAND":"1"}}"#,
            r#"{"argv":["x\u0000"]}"#,
            r#"{"argv":["x"],"cwd":"tmp"}"#,
            r#"{"argv":["x"],"time_limit_s":0}"#,
            r#"{"argv":["x"],"output_limit":65537}"#,
            r#"{"argv":["x"],"memory_bytes":1}"#,
            r#"{"argv":["x"],"cpus":0}"#,
            r#"{"argv":["x"],"tasks":0}"#,
            r#"{"argv":["x"],"stdin_base64":"?"}"#,
        ] {
            let command = Command::parse(body("", args)).expect("a header");
            assert!(matches!(command.body(Kind::NodeExec), Err(StrictError::Invalid(_))), "{args}");
        }
    }
}
