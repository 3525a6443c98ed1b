//! The control group of a program: what it starts cannot leave it, and the kernel kills all of it at once.
//!
//! A group is planned first (so that the begun record names it), made next, and removed when it is empty. Where no
//! group can be made the supervisor still ends everything, since it adopts what its program starts; a group holds even
//! what forks faster than that, and what is left when the supervisor itself is killed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::exec::mark::Mark;
use crate::model::Digest;

/// How long a killed group may take to become empty; what is left then hangs in the kernel.
const EMPTY_ROUNDS: u32 = 250;
const EMPTY_PAUSE: Duration = Duration::from_millis(20);

/// The groups that a program is to have: one of cgroup v2, below this process's own, where that may be written.
pub(crate) fn plan(mark: &Mark) -> Vec<PathBuf> {
    let name = format!("bcd-{}", &Digest::of(mark.value().as_bytes()).hex()[..24]);
    let own = own_v2().filter(|own| own.join("cgroup.procs").exists() && may_write(own));
    own.map(|own| own.join(name)).into_iter().collect()
}

fn may_write(dir: &Path) -> bool {
    rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

/// The directory of this process's own group in the cgroup v2 hierarchy.
fn own_v2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::"))?;
    directory(&mounts, own)
}

/// Field 4 of a line of mountinfo is what of the hierarchy is mounted, 5 where; the type stands behind a lone `-`.
fn directory(mountinfo: &str, own: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        let below = Path::new(own).strip_prefix(root).ok()?;
        (kind.split(' ').next() == Some("cgroup2")).then(|| Path::new(place).join(below))
    })
}

/// Makes the groups; whoever writes "0" into the files given back is in them.
///
/// # Errors
/// One cannot be made; none is left.
pub(super) fn make(groups: &[PathBuf]) -> io::Result<Vec<File>> {
    let made = groups.iter().map(|group| {
        match fs::create_dir(group) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        OpenOptions::new().write(true).open(group.join("cgroup.procs"))
    });
    made.collect::<io::Result<Vec<File>>>().inspect_err(|_| remove(groups))
}

/// Sends SIGKILL to all that is in the groups.
pub(super) fn kill(groups: &[PathBuf]) {
    for group in groups {
        let file = OpenOptions::new().write(true).open(group.join("cgroup.kill"));
        // A group that is not there holds nothing; an older kernel's has no such file, and the walk does it alone.
        let _ = file.and_then(|mut file| file.write_all(b"1"));
    }
}

/// Kills what is in the groups until they are empty, and removes them; false when something hangs. Blocks.
pub(crate) fn end(groups: &[PathBuf]) -> bool {
    for _ in 0..EMPTY_ROUNDS {
        kill(groups);
        remove(groups);
        if !groups.iter().any(|group| group.exists()) {
            return true;
        }
        thread::sleep(EMPTY_PAUSE);
    }
    false
}

fn remove(groups: &[PathBuf]) {
    for group in groups {
        // One that is not empty stays; the next round, or the next daemon, finds it by the record.
        let _ = fs::remove_dir(group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 29 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
32 30 0:28 /box /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw";

    #[test]
    fn the_own_group_is_found_below_what_is_mounted_of_the_hierarchy() {
        let found = |own| directory(MOUNTS, own);
        assert_eq!(found("/box/bcd.service"), Some("/sys/fs/cgroup/unified/bcd.service".into()));
        assert_eq!(found("/box"), Some("/sys/fs/cgroup/unified/".into()));
        assert_eq!(found("/elsewhere"), None, "a group outside of what is mounted cannot be written");
        assert_eq!(directory("31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu", "/"), None);
    }
}
