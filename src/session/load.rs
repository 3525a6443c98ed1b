//! The machine's load for a heartbeat. procfs is memory: reading it waits for no disk.

use std::io::Read as _;

use nix::sys::sysinfo::sysinfo;

use crate::wire::pb;

/// Reads it; absent where the kernel does not say.
pub(crate) fn read(running_commands: usize, pending_events: u64) -> Option<pb::Load> {
    let (one, five, fifteen) = sysinfo().ok()?.load_average();
    Some(pb::Load {
        load_averages: vec![one, five, fifteen],
        available_memory: available(&first_lines("/proc/meminfo")?)?,
        running_commands: u32::try_from(running_commands).unwrap_or(u32::MAX),
        pending_events,
    })
}

/// What one read gives: procfs says no size, so that reading a file whole takes a dozen.
fn first_lines(path: &str) -> Option<String> {
    let mut lines = vec![0; 256];
    let length = std::fs::File::open(path).ok()?.read(&mut lines).ok()?;
    lines.truncate(length);
    String::from_utf8(lines).ok()
}

/// Memory that programs can have without swapping, bytes; the call that gives the averages knows only what is free.
fn available(meminfo: &str) -> Option<u64> {
    let available = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = available.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_it_in_the_lines_that_are_read() {
        let load = read(2, 1).expect("a load");
        assert_eq!((load.load_averages.len(), load.running_commands, load.pending_events), (3, 2, 1));
        assert!(load.available_memory > 1 << 20, "{load:?}");
    }

    #[test]
    fn the_averages_are_those_of_procfs() {
        // They change every five seconds: the two may be read on either side of that.
        let same = (0..5).any(|_| {
            let text = std::fs::read_to_string("/proc/loadavg").expect("procfs");
            let shown: Vec<f64> =
                text.split(' ').take(3).map(|word| word.parse().expect("a number")).collect();
            let load = read(0, 0).expect("a load");
            load.load_averages.iter().zip(&shown).all(|(ours, shown)| (ours - shown).abs() <= 0.011)
        });
        assert!(same);
    }

    #[test]
    fn the_kernels_words_become_bytes() {
        assert_eq!(available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n"), Some(2 << 20));
        assert_eq!(available("MemTotal: 9 kB"), None);
    }
}
