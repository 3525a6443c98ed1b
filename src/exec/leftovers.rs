//! Programs that a dead daemon left behind: ended before anything is recovered, since a row that becomes
//! `interrupted` must not have a program that still works at it.

use super::mark::{self, Mark};
use crate::model::JournalId;

/// Ends every program that was started under this journal and still runs; how many there were. Blocks.
///
/// Called between taking the journal's lock (so that no living daemon owns them) and recovery. Programs of another
/// journal are never touched.
pub fn end(journal: &JournalId) -> usize {
    match mark::sweep(&Mark::journal(journal)) {
        Ok(swept) => {
            for pid in &swept.killed {
                tracing::warn!(pid, %journal, "ended a program that an earlier daemon left behind");
            }
            if swept.remain {
                tracing::error!(%journal, "a program of an earlier daemon does not go away on SIGKILL");
            }
            swept.killed.len()
        }
        Err(error) => {
            tracing::error!(%journal, %error, "cannot look for programs of an earlier daemon in /proc");
            0
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};

    use super::*;

    fn sleeper(mark: &str) -> Child {
        Command::new("/bin/sleep").arg("60").env(mark::VARIABLE, mark).spawn().expect("a sleeper")
    }

    #[test]
    fn a_leftover_is_killed_by_its_mark_and_other_journals_are_untouched() {
        let mut rng = rand::rngs::StdRng::from_os_rng();
        let (ours, other) = (JournalId::random(&mut rng), JournalId::random(&mut rng));
        let mut left = sleeper(&format!("{ours}/c-1/1"));
        let mut second = sleeper(&format!("{ours}/c-2/3"));
        let mut spared = sleeper(&format!("{other}/c-1/1"));

        assert_eq!(end(&ours), 2);
        assert_eq!(left.wait().expect("a status").signal(), Some(9));
        assert_eq!(second.wait().expect("a status").signal(), Some(9));
        assert!(spared.try_wait().expect("a status").is_none(), "another journal's program was ended");
        assert_eq!(end(&ours), 0);

        spared.kill().expect("a signal");
        spared.wait().expect("a status");
    }

    use rand::SeedableRng as _;
}
