//! A run against somebody else's gateway. Nothing is known of its history and nothing is asked of it but to take the
//! nodes; what is judged is what the agents say of themselves over their status sockets.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::agent::{Ground, Plan};
use super::chaos;
use super::faults::Tally;
use super::history::Evidence;
use super::invariants::Verdict;
use super::report::Report;
use super::run::{SETTLE, make_dir, patience};
use super::spread::{Agents, ChildStart};
use super::strikes::strike_agents;
use super::{Options, SimError, seed};
use crate::blocking;
use crate::session::SessionState;
use crate::status::report;
use crate::status::socket::{self, Question};

/// Between two rounds of questions to all agents.
const POLL: Duration = Duration::from_secs(1);

/// Whose gateway, and how to get in.
#[derive(Debug, Clone, PartialEq)]
pub struct Foreign {
    /// host:port, instead of what the ticket names.
    pub gateway: String,
    /// File with a join ticket for all the agents.
    pub ticket: PathBuf,
}

/// What can only be judged with the gateway's own history.
const NOT_JUDGED: [&str; 6] = ["I1", "I2", "I4", "I5", "I7", "I9"];

/// Runs it, with all files below `work`.
///
/// # Errors
/// See [`SimError`]. An invariant that did not hold is in the report.
pub async fn run(options: Options, foreign: &Foreign, exe: PathBuf, work: &Path) -> Result<Report, SimError> {
    let ground = Arc::new(Ground::real());
    let clock = Arc::clone(&ground.clock);
    let ticket = std::fs::read_to_string(&foreign.ticket)
        .map_err(|source| SimError::Ticket { path: foreign.ticket.clone(), source })?;
    let sockets = make_dir(work, "run")?;
    let plan = Plan {
        homes: make_dir(work, "nodes")?,
        seed: options.seed,
        skew: options.skew,
        gateways: vec![foreign.gateway.clone()],
        run: Some(sockets.clone()),
    };
    let tally = Arc::new(Tally::default());
    let start = ChildStart { exe: &exe, work, ground: &ground, tally: &tally };
    let (mut agents, nodes) =
        Agents::join(&plan, options.nodes, options.per_process, start, ticket.trim()).await?;
    agents.start(&clock, &tally).await?;
    let mut watch =
        Watch { sockets, agents: options.nodes, epochs: BTreeMap::new(), checks: 0, fallen: Vec::new() };
    let mut troubles = Vec::new();
    if !watch.until_at_rest(patience(SETTLE, options.nodes)).await {
        troubles.push("not every node was connected after its start".to_owned());
    }
    let faults = chaos::schedule(
        options.chaos,
        options.nodes,
        0,
        (options.duration, options.pace()),
        &mut seed::stream(options.seed, "chaos", 0),
    );
    let began = Instant::now();
    let (nobody_to_ask, _asked) = mpsc::channel(faults.len().max(1));
    let watched = async {
        while Instant::now() < began + options.duration {
            watch.look().await;
            sleep(POLL).await;
        }
    };
    tokio::join!(strike_agents(&agents, began, &faults, nobody_to_ask), watched);
    sleep_until(began + options.duration).await;
    let at_rest = watch.until_at_rest(patience(SETTLE, options.nodes)).await;
    let last = watch.look().await;
    let (_, grown_kib) = agents.told().await?;
    troubles.extend(agents.stop().await?.troubles);

    let mut broken = last.broken;
    if !at_rest && broken.is_empty() {
        broken.push("the nodes did not come to rest".into());
    }
    let verdicts = vec![
        Verdict::new("I3", watch.checks, "epochs applied", watch.fallen),
        Verdict::new("I8", last.answered, "nodes, by their own word", broken),
    ];
    let count = u64::try_from(options.nodes.max(1)).unwrap_or(u64::MAX);
    let evidence = Evidence { agents: nodes, ..Evidence::default() };
    let mut report = Report::new(options, &evidence, verdicts);
    report.connected = last.live;
    report.not_judged = NOT_JUDGED.to_vec();
    report.faults = tally.counts();
    report.memory_kib = grown_kib / count;
    report.troubles = troubles;
    Ok(report)
}

/// Looks at all agents, again and again.
struct Watch {
    sockets: PathBuf,
    agents: usize,
    /// The last epoch that each agent was seen with.
    epochs: BTreeMap<usize, u64>,
    /// Epochs seen that were new.
    checks: usize,
    /// Epochs that went back.
    fallen: Vec<String>,
}

/// One round.
#[derive(Default)]
struct Seen {
    answered: usize,
    live: usize,
    /// Agents that are away or owe something.
    broken: Vec<String>,
}

impl Watch {
    async fn until_at_rest(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        loop {
            let seen = self.look().await;
            if seen.broken.is_empty() && seen.live == self.agents {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            sleep(POLL).await;
        }
    }

    async fn look(&mut self) -> Seen {
        let (sockets, agents) = (self.sockets.clone(), self.agents);
        let asked = blocking::run(move || {
            let ask = |agent: usize| {
                let answer = socket::ask(&sockets.join(agent.to_string()), &Question::Status).ok()?;
                serde_json::from_slice::<report::Report>(&answer).ok()
            };
            (0..agents).map(ask).collect::<Vec<_>>()
        });
        let mut seen = Seen::default();
        for (agent, report) in asked.await.unwrap_or_default().into_iter().enumerate() {
            let Some(report) = report else {
                seen.broken.push(format!("agent {agent} does not answer"));
                continue;
            };
            seen.answered += 1;
            self.epoch(agent, &report);
            match owed(&report) {
                None => seen.live += 1,
                Some(what) => seen.broken.push(format!("{} {what}", report.node.id)),
            }
        }
        seen
    }

    /// A lost journal has no epoch until its first Welcome.
    fn epoch(&mut self, agent: usize, report: &report::Report) {
        let now = report.journal.as_ref().map_or(0, |journal| journal.last_epoch);
        let before = self.epochs.get(&agent).copied().unwrap_or(0);
        if now == 0 || now == before {
            return;
        }
        self.checks += 1;
        if now < before {
            self.fallen.push(format!("{} applied epoch {now} after {before}", report.node.id));
        }
        self.epochs.insert(agent, now);
    }
}

/// What keeps a node from being at rest.
fn owed(report: &report::Report) -> Option<String> {
    if report.session.state != SessionState::Live {
        return Some("has no session".into());
    }
    let journal = report.journal.as_ref()?;
    match journal.accepted + journal.running + journal.unacked {
        0 => None,
        owed => Some(format!("still has {owed} commands to carry out or results to deliver")),
    }
}
