//! The fixed files of an `io_uring`: those that a process has registered with it, and whose
//! descriptors it may have closed since.
//!
//! The kernel shows them in the `fdinfo` of the ring (`io_uring/fdinfo.c`). Up to Linux 6.13
//! it shows the last component of a file's path, and later the path. It shows them only if
//! no thread holds the ring's lock at that moment.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use super::descriptors::fdinfo_path;
use crate::kernel::Roots;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::machine::kernel_version;

/// How often a ring is read while a thread holds its lock: a submission takes the lock for a
/// moment, again and again.
const TRIES: usize = 64;

/// From this version on the kernel shows nothing of a ring while its lock is held. Earlier
/// versions left out the files alone.
const SHOWS_ALL_OR_NOTHING: (u32, u32) = (6, 16);

/// Whether the link of a descriptor says that it is a ring.
pub(super) fn is_ring(link: &Path) -> bool {
    link == Path::new("anon_inode:[io_uring]")
}

/// The devices of `wanted` that are fixed files of this ring of a process, whose directory in
/// `/proc` is `process`. **May block** if the path of a file leads to a file server.
pub(super) fn fixed_files(
    roots: &Roots,
    process: &Path,
    ring: &Path,
    wanted: &[NumberedDevice],
    is_complete: &mut bool,
) -> Vec<NumberedDevice> {
    let Some(fdinfo) = fdinfo_path(ring) else {
        return Vec::new();
    };
    let is_all = || kernel_version(roots).is_ok_and(|version| version >= SHOWS_ALL_OR_NOTHING);
    for _ in 0..TRIES {
        // If the descriptor has gone, another thread or a mapping may still have the ring.
        let Ok(text) = fs::read_to_string(&fdinfo) else {
            break;
        };
        if let Some(names) = names(&text, &is_all) {
            let found = names.into_iter();
            return found
                .filter_map(|name| device(roots, process, name, wanted))
                .collect();
        }
        thread::yield_now();
    }
    *is_complete = false;
    Vec::new()
}

/// The names of the files that the kernel shows; `None` if the ring's lock was held.
fn names<'a>(text: &'a str, is_all: &dyn Fn() -> bool) -> Option<Vec<&'a str>> {
    let mut lines = text.lines();
    let count = lines.find_map(|line| line.strip_prefix("UserFiles:"))?;
    let of_files = lines.take_while(|line| !line.starts_with("UserBufs:"));
    let shown: Vec<&str> = of_files
        .filter_map(|line| line.split_once(": ").map(|(_, name)| name))
        .collect();
    // Newer kernels leave out the empty places of a table.
    if shown.is_empty() && count.trim() != "0" && !is_all() {
        return None;
    }
    Some(shown.into_iter().filter(|name| *name != "<none>").collect())
}

/// The device of `wanted` with this name or path. If the path leads nowhere from here, the
/// device's own name decides.
fn device(
    roots: &Roots,
    process: &Path,
    name: &str,
    wanted: &[NumberedDevice],
) -> Option<NumberedDevice> {
    // `seq_file_path` escapes the blank (`fs/seq_file.c`).
    let name = name.trim_end_matches("\\040(deleted)");
    let root = process.join("root");
    let path = match name.strip_prefix('/') {
        Some(path) => root.join(path),
        None => root.join("dev").join(name),
    };
    if let Ok(found) = roots.devices.device_at(&path)
        && (found.is_some() || name.starts_with('/'))
    {
        return found.filter(|device| wanted.contains(device));
    }
    let last = Path::new(name).file_name();
    let mut wanted = wanted.iter().copied();
    wanted.find(|device| kernel_name(roots, *device).as_deref() == last)
}

/// The kernel's name of a device: `sda1`.
fn kernel_name(roots: &Roots, device: NumberedDevice) -> Option<std::ffi::OsString> {
    let (kind, number) = match device {
        NumberedDevice::Block(number) => ("block", number),
        NumberedDevice::Character(number) => ("char", number),
    };
    let link = roots.sysfs.join("dev").join(kind).join(number.to_string());
    let path: PathBuf = fs::read_link(link).ok()?;
    path.file_name().map(OsStr::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::Arc;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn the_files_of_a_ring_are_read_as_each_kernel_shows_them() {
        let old = "pos:\t0\nSqThread:\t-1\nUserFiles:\t3\n    0: <none>\n    1: sda\n    2: a: b\n\
                   UserBufs:\t1\n    0: 0x1000/4096\nPollList:\n";
        let locked = "UserFiles:\t3\nUserBufs:\t0\nPollList:\n";
        assert_eq!(names(old, &|| false), Some(vec!["sda", "a: b"]));
        assert_eq!(names(locked, &|| false), None);
        assert_eq!(names(locked, &|| true), Some(vec![]), "an empty table");
        let none = "UserFiles:\t0\nUserBufs:\t0\n";
        assert_eq!(names(none, &|| false), Some(vec![]));
        let new = "UserFiles:\t3\n    1: /dev/sda\nUserBufs:\t0\n";
        assert_eq!(names(new, &|| true), Some(vec!["/dev/sda"]));
        let locked = "pos:\t0\nflags:\t02000002\n";
        assert_eq!(names(locked, &|| true), None);
    }

    #[test]
    fn a_ring_that_the_kernel_does_not_show_makes_the_look_incomplete() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let process = roots.proc.join("7");
        fs::create_dir_all(process.join("fdinfo")).unwrap();
        let ring = process.join("fd/3");
        let look = || {
            let mut is_complete = true;
            let files = fixed_files(&roots, &process, &ring, &[], &mut is_complete);
            assert!(files.is_empty(), "{files:?}");
            is_complete
        };
        assert!(!look(), "its descriptor has gone");
        fs::write(process.join("fdinfo/3"), "flags:\t02\n").unwrap();
        assert!(!look(), "its lock is never free");
        fs::write(process.join("fdinfo/3"), "UserFiles:\t0\n").unwrap();
        assert!(look());
    }

    #[test]
    fn a_file_is_known_by_its_path_and_where_that_leads_nowhere_by_its_name() {
        let root = tempfile::tempdir().unwrap();
        let mut roots = Roots::below(root.path());
        let process = roots.proc.join("7");
        let dev = process.join("root/dev");
        fs::create_dir_all(&dev).unwrap();
        fs::write(dev.join("sdz"), "").unwrap();
        let named: &'static str = dev.join("disk").to_str().unwrap().to_owned().leak();
        roots.devices = Devices::Other(Arc::new(Named(named, SDA)));
        let numbers = roots.sysfs.join("dev/block");
        fs::create_dir_all(&numbers).unwrap();
        symlink("../../devices/x/block/sda", numbers.join("8:0")).unwrap();
        let wanted = [NumberedDevice::Block(SDA)];
        let found = |name| device(&roots, &process, name, &wanted);
        for name in [
            "/dev/disk",
            "disk",
            "/dev/sda",
            "sda",
            "/dev/sda\\040(deleted)",
        ] {
            assert_eq!(found(name), Some(wanted[0]), "{name}");
        }
        for name in ["/dev/sdz", "sdz", "/dev/sdb", "anon_inode:[eventfd]"] {
            assert_eq!(found(name), None, "{name}");
        }
    }
}
