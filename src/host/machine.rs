//! What tells this machine from others, read from its files.

use std::path::{Path, PathBuf};

use crate::model::{Digest, Machine};

/// The files are longer on no machine; what is longer is none of them.
const FILE_BYTES: u64 = 64 << 10;
/// A root file system lies on a partition of a mapped disk of an array, and hardly on more.
const LAYERS: usize = 8;

/// Reads the traces of the machine whose file system begins at `root`. Blocks.
pub fn read(root: &Path) -> Machine {
    let digest = |what: &str, value: String| Digest::of(format!("{what}:{value}").as_bytes());
    Machine {
        dmi_uuid: text(&root.join("sys/class/dmi/id/product_uuid"))
            .map(|uuid| uuid.to_ascii_lowercase())
            .filter(|uuid| is_one_of_a_kind(uuid))
            .map(|uuid| digest("dmi", uuid)),
        root_disk: root_disk(root).map(|disk| digest("disk", disk)),
        machine_id: text(&root.join("etc/machine-id")).map(|id| digest("machine-id", id)),
    }
}

/// Firmware that was never given a UUID has one that every such board has.
fn is_one_of_a_kind(uuid: &str) -> bool {
    let digits: String = uuid.chars().filter(|c| *c != '-').collect();
    let one = |digit: char| digits.chars().all(|c| c == digit);
    digits.len() == 32 && !one('0') && !one('f') && uuid != "03000200-0400-0500-0006-000700080009"
}

/// The content of a small file, trimmed; absent where there is nothing in it.
fn text(path: &Path) -> Option<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path).ok()?.take(FILE_BYTES).read_to_string(&mut text).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

/// The name that the root file system's disk has by itself, wherever it is plugged in. A file system's UUID would not do:
/// the copy of a disk has it too.
fn root_disk(root: &Path) -> Option<String> {
    let mounts = text(&root.join("proc/self/mountinfo"))?;
    // The last one covers those before it.
    let mount = mounts.lines().rev().find(|line| line.split(' ').nth(4) == Some("/"))?;
    let number = mount.split(' ').nth(2)?;
    let source = mount.split_once(" - ").and_then(|(_, rest)| rest.split(' ').nth(1));
    let source = source.and_then(|source| source.strip_prefix("/dev/"));
    // A file system of several devices has a number of its own, and names one of them.
    let by_number = root.join("sys/dev/block").join(number);
    let by_name = source.map(|name| root.join("sys/class/block").join(name));
    let device = Some(by_number).filter(|path| path.exists()).or(by_name.filter(|path| path.exists()));
    disk_name(&device?.canonicalize().ok()?)
}

/// The name of a block device, or of the first of those that it lies on.
fn disk_name(device: &Path) -> Option<String> {
    let mut device = device.to_owned();
    for _ in 0..LAYERS {
        if device.join("partition").exists() {
            device = device.parent()?.to_owned();
            continue;
        }
        for file in ["wwid", "device/wwid", "serial", "device/serial"] {
            if let Some(name) = text(&device.join(file)) {
                return Some(name);
            }
        }
        device = below(&device)?;
    }
    None
}

/// What a mapped device or an array lies on.
fn below(device: &Path) -> Option<PathBuf> {
    let slaves = std::fs::read_dir(device.join("slaves")).ok()?.flatten();
    let first = slaves.map(|slave| slave.path()).min()?;
    first.canonicalize().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    /// A disk with one partition that holds the root file system.
    fn tree(serial: &str) -> tempfile::TempDir {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path();
        write(root, "sys/class/dmi/id/product_uuid", "4C4C4544-0042-3510-8052-B4C04F4E3132\n");
        write(root, "etc/machine-id", "b08dfa6083e7567a1921a715000001fb\n");
        write(
            root,
            "proc/self/mountinfo",
            "21 1 8:2 / / rw - ext4 /dev/sda2 rw\n30 21 0:5 / /proc rw - proc proc rw\n",
        );
        write(root, "sys/devices/sda/sda2/partition", "2\n");
        write(root, "sys/devices/sda/device/wwid", serial);
        std::fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        symlink("../../devices/sda/sda2", root.join("sys/dev/block/8:2")).unwrap();
        temp
    }

    #[test]
    fn the_root_disk_is_named_by_itself_through_partitions_and_mappings() {
        let plain = read(tree("naa.5000\n").path());
        assert!(plain.dmi_uuid.is_some() && plain.machine_id.is_some());
        assert_ne!(plain.root_disk, read(tree("naa.6000\n").path()).root_disk);

        let mapped = tree("naa.5000\n");
        let root = mapped.path();
        std::fs::create_dir_all(root.join("sys/devices/dm-0/slaves")).unwrap();
        symlink("../../sda/sda2", root.join("sys/devices/dm-0/slaves/sda2")).unwrap();
        symlink("../../devices/dm-0", root.join("sys/dev/block/253:0")).unwrap();
        write(root, "proc/self/mountinfo", "21 1 253:0 / / rw - ext4 /dev/mapper/root rw\n");
        assert_eq!(read(root).root_disk, plain.root_disk);
        // A file system with a number of its own.
        std::fs::create_dir_all(root.join("sys/class/block")).unwrap();
        symlink("../../devices/sda/sda2", root.join("sys/class/block/sda2")).unwrap();
        write(root, "proc/self/mountinfo", "21 1 0:33 /@ / rw - btrfs /dev/sda2 rw\n");
        assert_eq!(read(root).root_disk, plain.root_disk);
    }

    #[test]
    fn a_disk_without_a_name_is_not_known_by_its_file_system_which_its_copy_has_too() {
        let nameless = tree("\n");
        let root = nameless.path();
        std::fs::create_dir_all(root.join("dev/disk/by-uuid")).unwrap();
        symlink("../../sda2", root.join("dev/disk/by-uuid/1b4e28ba")).unwrap();
        assert_eq!(read(root).root_disk, None);
    }

    #[test]
    fn a_uuid_that_every_such_board_has_and_a_machine_without_files_tell_nothing() {
        let temp = tree("naa.5000\n");
        for uuid in ["00000000-0000-0000-0000-000000000000", "03000200-0400-0500-0006-000700080009", "None"] {
            write(temp.path(), "sys/class/dmi/id/product_uuid", uuid);
            assert_eq!(read(temp.path()).dmi_uuid, None, "{uuid}");
        }
        assert_eq!(read(Path::new("/nowhere")), Machine::default());
    }
}
