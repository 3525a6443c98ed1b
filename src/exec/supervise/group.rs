//! The control groups of a program: what it starts cannot leave them, the kernel kills all of it at once, and they hold
//! its limits.
//!
//! Groups are planned first (so that the begun record names them), made next, and removed when they are empty. Where
//! none can be made the supervisor still ends everything, since it adopts what its program starts; a group holds even
//! what forks faster than that, and what is left when the supervisor itself is killed. A limit has no such substitute.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::exec::launch;
use crate::exec::mark::Mark;
use crate::model::{Digest, ExecArgs};

/// How long a killed group may take to become empty; what is left then hangs in the kernel.
const EMPTY_ROUNDS: u32 = 250;
const EMPTY_PAUSE: Duration = Duration::from_millis(20);

/// The period of which a CPU limit is a share, µs: the kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;

/// This process's own groups.
#[derive(Debug, Default, PartialEq, Eq)]
struct Own {
    /// In the v2 hierarchy.
    v2: Option<PathBuf>,
    /// In the v1 hierarchies: controller and directory.
    v1: Vec<(String, PathBuf)>,
}

/// What is written into a group before anything is in it.
#[derive(Debug, PartialEq, Eq)]
struct Setting {
    file: PathBuf,
    value: String,
    /// False where it only sharpens another one and not every kernel has it.
    needed: bool,
}

/// The groups that a program is to have.
#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Their directories.
    pub(super) groups: Vec<PathBuf>,
    settings: Vec<Setting>,
    /// A limit that cannot be held here.
    missing: Option<&'static str>,
}

impl Plan {
    /// The groups that this host lets this process make, and the limits that they hold.
    pub(super) fn of(mark: &Mark, args: &ExecArgs) -> Self {
        let name = format!("bcd-{}", &Digest::of(mark.value().as_bytes()).hex()[..24]);
        let own = Own::look();
        let mut plan = Self::default();
        match &own.v2 {
            Some(v2) => plan.groups.push(v2.join(&name)),
            None => plan.groups.extend(own.controller("freezer").map(|(dir, _)| dir.join(&name))),
        }
        // Without a limit too: the kernel counts there whom it kills for want of memory.
        if args.memory_bytes.is_none()
            && let Some((dir, _)) = own.controller("memory")
        {
            plan.join(dir.join(&name));
        }
        if let Some(bytes) = args.memory_bytes {
            let bytes = bytes.to_string();
            plan.limit(&own, &name, "memory", |v2| match v2 {
                true => vec![("memory.max", bytes.clone(), true), ("memory.swap.max", "0".into(), false)],
                false => vec![
                    ("memory.limit_in_bytes", bytes.clone(), true),
                    ("memory.memsw.limit_in_bytes", bytes.clone(), false),
                ],
            });
        }
        if let Some(cpus) = args.cpus {
            let quota = u64::from(cpus) * CPU_PERIOD_US;
            plan.limit(&own, &name, "cpu", |v2| match v2 {
                true => vec![("cpu.max", format!("{quota} {CPU_PERIOD_US}"), true)],
                false => vec![
                    ("cpu.cfs_period_us", CPU_PERIOD_US.to_string(), true),
                    ("cpu.cfs_quota_us", quota.to_string(), true),
                ],
            });
        }
        if let Some(tasks) = args.tasks {
            plan.limit(&own, &name, "pids", |_| vec![("pids.max", tasks.to_string(), true)]);
        }
        plan
    }

