//! Power loss while an opening changes what it finds: a corrupt journal that is moved aside, an old schema that is
//! brought up to date. Crashed at every operation, the next opening ends where this one would have.

use std::path::Path;

use rusqlite::Connection;

use super::disk::{DiskError, Image, Op};
use super::sweep::crashes;
use super::vfs::Vfs;
use super::workload::{self, Scenario, id, now};
use crate::journal::{Admission, Hindrance, Journal, OpenError, WriteError, schema, settings};
use crate::model::{EventType, JournalId, NodeId, Outcome, Reason, Terminal};

/// A disk that somebody opens, and its directory for what lies on the real one.
struct Opening {
    vfs: Vfs,
    scenario: Scenario,
    dir: tempfile::TempDir,
}

impl Opening {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        Self { vfs: Vfs::new(), scenario: super::scenario(&[]), dir }
    }

    fn open(&self, new_id: &str) -> anyhow::Result<Journal> {
        let state = self.dir.path().join("state");
        workload::open(&self.vfs, &self.scenario, &state, "i-after", JournalId::new(new_id)?)
    }

    /// Opens what lies on `image`, crashes that opening at every operation, opens what each crash left, and has
    /// `look` judge the journal. How many crashes there were.
    fn every_crash(&self, image: &Image, look: impl Fn(&Journal, &Image, &str)) -> usize {
        self.vfs.boot(image.clone());
        let journal = self.open("j-first").expect("opened");
        let trace: Vec<Op> = self.vfs.disk().trace().to_vec();
        // Not within the call: the guard would be held while `look` reads the journal from this very disk.
        let after = self.vfs.disk().image();
        look(&journal, &after, "no crash");
        self.vfs.disk().cut_power();
        drop(journal);
        let mut cases = 0;
        for (crash, left) in crashes(image, &trace, 3, |_| true) {
            self.vfs.boot(left);
            let journal = self.open("j-second").unwrap_or_else(|error| panic!("{crash}: {error:#}"));
            let after = self.vfs.disk().image();
            look(&journal, &after, &crash.to_string());
            self.vfs.disk().cut_power();
            cases += 1;
        }
        cases
    }
}

/// Content that is no journal, told from any other by its byte.
fn garbage(byte: u8) -> Vec<u8> {
    vec![byte; 8192]
}

