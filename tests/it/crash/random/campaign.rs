//! One lab's kills: a round starts a node that is to die, gives it work, and waits for the death.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;
use std::thread::sleep;
use std::time::Duration;

use bcd::gateway::control::Response;
use bcd::gateway::worker::Draft;
use bcd::model::{CommandId, NodeId};
use bcd::sim::history::Handed;
use bcd::sim::load::Planned;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::super::{GATEWAY_STEPS, NODE_STEPS, SUPERVISOR_STEPS};
use super::checks;
use super::programs::{self, Programs};
use super::{Deaths, Progress};
use crate::lab::{Lab, until};

/// Who dies in a round, and when.
#[derive(Debug, Clone)]
enum Victim {
    /// The node, when it is at this step for the n-th time.
    NodeStep(&'static str, u32),
    /// The node, whatever it does then.
    NodeMoment,
    /// Every supervisor that the node starts, at this step.
    SupervisorStep(&'static str),
    /// A supervisor that runs, whatever it does then.
    SupervisorMoment,
    /// The gateway, when it is at this step for the n-th time.
    GatewayStep(&'static str, u32),
}

impl Victim {
    fn draw(rng: &mut StdRng) -> Self {
        let nth = rng.random_range(1..4);
        match rng.random_range(0..100) {
            0..70 => Self::NodeStep(NODE_STEPS[rng.random_range(0..NODE_STEPS.len())].0.name(), nth),
            70..78 => Self::NodeMoment,
            78..88 => {
                Self::SupervisorStep(SUPERVISOR_STEPS[rng.random_range(0..SUPERVISOR_STEPS.len())].0.name())
            }
            88..92 => Self::SupervisorMoment,
            _ => {
                let step = GATEWAY_STEPS[rng.random_range(0..GATEWAY_STEPS.len())];
                // A node says one Hello a round.
                Self::GatewayStep(step.name(), if step == bcd::failpoint::GATEWAY_HELLO { 1 } else { nth })
            }
        }
    }
}

/// How long an armed step is waited for before more work is given, and before it is given up.
const STEP: Duration = Duration::from_secs(4);
const TRIES: u32 = 3;
const POLL: Duration = Duration::from_millis(5);

/// The death of a node in the middle of everything: it dials within a second of its start.
const MOMENT_MS: std::ops::Range<u64> = 0..1800;

pub(super) struct Campaign {
    pub(super) lab: Lab,
    node: NodeId,
    rng: StdRng,
    programs: Programs,
    pub(super) handed: BTreeMap<CommandId, Handed>,
    /// Deaths at no named step.
    moments: Deaths,
    pub(super) replay: String,
}

/// Kills a node `kills` times at named steps, and whoever else the dice name meanwhile; then judges.
pub(super) fn run(seed: u64, kills: usize, replay: &str, progress: &Progress) {
    let lab = Lab::joined();
    let mut campaign = Campaign {
        node: lab.node_id(),
        lab,
        rng: StdRng::seed_from_u64(seed),
        programs: Programs::new(seed),
        handed: BTreeMap::new(),
        moments: Deaths::new(),
        replay: replay.to_owned(),
    };
    let mut named = 0;
    while named < kills {
        let victim = Victim::draw(&mut campaign.rng);
        if campaign.round(&victim) {
            named += 1;
            progress.one();
        }
    }
    campaign.lab.start_node(None);
    let mut deaths = campaign.moments.clone();
    for step in campaign.lab.hits() {
        *deaths.entry(step).or_default() += 1;
    }
    progress.add(&deaths);
    checks::settled(&mut campaign, &deaths);
}

impl Campaign {
    /// Whether a node died at a named step.
    fn round(&mut self, victim: &Victim) -> bool {
        match victim {
            Victim::NodeStep(step, nth) => return self.node_at(step, *nth),
            Victim::NodeMoment => {
                self.lab.start_node(None);
                self.hand_over();
            }
            Victim::SupervisorStep(step) => {
                let before = self.lab.hits().len();
                self.lab.start_node(Some(step));
                self.hand_over();
                self.wait(STEP, |campaign| campaign.lab.hits().len() > before);
            }
            Victim::SupervisorMoment => {
                self.lab.start_node(None);
                self.hand_over();
                self.kill_a_supervisor();
            }
            Victim::GatewayStep(step, nth) => self.gateway_at(step, *nth),
        }
        self.pause();
        self.kill_node();
        false
    }

    fn node_at(&mut self, step: &str, nth: u32) -> bool {
        self.lab.start_node(Some(&format!("{step}:{nth}")));
        for _ in 0..TRIES {
            self.hand_over();
            if self.wait(STEP, |campaign| !campaign.lab.node().is_running()) {
                let status = self.lab.node().kill();
                assert_eq!(
                    status.signal(),
                    Some(9),
                    "{step}: {status}\n{}\n{}",
                    self.replay,
                    self.lab.logs()
                );
                return true;
            }
        }
        self.kill_node();
        false
    }

    fn gateway_at(&mut self, step: &str, nth: u32) {
        self.lab.kill_gateway();
        self.lab.start_gateway(Some(&format!("{step}:{nth}")));
        self.lab.start_node(None);
        self.hand_over();
        let died = |campaign: &mut Self| campaign.lab.gateway.as_mut().is_none_or(|one| !one.is_running());
        if !self.wait(STEP, died) {
            self.count("gateway.moment");
        }
        self.lab.kill_gateway();
        self.lab.start_gateway(None);
    }

    /// Waits for something, as long as it may take.
    fn wait(&mut self, limit: Duration, is_so: impl Fn(&mut Self) -> bool) -> bool {
        let mut waited = Duration::ZERO;
        while waited < limit {
            if is_so(self) {
                return true;
            }
            sleep(POLL);
            waited += POLL;
        }
        false
    }

    fn pause(&mut self) {
        sleep(Duration::from_millis(self.rng.random_range(MOMENT_MS)));
    }

    /// At no step in particular. A node that has ended by itself is a failure.
    fn kill_node(&mut self) {
        if let Some(status) = self.lab.node().ended() {
            panic!("the node ended by itself: {status}\n{}\n{}", self.replay, self.lab.logs());
        }
        self.lab.kill_node();
        self.count("node.moment");
    }

    fn kill_a_supervisor(&mut self) {
        let mut found = Vec::new();
        self.wait(STEP, |campaign| !programs::supervisors(&campaign.lab).is_empty());
        found.extend(programs::supervisors(&self.lab));
        if found.is_empty() {
            return;
        }
        let pid = found[self.rng.random_range(0..found.len())];
        if nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).is_ok() {
            self.count("supervisor.moment");
        }
    }

    fn count(&mut self, moment: &str) {
        *self.moments.entry(moment.into()).or_default() += 1;
    }

    /// Gives the gateway some commands for the node.
    fn hand_over(&mut self) {
        for _ in 0..self.rng.random_range(2..5) {
            let planned = self.programs.draw();
            self.enqueue(&planned);
            self.handed.insert(planned.id.clone(), Handed { planned, acknowledged: true, signed_ms: 0 });
        }
    }

    /// A gateway that dies meanwhile is started again, and asked again: the id makes it one command.
    fn enqueue(&mut self, planned: &Planned) {
        let draft = Draft {
            node: self.node.clone(),
            kind: planned.kind().into(),
            args: programs::args(&self.lab, planned),
            ttl_s: planned.ttl_s(),
            id: Some(planned.id.clone()),
        };
        let request = self.lab.signed(draft);
        let lab = &mut self.lab;
        let answer = until("the gateway's word on a command", || {
            let answer = lab.try_ask(&request);
            if answer.is_none() && lab.gateway.as_mut().is_some_and(|gateway| !gateway.is_running()) {
                lab.start_gateway(None);
            }
            answer
        });
        assert!(matches!(answer, Response::Enqueued(_)), "{answer:?}");
    }
}
