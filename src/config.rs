//! bcd.toml, the environment and the flags, as one strict configuration that knows where each value came from.
//!
//! One table, [`KEYS`], has every key with its environment variable, default and allowed values; `bcd config show`,
//! docs/config.md and every error message are made from it. Precedence: flag, environment, file, default.

mod documents;
mod keys;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use toml::{Table, Value};

pub use documents::{manual, reference, sample};
pub use keys::{KEYS, Key};

use crate::journal::{self, EventLimits, Limits};
use crate::model::Exit;
use crate::upkeep::Retention;
use crate::wire::dsse::Policy;
use crate::wire::link::Endpoint;

/// Read when no file is named; may be missing.
pub const DEFAULT_FILE: &str = "/etc/bcd/bcd.toml";
/// Names the file, as `--config` does.
pub const FILE_VARIABLE: &str = "BCD_CONFIG";
/// A configuration has a few hundred bytes; a larger file is another file.
const FILE_BYTES: u64 = 1 << 20;

/// The effective configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to dial; empty: where the join said.
    pub endpoints: Vec<Endpoint>,
    /// The state directory.
    pub state: PathBuf,
    /// The directory of the status socket.
    pub run: PathBuf,
    /// What bcd may take of the disk.
    pub limits: Limits,
    /// Which commands need a signature.
    pub signatures: Policy,
    /// Kinds that this host never runs.
    pub denied: Arc<BTreeSet<String>>,
    /// How many events may wait for their ack.
    pub event_limits: EventLimits,
    /// How much of audit.log is kept.
    pub audit: Retention,
    /// Least severe level that is logged.
    pub log_level: tracing::Level,
    /// Form of the log.
    pub log_format: LogFormat,
    sources: BTreeMap<&'static str, Source>,
}

/// Form of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// To the journal where standard error leads there, else lines for people.
    Auto,
    /// To the journal, with a field of its own for each value.
    Journald,
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Flag(&'static str),
    /// An environment variable.
    Environment(&'static str),
    /// The configuration file.
    File(PathBuf),
    /// None of them.
    Default,
}

impl LogFormat {
    pub(super) const ALL: [Self; 4] = [Self::Auto, Self::Journald, Self::Text, Self::Json];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Journald => "journald",
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(flag) => f.write_str(flag),
            Self::Environment(variable) => write!(f, "environment {variable}"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read the configuration {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is too large.
    #[error("{} is larger than {FILE_BYTES} bytes, so it is no configuration of bcd", .0.display())]
    TooLarge(PathBuf),
    /// The file is not TOML.
    #[error("{} is not TOML: {detail}", .path.display())]
    Syntax {
        /// Which.
        path: PathBuf,
        /// Where and what.
        detail: String,
    },
    /// A key that there is not.
    #[error("{}: unknown key {key}; {}", .path.display(), nearest.map_or_else(|| format!("the keys are: {}", all_names()), |near| format!("did you mean {near}?")))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// With its section.
        key: String,
        /// The known key that looks most like it.
        nearest: Option<&'static str>,
    },
    /// A value that a key cannot have.
    #[error("{place}: {key} cannot be {value}: {why}; allowed: {allowed}")]
    Value {
        /// File, variable or flag.
        place: Source,
        /// Which key.
        key: &'static str,
        /// The value, as it was given.
        value: String,
        /// What is wrong with it.
        why: String,
        /// What it may be.
        allowed: &'static str,
    },
}

fn all_names() -> String {
    KEYS.map(|key| key.name).join(", ")
}

impl ConfigError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Read { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
                Exit::Permission
            }
            _ => Exit::Configuration,
        }
    }
}

/// What the command line says.
#[derive(Debug, Clone, Default)]
pub struct Flags {
    /// The file; absent: the environment's, else the default one, which may be missing.
    pub file: Option<PathBuf>,
    /// Values by key, with the flag's name.
    pub values: Vec<(&'static str, &'static str, String)>,
}

impl Config {
    /// Every value at its default.
    pub fn defaults() -> Self {
        Self {
            endpoints: Vec::new(),
            state: "/var/lib/bcd".into(),
            run: "/run/bcd".into(),
            limits: Limits { state_bytes: 512 << 20, reserve_bytes: journal::RESERVE_BYTES },
            signatures: Policy::default(),
            denied: Arc::default(),
            event_limits: EventLimits::default(),
            audit: Retention::default(),
            log_level: tracing::Level::INFO,
            log_format: LogFormat::Auto,
            sources: BTreeMap::new(),
        }
    }