#[test]
fn a_power_loss_while_a_journal_is_moved_aside_keeps_it_with_its_log_and_the_next_opening_ends_the_move() {
    let opening = Opening::new();
    let mut image = Image::new();
    for (name, byte) in [("journal.db", b'd'), ("journal.db-wal", b'l')] {
        image.insert(name.into(), garbage(byte));
    }
    for kept in 1..=3 {
        image.insert(format!("journal.db.corrupt-{kept}"), garbage(kept));
        image.insert(format!("journal.db.corrupt-{kept}-wal"), garbage(kept));
    }
    let cases = opening.every_crash(&image, |journal, disk, case| {
        let aside =
            |byte: u8| disk.iter().find(|(_, content)| **content == garbage(byte)).map(|(name, _)| name);
        let (db, log) = (aside(b'd').expect(case), aside(b'l').expect(case));
        assert!(db.starts_with("journal.db.corrupt-"), "{case}: {db}");
        assert_eq!(log, &format!("{db}-wal"), "{case}");
        let kept = disk.keys().filter(|name| name.starts_with("journal.db.corrupt-"));
        let kept = kept.filter(|name| !name.ends_with(".untold")).count();
        // The three latest pairs; a crash before the oldest went leaves it to the next move.
        assert!((6..=8).contains(&kept), "{case}: {:?}", disk.keys());
        for byte in 2..=3 {
            assert!(aside(byte).is_some(), "{case}: the last three are kept");
        }
        let snapshot = now(journal.snapshot()).expect("read");
        assert!(snapshot.commands.is_empty(), "{case}: {snapshot:?}");
        let events = now(journal.events(0, 100, usize::MAX)).expect("read").events;
        let told: Vec<String> = events
            .iter()
            .filter(|event| event.kind == EventType::JournalMovedAside.name())
            .map(|event| event.body.clone())
            .collect();
        assert_eq!(told, [format!(r#"{{"kept":"{db}"}}"#)], "{case}: told once, whatever the crash");
    });
    assert!(cases >= 60, "{cases}");
}

/// A journal as a release with the first `version` migrations left it, with a command that is done, one that is accepted,
/// and an event where there are some.
fn old_journal(opening: &Opening, version: usize) -> Image {
    opening.vfs.boot(Image::new());
    opening.vfs.disk().create("journal.db").expect("made");
    let conn = settings::connect(Path::new("/journal.db"), Some(opening.vfs.name())).expect("opened");
    let node = NodeId::new("n-1").expect("an id");
    schema::create_old(&conn, version, &node, &workload::journal_id()).expect("made");
    done(&conn);
    accepted(&conn);
    if version >= 2 {
        let event = "INSERT INTO events VALUES (1, 1, 'daemon.started', ?, 1796000000000, 'b-0', 1)";
        conn.execute(event, [OLD_EVENT]).expect("written");
    }
    drop(conn);
    opening.vfs.disk().image()
}

const OLD_EVENT: &str = r#"{"incarnation":"i-old"}"#;

fn accepted(conn: &Connection) {
    let body = workload::verified(1).get().body_sha256;
    let row = "INSERT INTO commands VALUES (?, ?, 'node.exec', 1, 1796003600000, 1, 0, 'i-old', 'b-0', 1, NULL, NULL, NULL)";
    conn.execute(row, rusqlite::params![id(1).as_str(), body.0]).expect("written");
}

fn done(conn: &Connection) {
    let outcome = Outcome { output: Vec::new(), ..workload::outcome(0) };
    let outcome = serde_json::to_string(&outcome).expect("encoded");
    let id = id(0);
    let row = "INSERT INTO commands VALUES (?, zeroblob(32), 'node.exec', 0, 1796003600000, 3, 1, 'i-old', 'b-0', 1, 1, ?, 1)";
    conn.execute(row, [id.as_str(), &outcome]).expect("written");
    conn.execute("INSERT INTO results VALUES (1, ?, x'68656c6c6f')", [id.as_str()]).expect("written");
}

#[test]
fn every_older_schema_is_brought_up_to_date_whatever_power_loss_falls_into_it_and_owes_what_it_owed() {
    let opening = Opening::new();
    for version in 1..usize::try_from(schema::newest()).expect("a version") {
        let image = old_journal(&opening, version);
        let cases = opening.every_crash(&image, |journal, _, case| {
            let case = format!("schema {version}, {case}");
            assert_eq!(journal.id(), workload::journal_id(), "{case}");
            let done = now(journal.result(id(0))).expect("read").expect(&case).into_inner();
            assert_eq!(done.outcome.output, b"hello", "{case}");
            // What a later schema brought is there: the start was told of, behind what was told before.
            let events = now(journal.events(0, 100, usize::MAX)).expect("read").events;
            assert_eq!(events[0].body == OLD_EVENT, version >= 2, "{case}: {events:?}");
            assert!(events.iter().any(|event| event.body.contains("i-after")), "{case}: {events:?}");
            // Who asked is known of what was accepted before anybody noted it, once it has come again.
            let again = now(journal.admit(workload::verified(1), workload::context())).expect("written");
            let Admission::Accepted(accepted) = again else { panic!("{case}: {again:?}") };
            let end = Outcome::not_run(Terminal::Cancelled, Reason::Cancelled, "cancelled");
            now(journal.finish_accepted(accepted, end)).expect("written");
            let lines = now(journal.audit_lines(0)).expect("read").lines;
            assert!(lines.len() == 1 && lines[0].contains(r#""argv":["true"]"#), "{case}: {lines:?}");
        });
        assert!(cases >= 20, "schema {version}: {cases}");
    }
}

/// What holds an opening up whose disk breaks at the operation `n`; absent where the opening ended all the same.
fn hindered(opening: &Opening, image: &Image, n: usize) -> Option<Hindrance> {
    opening.vfs.boot(image.clone());
    opening.vfs.disk().fail_after(n, DiskError::Broken);
    let opened = opening.open("j-broken");
    opening.vfs.disk().cut_power();
    let error = opened.err()?;
    let by_open = error.downcast_ref::<OpenError>().map(OpenError::hindrance);
    let hindrance = by_open.or_else(|| error.downcast_ref::<WriteError>().map(WriteError::hindrance));
    Some(hindrance.flatten().unwrap_or_else(|| panic!("operation {n}: {error:#}")))
}

#[test]
fn a_sync_that_fails_in_any_step_of_an_opening_is_told_from_every_other_error_of_the_disk() {
    let opening = Opening::new();
    let mut half_moved = Image::new();
    half_moved.insert("journal.db-wal".into(), garbage(b'l'));
    half_moved.insert("journal.db.corrupt-1".into(), garbage(b'd'));
    for image in [Image::new(), half_moved, old_journal(&opening, 1)] {
        opening.vfs.boot(image.clone());
        let journal = opening.open("j-first").expect("opened");
        let trace: Vec<Op> = opening.vfs.disk().trace().to_vec();
        opening.vfs.disk().cut_power();
        drop(journal);
        let mut syncs = 0;
        for (n, op) in trace.iter().enumerate() {
            let sync = matches!(op, Op::Sync { .. } | Op::SyncDir);
            let found = hindered(&opening, &image, n);
            let told = matches!(found, Some(Hindrance::FailedSync(_)));
            assert_eq!(told, sync, "operation {n}, {op:?}: {found:?}");
            syncs += usize::from(sync);
        }
        assert!(syncs >= 4, "{syncs} syncs in {} operations", trace.len());
    }
}
