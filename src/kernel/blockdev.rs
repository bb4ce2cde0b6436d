//! Block devices: what sysfs says of one, and its node.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use memmap2::MmapMut;
use nix::fcntl::OFlag;

use super::devices::Devices;
use super::roots::Roots;
use super::sysfs;
use crate::crash::point;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{DevNo, DiskSeq};

/// The kernel counts sizes in these, whatever the device's block size
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
    /// The block device of this sysfs directory; `None` where it is gone.
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

    /// The block device of this number; `None` where there is none.
    pub fn of(roots: &Roots, devno: DevNo) -> Result<Option<Self>> {
        let link = roots.sysfs.join("dev/block").join(devno.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Self::at(&dir),
            None => Ok(None),
        }
    }

    /// Its directory in sysfs, with no link in the path.
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

    /// Its life's serial number, from sysfs; `None` before Linux 5.15.
    pub fn diskseq(&self) -> Result<Option<DiskSeq>> {
        let Some(text) = sysfs::read_if_there(&self.dir.join("diskseq"))? else {
            return Ok(None);
        };
        Ok(Some(text.parse::<DiskSeq>()?))
    }

    /// The size in bytes.
    pub fn size(&self) -> Result<u64> {
        let sectors: u64 = sysfs::parse(&self.dir.join("size"))?;
        Ok(sectors.saturating_mul(SECTOR))
    }

    /// Whether the kernel refuses writes.
    pub fn read_only(&self) -> Result<bool> {
        Ok(sysfs::read(&self.dir.join("ro"))? != "0")
    }

    /// One line on what can be seen, for the error of a timeout.
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

    /// Where the node is.
    #[must_use]
    pub fn node(&self, roots: &Roots) -> PathBuf {
        // The kernel writes a slash in a name as `!`.
        roots.dev.join(self.name.replace('!', "/"))
    }

    /// Reads the first logical block of the device itself, or 4,096 bytes where a block is
    /// shorter, past the page cache.
    /// **Blocks** for as long as the device does.
    ///
    /// # Errors
    /// `Io` where the device answers with an error.
    pub(crate) fn read_first_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, |_, _| 0).map(drop)
    }

    /// As [`read_first_block`](Self::read_first_block), of the last.
    pub(crate) fn read_last_block(&self, roots: &Roots) -> Result<()> {
        self.read(roots, 0, u64::saturating_sub).map(drop)
    }

    /// As [`read_first_block`](Self::read_first_block), of at least `length` bytes where
    /// the device has as many.
    pub(crate) fn read_first_bytes(&self, roots: &Roots, length: usize) -> Result<Vec<u8>> {
        self.read(roots, length, |_, _| 0)
    }

    /// `place` says where, by the size of the device and the length of what is read.
    fn read(
        &self,
        roots: &Roots,
        length: usize,
        place: impl FnOnce(u64, u64) -> u64,
    ) -> Result<Vec<u8>> {
        // A partition has no queue of its own; its blocks are no longer than a page.
        let block = sysfs::parse(&self.dir.join("queue/logical_block_size"));
        let length = length_of_read(block.unwrap_or(0), length);
        let node = self.node(roots);
        let failed = |error: &std::io::Error| Error::io("cannot read", &node, error);
        let mut buffer = MmapMut::map_anon(length).map_err(|error| failed(&error))?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_DIRECT.bits())
            .open(&node)
            .map_err(|error| failed(&error))?;
        let size = self.size()?;
        let wanted = length.min(usize::try_from(size).unwrap_or(length));
        let (block, _) = buffer.split_at_mut(wanted);
        let at = place(size, u64::try_from(wanted).unwrap_or(0));
        file.read_exact_at(block, at)
            .map_err(|error| failed(&error))?;
        Ok(block.to_vec())
    }

    /// Whether the disk can be opened: its directory is in sysfs a moment before
    /// (`block/genhd.c`, `add_disk`: `ENXIO` until the disk is live). **May
    /// block**, as [`open`](Self::open).
    pub(crate) fn is_live(&self, roots: &Roots) -> Result<bool> {
        match self.open(roots, false) {
            Ok(_) => Ok(true),
            Err(error) if error.errno() == Some(nix::libc::ENXIO) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether the kernel has the device, and its node is missing. A device that comes
    /// has its number in sysfs before it has a node, and one that goes still has it
    /// after that (`drivers/base/core.c`, `device_add` and `device_del`): a thread of
    /// the kernel's own makes and takes away the node.
    fn lacks_its_node(&self, error: &Error) -> bool {
        error.errno() == Some(nix::libc::ENOENT) && self.dir.join("dev").exists()
    }

    /// Writes dirty pages back and has the device write its cache (`fsync`), then
    /// drops the pages (`BLKFLSBUF`): of each partition, whose pages are its own
    /// (`block/bdev.c`, one inode each), and then of the disk, which `file` is.
    /// **Blocks** until the device has done it.
    ///
    /// # Errors
    /// `Io` where a write failed: the pages are lost then, and the device must not
    /// be deleted as if it had been flushed.
    pub(crate) fn flush(&self, roots: &Roots, file: &File) -> Result<()> {
        for partition in self.partitions()? {
            match partition.flush_partition(roots) {
                // Somebody has removed it, and the kernel wrote it back then.
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

    /// Writes dirty pages back as [`flush`](Self::flush) does, and has the device flush
    /// nothing. `false` where this cannot be done apart from a flush. **Blocks** until all
    /// are written.
    ///
    /// # Errors
    /// `Io` where a write failed: the pages are lost then.
    pub(crate) fn write_pages(&self, roots: &Roots, file: &File) -> Result<bool> {
        for partition in self.partitions()? {
            let own = partition.open(roots, false);
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
        let (file, node) = (self.open(roots, false)?, self.node(roots));
        sync(&roots.devices, &file, &node)?;
        drop_pages(&roots.devices, &file, &node)
    }

    /// Opens the node read-only (a writer's close would wake udev), and makes
    /// sure that it is this device. With `claim` the open is exclusive: the
    /// kernel refuses it (`EBUSY`, so `InUse`) while anything mounts, maps,
    /// swaps on or claims the disk or a partition of it, and while the file is
    /// open nothing else can (`block/bdev.c`, `bd_may_claim`).
    ///
    /// **May block** while the device recovers from an error, and for a second where
    /// the node is missing: call it on a worker.
    ///
    /// # Errors
    /// By the errno; `NotReady` where the kernel has the device all the time, and its
    /// node stays missing; `Vanished` where the node is another device's.
    pub(crate) fn open(&self, roots: &Roots, claim: bool) -> Result<File> {
        let node = self.node(roots);
        let (file, found) = self.open_when_made(&node, &roots.devices, claim)?;
        if found != Some(self.devno) {
            let expected = self.devno;
            let message = format!("the node is not block device {expected}");
            return Err(Error::new(ErrorKind::Vanished, message).with_path(node));
        }
        Ok(file)
    }

    /// A missing node of a device that is there to stay is a fault of `/dev`.
    fn open_when_made(
        &self,
        node: &Path,
        devices: &Devices,
        claim: bool,
    ) -> Result<(File, Option<DevNo>)> {
        /// Longer than the kernel's thread takes.
        const PATIENCE: Duration = Duration::from_secs(1);
        let patience = Deadline::after(PATIENCE);
        let mut pauses = Backoff::new(Duration::from_millis(1), Duration::from_millis(50));
        loop {
            let error = match devices.open(node, claim) {
                Ok(opened) => return Ok(opened),
                Err(error) => Error::io("cannot open", node, &error),
            };
            if !self.lacks_its_node(&error) {
                return Err(error);
            }
            if patience.has_passed() {
                let message = "the kernel has the device and its node is missing: is this /dev the machine's devtmpfs?";
                return Err(Error::new(ErrorKind::NotReady, message).caused_by(error));
            }
            thread::park_timeout(pauses.pause());
        }
    }
}

/// Those of `links` (as udev names them, below `/dev`) that lead to the device,
/// as paths below our own root.
#[must_use]
pub fn links_to(roots: &Roots, devno: DevNo, links: &[String]) -> Vec<PathBuf> {
    links
        .iter()
        .filter_map(|link| Some(roots.dev.join(link.strip_prefix("/dev/")?)))
        .filter(|link| devno_at(roots, link).is_ok_and(|found| found == devno))
        .collect()
}

/// The number of the block device that `path` leads to, links followed.
///
/// # Errors
/// `NotFound` where nothing is there, `InvalidInput` where it is something
/// else than a block device.
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

/// Of a read past the page cache: whole logical blocks, whatever a page is, and 4 KiB at
/// least.
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
            // Of a kernel with pages of 64 KiB, on a machine with pages of any size.
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
            let opened = scope.spawn(|| disk.open(&roots, false));
            // No block device, which is seen only of what could be opened.
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
            let opened = scope.spawn(|| disk.open(&roots, true));
            fs::remove_file(disk.dir().join("dev")).unwrap();
            let error = opened.join().unwrap().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Vanished, "{error}");
            assert_eq!(error.errno(), Some(nix::libc::ENOENT));
        });
    }

    #[test]
    fn a_disk_that_stays_and_whose_node_does_not_come_has_another_dev() {
        let (_root, roots, disk) = without_a_node();
        let error = disk.open(&roots, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotReady);
        assert!(error.to_string().contains("its node is missing"), "{error}");
    }
}
