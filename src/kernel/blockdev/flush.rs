//! The flush of a block device. Each partition has pages of its own (`block/bdev.c`, one inode
//! each). So each step is done for the partitions and then for the disk, which `file` has open.
//!
//! The kernel reports a failed write once. A process that is killed while it waits in `fsync`
//! takes the report with it, and the next `fsync` succeeds. `BLKFLSBUF` waits too, and leaves the
//! report to the next call (`mm/filemap.c`, `filemap_check_errors`). So it comes first. Before
//! Linux 5.11 it can fail before it has written anything (`block/ioctl.c`, `blkdev_flushbuf`).

use std::fs::File;
use std::io;

use super::BlockDevice;
use crate::crash::crash_point;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::{OpenMode, Roots};

/// An open disk whose pages, and those of its partitions, are to be written back.
#[derive(Debug)]
pub(crate) struct UnwrittenDisk<'a> {
    roots: &'a Roots,
    disk: &'a BlockDevice,
    file: &'a File,
    /// The partitions before the first step. A later one has pages only if a process has opened
    /// the disk since, and a detach looks for such a process after its flush.
    partitions: Vec<BlockDevice>,
}

impl BlockDevice {
    /// This disk, which `file` has open, before its write-back.
    ///
    /// # Errors
    /// Those of [`BlockDevice::partitions`].
    pub(crate) fn to_write_back<'a>(
        &'a self,
        roots: &'a Roots,
        file: &'a File,
    ) -> Result<UnwrittenDisk<'a>> {
        Ok(UnwrittenDisk {
            roots,
            disk: self,
            file,
            partitions: self.partitions()?,
        })
    }

    pub(super) fn failed(&self, what: &str, roots: &Roots, error: &io::Error) -> Error {
        Error::io(what, &self.node(roots), error)
    }
}

impl UnwrittenDisk<'_> {
    /// Writes dirty pages back, waits for them and drops them (`BLKFLSBUF`). It does not report a
    /// failed write: the calls after it do. **Blocks** until the device has done it.
    ///
    /// # Errors
    /// `NotPermitted` without `CAP_SYS_ADMIN`. Before Linux 5.11 also those of the device's
    /// driver: `Vanished` if the last used path of a map is dead.
    pub(crate) fn drop_pages(&self) -> Result<()> {
        crash_point!(FlushToBegin);
        let roots = self.roots;
        self.on_each(|device, file| {
            let dropped = roots.devices.drop_pages(file);
            dropped.map_err(|error| device.failed("cannot drop the page cache of", roots, &error))
        })
    }

    /// Writes dirty pages back, and does not flush the device's cache. `false` if the pages
    /// cannot be written without a flush. **Blocks** until all pages are written.
    ///
    /// # Errors
    /// `Io` if a write failed, also an earlier one that was not reported. The pages are lost.
    pub(crate) fn write_pages(&self) -> Result<bool> {
        let mut all_written = true;
        let roots = self.roots;
        self.on_each(|device, file| {
            match roots.devices.write_pages(file) {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => all_written = false,
                Err(error) => return Err(device.failed("cannot write back", roots, &error)),
                Ok(()) => {}
            }
            Ok(())
        })?;
        Ok(all_written)
    }

    /// Writes dirty pages back and has the device write its cache (`fsync`). **Blocks** until
    /// the device has done it.
    ///
    /// # Errors
    /// `Io` if a write failed. The pages are lost, and the caller must not delete the
    /// device as if it had been flushed.
    pub(crate) fn flush(&self) -> Result<()> {
        let roots = self.roots;
        self.on_each(|device, file| {
            let synced = roots.devices.sync(file);
            synced.map_err(|error| device.failed("cannot flush", roots, &error))
        })?;
        crash_point!(FlushSynced);
        Ok(())
    }

    fn on_each(&self, mut operation: impl FnMut(&BlockDevice, &File) -> Result<()>) -> Result<()> {
        for partition in &self.partitions {
            let opened = partition.open(self.roots, OpenMode::Shared);
            match opened.and_then(|opened| operation(partition, &opened)) {
                // Another process removed the partition, and the kernel wrote it back at
                // that time.
                Err(error) if error.kind() == ErrorKind::Vanished && !partition.dir.exists() => {}
                done => done?,
            }
        }
        operation(self.disk, self.file)
    }
}
