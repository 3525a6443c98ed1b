//! The table of keys.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::Value;

use super::{Config, LogFormat};
use crate::journal;
use crate::upkeep::FILES;
use crate::wire::dsse::Policy;

/// One key of bcd.toml.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    /// `section.name`.
    pub name: &'static str,
    /// The environment variable that overrides the file.
    pub variable: &'static str,
    /// What it may be.
    pub allowed: &'static str,
    /// What it does.
    pub meaning: &'static str,
    pub(super) is_list: bool,
    pub(super) apply: fn(&mut Config, &Value) -> Result<(), String>,
    pub(super) show: fn(&Config) -> Value,
}

impl Key {
    pub(super) fn section(&self) -> &'static str {
        self.name.split('.').next().unwrap_or(self.name)
    }

    /// The value that a text of the environment or the command line stands for; lists are separated by commas.
    pub(super) fn value_of(&self, text: &str) -> Value {
        if !self.is_list {
            return Value::String(text.to_owned());
        }
        let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
        Value::Array(parts.map(|part| Value::String(part.to_owned())).collect())
    }
}

/// Every key, in the order of the file.
pub const KEYS: [Key; 12] = [
    Key {
        name: "gateway.endpoints",
        variable: "BCD_GATEWAY_ENDPOINTS",
        allowed: "a list of \"host:port\", such as [\"gw1.lab.example:443\", \"[::1]:7443\"]",
        meaning: "gateways to dial, in turn from one drawn at the start; empty: those of the join",
        is_list: true,
        apply: |config, value| {
            let parse = |text: &String| text.parse().map_err(|error| format!("{error}"));
            config.endpoints = strings(value)?.iter().map(parse).collect::<Result<_, _>>()?;
            Ok(())
        },
        show: |config| list(config.endpoints.iter().map(ToString::to_string)),
    },
    Key {
        name: "paths.state",
        variable: "BCD_STATE",
        allowed: "an absolute path",
        meaning: "identity, keys and journal; 0700, owned by the user that bcd runs as",
        is_list: false,
        apply: |config, value| absolute(value).map(|path| config.state = path),
        show: |config| path(&config.state),
    },
    Key {
        name: "paths.run",
        variable: "BCD_RUN",
        allowed: "an absolute path",
        meaning: "the status socket, bcd.sock",
        is_list: false,
        apply: |config, value| absolute(value).map(|path| config.run = path),
        show: |config| path(&config.run),
    },
    Key {
        name: "signatures.commands",
        variable: "BCD_SIGNATURES_COMMANDS",
        allowed: if cfg!(feature = "fakehw") { "all, destructive, none" } else { "all, destructive" },
        meaning: "commands that need a signature: all, or only those of destructive kinds",
        is_list: false,
        apply: |config, value| policy(text(value)?).map(|policy| config.signatures = policy),
        show: |config| Value::String(policy_name(config.signatures).to_owned()),
    },
    Key {
        name: "kinds.deny",
        variable: "BCD_KINDS_DENY",
        allowed: "a list of kinds, such as [\"node.exec\"] (bcd kinds prints them)",
        meaning: "kinds of commands that this host never runs, whatever the control plane signs",
        is_list: true,
        apply: |config, value| {
            let kinds = strings(value)?;
            let plain = |kind: &&String| {
                !kind.is_empty()
                    && kind
                        .bytes()
                        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".-".contains(&b))
            };
            if let Some(bad) = kinds.iter().find(|kind| !plain(kind)) {
                return Err(format!("{bad:?} is not the name of a kind"));
            }
            config.denied = Arc::new(BTreeSet::from_iter(kinds));
            Ok(())
        },
        show: |config| list(config.denied.iter().cloned()),
    },
    Key {
        name: "limits.events",
        variable: "BCD_LIMITS_EVENTS",
        allowed: "a number from 100 to 1000000",
        meaning: "events that may wait for their ack; then metrics are dropped, then logs, and commands are refused busy",
        is_list: false,
        apply: |config, value| number(value, 100..=1_000_000).map(|count| config.event_limits.count = count),
        show: |config| shown_number(config.event_limits.count),
    },
    Key {
        name: "limits.event_bytes",
        variable: "BCD_LIMITS_EVENT_BYTES",
        allowed: "a number from 1048576 to 1073741824",
        meaning: "size of those events, bytes",
        is_list: false,
        apply: |config, value| {
            number(value, 1 << 20..=1 << 30).map(|bytes| config.event_limits.bytes = bytes)
        },
        show: |config| shown_number(config.event_limits.bytes),
    },
    Key {
        name: "limits.state_bytes",
        variable: "BCD_LIMITS_STATE_BYTES",
        allowed: "a number of bytes, 67108864 (64 MiB) or more",
        meaning: "most that bcd keeps in the state directory; before it is passed, commands get busy with disk",
        is_list: false,
        apply: |config, value| {
            let most = journal::LEAST_STATE_BYTES..=u64::MAX;
            number(value, most).map(|bytes| config.limits.state_bytes = bytes)
        },
        show: |config| shown_number(config.limits.state_bytes),
    },
    Key {
        name: "audit.file_bytes",
        variable: "BCD_AUDIT_FILE_BYTES",
        allowed: "a number from 65536 to 1073741824",
        meaning: "size at which audit.log is put aside as audit.log.1 and a new one begun, bytes",
        is_list: false,
        apply: |config, value| number(value, 64 << 10..=1 << 30).map(|bytes| config.audit.file_bytes = bytes),
        show: |config| shown_number(config.audit.file_bytes),
    },
    Key {
        name: "audit.files",
        variable: "BCD_AUDIT_FILES",
        allowed: "a number from 1 to 1000",
        meaning: "how many of those that were put aside are kept; they count towards limits.state_bytes",
        is_list: false,
        apply: |config, value| {
            let files = number(value, 1..=u64::from(FILES))?;
            config.audit.files = u32::try_from(files).map_err(|error| error.to_string())?;
            Ok(())
        },
        show: |config| shown_number(config.audit.files.into()),
    },
    Key {
        name: "log.level",
        variable: "BCD_LOG",
        allowed: "error, warn, info, debug, trace",
        meaning: "least severe level of bcd's own lines; libraries log from warn on",
        is_list: false,
        apply: |config, value| {
            // tracing's own parser takes numbers too.
            let known = ["error", "warn", "info", "debug", "trace"];
            let text = text(value)?;
            let level = known.contains(&text).then(|| text.parse().ok()).flatten();
            config.log_level = level.ok_or("there is no such level")?;
            Ok(())
        },
        show: |config| Value::String(config.log_level.as_str().to_ascii_lowercase()),
    },
    Key {
        name: "log.format",
        variable: "BCD_LOG_FORMAT",
        allowed: "auto, journald, text, json",
        meaning: "form of the log: to the journal with fields, or lines or JSON on standard error; auto: the journal where standard error leads there, else text",
        is_list: false,
        apply: |config, value| {
            let text = text(value)?;
            let known = LogFormat::ALL.into_iter().find(|format| format.name() == text);
            config.log_format = known.ok_or("there is no such format")?;
            Ok(())
        },
        show: |config| Value::String(config.log_format.name().to_owned()),
    },
];

