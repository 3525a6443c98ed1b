//! Opening: what is refused, what is moved aside, what is made.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;

use super::*;
use crate::model::Exit;

fn open(machine: &Machine) -> Result<Locked, OpenError> {
    Locked::open(machine.options(Mode::Inline), journal_id("j-new"))
}

fn refused(machine: &Machine) -> OpenError {
    open(machine).map(|locked| locked.facts()).expect_err("refused")
}

fn mode(path: &Path) -> u32 {
    path.symlink_metadata().expect("a file").mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("chmod");
}

fn names(machine: &Machine, part: &str) -> Vec<String> {
    let entries = std::fs::read_dir(machine.state()).expect("a directory");
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
        .filter(|name| name.contains(part))
        .collect();
    names.sort();
    names
}

#[tokio::test]
async fn every_setting_holds_in_an_open_journal() {
    let machine = Machine::new();
    let journal = machine.start();
    let db = machine.db();
    let again = journal.submit(move |core| {
        Ok(settings::verify(settings::SETTINGS, &core.conn, &db).map_err(|e| e.to_string()))
    });
    assert_eq!(again.await.expect("read"), Ok(()));
    let found = journal
        .submit(|core| {
            let text = |name: &str| {
                core.conn.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, String>(0))
            };
            let number =
                |name: &str| core.conn.query_row(&format!("PRAGMA {name}"), [], |row| row.get::<_, i64>(0));
            Ok((text("locking_mode")?, text("journal_mode")?, number("synchronous")?, number("page_size")?))
        })
        .await
        .expect("read");
    assert_eq!(found, ("exclusive".into(), "wal".into(), 2, 4096));
}

#[tokio::test]
async fn files_are_private_from_their_creation_and_the_log_is_grown() {
    let machine = Machine::new();
    let journal = machine.start();
    done(&journal, "c-1", ONCE).await;
    assert_eq!(mode(&machine.state()), 0o700);
    assert_eq!(mode(&machine.state().join("begun")), 0o700);
    for name in ["journal.db", "journal.db-wal", "journal.lock"] {
        assert_eq!(mode(&machine.state().join(name)), 0o600, "{name}");
    }
    let grown = machine.state().join("journal.db-wal").metadata().expect("a log").len();
    assert_eq!(grown, 64 << 10, "commits overwrite what was grown at open");
    assert_eq!(names(&machine, "-shm"), Vec::<String>::new());
}

#[tokio::test]
async fn everything_survives_a_restart_after_a_crash_and_after_a_clean_stop() {
    let machine = Machine::new();
    let journal = machine.start();
    assert_eq!((journal.id(), journal.birth()), (journal_id("j-1"), Some(at(BIRTH))));
    let first = done(&journal, "c-1", ONCE).await.into_inner();
    drop(journal);
    let journal = machine.start();
    assert_eq!((journal.id(), journal.birth()), (journal_id("j-1"), Some(at(BIRTH))));
    assert_eq!(result(&journal, "c-1").await, first.outcome);
    journal.close().await;
    assert_eq!(names(&machine, "-wal"), Vec::<String>::new(), "a clean stop leaves one file");
    assert_eq!(result(&machine.start(), "c-1").await, first.outcome);
}

#[test]
fn a_second_daemon_is_told_who_holds_the_journal() {
    let machine = Machine::new();
    // Another process: the lock of this one would be waited for, as that of an agent that is still closing.
    let mut holder = std::process::Command::new("flock")
        .arg(machine.state().join("journal.lock"))
        .args(["sh", "-c", "echo 4242 > \"$0\"; echo held; exec cat"])
        .arg(machine.state().join("journal.lock"))
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("flock(1)");
    let mut line = String::new();
    let mut out = std::io::BufReader::new(holder.stdout.take().expect("its output"));
    std::io::BufRead::read_line(&mut out, &mut line).expect("a line");
    let error = refused(&machine);
    drop(holder.stdin.take());
    holder.wait().expect("ended");
    assert!(matches!(error, OpenError::Held { pid: 4242, .. }), "{error:?}");
    assert!(error.to_string().contains("pid 4242"), "{error}");
    open(&machine).expect("free again");
}

#[test]
fn the_journal_of_another_node_is_refused_with_the_mend_and_left_alone() {
    let machine = Machine::new();
    let before = std::fs::read(machine.db()).expect("a file");
    let mut options = machine.options(Mode::Inline);
    options.node_id = NodeId::new("n-2").expect("an id");
    let error = Locked::open(options, journal_id("j-new")).expect_err("refused");
    assert!(matches!(&error, OpenError::ForeignNode { found, .. } if found == "n-1"), "{error:?}");
    let (text, dir) = (error.to_string(), machine.state());
    for name in ["journal.db*", "begun", "outcome"] {
        let path = dir.canonicalize().expect("a path").join(name);
        assert!(text.contains(&format!(" {} ", path.display())), "{text}");
    }
    assert_eq!(error.exit(), Exit::ForeignState);
    assert_eq!(std::fs::read(machine.db()).expect("a file"), before);
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_untouched_log_included() {
    let machine = Machine::new();
    done(&machine.start(), "c-1", ONCE).await;
    let sql = machine.sql();
    sql.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).expect("set");
    sql.pragma_update(None, "user_version", 99).expect("written");
    drop(sql);
    let wal = machine.state().join("journal.db-wal");
    let read = || (std::fs::read(machine.db()).expect("a file"), std::fs::read(&wal).expect("a log"));
    set_mode(&machine.state().join("journal.db-wal"), 0o600);
    let before = read();
    let error = refused(&machine);
    assert!(matches!(error, OpenError::Newer { found: 99, .. }), "{error:?}");
    assert_eq!(error.exit(), Exit::ForeignState);
    assert!(before == read(), "it was changed");
}

