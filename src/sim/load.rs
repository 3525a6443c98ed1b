//! What the fleet is asked to do, and what each command is expected to leave behind.

use std::path::Path;
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use serde_json::json;
use serde_json::value::RawValue;

use crate::model::CommandId;

/// What a command is meant to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// `node.probe`: answers, leaves no witness.
    Probe,
    /// `inventory.barrier`: answers, leaves no witness.
    Barrier,
    /// A program that leaves its line and exits 0.
    Succeeds,
    /// A program that leaves its line and exits 3, as asked.
    Fails,
    /// A program that leaves its line, then runs this long, so that faults find it running, and leaves another.
    Sleeps(Duration),
    /// As `Sleeps`, and it is cancelled so long after it was handed over.
    Cancelled(Duration),
    /// As `Succeeds`, and it may run twice.
    RetrySafe,
    /// As `Succeeds`, with so little time that a dead node lets it expire.
    Hurried,
    /// `node.reboot`. Part of the chaos, not of what is drawn.
    Reboot,
}

/// Longer than a cancellation takes to come, shorter than a run takes to settle.
const CANCELLED_SLEEP: Duration = Duration::from_secs(20);

impl Class {
    /// Whether it may run twice.
    pub fn retry_safe(self) -> bool {
        matches!(self, Self::Probe | Self::Barrier | Self::RetrySafe)
    }

    /// Whether its program leaves a line in the witness file.
    pub fn leaves_witness(self) -> bool {
        !matches!(self, Self::Probe | Self::Barrier | Self::Reboot)
    }

    /// How long its program runs on after its line.
    pub fn sleep(self) -> Option<Duration> {
        match self {
            Self::Sleeps(time) => Some(time),
            Self::Cancelled(_) => Some(CANCELLED_SLEEP),
            _ => None,
        }
    }

    /// Whether its run time says something about bcd.
    pub fn is_quick(self) -> bool {
        self.sleep().is_none() && self != Self::Reboot
    }

    /// Most need no process, so that tens of thousands of commands do not measure how fast a machine forks; a barrier
    /// looks at every process of the machine, which here is that of all agents.
    fn draw(rng: &mut StdRng) -> Self {
        match rng.random_range(0..1000) {
            0..10 => Self::Barrier,
            10..20 => Self::Fails,
            20..32 => Self::Sleeps(Duration::from_millis(rng.random_range(100..8000))),
            32..37 => Self::Cancelled(Duration::from_millis(rng.random_range(0..4000))),
            37..47 => Self::RetrySafe,
            47..55 => Self::Hurried,
            55..80 => Self::Succeeds,
            _ => Self::Probe,
        }
    }
}

/// A command of the load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Planned {
    /// Its id, drawn here: asking again after the gateway died in the middle makes no second command.
    pub id: CommandId,
    /// Number of the agent that it is for.
    pub agent: usize,
    /// What it is meant to become.
    pub class: Class,
}

/// Draws commands for ever.
#[derive(Debug)]
pub struct Load {
    rng: StdRng,
    agents: usize,
}

impl Load {
    /// A load over so many agents.
    pub fn new(agents: usize, rng: StdRng) -> Self {
        Self { rng, agents }
    }

    /// The next command.
    pub fn draw(&mut self) -> Planned {
        let (agent, class) = (self.rng.random_range(0..self.agents), Class::draw(&mut self.rng));
        self.planned(agent, class)
    }

    /// A command of this class for this agent.
    pub fn planned(&mut self, agent: usize, class: Class) -> Planned {
        Planned { agent, class, id: CommandId::random(&mut self.rng) }
    }
}

/// Seconds until a command's not_after: longer than any run, but for the hurried ones, and for those that may not run
/// twice: a journal that took a lost one's place refuses them until a signed answer tells it its age, or they expire.
const TTL_S: u64 = 3600;
const ONCE_TTL_S: u64 = 60;
const HURRIED_TTL_S: u64 = 2;

impl Planned {
    /// The kind's name.
    pub fn kind(&self) -> &'static str {
        match self.class {
            Class::Probe => "node.probe",
            Class::Barrier => "inventory.barrier",
            Class::Reboot => "node.reboot",
            _ => "node.exec",
        }
    }

    /// How far ahead not_after lies, seconds.
    pub fn ttl_s(&self) -> u64 {
        match self.class {
            Class::Hurried => HURRIED_TTL_S,
            class if class.retry_safe() => TTL_S,
            _ => ONCE_TTL_S,
        }
    }

    /// The kind's arguments.
    ///
    /// # Errors
    /// They cannot be written as JSON.
    pub fn args(&self, witness: &Path) -> serde_json::Result<Box<RawValue>> {
        match self.class {
            Class::Probe | Class::Reboot => return RawValue::from_string("{}".into()),
            Class::Barrier => return serde_json::value::to_raw_value(&json!({ "barrier_id": self.id })),
            _ => {}
        }
        let sleep = self.class.sleep().unwrap_or_default().as_secs_f32().to_string();
        let status = if self.class == Class::Fails { "3" } else { "0" };
        let argv =
            ["/bin/sh", "-c", SCRIPT, "sh", self.id.as_str(), &witness.to_string_lossy(), &sleep, status];
        serde_json::value::to_raw_value(&json!({
            "argv": argv, "time_limit_s": 60, "grace_s": 1, "retry_safe": self.class.retry_safe(),
        }))
    }
}

/// Its arguments: the command, the witness file, seconds to run on, exit status. Each line is one appending write, the
/// first is the program's first act: two runs leave two. The run's number is the end of the mark that bcd leaves in
/// the environment.
const SCRIPT: &str = r#"echo "$1 ${BCD_EXEC##*/} begin" >> "$2"
if [ "$3" != 0 ]; then sleep "$3"; echo "$1 ${BCD_EXEC##*/} end" >> "$2"; fi
exit "$4""#;

#[cfg(test)]
mod tests {
    use super::super::seed;
    use super::*;

    #[test]
    fn every_class_is_drawn_and_its_arguments_are_ones_that_the_node_takes() {
        let mut load = Load::new(3, seed::stream(1, "load", 0));
        let drawn: Vec<Planned> = (0..5000).map(|_| load.draw()).collect();
        for class in
            [Class::Probe, Class::Barrier, Class::Succeeds, Class::Fails, Class::RetrySafe, Class::Hurried]
        {
            assert!(drawn.iter().any(|planned| planned.class == class), "{class:?}");
        }
        for planned in &drawn {
            assert!(planned.agent < 3);
            let args = planned.args(Path::new("/tmp/a b/witness")).expect("arguments");
            if planned.kind() == "node.exec" {
                let exec: crate::model::ExecArgs =
                    crate::model::strict::parse(args.get().as_bytes()).expect("args");
                assert_eq!(exec.retry_safe, planned.class.retry_safe());
            }
        }
    }
}
