//! Holds docs/commands.md against the kinds.

use std::collections::BTreeSet;

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer, Error as _, Visitor, value};
use serde_json::{Value, json};

use super::{ProbeFacts, probe};
use crate::model::limits::{ARG_BYTES, ARGV, STREAM_BYTES};
use crate::model::{BootId, Command, ExecArgs, Kind, NodeId, Role};

const DOCUMENT: &str = include_str!("../../docs/commands.md");

/// The first two cells of each row of the tables of a kind, where the first cell is code.
pub(super) fn rows(kind: Kind) -> Vec<(Vec<&'static str>, &'static str)> {
    let section =
        DOCUMENT.split("\n## ").find(|section| section.starts_with(kind.name())).expect("a section");
    let code = |cell: &'static str| cell.split('`').skip(1).step_by(2).collect::<Vec<_>>();
    section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once(" | ").map(|(_, rest)| (line, rest)))
        .map(|(line, rest)| (code(line.split(" | ").next().unwrap_or_default()), rest))
        .collect()
}

pub(super) fn names(kind: Kind) -> BTreeSet<&'static str> {
    rows(kind).into_iter().flat_map(|(names, _)| names).collect()
}

fn row(argument: &str) -> &'static str {
    rows(Kind::NodeExec).into_iter().find(|(names, _)| names == &[argument]).expect(argument).1
}

/// Asks a type for the names of its fields, and reads nothing.
struct Fields<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, value::Error> {
        Err(value::Error::custom("not a struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        fields: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, value::Error> {
        *self.0 = fields;
        Err(value::Error::custom("the fields are known"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

fn runs(args: &Value) -> bool {
    let body = json!({
        "trust_domain": "lab.example", "node_id": "n-1", "id": "c-1", "kind": "node.exec",
        "issued_at": "2026-11-29T10:00:00Z", "not_after": "2026-11-29T11:00:00Z", "args": args,
    });
    Command::parse(Bytes::from(body.to_string())).expect("a header").body(Kind::NodeExec).is_ok()
}

/// The names of a JSON object.
pub(super) fn keys(object: &Value) -> BTreeSet<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn every_argument_of_node_exec_is_described_and_no_other() {
    let mut fields: &'static [&'static str] = &[];
    assert!(ExecArgs::deserialize(Fields(&mut fields)).is_err());
    let arguments: BTreeSet<_> = fields.iter().copied().collect();
    assert!(arguments.len() > 5, "{arguments:?}");
    let outputs = BTreeSet::from(["exit_status", "signal", "stdout", "stderr"]);
    let described: BTreeSet<_> = names(Kind::NodeExec).difference(&outputs).copied().collect();
    assert_eq!(described, arguments);
}

#[test]
fn the_limits_of_node_exec_are_the_described_ones() {
    let kind = Kind::NodeExec.properties();
    let with = |name: &str, value: Value| {
        let mut args = json!({ "argv": ["x"] });
        args[name] = value;
        runs(&args)
    };
    assert!(row("time_limit_s").contains(&format!("| {} |", kind.default_run_time.as_secs())));
    for (name, most) in [
        ("time_limit_s", kind.max_run_time.as_secs()),
        ("grace_s", 600),
        ("output_limit", STREAM_BYTES as u64),
    ] {
        assert!(row(name).contains(&most.to_string()), "{name}: {most}");
        assert!(with(name, json!(most)) && !with(name, json!(most + 1)), "{name}: {most}");
    }
    assert!(row("argv").contains(&format!("1 to {ARGV} entries, each under {} KiB", ARG_BYTES >> 10)));
    assert!(row("env").contains(&format!("at most {ARGV} entries, each under {} KiB", ARG_BYTES >> 10)));
    assert!(with("argv", json!(vec!["x"; ARGV])) && !with("argv", json!(vec!["x"; ARGV + 1])));
    assert!(!with("argv", json!([])) && !with("argv", json!(["x", "y".repeat(ARG_BYTES)])));
    assert!(!with("env", json!({ "BCD_X": "1" })));
    assert!(row("memory_bytes").contains("at least 1048576"));
    assert!(with("memory_bytes", json!(1_048_576)) && !with("memory_bytes", json!(1_048_575)));
    for name in ["cpus", "tasks"] {
        assert!(with(name, json!(1)) && !with(name, json!(0)), "{name}");
    }
    assert!(with("cwd", json!("/tmp")) && !with("cwd", json!("tmp")));
}

#[tokio::test]
async fn the_output_of_node_probe_is_the_described_one() {
    let facts = ProbeFacts {
        node_id: NodeId::new("n-1").expect("an id"),
        site: "fra1".into(),
        role: Role::Host,
        daemon_version: "0.1.0".into(),
        boot_id: BootId::new("b-1").expect("an id"),
    };
    let dir = tempfile::tempdir().expect("a directory");
    let output: Value = serde_json::from_slice(&probe::run(&facts, dir.path()).await.output).expect("JSON");
    assert_eq!(keys(&output), names(Kind::NodeProbe));
    let state = rows(Kind::NodeProbe).into_iter().find(|(names, _)| names == &["state"]).expect("a row").1;
    for name in keys(&output["state"]) {
        assert!(state.contains(&format!("`{name}`")), "{name}");
    }
}
