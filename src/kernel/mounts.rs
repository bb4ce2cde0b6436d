//! The mounts and swap areas that `/proc` lists.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::btrfs_devices::BtrfsDevices;
use super::file_servers::FileServers;
use super::mount_sources::MountSourceLookup;
use super::{Roots, namespace, proc_file, process};
use crate::deadline::Deadline;
use crate::error::{ErrorKind, Result};
use crate::id::DevNo;

/// One mount of a block device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Mount {
    /// The mounted device.
    pub device: DevNo,
    /// The mount point, as the process `pid` sees it.
    pub path: PathBuf,
    /// A process in the mount namespace of the mount; `None` for our own namespace.
    pub pid: Option<u32>,
}

/// What was read about mounts or swap areas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed<T> {
    /// The mounts or swap areas of block devices.
    pub found: Vec<T>,
    /// Source paths of other mounts or swap areas. They lead through a file server that
    /// does not answer, so their device is unknown.
    pub unknown: Vec<PathBuf>,
}

/// The mounts of all block devices, in our own mount namespace and in those of all
/// readable processes. A mount of a btrfs is listed for each of its devices. Each lookup of a
/// source path takes at most two seconds, and all together end by `deadline`.
pub fn read_mounts(roots: &Roots, deadline: Deadline) -> Result<Listed<Mount>> {
    let mut namespaces = BTreeSet::new();
    let namespace = |process: &Path| namespace::inode(process, "mnt");
    let mut found = Vec::new();

    let own = roots.proc.join("self");
    namespaces.extend(namespace(&own).ok());
    let text = proc_file::read_text(&own.join("mountinfo"))?;
    // A source is looked up in our own namespace, whichever process mounted it.
    let servers = FileServers::of_mounts(points(&text));
    let mut sources = MountSourceLookup::new(roots, servers, deadline);
    found.extend(parse_mountinfo(&text, None, &mut sources));

    for pid in process::program_pids(roots)? {
        let process = roots.proc.join(pid.to_string());
        // Skip a process that has ended or that we may not read. Another one may have its
        // namespace.
        let Ok(inode) = namespace(&process) else {
            continue;
        };
        if namespaces.contains(&inode) {
            continue;
        }
        if let Ok(text) = proc_file::read_text(&process.join("mountinfo")) {
            namespaces.insert(inode);
            found.extend(parse_mountinfo(&text, Some(pid), &mut sources));
        }
    }
    let unknown = sources.unknown();
    let btrfs = BtrfsDevices::read(roots)?;
    let on_others = found.iter().flat_map(|mount| {
        let others = btrfs.beside(mount.device);
        others.map(move |device| Mount {
            device,
            ..mount.clone()
        })
    });
    let on_others: Vec<Mount> = on_others.collect();
    found.extend(on_others);
    Ok(Listed { found, unknown })
}

/// The mounts in our mount namespace, and which of them are on file servers.
pub(crate) fn read_file_servers(roots: &Roots) -> Result<FileServers> {
    let text = proc_file::read_text(&roots.proc.join("self/mountinfo"))?;
    Ok(FileServers::of_mounts(points(&text)))
}

/// The options of the file system that is mounted at `point`.
pub(crate) fn read_options(roots: &Roots, point: &Path) -> Result<String> {
    read_field(roots, point, 2)
}

/// The type of the file system that is mounted at `point`; empty if none is.
pub(crate) fn read_type(roots: &Roots, point: &Path) -> Result<String> {
    read_field(roots, point, 0)
}

/// A field after the dash, of the last file system mounted at `point`.
fn read_field(roots: &Roots, point: &Path, field: usize) -> Result<String> {
    let text = proc_file::read_text(&roots.proc.join("self/mountinfo"))?;
    let mut fields = text.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let is_it = Path::new(&unescape(mount.split(' ').nth(4)?)) == point;
        is_it.then(|| file_system.split(' ').nth(field)).flatten()
    });
    Ok(fields.next_back().unwrap_or_default().to_owned())
}

