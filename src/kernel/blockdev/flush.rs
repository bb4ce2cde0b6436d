//! The flush of a block device.

use std::fs::File;
use std::path::Path;

use super::BlockDevice;
use crate::crash::point;
use crate::error::{Error, ErrorKind, Result};
use crate::kernel::{Devices, OpenMode, Roots};

impl BlockDevice {
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

    /// `BLKFLSBUF` does the waiting. The calls after it report the error of a failed write, and
    /// the kernel reports that once: if they did the waiting, a process that is killed
    /// meanwhile would take the error with it, and the next flush would succeed. `BLKFLSBUF`
    /// leaves the error (`mm/filemap.c`, `filemap_check_errors`).
    fn write_own_pages(&self, roots: &Roots, file: &File) -> Result<bool> {
        match drop_pages(&roots.devices, file, &self.node(roots)) {
            Err(error) if error.kind() != ErrorKind::NotPermitted => return Err(error),
            _ => {}
        }
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
