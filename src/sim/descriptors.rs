//! The descriptor limit: raised to what the machine allows; agents beyond it run in processes of their own, and too
//! little for that is said before anything starts.

use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// An agent holds its connection, its journal (2) and the journal's lock, and for each running program two pipes
/// and a pidfd; two programs run at once on average, more after a restart.
const PER_AGENT: u64 = 12;
/// The runtime, standard streams, the log, questions to the gateway, joins under way.
const OWN: u64 = 256;
/// Processes with agents at most: each has threads and memory of its own.
const PROCESSES: u64 = 16;

/// Too few descriptors.
#[derive(Debug, thiserror::Error)]
#[error(
    "{nodes} nodes in {PROCESSES} processes need {needed} file descriptors each and the limit is {have}; raise it (ulimit -Hn {needed}, as root) or take fewer nodes"
)]
pub struct TooFew {
    nodes: usize,
    needed: u64,
    have: u64,
}

/// Raises the soft limit to the hard one, and says how many of so many agents one process may hold.
///
/// # Errors
/// The hard limit is below what a share of the agents needs.
pub fn agents_per_process(nodes: usize) -> Result<usize, TooFew> {
    // An unreadable limit is not a reason to refuse: opening too many fails with its own words.
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return Ok(nodes) };
    let raised = soft == hard || setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    share(nodes, if raised { hard } else { soft })
}

fn share(nodes: usize, have: u64) -> Result<usize, TooFew> {
    let all = u64::try_from(nodes).unwrap_or(u64::MAX / PER_AGENT);
    let needed = PER_AGENT * all.div_ceil(PROCESSES) + OWN;
    if have < needed {
        return Err(TooFew { nodes, needed, have });
    }
    let most = (have - OWN) / PER_AGENT;
    // Shares of one size: the fewest that hold them all.
    let each = all.div_ceil(all.div_ceil(most.max(1)).max(1));
    Ok(usize::try_from(each).unwrap_or(nodes).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_spread_in_equal_shares_over_as_few_processes_as_the_limit_allows() {
        assert_eq!(share(1600, 20_000).expect("enough"), 1600);
        assert_eq!(share(5000, 20_000).expect("enough"), 1250);
        assert_eq!(share(1, 1024).expect("enough"), 1);
        let error = share(10_000, 1024).expect_err("too few").to_string();
        assert!(error.contains("10000 nodes in 16 processes need 7756 file descriptors each"), "{error}");
    }
}