/// The mount points, each with its file system type.
fn points(text: &str) -> impl Iterator<Item = (&str, PathBuf)> {
    text.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let point = unescape(mount.split(' ').nth(4)?);
        Some((file_system.split(' ').next()?, PathBuf::from(point)))
    })
}

/// The mounts of block devices in a `mountinfo` (proc(5)). It finds the device by its
/// number or, for file systems with a number of their own (btrfs), by the source's node.
fn parse_mountinfo(
    text: &str,
    pid: Option<u32>,
    sources: &mut MountSourceLookup<'_>,
) -> Vec<Mount> {
    let parse = |line: &str| {
        let mut fields = line.split(' ');
        let device: DevNo = fields.nth(2)?.parse().ok()?;
        let path = PathBuf::from(unescape(fields.nth(1)?));
        // A dash ends the optional fields; type and source follow.
        let mut rest = fields.skip_while(|&field| field != "-");
        let source = unescape(rest.nth(2)?);
        let device = if device.major == 0 {
            sources.number_at(Path::new(&source))?
        } else {
            device
        };
        Some(Mount { device, path, pid })
    };
    text.lines().filter_map(parse).collect()
}

/// Undoes the kernel's `\ooo` for blanks and backslashes.
fn unescape(field: &str) -> String {
    let mut out = String::with_capacity(field.len());
    let mut rest = field;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let code = after
            .get(..3)
            .and_then(|octal| u8::from_str_radix(octal, 8).ok());
        if let Some(code) = code {
            out.push(char::from(code));
            rest = after.get(3..).unwrap_or_default();
        } else {
            out.push('\\');
            rest = after;
        }
    }
    out.push_str(rest);
    out
}

