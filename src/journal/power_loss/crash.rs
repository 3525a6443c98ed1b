//! What a crash leaves: everything synced, and of the rest what chance wants.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::disk::{self, Image, Inode, Op};

/// What becomes of the operations that were not synced. They concern one file or the directory; a name and the
/// content behind it are durable apart from each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// None of them happened.
    Dropped,
    /// All of them happened.
    Kept,
    /// Any of them happened: a later one may have overtaken an earlier one.
    Reordered,
    /// The same, and of each write any sectors.
    Torn,
}

/// What a disk writes whole, bytes.
const SECTOR: usize = 512;

impl Mode {
    pub(super) const ALL: [(Self, &'static str); 4] = [
        (Self::Dropped, "dropped"),
        (Self::Kept, "kept"),
        (Self::Reordered, "reordered"),
        (Self::Torn, "torn"),
    ];

    /// Whether chance decides, so that each seed is another case.
    pub(super) fn draws(self) -> bool {
        matches!(self, Self::Reordered | Self::Torn)
    }
}

/// One crash: after this many operations, in this mode, with this seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Crash {
    pub(super) point: usize,
    pub(super) mode: Mode,
    pub(super) seed: u64,
}

impl fmt::Display for Crash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = Mode::ALL.iter().find(|(mode, _)| *mode == self.mode).map_or("", |(_, name)| name);
        write!(f, "{}:{mode}:{}", self.point, self.seed)
    }
}

impl FromStr for Crash {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("not <point>:<mode>:<seed>: {text:?}");
        let [point, mode, seed] = *text.split(':').collect::<Vec<_>>() else { return Err(bad()) };
        let (mode, _) = *Mode::ALL.iter().find(|(_, name)| *name == mode).ok_or_else(bad)?;
        Ok(Self { point: point.parse().map_err(|_| bad())?, mode, seed: seed.parse().map_err(|_| bad())? })
    }
}

/// What is durable, and what is only written, at one point of a trace.
#[derive(Debug)]
pub(super) struct Platter<'a> {
    files: Vec<Vec<u8>>,
    names: BTreeMap<String, Inode>,
    unsynced: Vec<&'a Op>,
}

impl<'a> Platter<'a> {
    /// The disk on which the trace began.
    pub(super) fn new(image: &Image) -> Self {
        let names = image.keys().cloned().zip(0..).collect();
        Self { files: image.values().cloned().collect(), names, unsynced: Vec::new() }
    }

    /// Goes on by one operation.
    pub(super) fn step(&mut self, op: &'a Op) {
        let now_durable = match *op {
            Op::Sync { inode } => Some(inode),
            Op::SyncDir => None,
            _ => return self.unsynced.push(op),
        };
        let unsynced = std::mem::take(&mut self.unsynced).into_iter();
        let (synced, left): (Vec<_>, Vec<_>) = unsynced.partition(|op| content_of(op) == now_durable);
        self.unsynced = left;
        for op in synced {
            disk::apply(op, &mut self.files, &mut self.names);
        }
    }

    /// Whether every mode leaves the same.
    pub(super) fn is_clean(&self) -> bool {
        self.unsynced.is_empty()
    }

    /// The disk after the crash.
    pub(super) fn crash(&self, crash: Crash) -> Image {
        let mut rng = StdRng::seed_from_u64(((crash.point as u64) << 20) ^ crash.seed);
        let (mut files, mut names) = (self.files.clone(), self.names.clone());
        for op in &self.unsynced {
            match (crash.mode, op) {
                (Mode::Dropped, _) => {}
                (Mode::Torn, Op::Write { inode, at, bytes, .. }) => {
                    tear(disk::hold(&mut files, *inode), *at, bytes, &mut rng);
                }
                (Mode::Reordered | Mode::Torn, _) if rng.random() => {}
                _ => disk::apply(op, &mut files, &mut names),
            }
        }
        names.into_iter().map(|(name, inode)| (name, disk::hold(&mut files, inode).clone())).collect()
    }
}

/// The file whose content an operation changes; none when it changes the directory.
fn content_of(op: &Op) -> Option<Inode> {
    match *op {
        Op::Write { inode, .. } | Op::Truncate { inode, .. } | Op::Sync { inode } => Some(inode),
        Op::Create { .. } | Op::Rename { .. } | Op::Unlink { .. } | Op::SyncDir => None,
    }
}

