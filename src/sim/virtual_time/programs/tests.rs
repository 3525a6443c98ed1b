use rand::SeedableRng as _;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::model::{Digest, NodeId, Reason, ServerTime, Terminal};

struct Bench {
    dir: TempDir,
    programs: VirtualPrograms,
}

fn boot(text: &str) -> BootId {
    BootId::new(text).expect("an id")
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        for records in ["begun", "outcome"] {
            std::fs::create_dir(dir.path().join(records)).expect("a directory");
        }
        Self { dir, programs: VirtualPrograms::new(StdRng::seed_from_u64(1)) }
    }

    fn state(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    fn job(&self, id: &str, sleep: &str, status: &str) -> Job {
        let witness = self.dir.path().join("witness");
        let argv = ["/bin/sh", "-c", "script", "sh", id, &witness.to_string_lossy(), sleep, status];
        let begun = Record {
            id: CommandId::new(id).expect("an id"),
            body_sha256: Digest::of(b"body"),
            kind: "node.exec".into(),
            attempt: 1,
            node_id: Some(NodeId::new("n-1").expect("an id")),
            journal_id: JournalId::new("j-1").expect("an id"),
            not_after: ServerTime(1_900_000_000_000),
            started: Some(ServerTime(1_800_000_000_000)),
            retry_safe: false,
            supervisor: None,
            boot_id: None,
        };
        let args = serde_json::from_value(json!({ "argv": argv, "time_limit_s": 60 })).expect("arguments");
        Job { state: self.state(), boot_id: boot("b-1"), begun, args }
    }

    fn outcome(&self, job: &Job) -> Option<Outcome> {
        Ended::read(&self.state(), &job.begun).expect("a readable record")
    }

    fn witness(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("witness")).unwrap_or_default()
    }

    /// The record as it stands in the state directory.
    fn begun(&self, id: &str) -> Record {
        let text = std::fs::read(self.dir.path().join(format!("begun/{id}.json"))).expect("a record");
        serde_json::from_slice(&text).expect("a record")
    }
}

#[tokio::test(start_paused = true)]
async fn a_program_outlives_its_daemon_and_its_record_tells_how_it_ended() {
    let bench = Bench::new();
    let job = bench.job("c-1", "5", "3");
    drop(bench.programs.start(job.clone()).await.expect("started"));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.outcome(&job), None);
    let again = bench.programs.start(job.clone()).await;
    assert!(matches!(again, Err(StartError::Began)), "a record that exists starts nothing");

    // The next daemon.
    let begun = bench.begun("c-1");
    assert!(bench.programs.lives(begun.supervisor.as_ref().expect("a supervisor"), &boot("b-1")));
    assert_eq!(bench.programs.settle_in(&boot("b-1")).ended, 0);
    let found = bench.programs.find(bench.state(), begun, &boot("b-1"));
    let (_cancel, mut cancelled) = Cancelled::pair();
    let outcome = found.ended(&mut cancelled).await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Failed, Some(Reason::ExitStatus)));
    assert_eq!(bench.outcome(&job), Some(outcome));
    assert_eq!(bench.witness(), "c-1 1 begin\nc-1 1 end\n");
}

#[tokio::test(start_paused = true)]
async fn a_program_dies_with_its_boot_and_leaves_no_outcome() {
    let bench = Bench::new();
    let job = bench.job("c-1", "5", "0");
    drop(bench.programs.start(job.clone()).await.expect("started"));
    sleep(Duration::from_secs(1)).await;
    assert_eq!(bench.programs.settle_in(&boot("b-2")).ended, 1);
    let begun = bench.begun("c-1");
    assert!(!bench.programs.lives(begun.supervisor.as_ref().expect("a supervisor"), &boot("b-2")));
    sleep(Duration::from_secs(60)).await;
    assert_eq!(bench.outcome(&job), None);
    assert_eq!(bench.witness(), "c-1 1 begin\n");
}

#[tokio::test(start_paused = true)]
async fn a_cancellation_ends_a_program_as_it_ends_a_real_one() {
    let bench = Bench::new();
    let job = bench.job("c-1", "5", "0");
    let program = bench.programs.start(job.clone()).await.expect("started");
    let (cancel, mut cancelled) = Cancelled::pair();
    cancel.send_replace(true);
    let outcome = program.ended(&mut cancelled).await;
    assert_eq!((outcome.state, outcome.reason), (Terminal::Cancelled, Some(Reason::Cancelled)));
    assert_eq!(bench.outcome(&job), Some(outcome));
}
