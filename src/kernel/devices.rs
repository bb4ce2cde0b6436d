//! The operations on devices beyond reading files: opening a block device, querying and
//! flushing it, and writing an attribute of sysfs.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Write as _};
use std::ops::Deref;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use lunbd_sys::sg::{Completion, Info};
use lunbd_sys::stat::DeviceKind;
use nix::fcntl::OFlag;
use nix::sys::stat;

use crate::id::DevNo;

/// A device by its kind and number: a block and a character device may have the same
/// number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum NumberedDevice {
    /// A block device.
    Block(DevNo),
    /// A character device.
    Character(DevNo),
}

/// How a node is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenMode {
    /// Beside other users of the device.
    Shared,
    /// Exclusively (`O_EXCL`): no other process can mount the device, stack another device on
    /// it or swap on it while the file is open.
    Exclusive,
}

/// How the engine reaches the devices of a SCSI volume. [`Devices::Kernel`] uses the
/// machine's own kernel. A process that may not open devices can supply an implementation
/// that asks a helper process, and a test can supply one that imitates a kernel.
///
/// Each call may block for as long as the kernel does, so the engine makes it on a thread
/// of its own. The errno of an error decides what the engine does next, so an
/// implementation passes on the kernel's errno.
pub trait DeviceAccess: fmt::Debug + Send + Sync {
    /// Opens the attribute and writes `text` with one write(2) if `is_still_ours` returns
    /// true after the open. The kernel refuses a write once the object of an open attribute
    /// has gone (`ENODEV`, `fs/kernfs/file.c`), so the write cannot reach a successor.
    /// `false` if the object is not ours; nothing was written.
    ///
    /// # Errors
    /// The kernel's; `WriteZero` if the kernel took only a part of `text`.
    fn write_attribute(
        &self,
        attribute: &Path,
        text: &str,
        is_still_ours: &dyn Fn() -> bool,
    ) -> io::Result<bool>;

    /// Opens a node read-only without waiting for a medium. Also returns the block device's
    /// number; `None` if it is no block device.
    ///
    /// # Errors
    /// The kernel's.
    fn open(&self, node: &Path, mode: OpenMode) -> io::Result<(File, Option<DevNo>)>;

    /// The device that `path` leads to, through links; `None` if it is no device. An
    /// implementation should not ask a file server (`AT_STATX_DONT_SYNC`).
    ///
    /// # Errors
    /// The kernel's.
    fn device_at(&self, path: &Path) -> io::Result<Option<NumberedDevice>>;

    /// Like [`device_at`](Self::device_at), but `None` unless it is a block device.
    ///
    /// # Errors
    /// The kernel's.
    fn number_at(&self, path: &Path) -> io::Result<Option<DevNo>> {
        Ok(match self.device_at(path)? {
            Some(NumberedDevice::Block(number)) => Some(number),
            Some(NumberedDevice::Character(_)) | None => None,
        })
    }

    /// The block device that backs the loop device at this node; `None` if a regular file
    /// backs it (`LOOP_GET_STATUS64`).
    ///
    /// # Errors
    /// The kernel's: `ENXIO` if nothing backs it. `Unsupported` if the implementation does
    /// not offer this: the engine then uses the path in sysfs.
    fn loop_backing(&self, _node: &Path) -> io::Result<Option<DevNo>> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The disk sequence number of the open disk (Linux 5.15).
    ///
    /// # Errors
    /// The kernel's; `ENOTTY` if the kernel has no such number.
    fn disk_sequence(&self, disk: &File) -> io::Result<u64>;

    /// Writes dirty pages back and has the device write its cache (`fsync`).
    ///
    /// # Errors
    /// The kernel's: a write failed, and its pages are lost.
    fn sync(&self, disk: &File) -> io::Result<()>;

    /// Writes dirty pages back, and does not flush the device's cache (`sync_file_range`).
    ///
    /// # Errors
    /// The kernel's: a write failed, and its pages are lost. `Unsupported` if the
    /// implementation does not offer this: a flush that fails then counts as a failed
    /// write.
    fn write_pages(&self, _disk: &File) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Writes dirty pages back, waits for them and drops them (`BLKFLSBUF`). A failed write is no
    /// error of this call.
    ///
    /// # Errors
    /// The kernel's.
    fn drop_pages(&self, disk: &File) -> io::Result<()>;

    /// Sends a SCSI command that reads (`SG_IO`). `timeout` limits each try.
    ///
    /// # Errors
    /// The kernel's, if it did not send the command. A command that failed at the device is
    /// no error: see [`Completion`].
    fn scsi_read(
        &self,
        disk: &File,
        cdb: &[u8],
        buffer: &mut [u8],
        timeout: Duration,
    ) -> io::Result<Completion>;
}

/// The [`DeviceAccess`] that the engine uses.
#[derive(Debug, Clone, Default)]
pub enum Devices {
    /// This machine's kernel.
    #[default]
    Kernel,
    /// Another implementation.
    Other(Arc<dyn DeviceAccess>),
}

