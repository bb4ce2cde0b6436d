//! The opening of a block device's node.

use std::fs::File;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::BlockDevice;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result};
use crate::id::DevNo;
use crate::kernel::{Devices, OpenMode, Roots};

impl BlockDevice {
    /// Whether the disk can be opened. Its directory is in sysfs a moment before that
    /// (`block/genhd.c`, `add_disk`: `ENXIO` until the disk is live). **May block**, like
    /// [`open`](Self::open).
    pub(crate) fn is_live(&self, roots: &Roots) -> Result<bool> {
        match self.open(roots, OpenMode::Shared) {
            Ok(_) => Ok(true),
            Err(error) if error.errno() == Some(nix::libc::ENXIO) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the kernel has the device but its node is missing. A thread of the kernel
    /// makes and removes the node: a new device has its number in sysfs before it has a
    /// node, and a device that goes away keeps the number after the node is gone
    /// (`drivers/base/core.c`, `device_add` and `device_del`).
    fn is_node_missing(&self, error: &Error) -> bool {
        error.errno() == Some(nix::libc::ENOENT) && self.dir.join("dev").exists()
    }

    /// Opens the node read-only (a writer's close would wake udev), and checks that it is
    /// this device. The kernel refuses an exclusive open (`EBUSY`, so `InUse`) while anything
    /// mounts, maps, swaps on or claims the disk or a partition of it, and refuses those while
    /// the file is open (`block/bdev.c`, `bd_may_claim`).
    ///
    /// **May block** while the device recovers from an error, and for a second if the node
    /// is missing: call it on a worker.
    ///
    /// # Errors
    /// By the errno; `NotReady` if the kernel keeps the device and its node stays missing;
    /// `Vanished` if the node belongs to another device.
    pub(crate) fn open(&self, roots: &Roots, mode: OpenMode) -> Result<File> {
        let node = self.node(roots);
        let (file, found) = self.open_waiting_for_node(&node, &roots.devices, mode)?;
        if found != Some(self.devno) {
            let expected = self.devno;
            let message = format!("the node is not block device {expected}");
            return Err(Error::new(ErrorKind::Vanished, message).with_path(node));
        }
        Ok(file)
    }

    /// Waits a second for a missing node. If the device stays and the node does not come,
    /// `/dev` is at fault.
    fn open_waiting_for_node(
        &self,
        node: &Path,
        devices: &Devices,
        mode: OpenMode,
    ) -> Result<(File, Option<DevNo>)> {
        /// Longer than the kernel's thread takes to make the node.
        const NODE_LIMIT: Duration = Duration::from_secs(1);
        let limit = Deadline::after(NODE_LIMIT);
        let mut pauses = Backoff::for_kernel_state();
        loop {
            let error = match devices.open(node, mode) {
                Ok(opened) => return Ok(opened),
                Err(error) => Error::io("cannot open", node, &error),
            };
            if !self.is_node_missing(&error) {
                return Err(error);
            }
            if limit.has_passed() {
                let message = "the kernel has the device and its node is missing: is this /dev the machine's devtmpfs?";
                return Err(Error::new(ErrorKind::NotReady, message).caused_by(error));
            }
            thread::park_timeout(pauses.pause());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A machine with a disk in sysfs that has no node.
    fn without_a_node() -> (tempfile::TempDir, Roots, BlockDevice) {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let dir = roots.sysfs.join("devices/sdb");
        fs::create_dir_all(&dir).unwrap();
        fs::create_dir_all(&roots.dev).unwrap();
        fs::write(dir.join("dev"), "8:16\n").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        (root, roots, disk)
    }

    #[test]
    fn a_node_that_is_still_to_come_is_waited_for() {
        let (_root, roots, disk) = without_a_node();
        thread::scope(|scope| {
            let opened = scope.spawn(|| disk.open(&roots, OpenMode::Shared));
            // This is no block device, but `open` sees that only after it could open the
            // node.
            fs::write(disk.node(&roots), "").unwrap();
            let error = opened.join().unwrap().unwrap_err();
            let message = error.to_string();
            assert!(
                message.contains("the node is not block device"),
                "{message}"
            );
        });
    }

    #[test]
    fn a_disk_that_vanishes_while_its_node_is_missing_gives_vanished() {
        let (_root, roots, disk) = without_a_node();
        thread::scope(|scope| {
            let opened = scope.spawn(|| disk.open(&roots, OpenMode::Exclusive));
            fs::remove_file(disk.dir().join("dev")).unwrap();
            let error = opened.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Vanished, "{error}");
            assert_eq!(error.errno(), Some(nix::libc::ENOENT));
        });
    }

    #[test]
    fn a_disk_that_stays_and_whose_node_does_not_come_has_another_dev() {
        let (_root, roots, disk) = without_a_node();
        let error = disk.open(&roots, OpenMode::Exclusive).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotReady);
        assert!(error.to_string().contains("its node is missing"), "{error}");
    }
}
