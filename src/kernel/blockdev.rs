//! A block device: its attributes in sysfs, and its node.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use memmap2::MmapMut;
use nix::fcntl::OFlag;

use super::devices::{Devices, OpenMode};
use super::roots::Roots;
use super::sysfs;
use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{DevNo, DiskSeq};

/// The unit in which the kernel counts sizes, whatever the device's block size
/// (`include/linux/blk_types.h`, `SECTOR_SIZE`).
const SECTOR: u64 = 512;

/// A whole disk or a partition in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDevice {
    dir: PathBuf,
    name: String,
    devno: DevNo,
}

impl BlockDevice {
    /// The block device of this sysfs directory; `None` if it is gone.
    pub fn at(dir: &Path) -> Result<Option<Self>> {
        let Some(text) = sysfs::read_if_there(&dir.join("dev"))? else {
            return Ok(None);
        };
        let name = dir.file_name().and_then(|name| name.to_str());
        let (Some(name), Ok(devno)) = (name, text.parse()) else {
            let message = format!("{text:?} is no device number");
            return Err(Error::new(ErrorKind::Io, message).with_path(dir));
        };
        Ok(Some(Self {
            dir: dir.to_owned(),
            name: name.to_owned(),
            devno,
        }))
    }

    /// The block device of this number; `None` if there is none.
    pub fn of(roots: &Roots, devno: DevNo) -> Result<Option<Self>> {
        let link = roots.sysfs.join("dev/block").join(devno.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Self::at(&dir),
            None => Ok(None),
        }
    }

    /// The device's directory in sysfs, with no link in the path.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The kernel's name, `sda` or `sda1`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device number.
    #[must_use]
    pub fn devno(&self) -> DevNo {
        self.devno
    }

    /// The disk sequence number, from sysfs; `None` before Linux 5.15.
    pub fn diskseq(&self) -> Result<Option<DiskSeq>> {
        let Some(text) = sysfs::read_if_there(&self.dir.join("diskseq"))? else {
            return Ok(None);
        };
        Ok(Some(text.parse::<DiskSeq>()?))
    }

    /// What distinguishes this disk from an earlier or later one of its name: its sequence
    /// number. Before Linux 5.15 it is the inode of its directory in sysfs, which gives each
    /// directory its own.
    pub(crate) fn life(&self) -> Result<String> {
        if let Some(sequence) = self.diskseq()? {
            return Ok(sequence.to_string());
        }
        let metadata = fs::metadata(&self.dir);
        let metadata = metadata.map_err(|error| Error::io("cannot examine", &self.dir, &error))?;
        Ok(metadata.ino().to_string())
    }

    /// The size in bytes.
    pub fn size(&self) -> Result<u64> {
        let sectors: u64 = sysfs::parse(&self.dir.join("size"))?;
        Ok(sectors.saturating_mul(SECTOR))
    }

    /// Whether the device is read-only: the kernel refuses writes.
    pub fn read_only(&self) -> Result<bool> {
        Ok(sysfs::read(&self.dir.join("ro"))? != "0")
    }

