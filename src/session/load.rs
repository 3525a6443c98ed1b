//! The machine's load for a heartbeat. procfs is memory: reading it waits for no disk.

use std::io::Read as _;

use crate::wire::pb;

/// Reads it; absent where procfs does not say.
pub(crate) fn read(running_commands: usize, pending_events: u64) -> Option<pb::Load> {
    let averages = first_lines("/proc/loadavg")?;
    let memory = first_lines("/proc/meminfo")?;
    Some(pb::Load { pending_events, ..parse(&averages, &memory, running_commands)? })
}

/// What one read gives: procfs says no size, so that reading a file whole takes a dozen.
fn first_lines(path: &str) -> Option<String> {
    let mut lines = vec![0; 256];
    let length = std::fs::File::open(path).ok()?.read(&mut lines).ok()?;
    lines.truncate(length);
    String::from_utf8(lines).ok()
}

fn parse(averages: &str, memory: &str, running_commands: usize) -> Option<pb::Load> {
    let load_averages: Vec<f64> = averages.split(' ').take(3).filter_map(|word| word.parse().ok()).collect();
    let available = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = available.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(pb::Load {
        load_averages,
        available_memory: kib.saturating_mul(1024),
        running_commands: u32::try_from(running_commands).unwrap_or(u32::MAX),
        pending_events: 0,
    })
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
    fn the_kernels_words_become_numbers_with_their_units() {
        let load = parse("0.52 0.58 1.59 2/915 4242\n", "MemTotal: 9 kB\nMemAvailable:   2048 kB\n", 3);
        let load = load.expect("a load");
        assert_eq!(load.load_averages, [0.52, 0.58, 1.59]);
        assert_eq!((load.available_memory, load.running_commands), (2 << 20, 3));
        assert_eq!(parse("0 0 0", "MemTotal: 9 kB", 0), None);
    }
}
