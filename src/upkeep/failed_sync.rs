//! What a failed sync of the journal leads to: one exit a boot, so that a new process reads what the disk holds. A disk
//! that fails again in the same boot would make the daemon exit for ever; then it runs on, admits nothing and says so.

use std::path::{Path, PathBuf};

use crate::blocking;
use crate::model::BootId;
use crate::state_dir;

/// The marker's name in the run directory, which does not outlive the boot; it holds the boot id all the same, for a
/// run directory that does.
pub const MARKER: &str = "sync-failed";

/// Whether this process is to end now; then it is noted.
pub async fn exits(run: Option<PathBuf>, boot: BootId) -> bool {
    blocking::run(move || may_exit(run.as_deref(), &boot)).await.unwrap_or(false)
}

/// Notes that this boot had its exit. False when it had one before, or when it cannot be noted: then there must be none,
/// since it might be one of many. Blocks.
fn may_exit(run: Option<&Path>, boot: &BootId) -> bool {
    // A node without a run directory has no supervisor that would start it again and again.
    let Some(run) = run else { return true };
    let marker = run.join(MARKER);
    if std::fs::read_to_string(&marker).is_ok_and(|text| text.trim() == boot.as_str()) {
        return false;
    }
    let noted =
        state_dir::make(run, rustix::fs::Mode::from_raw_mode(0o755)).map_err(|error| error.to_string());
    let noted = noted.and_then(|()| replace(&marker, boot).map_err(|error| error.to_string()));
    if let Err(error) = &noted {
        tracing::error!(path = %marker.display(), error, "the exit cannot be noted, so the daemon runs on");
    }
    noted.is_ok()
}

fn replace(marker: &Path, boot: &BootId) -> std::io::Result<()> {
    use std::io::Write as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    match std::fs::remove_file(marker) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(marker)?;
    file.write_all(boot.as_str().as_bytes())?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_boot_has_one_exit_and_the_next_boot_another() {
        let temp = tempfile::tempdir().unwrap();
        let run = temp.path().join("run");
        let boot = |id: &str| BootId::new(id).unwrap();
        assert!(may_exit(Some(&run), &boot("b-1")));
        assert!(!may_exit(Some(&run), &boot("b-1")));
        assert!(may_exit(Some(&run), &boot("b-2")));
        assert!(!may_exit(Some(&run), &boot("b-2")));
    }

    #[test]
    fn an_exit_that_cannot_be_noted_is_none() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(!may_exit(Some(&file.join("run")), &BootId::new("b-1").unwrap()));
    }
}
