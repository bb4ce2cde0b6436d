//! A disk and its partitions that a thread keeps open, to write their pages back later.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, Receiver, Sender};

use super::BlockDevice;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::{OpenMode, Roots, worker};

/// The files. A thread with a file table of its own has them and closes them, because the last
/// close writes dirty pages back: the kernel may hold that thread for as long as the device is
/// dead, and then holds nothing else of the process.
#[derive(Debug)]
pub(crate) struct OpenDisk {
    /// Tells the thread to write; when it is dropped, the thread closes the files.
    order: Sender<()>,
    written: Receiver<Result<()>>,
}

impl OpenDisk {
    /// Opens the disk and its partitions beside their other users. A partition that cannot be
    /// opened is left out. **May block** while the device recovers.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open`], for the disk.
    pub(crate) fn open(roots: &Roots, disk: &BlockDevice) -> Result<Self> {
        let (opened, is_open) = mpsc::channel();
        let (order, is_ordered) = mpsc::channel();
        let (done, written) = mpsc::channel();
        let (roots, disk) = (roots.clone(), disk.clone());
        worker::start_with_own_fd_table(Stage::Claim, move || {
            match open_all(&roots, &disk) {
                Err(error) => drop(opened.send(Err(error))),
                Ok(files) => {
                    if opened.send(Ok(())).is_ok() && is_ordered.recv().is_ok() {
                        let result = write_pages(&roots, &files);
                        drop(files);
                        let _nobody_waits = done.send(result);
                    }
                }
            }
            Ok(())
        })?;
        is_open.recv().map_err(|_| died())??;
        Ok(Self { order, written })
    }

    /// Writes the dirty pages of each file back, also after one has failed, and closes them.
    /// **Blocks** until that is done.
    ///
    /// # Errors
    /// `Io` if a write failed, also an earlier one since the open. The pages are lost.
    pub(crate) fn write_back(self) -> Result<()> {
        self.order.send(()).map_err(|_| died())?;
        self.written.recv().map_err(|_| died())?
    }
}

fn died() -> Error {
    Error::new(ErrorKind::Io, "the thread that has the disk open died")
}

fn open_all(roots: &Roots, disk: &BlockDevice) -> Result<Vec<(BlockDevice, File)>> {
    let mut files = vec![(disk.clone(), disk.open(roots, OpenMode::Shared)?)];
    for partition in disk.partitions()? {
        match partition.open(roots, OpenMode::Shared) {
            Ok(file) => files.push((partition, file)),
            Err(error) => tracing::debug!(%error, "a partition is left out"),
        }
    }
    Ok(files)
}

fn write_pages(roots: &Roots, files: &[(BlockDevice, File)]) -> Result<()> {
    let mut first = Ok(());
    for (device, file) in files {
        let written = match roots.devices.write_pages(file) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => roots.devices.sync(file),
            written => written,
        };
        let written = written.map_err(|error| device.failed("cannot write back", roots, &error));
        first = first.and(written);
    }
    first
}
