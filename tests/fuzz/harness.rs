//! Runs a property over a corpus and mutations of it: some thousands that are the same in every run (`make test`), or as
//! many as fit into a time (`make fuzz`).

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

use crate::grammar::Format;
use crate::memory;
use crate::mutate::{Edit, apply, edits};

/// Mutations of a plain test run.
const MUTATIONS: u32 = 2000;
/// Mutations between two looks at the clock.
const TOGETHER: u32 = 2000;
/// Seconds, for `make fuzz`.
const SECONDS: &str = "BCD_FUZZ_SECONDS";

/// What is held against hostile bytes.
pub struct Target {
    /// Its corpus below `tests/corpora`.
    pub name: &'static str,
    /// What the entries are written in.
    pub format: Format,
    /// Panics where the property does not hold. Whether the bytes were taken: a property over refusals alone says little.
    pub check: fn(&[u8]) -> bool,
    /// The most memory that it may take, bytes: so much for nothing at all,
    pub memory: usize,
    /// and so much for each byte that came.
    pub per_byte: usize,
}

/// A folder of `tests/corpora`.
pub fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpora").join(name)
}

/// Its files, by name.
pub fn corpus(name: &str) -> Vec<(String, Vec<u8>)> {
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.expect("a readable entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        (name, std::fs::read(&path).expect("a readable file"))
    };
    let mut entries: Vec<_> = std::fs::read_dir(folder(name)).expect(name).map(read).collect();
    entries.sort();
    assert!(!entries.is_empty(), "the corpus {name} is empty");
    entries
}

impl Target {
    /// Holds the property against the corpus and against mutations of it.
    pub fn run(&self) {
        let entries = corpus(self.name);
        let mut taken = 0_u64;
        for (_, bytes) in &entries {
            taken += u64::from(self.bounded(bytes).0);
        }
        assert!(taken > 0, "no entry of the corpus {} is taken", self.name);
        let entries: Vec<Vec<u8>> = entries.into_iter().map(|(_, bytes)| bytes).collect();
        match std::env::var(SECONDS) {
            Err(_) => {
                let taken = self.mutations(&entries, 1, MUTATIONS);
                assert!(taken >= u64::from(MUTATIONS) / 200, "{taken} of {MUTATIONS} mutations were taken");
            }
            Ok(seconds) => self.for_seconds(&entries, seconds.parse().expect("a number of seconds")),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "it is for so long that it runs")]
    fn for_seconds(&self, entries: &[Vec<u8>], seconds: u64) {
        let (from, limit) = (Instant::now(), Duration::from_secs(seconds));
        let (mut seed, mut done, mut taken) = (1, 0, 0);
        while from.elapsed() < limit {
            seed += 1;
            taken += self.mutations(entries, seed, TOGETHER);
            done += u64::from(TOGETHER);
        }
        let took = from.elapsed().as_secs();
        println!("fuzz {}: {done} executions in {took} s, {taken} of them taken, no finding", self.name);
    }

    /// How many mutations were taken.
    fn mutations(&self, entries: &[Vec<u8>], seed: u64, cases: u32) -> u64 {
        let taken = std::cell::Cell::new(0);
        let config = Config {
            cases,
            rng_seed: RngSeed::Fixed(seed),
            failure_persistence: None,
            max_shrink_iters: 20_000,
            ..Config::default()
        };
        let drawn = (any::<Index>(), any::<Index>(), edits());
        let made = |(entry, other, edits): &(Index, Index, Vec<Edit>)| {
            apply(entry.get::<Vec<u8>>(entries), other.get::<Vec<u8>>(entries), self.format, edits)
        };
        let outcome = TestRunner::new(config).run(&drawn, |drawn| {
            let bytes = made(&drawn);
            let (is_taken, most) = self.bounded(&bytes);
            taken.set(taken.get() + u64::from(is_taken));
            let bound = self.memory + self.per_byte * bytes.len();
            if most > bound {
                let held = format!("{} bytes held {most} bytes of memory, over {bound}", bytes.len());
                return Err(TestCaseError::fail(held));
            }
            Ok(())
        });
        if let Err(TestError::Fail(why, drawn)) = outcome {
            let bytes = made(&drawn);
            let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("found-{}-{seed}", self.name));
            std::fs::write(&path, &bytes).expect("written");
            panic!(
                "{} does not hold: {why}\n{}\nseed {seed}; once it is mended, keep these bytes: mv {} {}",
                self.name,
                bytes.escape_ascii(),
                path.display(),
                folder(self.name).display(),
            );
        }
        taken.get()
    }

    fn bounded(&self, bytes: &[u8]) -> (bool, usize) {
        memory::most(|| (self.check)(bytes))
    }
}