    fn limit(
        &mut self,
        own: &Own,
        name: &str,
        controller: &'static str,
        settings: impl Fn(bool) -> Vec<(&'static str, String, bool)>,
    ) {
        let Some((dir, v2)) = own.controller(controller) else {
            self.missing = self.missing.or(Some(controller));
            return;
        };
        let group = dir.join(name);
        self.settings.extend(settings(v2).into_iter().map(|(file, value, needed)| Setting {
            file: group.join(file),
            value,
            needed,
        }));
        self.join(group);
    }

    fn join(&mut self, group: PathBuf) {
        if !self.groups.contains(&group) {
            self.groups.push(group);
        }
    }

    /// Makes the groups; whoever writes "0" into the files given back is in them.
    ///
    /// # Errors
    /// A limit cannot be held, in words. Without limits there is none: the program runs without its groups.
    pub(super) fn make(&self) -> Result<Vec<File>, String> {
        if let Some(controller) = self.missing {
            return Err(format!(
                "a limit cannot be held: this host gives bcd no control group with the {controller} controller"
            ));
        }
        match self.made() {
            Err(error) if self.settings.is_empty() => {
                say_once(&error);
                Ok(Vec::new())
            }
            made => made.map_err(|error| format!("a limit cannot be held: {error}")),
        }
    }

    fn made(&self) -> io::Result<Vec<File>> {
        let named = |path: &Path| {
            let path = path.to_owned();
            move |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
        };
        let mut entries = Vec::new();
        for group in &self.groups {
            match fs::create_dir(group) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(named(group)(error));
                }
                _ => {}
            }
            let procs = group.join("cgroup.procs");
            entries.push(OpenOptions::new().write(true).open(&procs).map_err(named(&procs))?);
        }
        for setting in &self.settings {
            match write(&setting.file, &setting.value) {
                Err(error) if setting.needed => return Err(named(&setting.file)(error)),
                _ => {}
            }
        }
        Ok(entries)
    }

    /// How many processes of the program the kernel has killed for want of memory; 0 where no group tells.
    pub(super) fn oom_kills(&self) -> u64 {
        self.groups.iter().map(|group| oom_kills(group)).sum()
    }
}

fn say_once(error: &io::Error) {
    super::say(&format!("the program runs without a control group of its own: {error}"));
}