    /// Reads the file and lays environment and flags over it. Blocks.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn load(flags: &Flags, environment: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let named = flags.file.clone().or_else(|| environment(FILE_VARIABLE).map(PathBuf::from));
        let mut config = Self::defaults();
        match &named {
            Some(path) => config.apply_file(path, &read(path)?)?,
            None => match read(Path::new(DEFAULT_FILE)) {
                Ok(text) => config.apply_file(Path::new(DEFAULT_FILE), &text)?,
                Err(ConfigError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            },
        }
        for key in &KEYS {
            if let Some(text) = environment(key.variable) {
                config.set(key, &key.value_of(&text), Source::Environment(key.variable))?;
            }
        }
        for (name, flag, text) in &flags.values {
            if let Some(key) = KEYS.iter().find(|key| key.name == *name) {
                config.set(key, &key.value_of(text), Source::Flag(flag))?;
            }
        }
        Ok(config)
    }

    /// Lays a file's text over the values.
    ///
    /// # Errors
    /// See [`ConfigError`].
    pub fn apply_file(&mut self, path: &Path, text: &str) -> Result<(), ConfigError> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| ConfigError::Syntax {
            path: path.to_owned(),
            detail: error.to_string().trim_end().to_owned(),
        })?;
        for (section, value) in &table {
            let Value::Table(values) = value else {
                return Err(unknown(path, section));
            };
            if values.is_empty() && !KEYS.iter().any(|key| key.section() == section) {
                return Err(unknown(path, section));
            }
            for (name, value) in values {
                let full = format!("{section}.{name}");
                let key = KEYS.iter().find(|key| key.name == full).ok_or_else(|| unknown(path, &full))?;
                self.set(key, value, Source::File(path.to_owned()))?;
            }
        }
        Ok(())
    }

    fn set(&mut self, key: &Key, value: &Value, source: Source) -> Result<(), ConfigError> {
        if let Err(why) = (key.apply)(self, value) {
            let value = value.to_string().chars().take(80).collect();
            return Err(ConfigError::Value {
                place: source,
                key: key.name,
                value,
                why,
                allowed: key.allowed,
            });
        }
        self.sources.insert(key.name, source);
        Ok(())
    }

    /// Every key with its effective value, in TOML, and where that came from.
    pub fn effective(&self) -> Vec<(&'static Key, String, Source)> {
        let source = |key: &Key| self.sources.get(key.name).cloned().unwrap_or(Source::Default);
        KEYS.iter().map(|key| (key, (key.show)(self).to_string(), source(key))).collect()
    }

    /// What is allowed and yet perhaps not meant.
    pub fn warnings(&self) -> Vec<String> {
        let kinds = crate::model::Kind::ALL.map(crate::model::Kind::name);
        let strange = self.denied.iter().filter(|kind| !kinds.contains(&kind.as_str()));
        let audit = self.audit.bytes();
        let large = (audit > self.limits.state_bytes / 2).then(|| {
            format!(
                "audit.log and the {} before it may take {audit} bytes, more than half of limits.state_bytes; \
                 commands get busy when the rest is used up",
                self.audit.files
            )
        });
        strange
            .map(|kind| {
                let near = nearest(kind, kinds.into_iter());
                let hint = near.map(|near| format!("; did you mean {near}?")).unwrap_or_default();
                format!("kinds.deny names {kind}, a kind that this bcd does not know{hint}")
            })
            .chain(large)
            .collect()
    }
}

fn read(path: &Path) -> Result<String, ConfigError> {
    use std::io::Read as _;
    let failed = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    file.take(FILE_BYTES + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > FILE_BYTES { Err(ConfigError::TooLarge(path.to_owned())) } else { Ok(text) }
}

fn unknown(path: &Path, key: &str) -> ConfigError {
    let nearest = nearest(key, KEYS.iter().map(|key| key.name));
    ConfigError::UnknownKey { path: path.to_owned(), key: key.to_owned(), nearest }
}

/// The candidate that looks most like `word`, if one looks like it at all.
fn nearest(word: &str, candidates: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let word = word.to_ascii_lowercase();
    // The last part alone too: a key in the wrong section is mostly spelt right.
    let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_owned();
    let score = |candidate: &str| {
        strsim::jaro_winkler(&word, candidate).max(strsim::jaro_winkler(&last(&word), &last(candidate)))
    };
    candidates
        .map(|candidate| (score(candidate), candidate))
        .filter(|(score, _)| *score > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests;
