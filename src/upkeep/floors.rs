//! floors.json: what only rises, beside the journal, so that a lost journal lowers none of it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::model::{Exit, ServerTime};
use crate::state_dir::{StateDir, StateError};

/// The file's name in the state directory.
pub const NAME: &str = "floors.json";
/// A few numbers; those of a later release fit too.
const BYTES: u64 = 64 << 10;

/// Lowest values that are accepted. A value that is not there is the lowest of all.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Floors {
    /// The server time mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server_time_mark: Option<ServerTime>,
    /// Generation of the newest spec.
    #[serde(default)]
    pub spec_generation: u64,
    /// Highest rollout generation accepted.
    #[serde(default)]
    pub rollout_generation: u64,
    /// Version of the newest trust bundle.
    #[serde(default)]
    pub trust_version: u64,
    /// Sequence of the newest confirmed release.
    #[serde(default)]
    pub release_sequence: u64,
    /// Floors of a later release: kept as they are, since this one must not lower them.
    #[serde(flatten)]
    later: serde_json::Map<String, serde_json::Value>,
}

/// Why the floors cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FloorsError {
    /// The file system, or the file's owner or mode.
    #[error(transparent)]
    State(#[from] StateError),
    /// Damaged. Starting without it could take what an older peer replays.
    #[error(
        "{path} cannot be read as floors; a copy of it from this machine may be put back, or, when there is none, it \
         may be moved away (mv {path} {path}.damaged): the journal still has what it holds", path = .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

impl FloorsError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::State(error) => error.exit(),
            Self::Damaged { .. } => Exit::Configuration,
        }
    }
}

impl Floors {
    /// Reads the floors of a state directory; the lowest where there are none. Blocks.
    ///
    /// # Errors
    /// See [`FloorsError`].
    pub fn read(state: &Path) -> Result<Self, FloorsError> {
        let Some(dir) = StateDir::open(state)? else { return Ok(Self::default()) };
        let Some(bytes) = dir.read(NAME, BYTES)? else { return Ok(Self::default()) };
        serde_json::from_slice(&bytes)
            .map_err(|source| FloorsError::Damaged { path: state.join(NAME), source })
    }

    /// Sets the mark to the working clock, which nothing but a signed answer sets back.
    pub fn set_mark(&mut self, working: Option<ServerTime>) {
        self.server_time_mark = working.or(self.server_time_mark);
    }

    /// A bundle of this version is held.
    pub fn raise_trust(&mut self, version: u64) {
        self.trust_version = self.trust_version.max(version);
    }

    /// Replaces the file. Blocks.
    ///
    /// # Errors
    /// See [`FloorsError`]; the old file stays.
    pub fn write(&self, state: &Path) -> Result<(), FloorsError> {
        let damaged = |source| FloorsError::Damaged { path: state.join(NAME), source };
        let mut bytes = serde_json::to_vec(self).map_err(damaged)?;
        bytes.push(b'\n');
        Ok(StateDir::ensure(state)?.write(NAME, &bytes)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> (tempfile::TempDir, PathBuf) {
        let temp = tempfile::tempdir().unwrap();
        let state = temp.path().join("state");
        StateDir::ensure(&state).unwrap();
        (temp, state)
    }

    #[test]
    fn floors_are_kept_and_none_is_lowered_nor_one_of_a_later_release_lost() {
        let (_temp, state) = state();
        assert_eq!(Floors::read(&state).unwrap(), Floors::default());
        let text = r#"{"server_time_mark":"2026-11-29T10:00:00Z","spec_generation":41,"quota_floor":9}"#;
        StateDir::ensure(&state).unwrap().write(NAME, text.as_bytes()).unwrap();
        let mut floors = Floors::read(&state).unwrap();
        floors.set_mark(None);
        assert_eq!(floors.server_time_mark, ServerTime::parse("2026-11-29T10:00:00Z"));
        floors.set_mark(ServerTime::parse("2026-11-30T10:00:00Z"));
        floors.raise_trust(3);
        floors.raise_trust(2);
        floors.write(&state).unwrap();
        let text = std::fs::read_to_string(state.join(NAME)).unwrap();
        assert!(text.contains(r#""server_time_mark":"2026-11-30T10:00:00"#), "{text}");
        assert_eq!(floors.trust_version, 3);
        assert!(text.contains(r#""spec_generation":41"#) && text.contains(r#""quota_floor":9"#), "{text}");
        assert_eq!(Floors::read(&state).unwrap(), floors);
    }

    #[test]
    fn damaged_floors_are_refused_with_the_mend_and_left_as_they_are() {
        let (_temp, state) = state();
        for text in ["", "{", "[]", r#"{"spec_generation":-1}"#] {
            StateDir::ensure(&state).unwrap().write(NAME, text.as_bytes()).unwrap();
            let error = Floors::read(&state).unwrap_err();
            assert!(error.to_string().contains("mv "), "{error}");
            assert_eq!(std::fs::read_to_string(state.join(NAME)).unwrap(), text);
        }
    }
}