fn text(value: &Value) -> Result<&str, String> {
    value.as_str().ok_or_else(|| format!("it is of type {}, not a string", value.type_str()))
}

/// A number, which the environment gives as a text.
fn number(value: &Value, allowed: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
    let number = match value {
        Value::Integer(number) => u64::try_from(*number).ok(),
        other => {
            text(other).map_err(|_| format!("it is of type {}, not a number", other.type_str()))?.parse().ok()
        }
    };
    number.filter(|number| allowed.contains(number)).ok_or_else(|| "it is no such number".into())
}

fn shown_number(number: u64) -> Value {
    Value::Integer(i64::try_from(number).unwrap_or(i64::MAX))
}

fn strings(value: &Value) -> Result<Vec<String>, String> {
    let items = value.as_array().ok_or_else(|| format!("it is of type {}, not a list", value.type_str()))?;
    items.iter().map(|item| text(item).map(str::to_owned)).collect()
}

fn absolute(value: &Value) -> Result<PathBuf, String> {
    let path = PathBuf::from(text(value)?);
    if path.is_absolute() { Ok(path) } else { Err("it is not absolute".into()) }
}

fn policy(name: &str) -> Result<Policy, String> {
    match name {
        "all" => Ok(Policy::All),
        "destructive" => Ok(Policy::Destructive),
        #[cfg(feature = "fakehw")]
        "none" => Ok(Policy::None),
        #[cfg(not(feature = "fakehw"))]
        "none" => {
            Err("with it whoever reaches the node commands it, so only simulation builds take it".into())
        }
        _ => Err("there is no such policy".into()),
    }
}

fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::All => "all",
        Policy::Destructive => "destructive",
        #[cfg(feature = "fakehw")]
        Policy::None => "none",
    }
}

fn list(items: impl Iterator<Item = String>) -> Value {
    Value::Array(items.map(Value::String).collect())
}

fn path(path: &Path) -> Value {
    Value::String(path.display().to_string())
}
