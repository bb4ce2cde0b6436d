//! Loop devices that a block device backs.

use std::path::Path;

use super::{Roots, file_server_lookup, sysfs};
use crate::deadline::Deadline;
use crate::error::{Error, Result, Stage};
use crate::id::DevNo;

#[derive(Debug, Default)]
pub(crate) struct Loops {
    /// The loop devices' names, each with the device that backs it.
    pub(crate) found: Vec<(String, DevNo)>,
    /// Names of the loop devices whose backing is unknown.
    pub(crate) unknown: Vec<String>,
}

/// The loop devices that one of `devices` backs. sysfs shows only a path, as the
/// process that set the loop device up saw it. So this asks the kernel for the device's
/// number.
///
/// It passes over a loop device whose path is on a file server, because a file there is
/// no disk of this machine. If the path does not show that (its mount is in another
/// mount namespace, or was detached with `umount --lazy`) and the server does not
/// answer, the loop device is unknown. A loop device whose path is below `/dev` may be
/// on one of `devices`, so its lookup may take all the remaining time.
///
/// # Errors
/// `TimedOut` at stage `claim` if the kernel does not say what backs a loop device
/// whose path is below `/dev`.
pub(crate) fn read_loops(
    roots: &Roots,
    devices: &[DevNo],
    is_on_file_server: &dyn Fn(&Path) -> bool,
    deadline: Deadline,
) -> Result<Loops> {
    let mut loops = Loops::default();
    for name in sysfs::names(&roots.sysfs.join("block"))? {
        if !name.starts_with("loop") {
            continue;
        }
        let file = roots.sysfs.join("block").join(&name);
        let file = file.join("loop/backing_file");
        let Some(path) = sysfs::read_if_there(&file)? else {
            continue;
        };
        let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(&path)).to_owned();
        if is_on_file_server(&path) {
            continue;
        }
        let node = roots.dev.join(&name);
        let what = format!("{} of {}", path.display(), node.display());
        let owned = roots.clone();
        let is_node = path.starts_with(&roots.dev);
        let until = if is_node {
            deadline
        } else {
            file_server_lookup::lookup_deadline(deadline)
        };
        let look = move || backing(&owned, &node, &path);
        let found = file_server_lookup::lookup(what.clone(), until, look);
        match found {
            Ok(Some(device)) if devices.contains(&device) => loops.found.push((name, device)),
            Ok(_) => {}
            Err(error) if is_node && error.kind() == std::io::ErrorKind::TimedOut => {
                return Err(Error::timed_out(Stage::Claim, deadline, &what));
            }
            Err(error) => {
                tracing::debug!(%error, name, "lunbd cannot find what backs the loop device");
                loops.unknown.push(name);
            }
        }
    }
    Ok(loops)
}

/// The device that backs the loop device; `None` if a file or nothing backs it. If the
/// node is missing or may not be opened, as in a container, this uses the path.
fn backing(roots: &Roots, node: &Path, path: &Path) -> std::io::Result<Option<DevNo>> {
    match roots.devices.loop_backing(node) {
        Err(error) if error.raw_os_error() == Some(nix::libc::ENXIO) => Ok(None),
        Err(_) => roots.devices.number_at(path),
        found => found,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::error::ErrorKind;
    use crate::kernel::Devices;
    use crate::kernel::devices::tests::Named;

    const SDA: DevNo = DevNo { major: 8, minor: 0 };

    #[test]
    fn a_loop_device_is_known_by_the_device_that_backs_it() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::new(Named("/dev/sda", SDA))),
            ..Roots::below(root.path())
        };
        let file = root.path().join("image");
        fs::write(&file, "").unwrap();
        let backed = [
            ("loop0", "/dev/sda"),
            ("loop1", file.to_str().unwrap()),
            ("loop2", "/srv/nfs/image"),
            ("loop3", "/none/there (deleted)"),
            ("sda", "/dev/sda"),
        ];
        for (name, path) in backed {
            let directory = roots.sysfs.join("block").join(name).join("loop");
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("backing_file"), format!("{path}\n")).unwrap();
        }
        fs::create_dir_all(roots.sysfs.join("block/loop4")).unwrap();
        let mounts = [("nfs4", PathBuf::from("/srv/nfs"))];
        let servers = crate::kernel::file_servers::FileServers::of_mounts(mounts.into_iter());
        let soon = Deadline::after(std::time::Duration::from_secs(600));
        let loops = read_loops(&roots, &[SDA], &|path| servers.contains(path), soon).unwrap();
        assert_eq!(loops.found, [("loop0".to_owned(), SDA)]);
        // Its node is missing, and its path leads nowhere.
        assert_eq!(loops.unknown, ["loop3"]);
    }

    #[test]
    fn a_loop_device_that_may_be_on_the_disk_is_not_passed_over_where_the_kernel_says_nothing() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let directory = roots.sysfs.join("block/loop7/loop");
        fs::create_dir_all(&directory).unwrap();
        let (disk, node) = (roots.dev.join("sda"), roots.dev.join("loop7"));
        fs::write(directory.join("backing_file"), disk.to_str().unwrap()).unwrap();
        // An earlier lookup of it has not returned.
        let (_release, hang) = std::sync::mpsc::channel::<()>();
        let what = format!("{} of {}", disk.display(), node.display());
        let past = Deadline::after(std::time::Duration::ZERO);
        let earlier = file_server_lookup::lookup(what, past, move || {
            let _released = hang.recv();
            Ok(None)
        });
        assert!(earlier.is_err());
        let soon = Deadline::after(std::time::Duration::from_secs(600));
        let looked = read_loops(&roots, &[SDA], &|_| false, soon);
        assert_eq!(looked.unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