#[test]
fn a_database_of_somebody_else_is_refused() {
    let machine = Machine::bare();
    open(&machine).expect("opened");
    std::fs::remove_file(machine.db()).expect("removed");
    machine.sql().execute_batch("CREATE TABLE other (x)").expect("written");
    set_mode(&machine.db(), 0o600);
    assert!(matches!(refused(&machine), OpenError::NotAJournal { .. }));
}

#[test]
fn a_state_directory_open_to_others_is_refused_with_the_mend() {
    let machine = Machine::new();
    set_mode(&machine.state(), 0o755);
    let error = refused(&machine);
    assert!(error.to_string().contains("chmod 700"), "{error}");
    assert_eq!(error.exit(), Exit::Permission);
    set_mode(&machine.state(), 0o700);
    set_mode(&machine.db(), 0o644);
    assert!(refused(&machine).to_string().contains("chmod 600"));
}

#[test]
fn a_symbolic_link_in_the_place_of_a_file_is_refused() {
    let elsewhere = tempfile::NamedTempFile::new().expect("a file");
    for name in ["journal.db", "journal.db-wal", "journal.lock"] {
        let machine = Machine::new();
        let path = machine.state().join(name);
        let _ = std::fs::remove_file(&path);
        symlink(elsewhere.path(), &path).expect("a link");
        open(&machine).map(|locked| locked.facts()).expect_err(name);
    }
    let machine = Machine::new();
    std::fs::rename(machine.state(), machine.dir.path().join("real")).expect("renamed");
    symlink(machine.dir.path().join("real"), machine.state()).expect("a link");
    assert!(matches!(refused(&machine), OpenError::Shape { found: "a symbolic link", .. }));
    assert_eq!(elsewhere.as_file().metadata().expect("a file").len(), 0);
}

#[tokio::test]
async fn a_log_without_its_journal_is_never_applied_to_a_new_one() {
    let machine = Machine::new();
    done(&machine.start_thread(), "c-1", ONCE).await;
    // A log with committed frames, as a crash leaves it.
    let sql = machine.sql();
    sql.set_db_config(rusqlite::config::DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).expect("set");
    sql.execute("UPDATE journal SET last_epoch = 5", []).expect("written");
    drop(sql);
    std::fs::remove_file(machine.db()).expect("removed");
    let (journal, _) = machine.start_at(ISSUED);
    let snapshot = journal.snapshot().await.expect("a snapshot");
    assert_eq!((snapshot.journal_id.as_str(), snapshot.last_epoch, snapshot.commands.len()), ("j-2", 0, 0));
    assert_eq!(names(&machine, "stray").len(), 1);
}

#[tokio::test]
async fn a_corrupt_journal_is_moved_aside_and_the_last_three_are_kept() {
    let machine = Machine::new();
    for n in 0..5 {
        std::fs::write(machine.db(), vec![b'x'; 8192 + n]).expect("written");
        let (journal, _) = machine.start_at(ISSUED);
        assert_eq!((journal.id(), journal.birth()), (journal_id("j-2"), None));
        journal.close().await;
    }
    let kept = names(&machine, "corrupt");
    assert_eq!(kept.len(), 3, "{kept:?}");
    let newest = std::fs::read(machine.state().join(&kept[2])).expect("a file");
    assert_eq!(newest.len(), 8192 + 4, "what was moved aside is as it was");
}

#[test]
fn an_error_that_is_not_corruption_leaves_the_file_where_it_is() {
    let machine = Machine::new();
    let before = std::fs::read(machine.db()).expect("a file");
    std::fs::create_dir(machine.state().join("journal.db-wal")).expect("a directory");
    assert!(matches!(refused(&machine), OpenError::Shape { .. }));
    std::fs::remove_dir(machine.state().join("journal.db-wal")).expect("removed");
    assert_eq!(std::fs::read(machine.db()).expect("a file"), before);
    assert_eq!(names(&machine, "corrupt"), Vec::<String>::new());
}

#[tokio::test]
async fn a_join_replaces_a_rowless_journal_and_no_other() {
    let machine = Machine::new();
    let options = machine.options(Mode::Inline);
    Locked::create(&options, Some(at(ISSUED)), journal_id("j-second")).expect("replaced");
    let journal = machine.start();
    assert_eq!((journal.id(), journal.birth()), (journal_id("j-second"), Some(at(ISSUED))));
    done(&journal, "c-1", ONCE).await;
    drop(journal);
    let error = Locked::create(&options, Some(at(NOW)), journal_id("j-third")).expect_err("refused");
    assert!(matches!(error, OpenError::NotEmpty { rows: 1, .. }), "{error:?}");
    assert_eq!(result(&machine.start(), "c-1").await, success());
}

#[test]
fn the_signed_time_of_the_join_is_the_first_mark() {
    let facts = Machine::new().locked().facts();
    assert_eq!((facts.birth, facts.mark, facts.signed), (Some(at(BIRTH)), Some(at(BIRTH)), Some(at(BIRTH))));
}

#[tokio::test]
async fn no_statement_is_compiled_again_for_the_values_that_are_bound_to_it() {
    let machine = Machine::new();
    let journal = machine.start();
    let again = journal.submit(|core| {
        let mut statement = core.conn.prepare("SELECT id FROM commands WHERE attempt = ? LIMIT ?")?;
        for (attempt, limit) in [(1, 2), (0, 1), (2, 3)] {
            statement.exists([attempt, limit])?;
        }
        Ok(statement.get_status(rusqlite::StatementStatus::RePrepare))
    });
    assert_eq!(again.await.expect("read"), 0);
}
