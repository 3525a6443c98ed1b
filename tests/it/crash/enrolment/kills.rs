//! Joins, renewals and re-joins that are killed again and again, at every step and on both sides. `make crash E=300` makes it
//! long.
//!
//! A lab has one ticket for one machine. Whatever died, the machine is one node at the end, its generation has risen once for
//! each time that its certificate ran out, and its identity works.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt as _;

use bcd::failpoint::{self, Step};

use super::super::for_each_of;
use super::{JOIN_STEPS, REJOIN_STEPS, RENEW_STEPS, SERVICE_STEPS};
use crate::lab::{Lab, shown, until};

/// Kills where nobody asks for more: one lab, once around.
const KILLS: usize = 15;
/// Labs at work at once: a node mostly waits for its dial.
const AT_ONCE: usize = 4;
/// Around so often in one lab: a failure is replayed in some minutes.
const ROUNDS: usize = 5;
/// By so much the control plane's clock goes on for a certificate to run out.
const AWAY_S: usize = 25 * 3600;

/// Of a renewal, in their order. None of them is left out by the kill at the one before it.
const RENEWED: &[Step] =
    &[failpoint::RENEW_ANSWERED, failpoint::RENEW_KEY, failpoint::RENEW_IDENTITY, failpoint::RENEW_TIME];
/// The steps after the switch of a re-join. There is only one of them to each.
const SWITCHED: &[Step] = &[failpoint::RENEW_IDENTITY, failpoint::RENEW_KEYS_REMOVED, failpoint::RENEW_TIME];

/// A machine, and how often its certificate has run out.
struct Machine {
    lab: Lab,
    away: usize,
}

impl Machine {
    fn start_gateway(&mut self, step: Option<&str>) {
        self.lab.kill_gateway();
        self.lab.variables = vec![("BCD_FAKE_CLOCK_OFF_S", (self.away * AWAY_S).to_string())];
        self.lab.start_gateway(step);
        self.lab.variables.clear();
    }

    fn deaths(&self, step: Step) -> usize {
        self.lab.hits().iter().filter(|hit| *hit == step.name()).count()
    }

    /// The gateway, or its worker, dies at `step`, while `meanwhile` goes on; then it runs again.
    fn service_dies(&mut self, step: Step, meanwhile: impl FnOnce(&mut Lab)) {
        let before = self.deaths(step);
        self.start_gateway(Some(step.name()));
        meanwhile(&mut self.lab);
        until(&format!("a death at {}", step.name()), || (self.deaths(step) > before).then_some(()));
        self.start_gateway(None);
    }

    /// The node dies at `step`.
    fn node_dies(&mut self, step: Step) {
        self.lab.start_node(Some(step.name()));
        self.lab.node().wait_killed(step.name());
    }

    /// One ticket, whatever dies.
    fn join(&mut self) {
        let ticket = self.lab.ticket(1);
        for step in SERVICE_STEPS {
            self.service_dies(*step, |lab| {
                let mut join = lab.join_command(&ticket, None);
                // Whose death is not counted: it may have the answer to an earlier attempt by now.
                let mut join = join.stderr(std::process::Stdio::null()).spawn().expect("bcd starts");
                let before = lab.hits().len();
                until(&format!("a death at {}", step.name()), || (lab.hits().len() > before).then_some(()));
                let _ = join.kill();
                join.wait().expect("a child to wait for");
            });
        }
        // The key is there by now; the first two steps are those of a join from the beginning.
        for step in JOIN_STEPS.iter().skip(2) {
            let killed = self.lab.join_command(&ticket, Some(step.name())).output().expect("bcd starts");
            assert_eq!(killed.status.signal(), Some(9), "{}: {}", step.name(), shown(&killed));
        }
        let joined = self.lab.join(&ticket);
        assert!(joined.status.success(), "{}", shown(&joined));
        self.works();
    }

    /// A journal without a birth asks for a renewal at once, again and again until one is whole.
    fn renew(&mut self) {
        self.lab.kill_node();
        self.lab.lose_journal();
        for step in SERVICE_STEPS {
            self.service_dies(*step, |lab| lab.start_node(None));
            self.lab.kill_node();
            self.lab.lose_journal();
        }
        RENEWED.iter().for_each(|step| self.node_dies(*step));
        self.works();
    }

