//! What a durable accept costs on this disk, against what the disk itself asks for.
//!
//! Every subject lives in the place's directory, and each round measures all of them one after the other. Commands are
//! taken through the journal as a session would: verified before, ended and acked after what is measured, and their
//! tombstones forgotten, so that no round finds more in the way than the one before it.

mod subject;

use std::path::PathBuf;
use std::time::Duration;

use self::subject::Subject;
use super::raw::{Raw, RawGroup, Submitter};
use super::{Aim, Figure, Part, Place, PlaceError, all};
use crate::clock::{Clock, SystemClock};
use crate::journal::{Mode, OpenError, WriteError};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// A directory on the disk that is asked about.
    pub state: PathBuf,
    /// A command's signed body, and the floor's record, bytes.
    pub size: usize,
    /// Rounds.
    pub rounds: usize,
    /// Accepts in a row of one round; twenty times as many come from many submitters.
    pub accepts: usize,
}

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum JournalBenchError {
    /// Nowhere to write.
    #[error(transparent)]
    Place(#[from] PlaceError),
    /// The floor's file.
    #[error("cannot write the file that the journal is compared with")]
    Raw(#[from] std::io::Error),
    /// A journal cannot be made or opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The journal took no write.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The journal took no command.
    #[error("the journal did not take a command: {0}; free some of the disk, or name another with --state")]
    Refused(String),
}

/// An accept writes two pages to the log, each behind its header.
const FRAMES: usize = 2;
const FRAME: usize = 24 + 4096;
/// Accepts by many submitters for each of those in a row: at 200 in a row still below the results that may wait for an
/// ack, 10,000.
const AT_ONCE: usize = 20;
/// Commands of the count of syncs: their pages are far below a checkpoint's.
#[cfg(feature = "fakehw")]
const COUNTED: u32 = 64;

/// Median and 99th percentile of a round, us.
#[derive(Debug, Default)]
struct Rounds {
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, mut times: Vec<Duration>) {
        times.sort_unstable();
        let at = |percent: usize| {
            times.get((times.len() * percent).div_ceil(100).saturating_sub(1)).map_or(f64::NAN, us)
        };
        self.p50.push(at(50));
        self.p99.push(at(99));
    }
}

fn us(time: &Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// How long `work` takes.
async fn timed<T, E>(work: impl Future<Output = Result<T, E>>) -> Result<(T, Duration), E> {
    let from = SystemClock.boot();
    let value = work.await?;
    Ok((value, SystemClock.boot().saturating_sub(from)))
}

fn a_second(count: usize, took: Duration) -> f64 {
    // Counts of a round are small.
    u32::try_from(count).map_or(f64::NAN, |count| f64::from(count) / took.as_secs_f64())
}

/// How many write at once, with the rounds of both sides, a second.
#[derive(Debug)]
struct Group {
    name: &'static str,
    submitters: usize,
    aim: f64,
    journal: Vec<f64>,
    raw: Vec<f64>,
}

impl Group {
    fn new(name: &'static str, submitters: usize, aim: f64) -> Self {
        Self { name, submitters, aim, journal: Vec::new(), raw: Vec::new() }
    }

    fn figure(self) -> Figure {
        let n = self.submitters;
        Figure::new(
            self.name,
            Part::new(format!("accepts by {n} submitters"), "/s", self.journal),
            Part::new("writes that share an fdatasync", "/s", self.raw),
            Aim::AtLeast(self.aim),
        )
        .without_margin()
    }
}

/// Measures. Takes seconds; writes about 200 MiB and leaves nothing behind.
///
/// # Errors
/// See [`JournalBenchError`].
pub async fn run(options: &Options) -> Result<Vec<Figure>, JournalBenchError> {
    let place = Place::make(&options.state)?;
    let at = |name: &str| place.path().join(name);
    let mut raw = Raw::create(&at("raw"), options.size)?;
    let mut frames = Raw::create(&at("raw-frames"), FRAME)?;
    let group = RawGroup::start(Raw::create(&at("raw-group"), options.size)?)?;
    let mut inline = Subject::create(&at("writer"), options.size, Mode::Inline)?;
    let mut thread = Subject::create(&at("submitter"), options.size, Mode::Thread)?;
    let mut full = Subject::create_full(&at("full"), options.size).await?;

    let mut alone = Alone::default();
    let mut groups = [Group::new("group commit, 16", 16, 0.6), Group::new("group commit, 64", 64, 0.55)];
    let at_once = options.accepts * AT_ONCE;
    for _ in 0..options.rounds {
        let mut times: [Vec<Duration>; 5] = Default::default();
        for subject in [&mut inline, &mut thread, &mut full] {
            subject.prepare(options.accepts)?;
        }
        // One of each in turn: what else runs on the machine slows all of them.
        for _ in 0..options.accepts {
            times[0].push(timed(async { raw.write(1) }).await?.1);
            times[1].push(inline.accept().await?);
            times[2].push(thread.accept().await?);
            times[3].push(full.accept().await?);
            times[4].push(timed(async { frames.write(FRAMES) }).await?.1);
        }
        for subject in [&mut inline, &mut thread, &mut full] {
            subject.forget().await?;
        }
        alone.add(times);
        for side in &mut groups {
            side.raw.push(raw_group(&group.submitter(), at_once, side.submitters).await?);
            side.journal.push(a_second(at_once, thread.accepts_at_once(at_once, side.submitters).await?));
        }
    }
    let mut figures = alone.figures(options.size);
    figures.extend(groups.map(Group::figure));
    #[cfg(feature = "fakehw")]
    figures.push(syncs(&at("counted"), options.size).await?);
    Ok(figures)
}

/// What is measured one at a time, in turn.
#[derive(Debug, Default)]
struct Alone {
    raw: Rounds,
    writer: Rounds,
    submitter: Rounds,
    full: Rounds,
    frames: Rounds,
}

impl Alone {
    /// A round, in the order of the fields.
    fn add(&mut self, times: [Vec<Duration>; 5]) {
        let Self { raw, writer, submitter, full, frames } = self;
        for (rounds, times) in [raw, writer, submitter, full, frames].into_iter().zip(times) {
            rounds.add(times);
        }
    }

    fn figures(self, size: usize) -> Vec<Figure> {
        let part = |what: &str, rounds: &[f64]| Part::new(what, "us", rounds.to_vec());
        let writer = part("p50 in the writer", &self.writer.p50);
        let sync = part(&format!("overwrite of {size} bytes and fdatasync"), &self.raw.p50);
        let p99 = part("p99 in the writer", &self.writer.p99);
        let full = part("p50 with 10,000 events, 64 MiB", &self.full.p50);
        vec![
            Figure::new("accept, writer", writer.clone(), sync.clone(), Aim::AtMost(1.3)).without_margin(),
            Figure::new(
                "accept, its bytes",
                writer.clone(),
                part("two pages of a log overwritten, and fdatasync", &self.frames.p50),
                Aim::Shown,
            ),
            Figure::new(
                "accept, submitter",
                part("p50 seen by the submitter", &self.submitter.p50),
                sync,
                Aim::AtMost(1.6),
            )
            .without_margin(),
            Figure::new(
                "accept, writer, p99",
                p99,
                part("p99 of the overwrite", &self.raw.p99),
                Aim::AtMost(3.0),
            ),
            Figure::new("accept, full journal", full, writer, Aim::AtMost(1.3)).without_margin(),
        ]
    }
}

async fn raw_group(raw: &Submitter, count: usize, submitters: usize) -> std::io::Result<f64> {
    let each = count / submitters;
    let writers = (0..submitters).map(|_| {
        let raw = raw.clone();
        async move {
            for _ in 0..each {
                raw.write().await?;
            }
            Ok::<_, std::io::Error>(())
        }
    });
    let (_, took) = timed(all(writers)).await?;
    Ok(a_second(each * submitters, took))
}

/// Syncs that SQLite asks the kernel for, over a log that does not grow and is not checkpointed meanwhile.
#[cfg(feature = "fakehw")]
async fn syncs(state: &std::path::Path, size: usize) -> Result<Figure, JournalBenchError> {
    let (mut subject, count) = Subject::create_counted(state, size)?;
    let commands = usize::try_from(COUNTED).unwrap_or_default();
    subject.prepare(commands + 1)?;
    // The first commit after the log begins anew also syncs its header.
    subject.accept().await?;
    let before = count.syncs();
    for _ in 0..commands {
        subject.accept().await?;
    }
    let syncs = count.syncs() - before;
    let syncs = u32::try_from(syncs).map_or(f64::NAN, f64::from);
    Ok(Figure::new(
        "syncs an accept",
        Part::new("counted at SQLite's VFS", "syncs", vec![syncs]),
        Part::new("1 submitter, no checkpoint", "accepts", vec![f64::from(COUNTED)]),
        Aim::Exactly(1.0),
    ))
}
