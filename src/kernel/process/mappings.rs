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

use super::descriptors::{has_gone, unless_denied};
use crate::kernel::devices::NumberedDevice;
use crate::kernel::{Roots, proc_file};

/// How the kernel names the memory that a process shares with an `io_uring`.
const RING: &str = "anon_inode:[io_uring]";

/// How many times the mappings are read while one goes meanwhile.
const MAX_READS: usize = 16;

/// What was found in the mappings of a process.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mapped {
    /// Whether nothing is mapped: the thread ends, or is one of the kernel.
    pub(super) is_empty: bool,
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
    /// The mappings of the thread of this directory in `/proc`. `None` if it has gone. **May
    /// block** while another thread changes the process's memory and waits for a file server.
    pub(super) fn read(
        &mut self,
        roots: &Roots,
        thread: &Path,
        is_complete: &mut bool,
    ) -> Option<Mapped> {
        let mut mapped = Mapped::default();
        for _ in 0..MAX_READS {
            mapped = Mapped::default();
            let read = proc_file::read_into(&thread.join("maps"), &mut self.text);
            unless_denied(read, is_complete)?;
            if self.add(roots, thread, &mut mapped, is_complete) {
                return Some(mapped);
            }
        }
        *is_complete = false;
        Some(mapped)
    }

    /// Adds the mappings that were read. `false` if one has gone: it may have become two, or a
    /// part of another one.
    fn add(
        &mut self,
        roots: &Roots,
        process: &Path,
        mapped: &mut Mapped,
        is_complete: &mut bool,
    ) -> bool {
        mapped.is_empty = self.text.is_empty();
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
                match device(roots, &link) {
                    Ok(found) => {
                        self.known.insert(file.to_owned(), found);
                        found
                    }
                    Err(error) if has_gone(&error) => return false,
                    Err(_) => {
                        *is_complete = false;
                        continue;
                    }
                }
            };
            mapped.devices.extend(device);
        }
        true
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
    use std::fs::OpenOptions;
    use std::io::Write as _;
    use std::path::PathBuf;
    use std::sync::Arc;
    use std::thread;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

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
            is_empty: false,
            devices: vec![NumberedDevice::Block(SDA)],
            has_ring: true,
        };
        let mut read = || mappings.read(&process.roots, &process.path, &mut is_complete);
        assert_eq!(read().as_ref(), Some(&both));
        let roots = Roots {
            devices: Devices::default(),
            ..process.roots.clone()
        };
        let again = mappings.read(&roots, &process.path, &mut is_complete);
        assert_eq!(again, Some(both));
        assert!(is_complete);
    }

    #[test]
    fn a_mapping_that_the_kernel_does_not_show_makes_the_look_incomplete() {
        let line = "1000-2000 rw-s 00000000 00:05 123    /dev/sda\n";
        let look = |process: &Process| {
            let mut is_complete = true;
            let mut mappings = Mappings::default();
            let mapped = mappings
                .read(&process.roots, &process.path, &mut is_complete)
                .unwrap();
            (mapped.devices, is_complete)
        };
        let changing = process(line, "none");
        assert_eq!(
            look(&changing),
            (Vec::new(), false),
            "listed, and not there"
        );
        let denied = process(line, "none");
        fs::remove_dir(denied.path.join("map_files")).unwrap();
        fs::write(denied.path.join("map_files"), "").unwrap();
        assert_eq!(look(&denied), (Vec::new(), false));
    }

    #[test]
    fn the_mappings_are_read_again_if_one_goes_meanwhile() {
        let whole = "1000-3000 rw-s 00000000 00:05 123    /dev/sda\n";
        let split = "1000-2000 r--s 00000000 00:05 123    /dev/sda\n\
                     2000-3000 rw-s 00001000 00:05 123    /dev/sda\n";
        let process = process(whole, "2000-3000");
        // The first read waits in this pipe.
        let maps = process.path.join("maps");
        fs::remove_file(&maps).unwrap();
        mkfifo(&maps, Mode::S_IRWXU).unwrap();
        let mut is_complete = true;
        let mapped = thread::scope(|scope| {
            scope.spawn(|| {
                let mut pipe = OpenOptions::new().write(true).open(&maps).unwrap();
                fs::remove_file(&maps).unwrap();
                fs::write(&maps, split).unwrap();
                pipe.write_all(whole.as_bytes()).unwrap();
            });
            Mappings::default().read(&process.roots, &process.path, &mut is_complete)
        });
        assert_eq!(mapped.unwrap().devices, [NumberedDevice::Block(SDA)]);
        assert!(is_complete);
    }
}