impl Deref for Devices {
    type Target = dyn DeviceAccess;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Kernel => &Kernel,
            Self::Other(other) => &**other,
        }
    }
}

impl PartialEq for Devices {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Kernel, Self::Kernel) => true,
            (Self::Other(one), Self::Other(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for Devices {}

#[derive(Debug)]
struct Kernel;

impl DeviceAccess for Kernel {
    fn write_attribute(
        &self,
        attribute: &Path,
        text: &str,
        is_still_ours: &dyn Fn() -> bool,
    ) -> io::Result<bool> {
        let mut file = OpenOptions::new().write(true).open(attribute)?;
        if !is_still_ours() {
            return Ok(false);
        }
        match file.write(text.as_bytes())? {
            written if written == text.len() => Ok(true),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn open(&self, node: &Path, mode: OpenMode) -> io::Result<(File, Option<DevNo>)> {
        let mut flags = OFlag::O_NONBLOCK;
        flags.set(OFlag::O_EXCL, mode == OpenMode::Exclusive);
        let mut options = OpenOptions::new();
        let file = options.read(true).custom_flags(flags.bits()).open(node)?;
        let number = number_of(&file.metadata()?);
        Ok((file, number))
    }

    fn device_at(&self, path: &Path) -> io::Result<Option<NumberedDevice>> {
        let found = lunbd_sys::stat::device_at(path)?;
        Ok(found.map(|(kind, major, minor)| {
            let number = DevNo { major, minor };
            match kind {
                DeviceKind::Block => NumberedDevice::Block(number),
                DeviceKind::Character => NumberedDevice::Character(number),
            }
        }))
    }

    fn loop_backing(&self, node: &Path) -> io::Result<Option<DevNo>> {
        let (file, _) = self.open(node, OpenMode::Shared)?;
        let backing = lunbd_sys::loop_device::backing_device(&file)?;
        Ok((backing != 0).then(|| devno_of(backing)))
    }

    fn disk_sequence(&self, disk: &File) -> io::Result<u64> {
        Ok(lunbd_sys::block::disk_sequence(disk)?)
    }

    fn sync(&self, disk: &File) -> io::Result<()> {
        disk.sync_all()
    }

    fn write_pages(&self, disk: &File) -> io::Result<()> {
        Ok(lunbd_sys::block::write_pages(disk)?)
    }

    fn drop_pages(&self, disk: &File) -> io::Result<()> {
        Ok(lunbd_sys::block::flush_buffers(disk)?)
    }

    fn scsi_read(
        &self,
        disk: &File,
        cdb: &[u8],
        buffer: &mut [u8],
        timeout: Duration,
    ) -> io::Result<Completion> {
        Ok(lunbd_sys::sg::read_command(disk, cdb, buffer, timeout)?)
    }
}

fn number_of(metadata: &Metadata) -> Option<DevNo> {
    let is_block = metadata.file_type().is_block_device();
    is_block.then(|| devno_of(metadata.rdev()))
}

pub(super) fn devno_of(rdev: u64) -> DevNo {
    let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
    DevNo {
        major: narrow(stat::major(rdev)),
        minor: narrow(stat::minor(rdev)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The kernel's access with three exceptions: one path leads to a device of this
    /// number, a path named `denied` may not be looked at, and a look at a path named
    /// `hangs` never returns.
    #[derive(Debug)]
    pub(crate) struct Named(pub(crate) &'static str, pub(crate) DevNo);

    impl DeviceAccess for Named {
        fn write_attribute(
            &self,
            attribute: &Path,
            text: &str,
            is_still_ours: &dyn Fn() -> bool,
        ) -> io::Result<bool> {
            Kernel.write_attribute(attribute, text, is_still_ours)
        }

        fn open(&self, node: &Path, mode: OpenMode) -> io::Result<(File, Option<DevNo>)> {
            Kernel.open(node, mode)
        }

        fn device_at(&self, path: &Path) -> io::Result<Option<NumberedDevice>> {
            if path == Path::new(self.0) {
                return Ok(Some(NumberedDevice::Block(self.1)));
            }
            if path.ends_with("hangs") {
                loop {
                    std::thread::park();
                }
            }
            if path.ends_with("denied") {
                return Err(nix::errno::Errno::EACCES.into());
            }
            Kernel.device_at(path)
        }

        fn disk_sequence(&self, disk: &File) -> io::Result<u64> {
            Kernel.disk_sequence(disk)
        }

        fn sync(&self, disk: &File) -> io::Result<()> {
            Kernel.sync(disk)
        }

        fn drop_pages(&self, disk: &File) -> io::Result<()> {
            Kernel.drop_pages(disk)
        }

        fn scsi_read(
            &self,
            disk: &File,
            cdb: &[u8],
            buffer: &mut [u8],
            timeout: Duration,
        ) -> io::Result<Completion> {
            Kernel.scsi_read(disk, cdb, buffer, timeout)
        }
    }
}
