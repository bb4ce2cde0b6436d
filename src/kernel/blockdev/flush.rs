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
    /// The partitions before the first step. The last step lists them again.
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
    /// driver: `Vanished` if a path of a map is dead, and `Io` with `EAGAIN` while a
    /// map is suspended.
    pub(crate) fn drop_pages(&self) -> Result<()> {
        crash_point!(FlushToBegin);
        let roots = self.roots;
        self.on_each(&self.partitions, |device, file| {
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
        self.on_each(&self.partitions, |device, file| {
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
        // `fsync` alone writes all of the pages of a partition that has come since.
        let partitions = self.disk.partitions()?;
        self.on_each(&partitions, |device, file| {
            let synced = roots.devices.sync(file);
            synced.map_err(|error| device.failed("cannot flush", roots, &error))
        })?;
        crash_point!(FlushSynced);
        Ok(())
    }

    fn on_each(
        &self,
        partitions: &[BlockDevice],
        mut operation: impl FnMut(&BlockDevice, &File) -> Result<()>,
    ) -> Result<()> {
        let mut on = |device: &BlockDevice| {
            let opened = device.open(self.roots, OpenMode::Shared);
            opened.and_then(|opened| operation(device, &opened))
        };
        for partition in partitions {
            match on(partition) {
                Err(error) if error.kind() == ErrorKind::Vanished => {
                    match BlockDevice::at(&partition.dir)? {
                        // Another process removed the partition, and the kernel wrote it back at
                        // that time.
                        None => {}
                        // It has come again under another number.
                        Some(now) if now != *partition => on(&now)?,
                        Some(_) => return Err(error),
                    }
                }
                done => done?,
            }
        }
        operation(self.disk, self.file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd as _;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    use nix::errno::Errno;
    use parking_lot::Mutex;

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::devices::{Completion, NumberedDevice};
    use crate::kernel::{DeviceAccess, Devices};

    /// A machine whose partition comes again under another number, and beside another one, when
    /// the pages of the disk are dropped.
    #[derive(Debug)]
    struct Repartitioned {
        root: PathBuf,
        calls: Mutex<Vec<String>>,
    }

    impl Repartitioned {
        fn add(&self, name: &str, number: &str) {
            let dir = self.root.join("sys/block/sda").join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("partition"), "").unwrap();
            fs::write(dir.join("dev"), number).unwrap();
            fs::write(self.root.join("dev").join(name), number).unwrap();
        }

        fn note(&self, call: &str, file: &File) {
            let node = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
            let name = node.file_name().unwrap().to_str().unwrap();
            self.calls.lock().push(format!("{call} {name}"));
        }
    }

    impl DeviceAccess for Repartitioned {
        fn write_attribute(&self, _: &Path, _: &str, _: &dyn Fn() -> bool) -> io::Result<bool> {
            Err(Errno::ENOSYS.into())
        }

        fn open(&self, node: &Path, _: OpenMode) -> io::Result<(File, Option<DevNo>)> {
            let number = fs::read_to_string(node)?.parse().ok();
            Ok((File::open(node)?, number))
        }

        fn device_at(&self, _: &Path) -> io::Result<Option<NumberedDevice>> {
            Err(Errno::ENOSYS.into())
        }

        fn disk_sequence(&self, _: &File) -> io::Result<u64> {
            Err(Errno::ENOSYS.into())
        }

        fn sync(&self, file: &File) -> io::Result<()> {
            self.note("flush", file);
            Ok(())
        }

        fn write_pages(&self, file: &File) -> io::Result<()> {
            self.note("write", file);
            Ok(())
        }

        fn drop_pages(&self, file: &File) -> io::Result<()> {
            self.note("drop", file);
            self.add("sda16", "259:1");
            self.add("sda17", "259:2");
            Ok(())
        }

        fn scsi_read(
            &self,
            _: &File,
            _: &[u8],
            _: &mut [u8],
            _: Duration,
        ) -> io::Result<Completion> {
            Err(Errno::ENOSYS.into())
        }
    }

    #[test]
    fn a_partition_that_comes_during_the_write_back_is_written_back_too() {
        let root = tempfile::tempdir().unwrap();
        let kernel = Arc::new(Repartitioned {
            root: root.path().to_owned(),
            calls: Mutex::default(),
        });
        fs::create_dir_all(root.path().join("dev")).unwrap();
        fs::write(root.path().join("dev/sda"), "8:0").unwrap();
        kernel.add("sda16", "259:0");
        fs::write(root.path().join("sys/block/sda/dev"), "8:0").unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::<Repartitioned>::clone(&kernel)),
            ..Roots::below(root.path())
        };
        let disk = BlockDevice::at(&roots.sysfs.join("block/sda")).unwrap();
        let disk = disk.unwrap();
        let file = disk.open(&roots, OpenMode::Shared).unwrap();
        let unwritten = disk.to_write_back(&roots, &file).unwrap();
        unwritten.drop_pages().unwrap();
        assert!(unwritten.write_pages().unwrap());
        unwritten.flush().unwrap();
        let steps = [
            "drop sda16",
            "drop sda",
            "write sda16",
            "write sda",
            "flush sda16",
            "flush sda17",
            "flush sda",
        ];
        assert_eq!(*kernel.calls.lock(), steps);
    }
}
