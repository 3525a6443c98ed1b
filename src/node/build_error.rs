//! Why a node cannot start, with the exit code and whether a mended disk would help.

use std::path::PathBuf;

use nix::errno::Errno;

use crate::identity::{LoadError, join_again};
use crate::journal::{self, Hindrance, OpenError, Trouble, WriteError};
use crate::model::{Exit, NodeId};
use crate::upkeep::FloorsError;

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Its identity cannot be loaded.
    #[error(transparent)]
    Identity(#[from] LoadError),
    /// Its state directory is a copy of another machine's.
    #[error(
        "{} was copied from another machine: neither this one nor its root disk is what {node_id} has joined with; nothing \
         of it is dialed, run or enforced here. To make this machine a node of its own, {}",
        .state.display(), join_again(.state)
    )]
    Copied {
        /// The state directory.
        state: PathBuf,
        /// Whose it is.
        node_id: NodeId,
    },
    /// Its journal cannot be opened.
    #[error(transparent)]
    Journal(#[from] OpenError),
    /// Its floors cannot be read.
    #[error(transparent)]
    Floors(#[from] FloorsError),
    /// What a dead daemon left cannot be settled.
    #[error("the commands that an earlier daemon left cannot be settled")]
    Recovery(#[from] WriteError),
    /// TLS cannot be set up with the identity.
    #[error("the identity cannot be used for TLS; {}", join_again(.state))]
    Tls {
        /// The state directory.
        state: PathBuf,
        /// Why.
        source: rustls::Error,
    },
}

impl BuildError {
    /// The exit code that it stands for.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Identity(error) => error.exit(),
            Self::Copied { .. } => Exit::ForeignState,
            Self::Journal(error) => error.exit(),
            Self::Floors(error) => error.exit(),
            Self::Recovery(_) => Exit::CannotWrite,
            Self::Tls { .. } => Exit::Configuration,
        }
    }

    /// What the disk has to be mended of before a start can succeed; absent where no mended disk would help.
    pub(super) fn hindrance(&self) -> Option<Hindrance> {
        let passing = |errno: Option<i32>, error: &dyn std::error::Error| {
            let why = journal::hindrance(Errno::from_raw(errno?))?;
            let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
            Some(Hindrance::Passing(Trouble { why, detail: format!("{error}{cause}") }))
        };
        match self {
            Self::Identity(error) => passing(error.errno(), error),
            Self::Journal(error) => error.hindrance(),
            Self::Floors(FloorsError::State(error)) => passing(error.errno(), error),
            Self::Recovery(error) => error.hindrance(),
            Self::Copied { .. } | Self::Floors(FloorsError::Damaged { .. }) | Self::Tls { .. } => None,
        }
    }
}