/// The block devices in use as swap. Lookups are limited as in [`read_mounts`].
pub fn read_swaps(roots: &Roots, deadline: Deadline) -> Result<Listed<DevNo>> {
    let none = Listed {
        found: Vec::new(),
        unknown: Vec::new(),
    };
    let text = match proc_file::read_text(&roots.proc.join("swaps")) {
        Ok(text) => text,
        // The kernel has no swap.
        Err(error) if error.kind() == ErrorKind::Vanished => return Ok(none),
        Err(error) => return Err(error),
    };
    let paths = text.lines().skip(1).filter_map(|line| {
        let path = line.split_ascii_whitespace().next()?;
        Some(PathBuf::from(unescape(path)))
    });
    let paths: Vec<PathBuf> = paths.collect();
    if paths.is_empty() {
        return Ok(none);
    }
    let mut sources = MountSourceLookup::new(roots, read_file_servers(roots)?, deadline);
    let numbers = paths.iter().filter_map(|path| sources.number_at(path));
    let found = numbers.collect();
    let unknown = sources.unknown();
    Ok(Listed { found, unknown })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    #[test]
    fn a_mount_is_found_by_its_device_number_and_its_path_is_unescaped() {
        let text = "36 35 8:16 / /mnt/a\\040b rw,noatime shared:1 - ext4 /dev/sdb rw\n\
                    37 35 0:22 / /proc rw - proc proc rw\n\
                    garbage\n";
        let roots = Roots::default();
        let soon = Deadline::after(std::time::Duration::from_secs(600));
        let mut sources = MountSourceLookup::new(&roots, FileServers::default(), soon);
        assert_eq!(
            parse_mountinfo(text, Some(7), &mut sources),
            [Mount {
                device: DevNo {
                    major: 8,
                    minor: 16
                },
                path: PathBuf::from("/mnt/a b"),
                pid: Some(7),
            }]
        );
    }

    #[test]
    fn a_btrfs_is_mounted_on_each_of_its_devices() {
        let root = tempfile::tempdir().unwrap();
        let devno = |minor| DevNo { major: 8, minor };
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", devno(0)))),
            ..Roots::below(root.path())
        };
        let put = |path: PathBuf, text: &str| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let line = "36 35 0:50 /a /mnt rw - btrfs /dev/sda rw,subvol=/a\n";
        put(roots.proc.join("self/mountinfo"), line);
        let btrfs = roots.sysfs.join("fs/btrfs");
        put(btrfs.join("features/raid56"), "0\n");
        for (uuid, name, minor) in [
            ("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "sda", 0),
            ("0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "sdb", 16),
            ("1a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9", "sdc", 32),
        ] {
            let number = format!("8:{minor}\n");
            put(roots.sysfs.join(format!("block/{name}/dev")), &number);
            let links = btrfs.join(uuid).join("devices");
            fs::create_dir_all(&links).unwrap();
            let target = format!("../../../../block/{name}");
            std::os::unix::fs::symlink(target, links.join(name)).unwrap();
        }
        let soon = Deadline::after(std::time::Duration::from_secs(60));
        let mounts = read_mounts(&roots, soon).unwrap();
        let mounted = |device| Mount {
            device,
            path: PathBuf::from("/mnt"),
            pid: None,
        };
        assert_eq!(mounts.found, [devno(0), devno(16)].map(mounted));
    }

    #[test]
    fn a_path_whose_lookup_hangs_is_given_up_and_named() {
        let root = tempfile::tempdir().unwrap();
        let devno = DevNo { major: 8, minor: 0 };
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", devno))),
            ..Roots::below(root.path())
        };
        let put = |name: &str, text: &str| {
            let path = roots.proc.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let line = |point| format!("36 35 0:22 / {point} rw - tmpfs /link/hangs rw\n");
        put("self/mountinfo", &[line("/a"), line("/b")].concat());
        put("swaps", "Filename Type\n/other/hangs file\n");
        let soon = Deadline::after(std::time::Duration::from_secs(4));
        let mounts = read_mounts(&roots, soon).unwrap();
        assert_eq!(mounts.unknown, [PathBuf::from("/link/hangs")]);
        assert_eq!(mounts.found, []);
        let swaps = read_swaps(&roots, soon).unwrap();
        assert_eq!(swaps.unknown, [PathBuf::from("/other/hangs")]);
    }

    #[test]
    fn the_files_of_a_server_are_known_by_the_type_of_their_mount() {
        let text = "36 35 8:16 / / rw - ext4 /dev/sdb rw\n\
                    37 36 0:52 / /srv/a\\040b rw shared:1 - nfs4 server:/a rw\n\
                    38 36 0:53 / /home/x rw - fuse.sshfs x rw\n\
                    39 36 0:54 / /run rw - tmpfs tmpfs rw\n";
        let servers = FileServers::of_mounts(points(text));
        let have = |path: &str| servers.contains(Path::new(path));
        assert!(have("/srv/a b/disk") && have("/home/x"));
        assert!(!have("/srv/a") && !have("/run/x") && !have("/dev/sda"));
    }

    #[test]
    fn below_a_root_of_a_server_the_nearest_mount_and_there_the_last_decides() {
        let text = "36 35 0:52 / / rw - nfs server:/a rw\n\
                    37 36 0:6 / /dev rw - devtmpfs devtmpfs rw\n\
                    38 36 0:53 / /boot rw - autofs systemd-1 rw\n\
                    39 38 8:17 / /boot rw - ext4 /dev/sdb1 rw\n\
                    40 37 0:54 / /dev/shm rw - tmpfs tmpfs rw\n\
                    41 40 0:55 / /dev/shm rw - fuse x rw\n";
        let servers = FileServers::of_mounts(points(text));
        let have = |path: &str| servers.contains(Path::new(path));
        assert!(!have("/dev/sda") && !have("/boot/disk"));
        assert!(have("/srv/disk") && have("/device") && have("/dev/shm/disk"));
    }

    #[test]
    fn a_backslash_that_begins_no_code_stays() {
        assert_eq!(unescape("a\\b\\0"), "a\\b\\0");
        assert_eq!(unescape("\\134"), "\\");
    }
}