    /// One line about the visible state, for the error of a timeout.
    pub(crate) fn describe(&self) -> String {
        let attribute = |name: &str| {
            let text = sysfs::read_if_there(&self.dir.join(name)).ok().flatten();
            text.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let inflight = attribute("inflight").unwrap_or_else(|| "unreadable".to_owned());
        let state = attribute("device/state");
        let state = state.map_or_else(String::new, |state| format!(" state={state}"));
        format!("{}:{state} inflight={inflight}", self.name)
    }

    /// Whether this is a partition.
    #[must_use]
    pub fn is_partition(&self) -> bool {
        self.dir.join("partition").exists()
    }

    /// The partitions of a disk, whose names begin with the disk's
    /// (`block/partitions/core.c`, `add_partition`).
    pub fn partitions(&self) -> Result<Vec<Self>> {
        let mut partitions = Vec::new();
        let mut names = sysfs::names(&self.dir)?;
        names.retain(|name| name.starts_with(&self.name));
        for name in names {
            let dir = self.dir.join(name);
            if dir.join("partition").exists() {
                partitions.extend(Self::at(&dir)?);
            }
        }
        Ok(partitions)
    }

    /// The kernel's names of the devices stacked on this one (`dm-0`, `md127`).
    pub fn holders(&self) -> Result<Vec<String>> {
        sysfs::names(&self.dir.join("holders"))
    }

    /// The path of the node.
    #[must_use]
    pub fn node(&self, roots: &Roots) -> PathBuf {
        // The kernel writes a slash in a name as `!`.
        roots.dev.join(self.name.replace('!', "/"))
    }

    /// Reads the first logical block from the device itself, past the page cache; at least
    /// 4,096 bytes. **Blocks** for as long as the device does.
    ///
    /// # Errors
    /// `Io` if the device answers with an error.
    pub(crate) fn read_first_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, |_, _| 0).map(drop)
    }

    /// Like [`read_first_block`](Self::read_first_block), but reads the last block.
    pub(crate) fn read_last_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, u64::saturating_sub).map(drop)
    }

    /// Like [`read_first_block`](Self::read_first_block), but reads at least `length`
    /// bytes if the device has as many.
    pub(crate) fn read_first_bytes(&self, roots: &Roots, length: usize) -> Result<Vec<u8>> {
        self.read(roots, length, |_, _| 0)
    }

    /// Reads `length` bytes at each of these offsets, past the page cache; `None` where the
    /// device answers with an error. All are whole pages and logical blocks. **Blocks** for as
    /// long as the device does.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub(crate) fn read_at_each(
        &self,
        roots: &Roots,
        offsets: &[u64],
        length: usize,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let node = self.node(roots);
        let failed = |error: &std::io::Error| Error::io("cannot read", &node, error);
        let mut buffer = MmapMut::map_anon(length).map_err(|error| failed(&error))?;
        let file = open_past_cache(&node).map_err(|error| failed(&error))?;
        let read_at = |offset: &u64| {
            let read = file.read_exact_at(&mut buffer, *offset);
            read.ok().map(|()| buffer.to_vec())
        };
        Ok(offsets.iter().map(read_at).collect())
    }

    /// Reads at the offset that `place` returns for the device's size and the length to
    /// read.
    fn read(
        &self,
        roots: &Roots,
        length: usize,
        place: impl FnOnce(u64, u64) -> u64,
    ) -> Result<Vec<u8>> {
        // A partition has no queue in sysfs; its blocks are no longer than a page.
        let block = sysfs::parse(&self.dir.join("queue/logical_block_size"));
        let length = length_of_read(block.unwrap_or(0), length);
        let node = self.node(roots);
        let failed = |error: &std::io::Error| Error::io("cannot read", &node, error);
        let mut buffer = MmapMut::map_anon(length).map_err(|error| failed(&error))?;
        let file = open_past_cache(&node).map_err(|error| failed(&error))?;
        let size = self.size()?;
        let wanted = length.min(usize::try_from(size).unwrap_or(length));
        let (block, _) = buffer.split_at_mut(wanted);
        let at = place(size, u64::try_from(wanted).unwrap_or(0));
        file.read_exact_at(block, at)
            .map_err(|error| failed(&error))?;
        Ok(block.to_vec())
    }

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

    /// Writes dirty pages back, has the device write its cache (`fsync`), and drops the
    /// pages (`BLKFLSBUF`). It does this for each partition, which has pages of its own
    /// (`block/bdev.c`, one inode each), and then for the disk, which `file` has open.
    /// **Blocks** until the device has done it.
    ///
    /// # Errors
    /// `Io` if a write failed. The pages are lost, and the caller must not delete the
    /// device as if it had been flushed.
    pub(crate) fn flush(&self, roots: &Roots, file: &File) -> Result<()> {
        for partition in self.partitions()? {
            match partition.flush_partition(roots) {
                // Another process removed the partition, and the kernel wrote it back at
                // that time.
                Err(error) if error.kind() == ErrorKind::Vanished && !partition.dir.exists() => {}
                flushed => flushed?,
            }
        }
        let (devices, node) = (&roots.devices, self.node(roots));
        point!(FlushToBegin);
        sync(devices, file, &node)?;
        point!(FlushSynced);
        drop_pages(devices, file, &node)?;
        point!(FlushDone);
        Ok(())
    }

    /// Writes dirty pages back like [`flush`](Self::flush), but does not flush the
    /// device's cache. `false` if the pages cannot be written without a flush. **Blocks**
    /// until all pages are written.
    ///
    /// # Errors
    /// `Io` if a write failed. The pages are lost.
    pub(crate) fn write_pages(&self, roots: &Roots, file: &File) -> Result<bool> {
        for partition in self.partitions()? {
            let own = partition.open(roots, OpenMode::Shared);
            let written = own.and_then(|own| partition.write_own_pages(roots, &own));
            match written {
                Err(error) if error.kind() == ErrorKind::Vanished && !partition.dir.exists() => {}
                Ok(true) => {}
                other => return other,
            }
        }
        self.write_own_pages(roots, file)
    }

    fn write_own_pages(&self, roots: &Roots, file: &File) -> Result<bool> {
        match roots.devices.write_pages(file) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => Ok(false),
            Err(error) => Err(Error::io("cannot write back", &self.node(roots), &error)),
        }
    }

    fn flush_partition(&self, roots: &Roots) -> Result<()> {
        let (file, node) = (self.open(roots, OpenMode::Shared)?, self.node(roots));
        sync(&roots.devices, &file, &node)?;
        drop_pages(&roots.devices, &file, &node)
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

/// The links among `links` (as udev names them, below `/dev`) that lead to the device, as
/// paths below our own root.
#[must_use]
pub fn links_to(roots: &Roots, devno: DevNo, links: &[String]) -> Vec<PathBuf> {
    links
        .iter()
        .filter_map(|link| Some(roots.dev.join(link.strip_prefix("/dev/")?)))
        .filter(|link| devno_at(roots, link).is_ok_and(|found| found == devno))
        .collect()
}

/// The number of the block device that `path` leads to. It follows links.
///
/// # Errors
/// `NotFound` if nothing is at `path`, `InvalidInput` if it is not a block device.
pub fn devno_at(roots: &Roots, path: &Path) -> Result<DevNo> {
    let found = roots.devices.number_at(path).map_err(|error| {
        let error = Error::io("cannot find the device", path, &error);
        match error.kind() {
            ErrorKind::Vanished => error.with_kind(ErrorKind::NotFound),
            _ => error,
        }
    })?;
    found.ok_or_else(|| {
        let message = "not a block device: expected a disk's node or a link to it";
        Error::new(ErrorKind::InvalidInput, message).with_path(path)
    })
}

fn sync(devices: &Devices, file: &File, node: &Path) -> Result<()> {
    devices
        .sync(file)
        .map_err(|error| Error::io("cannot flush", node, &error))
}

fn drop_pages(devices: &Devices, file: &File, node: &Path) -> Result<()> {
    devices
        .drop_pages(file)
        .map_err(|error| Error::io("cannot drop the page cache of", node, &error))
}

/// The length of a read past the page cache: whole logical blocks, whatever the page size,
/// and at least 4 KiB.
fn open_past_cache(node: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(OFlag::O_DIRECT.bits());
    options.open(node)
}

fn length_of_read(logical_block: usize, wanted: usize) -> usize {
    let block = logical_block.max(4096);
    wanted.next_multiple_of(block).max(block)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_read_goes_by_the_logical_block_and_not_by_the_page() {
        for (block, wanted, length) in [
            (512, 0, 4096),
            (4096, 0, 4096),
            (4096, 68 << 10, 68 << 10),
            // A kernel with pages of 64 KiB made these blocks; the pages of this machine
            // do not matter.
            (65_536, 0, 65_536),
            (65_536, 68 << 10, 128 << 10),
            (0, 0, 4096),
        ] {
            assert_eq!(length_of_read(block, wanted), length, "{block} {wanted}");
        }
    }

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
    fn a_disk_whose_node_has_gone_before_it_is_gone_and_dev_is_not_at_fault() {
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