/// v2 and v1 say it in files of different names and with the same words.
fn oom_kills(group: &Path) -> u64 {
    let read = |file: &str| fs::read_to_string(group.join(file)).ok();
    let text = read("memory.events").or_else(|| read("memory.oom_control")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

impl Own {
    fn look() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let mut own = Self::parse(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"));
        own.v2 = own.v2.filter(|dir| may_write(dir));
        own.v1.retain(|(_, dir)| may_write(dir));
        own
    }

    /// In a line of mountinfo, field 4 is what of the hierarchy is mounted, 5 where; behind a lone `-` stand the type,
    /// the source, and the options, among them a v1 hierarchy's controllers. In a line of /proc/self/cgroup stand a
    /// number, the controllers (none for v2) and the group.
    fn parse(mountinfo: &str, own: &str) -> Self {
        let mut found = Self::default();
        for line in mountinfo.lines() {
            let Some((mount, kind)) = line.split_once(" - ") else { continue };
            let mut fields = mount.split(' ').skip(3);
            let (Some(root), Some(place)) = (fields.next(), fields.next()) else { continue };
            let mut kind = kind.split(' ');
            let (kind, options) = (kind.next(), kind.nth(1).unwrap_or_default());
            let dir = |controller: &str| {
                let mut lines = own.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
                let group = lines.find_map(|line| match line[..] {
                    [_, "", group] if controller.is_empty() => Some(group.to_owned()),
                    [_, names, group] if names.split(',').any(|name| name == controller) => {
                        Some(group.to_owned()).filter(|_| !controller.is_empty())
                    }
                    _ => None,
                })?;
                let below = Path::new(&group).strip_prefix(root).ok()?.to_owned();
                Some(Path::new(place).join(below))
            };
            match kind {
                Some("cgroup2") => found.v2 = found.v2.or_else(|| dir("")),
                Some("cgroup") => {
                    let named = options.split(',').filter_map(|name| Some((name.to_owned(), dir(name)?)));
                    found.v1.extend(named);
                }
                _ => {}
            }
        }
        found
    }

    /// Where a controller can be used below this process's own group, and whether that is v2.
    fn controller(&self, name: &str) -> Option<(&Path, bool)> {
        if let Some(v2) = self.v2.as_deref().filter(|v2| enabled(v2, name)) {
            return Some((v2, true));
        }
        self.v1.iter().find(|(controller, _)| controller == name).map(|(_, dir)| (dir.as_path(), false))
    }
}

fn may_write(dir: &Path) -> bool {
    dir.join("cgroup.procs").exists() && rustix::fs::access(dir, rustix::fs::Access::WRITE_OK).is_ok()
}

/// Whether groups below have the controller; enables it where the kernel lets us.
fn enabled(v2: &Path, controller: &str) -> bool {
    let has = |file: &str| {
        let text = fs::read_to_string(v2.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().any(|name| name == controller)
    };
    if has("cgroup.subtree_control") || !has("cgroup.controllers") {
        return has("cgroup.subtree_control");
    }
    let enable = || write(&v2.join("cgroup.subtree_control"), &format!("+{controller}"));
    match enable() {
        // A group with processes of its own hands no controller down. That of a unit started for this supervisor is
        // this process's alone: it steps into a leaf.
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy && launch::is_own_unit(v2) => {
            let leaf = v2.join("supervisor");
            let _ = fs::create_dir(&leaf);
            write(&leaf.join("cgroup.procs"), "0").and_then(|()| enable()).is_ok()
        }
        enabled => enabled.is_ok(),
    }
}

fn write(file: &Path, value: &str) -> io::Result<()> {
    OpenOptions::new().write(true).open(file)?.write_all(value.as_bytes())
}

/// Sends SIGKILL to all that is in the groups.
pub(super) fn kill(groups: &[PathBuf]) {
    for group in groups {
        // An older kernel, and v1, kill one by one; frozen, nothing of the group forks meanwhile.
        if write(&group.join("cgroup.kill"), "1").is_err() && group.exists() {
            let freezer = group.join("freezer.state");
            let _ = write(&freezer, "FROZEN");
            kill_one_by_one(group);
            let _ = write(&freezer, "THAWED");
        }
    }
}

/// The pidfd is opened first and the group is read through the pid afterwards, so no other process is met.
fn kill_one_by_one(group: &Path) {
    let Some(name) = group.file_name().and_then(|name| name.to_str()) else { return };
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
    for pid in text.lines().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)) {
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        if groups.contains(name) {
            let _ = pidfd_send_signal(&pidfd, Signal::KILL);
        }
    }
}

/// Kills what is in the groups until they are empty, and removes them; false when something hangs. Blocks.
pub(crate) fn end(groups: &[PathBuf]) -> bool {
    for _ in 0..EMPTY_ROUNDS {
        kill(groups);
        for group in groups {
            // One that is not empty stays for the next round.
            let _ = fs::remove_dir(group);
        }
        if !groups.iter().any(|group| group.exists()) {
            return true;
        }
        thread::sleep(EMPTY_PAUSE);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 29 0:26 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/freezer rw,relatime - cgroup cgroup rw,freezer
33 30 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
32 30 0:28 /box /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw";

    #[test]
    fn the_own_groups_are_found_below_what_is_mounted_of_each_hierarchy() {
        let own =
            Own::parse(MOUNTS, "9:name=systemd:/x\n6:freezer:/\n2:cpu,cpuacct:/a/b\n0::/box/bcd.service\n");
        assert_eq!(own.v2, Some("/sys/fs/cgroup/unified/bcd.service".into()));
        let dir = |name: &str| own.v1.iter().find(|(found, _)| found == name).map(|(_, dir)| dir.as_path());
        assert_eq!(dir("freezer"), Some(Path::new("/sys/fs/cgroup/freezer/")));
        assert_eq!(dir("cpu"), Some(Path::new("/sys/fs/cgroup/cpu/a/b")));
        assert_eq!(dir("rw"), None);
    }

    #[test]
    fn a_group_outside_of_what_is_mounted_is_none_of_ours() {
        assert_eq!(Own::parse(MOUNTS, "0::/elsewhere\n").v2, None);
        assert_eq!(Own::parse("", "0::/\n"), Own::default());
    }
}