/// Writes some sectors of `bytes`. The length may have grown all the same: a file system keeps it elsewhere.
fn tear(file: &mut Vec<u8>, at: usize, bytes: &[u8], rng: &mut StdRng) {
    let end = at + bytes.len();
    if file.len() < end && rng.random() {
        file.resize(end, 0);
    }
    let mut from = at;
    while from < end {
        let to = end.min((from / SECTOR + 1) * SECTOR);
        if rng.random() {
            disk::put(file, from, &bytes[from - at..to - at]);
        }
        from = to;
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::Disk;
    use super::*;

    const SECTORS: usize = 64;

    /// A durable file `a` of zeros, the start of every test.
    fn disk() -> (Disk, Inode, Image) {
        let image = Image::from([("a".to_owned(), vec![0; SECTORS * SECTOR])]);
        let disk = Disk::boot(image.clone());
        let inode = disk.inode("a").expect("a file");
        (disk, inode, image)
    }

    fn left(disk: &Disk, image: &Image, mode: Mode, seed: u64) -> Image {
        let mut platter = Platter::new(image);
        disk.trace().iter().for_each(|op| platter.step(op));
        platter.crash(Crash { point: disk.trace().len(), mode, seed })
    }

    #[test]
    fn what_is_synced_stays_in_every_mode_and_what_is_not_stays_only_in_some() {
        let (mut disk, inode, image) = disk();
        disk.write(inode, 0, b"synced").expect("written");
        disk.sync(inode).expect("synced");
        disk.write(inode, 6, b"not").expect("written");
        for (mode, _) in Mode::ALL {
            assert_eq!(&left(&disk, &image, mode, 1)["a"][..6], b"synced", "{mode:?}");
        }
        assert_eq!(&left(&disk, &image, Mode::Dropped, 0)["a"][6..9], b"\0\0\0");
        assert_eq!(&left(&disk, &image, Mode::Kept, 0)["a"][6..9], b"not");
    }

    #[test]
    fn an_entry_is_durable_by_a_sync_of_the_directory_alone() {
        let (mut disk, a, image) = disk();
        let b = disk.create("b").expect("created");
        disk.unlink("a").expect("unlinked");
        disk.sync(a).expect("synced");
        disk.sync(b).expect("synced");
        let names = |image: Image| image.into_keys().collect::<Vec<_>>();
        assert_eq!(names(left(&disk, &image, Mode::Dropped, 0)), ["a"]);
        assert_eq!(names(left(&disk, &image, Mode::Kept, 0)), ["b"]);
        disk.sync_dir().expect("synced");
        assert_eq!(names(left(&disk, &image, Mode::Dropped, 0)), ["b"]);
    }

    #[test]
    fn a_later_write_can_overtake_an_earlier_one() {
        let (mut disk, inode, image) = disk();
        disk.write(inode, 0, b"x").expect("written");
        disk.write(inode, SECTOR, b"y").expect("written");
        let overtaken = (0..64).any(|seed| {
            let left = &left(&disk, &image, Mode::Reordered, seed)["a"];
            (left[0], left[SECTOR]) == (0, b'y')
        });
        assert!(overtaken);
    }

    #[test]
    fn a_torn_write_is_torn_at_sectors() {
        let (mut disk, inode, image) = disk();
        disk.write(inode, 0, &[1; SECTORS * SECTOR]).expect("written");
        let left = &left(&disk, &image, Mode::Torn, 1)["a"];
        let written = left.chunks(SECTOR).filter(|sector| sector.iter().all(|byte| *byte == 1)).count();
        let dropped = left.chunks(SECTOR).filter(|sector| sector.iter().all(|byte| *byte == 0)).count();
        assert_eq!(written + dropped, SECTORS);
        assert!(written > 0 && dropped > 0, "{written} of {SECTORS}");
    }

    #[test]
    fn a_crash_reads_back_from_its_text() {
        for (mode, _) in Mode::ALL {
            let crash = Crash { point: 7, mode, seed: 3 };
            assert_eq!(crash.to_string().parse(), Ok(crash));
        }
        assert!("7:split:3".parse::<Crash>().is_err());
    }
}
