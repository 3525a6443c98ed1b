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
    /// A program that leaves its line and exits 0.
    Succeeds,
    /// A program that leaves its line and exits 3, as asked.
    Fails,
    /// A program that leaves its line, then runs this long, so that kills find it running.
    Sleeps(Duration),
    /// As `Succeeds`, and it may run twice.
    RetrySafe,
    /// As `Succeeds`, with so little time that a dead node lets it expire.
    Hurried,
}

impl Class {
    /// Whether it may run twice.
    pub fn retry_safe(self) -> bool {
        matches!(self, Self::Probe | Self::RetrySafe)
    }

    /// Whether its program leaves a line in the witness file.
    pub fn leaves_witness(self) -> bool {
        self != Self::Probe
    }

    /// Whether its run time says something about bcd.
    pub fn is_quick(self) -> bool {
        !matches!(self, Self::Sleeps(_))
    }

    fn draw(rng: &mut StdRng) -> Self {
        match rng.random_range(0..100) {
            0..15 => Self::Probe,
            15..25 => Self::Fails,
            25..45 => Self::Sleeps(Duration::from_millis(rng.random_range(100..1500))),
            45..60 => Self::RetrySafe,
            60..63 => Self::Hurried,
            _ => Self::Succeeds,
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
        Planned {
            agent: self.rng.random_range(0..self.agents),
            class: Class::draw(&mut self.rng),
            id: CommandId::random(&mut self.rng),
        }
    }
}

/// Seconds until a command's not_after: longer than any run's end, but for the hurried ones.
const TTL_S: u64 = 3600;
const HURRIED_TTL_S: u64 = 2;

impl Planned {
    /// The kind's name.
    pub fn kind(&self) -> &'static str {
        match self.class {
            Class::Probe => "node.probe",
            _ => "node.exec",
        }
    }

    /// How far ahead not_after lies, seconds.
    pub fn ttl_s(&self) -> u64 {
        if self.class == Class::Hurried { HURRIED_TTL_S } else { TTL_S }
    }

    /// The kind's arguments. The program's first act is one appending write of its line: two runs leave two.
    ///
    /// # Errors
    /// They cannot be written as JSON.
    pub fn args(&self, witness: &Path) -> serde_json::Result<Box<RawValue>> {
        let rest = match self.class {
            Class::Probe => return RawValue::from_string("{}".into()),
            Class::Succeeds | Class::RetrySafe | Class::Hurried => String::new(),
            Class::Fails => "; exit 3".into(),
            Class::Sleeps(time) => format!("; exec sleep {}", time.as_secs_f32()),
        };
        // The run's number is the end of the mark that bcd leaves in the environment.
        let script = format!(r#"echo "$1 ${{BCD_EXEC##*/}}" >> "$2"{rest}"#);
        let argv = ["/bin/sh", "-c", &script, "sh", self.id.as_str(), &witness.to_string_lossy()];
        serde_json::value::to_raw_value(&json!({
            "argv": argv, "time_limit_s": 60, "retry_safe": self.class.retry_safe(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::seed;
    use super::*;

    #[test]
    fn every_class_is_drawn_and_its_arguments_are_ones_that_the_node_takes() {
        let mut load = Load::new(3, seed::stream(1, "load", 0));
        let drawn: Vec<Planned> = (0..500).map(|_| load.draw()).collect();
        for class in [Class::Probe, Class::Succeeds, Class::Fails, Class::RetrySafe, Class::Hurried] {
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
