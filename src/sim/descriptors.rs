//! The descriptor limit: raised to what the machine allows, and too little is said before anything starts.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// An agent holds its connection, its journal (2) and the journal's lock, and for each running program two pipes
/// and a pidfd; two programs run at once on average, more after a restart.
const PER_AGENT: u64 = 12;
/// The runtime, standard streams, the log, questions to the gateway, joins under way.
const OWN: u64 = 256;

/// Too few descriptors.
#[derive(Debug, thiserror::Error)]
#[error(
    "{nodes} nodes need {needed} file descriptors and the limit is {have}; raise it (ulimit -Hn {needed}, as root) or take fewer nodes"
)]
pub struct TooFew {
    nodes: usize,
    needed: u64,
    have: u64,
}

/// Raises the soft limit to the hard one.
///
/// # Errors
/// The hard limit is below what so many agents need.
pub fn raise(nodes: usize) -> Result<(), TooFew> {
    let needed = PER_AGENT * u64::try_from(nodes).unwrap_or(u64::MAX / PER_AGENT) + OWN;
    // An unreadable limit is not a reason to refuse: opening too many fails with its own words.
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(()) };
    let raised = soft == hard || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    let have = if raised { hard } else { soft };
    if have < needed { Err(TooFew { nodes, needed, have }) } else { Ok(()) }
}