    /// The certificate runs out while the node is away, once for each step that ends a re-join.
    fn rejoin(&mut self, nth: usize) {
        self.lab.kill_node();
        self.away += 1;
        self.start_gateway(None);
        for step in SERVICE_STEPS {
            self.service_dies(*step, |lab| lab.start_node(None));
            self.lab.kill_node();
        }
        let offered = [failpoint::RENEW_ANSWERED, failpoint::RENEW_KEY];
        REJOIN_STEPS.iter().chain(&offered).for_each(|step| self.node_dies(*step));
        self.node_dies(SWITCHED[nth % SWITCHED.len()]);
        self.works();
    }

    fn works(&mut self) {
        self.lab.start_node(None);
        let generation = until("a session", || {
            let status = self.lab.status()?;
            status["session"]["live"].as_object()?;
            status["node"]["generation"].as_u64()
        });
        assert_eq!(generation, self.away as u64 + 1, "{}", self.lab.logs());
        assert_eq!(self.lab.nodes().len(), 1, "one ticket, one machine, one node\n{}", self.lab.logs());
        self.lab.probe();
    }
}

/// A join from nothing, killed at each of its steps.
fn joined_from_nothing(lab: &Lab) {
    let (ticket, state) = (lab.ticket(1), lab.path("other"));
    let join = |step: Option<&str>| {
        lab.join_command(&ticket, step).env("BCD_STATE", &state).output().expect("bcd starts")
    };
    for step in JOIN_STEPS {
        let killed = join(Some(step.name()));
        assert_eq!(killed.status.signal(), Some(9), "{}: {}", step.name(), shown(&killed));
    }
    let joined = join(None);
    assert!(joined.status.success(), "{}", shown(&joined));
    std::fs::remove_dir_all(&state).expect("removed");
}

#[test]
fn kills_at_every_step_of_joins_renewals_and_rejoins_leave_an_identity_that_works_and_need_no_ticket_twice() {
    let asked = std::env::var("BCD_CRASH_ENROLMENTS").ok().and_then(|text| text.parse::<usize>().ok());
    let wanted = asked.unwrap_or(KILLS);
    // Three of a join's seven, and eight of a renewal and nine of a re-join each time around, at least.
    let a_round = 2 * SERVICE_STEPS.len() + RENEWED.len() + REJOIN_STEPS.len() + 3;
    let rounds = if asked.is_some() { ROUNDS } else { 1 };
    let labs: Vec<usize> = (0..wanted.div_ceil(rounds * a_round).max(1)).collect();
    let deaths = std::sync::Mutex::new(BTreeMap::<String, usize>::new());
    for_each_of(AT_ONCE, &labs, |_| {
        let mut machine = Machine { lab: Lab::new(), away: 0 };
        joined_from_nothing(&machine.lab);
        let gone = machine.lab.node_id();
        machine.lab.ask(&bcd::gateway::control::Request::Delete { node: gone.clone() });
        machine.lab.order(&bcd::gateway::worker::Order::Forget(gone));
        machine.join();
        for round in 0..rounds {
            machine.renew();
            machine.rejoin(round);
        }
        let mut deaths = deaths.lock().expect("no lab panics with the lock");
        for hit in machine.lab.hits() {
            *deaths.entry(hit).or_default() += 1;
        }
    });
    let deaths = deaths.into_inner().expect("no lab panics with the lock");
    deaths.iter().for_each(|(step, count)| eprintln!("{count:6}  {step}"));
    let total: usize = deaths.values().sum();
    eprintln!("kills: {total} at steps of joins, renewals and re-joins, {} labs", labs.len());
    assert!(total >= wanted, "{total} kills, and {wanted} were wanted");
    // A session moves only where it lives, and the others are drawn by round.
    let rare = [failpoint::RENEW_MOVES, failpoint::RENEW_KEYS_REMOVED];
    let all = [JOIN_STEPS, RENEW_STEPS, REJOIN_STEPS, SERVICE_STEPS].into_iter().flatten();
    let missing: Vec<&str> = all
        .filter(|step| !rare.contains(step))
        .map(|step| step.name())
        .filter(|step| !deaths.contains_key(*step))
        .collect();
    assert_eq!(missing, [""; 0], "no process died at these steps");
}
