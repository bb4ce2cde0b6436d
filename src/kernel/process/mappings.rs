//! The block devices that a process has mapped so that it can write to them.
//!
//! A mapping keeps its file open after the descriptor is closed. `/proc/PID/maps` shows the
//! file system that has the device's node, and not the device, so the kernel is asked for
//! the file itself (`map_files`, which needs `CAP_SYS_ADMIN`, or `CAP_CHECKPOINT_RESTORE`
//! from Linux 5.9). A private mapping writes nothing to its file.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;

use super::descriptors::unless_denied;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::{Roots, proc_file};

/// How the kernel names the memory that a process shares with an `io_uring`.
const RING: &str = "anon_inode:[io_uring]";

/// What was found in the mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mapped {
    /// The devices to which it can write by a mapping.
    pub(super) devices: Vec<NumberedDevice>,
    /// Whether it has a ring mapped: a ring still works after its descriptor is closed.
    pub(super) has_ring: bool,
}

/// A look at the mappings of several processes. Processes of one program have the same files
/// mapped, so each file is asked for once.
#[derive(Debug, Default)]
pub(super) struct Mappings {
    text: Vec<u8>,
    /// The device of each file, by what `maps` says of the file.
    known: BTreeMap<String, Option<NumberedDevice>>,
}

impl Mappings {
    /// The mappings of the process of this directory in `/proc`. **May block** while
    /// another thread changes the process's memory and waits for a file server.
    pub(super) fn read(&mut self, roots: &Roots, process: &Path, is_complete: &mut bool) -> Mapped {
        let read = proc_file::read_into(&process.join("maps"), &mut self.text);
        let mut mapped = Mapped::default();
        if unless_denied(read, is_complete).is_none() {
            return mapped;
        }
        let text = String::from_utf8_lossy(&self.text);
        for (addresses, file) in text.lines().filter_map(writable) {
            if file.ends_with(RING) {
                mapped.has_ring = true;
                continue;
            }
            let device = if let Some(known) = self.known.get(file) {
                *known
            } else {
                let link = process.join("map_files").join(addresses);
                let Some(found) = unless_denied(device(roots, &link), is_complete) else {
                    continue;
                };
                self.known.insert(file.to_owned(), found);
                found
            };
            mapped.devices.extend(device);
        }
        mapped
    }
}

/// The device that is mapped there; `None` if something else is.
fn device(roots: &Roots, link: &Path) -> io::Result<Option<NumberedDevice>> {
    let is_denied = |error: &io::Error| error.raw_os_error() == Some(Errno::EPERM as i32);
    match roots.devices.device_at(link) {
        // The file's own file system denies the look, as a FUSE mount may. Such a file is
        // no disk of this machine.
        Err(error) if !is_denied(&error) && fs::read_link(link).is_ok() => Ok(None),
        found => found,
    }
}

/// The addresses and the file of a line of `maps`, if a write to the mapping is a write to
/// the file. `map_files` has the addresses without leading zeros.
fn writable(line: &str) -> Option<(String, &str)> {
    let (addresses, rest) = line.split_once(' ')?;
    let (permissions, rest) = rest.split_once(' ')?;
    let (_offset, file) = rest.split_once(' ')?;
    let [_, b'w', _, b's'] = permissions.as_bytes() else {
        return None;
    };
    let (first, last) = addresses.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let addresses = format!("{:x}-{:x}", number(first)?, number(last)?);
    Some((addresses, file))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn only_a_shared_writable_mapping_counts_as_a_writer() {
        let file = "00:05 123                        /dev/sda";
        let line = |permissions: &str| format!("00400000-7f00a000 {permissions} 00001000 {file}");
        let shared = line("rw-s");
        let found = writable(&shared);
        assert_eq!(found, Some(("400000-7f00a000".to_owned(), file)));
        assert!(writable(&line("-w-s")).is_some());
        for other in ["r--s", "rw-p", "r-xp", "---s"] {
            assert_eq!(writable(&line(other)), None, "{other}");
        }
        assert_eq!(writable("damaged"), None);
    }

    struct Process {
        _root: tempfile::TempDir,
        roots: Roots,
        path: PathBuf,
    }

    fn process(maps: &str, device: &str) -> Process {
        let root = tempfile::tempdir().unwrap();
        let mut roots = Roots::below(root.path());
        let path = roots.proc.join("7");
        fs::create_dir_all(path.join("map_files")).unwrap();
        fs::write(path.join("maps"), maps).unwrap();
        let link = path.join("map_files").join(device);
        let named: &'static str = link.to_str().unwrap().to_owned().leak();
        roots.devices = Devices::Other(Arc::new(Named(named, SDA)));
        Process {
            _root: root,
            roots,
            path,
        }
    }

    #[test]
    fn the_device_of_a_mapping_is_asked_for_once_and_a_ring_is_no_device() {
        let maps = "1000-2000 rw-s 00000000 00:05 123    /dev/sda\n\
                    3000-4000 rw-s 00000000 00:0f 9      anon_inode:[io_uring]\n\
                    5000-6000 rw-p 00000000 00:05 124    /dev/sdb\n";
        let process = process(maps, "1000-2000");
        let mut mappings = Mappings::default();
        let mut is_complete = true;
        let both = Mapped {
            devices: vec![NumberedDevice::Block(SDA)],
            has_ring: true,
        };
        let mut read = || mappings.read(&process.roots, &process.path, &mut is_complete);
        assert_eq!(read(), both);
        let roots = Roots {
            devices: Devices::default(),
            ..process.roots.clone()
        };
        let again = mappings.read(&roots, &process.path, &mut is_complete);
        assert_eq!(again, both);
        assert!(is_complete);
    }

    #[test]
    fn an_unreadable_mapping_makes_the_look_incomplete_and_a_removed_mapping_does_not() {
        let maps = "1000-2000 rw-s 00000000 00:05 123    /dev/sda\n";
        let gone = process(maps, "none");
        let mut is_complete = true;
        let look = |process: &Process, is_complete: &mut bool| {
            Mappings::default().read(&process.roots, &process.path, is_complete)
        };
        assert_eq!(look(&gone, &mut is_complete), Mapped::default());
        assert!(is_complete);
        let maps = process(maps, "none");
        fs::remove_dir(maps.path.join("map_files")).unwrap();
        fs::write(maps.path.join("map_files"), "").unwrap();
        assert_eq!(look(&maps, &mut is_complete), Mapped::default());
        assert!(!is_complete);
    }
}
