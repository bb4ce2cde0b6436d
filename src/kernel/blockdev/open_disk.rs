//! A disk and its partitions that a thread keeps open, to write their pages back later.

use std::fs::File;
use std::io;
use std::sync::mpsc::{self, Sender};

use super::BlockDevice;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::kernel::worker::{self, NoteThread, Pending};
use crate::kernel::{OpenMode, Roots};

/// The files. A thread with a file table of its own has them and closes them, because the last
/// close writes dirty pages back: the kernel may hold that thread for as long as the device is
/// dead, and then holds nothing else of the process.
#[derive(Debug)]
pub(crate) struct OpenDisk {
    /// Tells the thread to write; when it is dropped, the thread closes the files.
    order: Sender<NoteThread>,
    written: Pending<()>,
}

impl OpenDisk {
    /// Opens the disk and its partitions beside their other users. **May block** while the device
    /// recovers. The thread that enters the kernel
    /// runs `note_thread` first.
    ///
    /// # Errors
    /// Those of [`BlockDevice::open`].
    pub(crate) fn open(roots: &Roots, disk: &BlockDevice, note_thread: NoteThread) -> Result<Self> {
        let (opened, is_open) = mpsc::channel();
        let (order, orders) = mpsc::channel::<NoteThread>();
        let (roots, disk) = (roots.clone(), disk.clone());
        let written = worker::start_with_own_fd_table(Stage::Claim, move || {
            note_thread();
            match open_all(&roots, &disk) {
                Err(error) => drop(opened.send(Err(error))),
                Ok(files) => {
                    if opened.send(Ok(())).is_ok()
                        && let Ok(note_thread) = orders.recv()
                    {
                        note_thread();
                        // The files are closed before the result is taken.
                        return write_pages(&roots, &files);
                    }
                }
            }
            Ok(())
        })?;
        is_open.recv().map_err(|_| died())??;
        Ok(Self { order, written })
    }

    /// Writes the dirty pages of each file back, also after one has failed, and closes them.
    /// **Blocks** until that is done. The thread that enters the kernel
    /// runs `note_thread` first.
    ///
    /// # Errors
    /// `Io` if a write failed, also an earlier one since the open. The pages are lost.
    pub(crate) fn write_back(self, note_thread: NoteThread) -> Result<()> {
        self.order.send(note_thread).map_err(|_| died())?;
        self.written.wait_without_limit()
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
            // Another process removed the partition, and the kernel wrote it back at that time.
            Err(error) if error.kind() == ErrorKind::Vanished && !partition.dir().exists() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(files)
}

/// A process that is killed while it waits for its pages takes the report of a failed write with
/// it, except in `BLKFLSBUF`, which comes first: see the head of `flush.rs`.
fn write_pages(roots: &Roots, files: &[(BlockDevice, File)]) -> Result<()> {
    let mut first = Ok(());
    for (device, file) in files {
        if let Err(error) = roots.devices.drop_pages(file) {
            let disk = device.name().to_owned();
            worker::emit(move || tracing::debug!(%error, disk, "the pages are not dropped"));
        }
        let written = match roots.devices.write_pages(file) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => roots.devices.sync(file),
            written => written,
        };
        let written = written.map_err(|error| device.failed("cannot write back", roots, &error));
        let is_lost = |result: &Result<()>| {
            let error = result.as_ref().err();
            error.is_some_and(|error| error.kind() == ErrorKind::Io)
        };
        if first.is_ok() || (is_lost(&written) && !is_lost(&first)) {
            first = written;
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use nix::errno::Errno;
    use nix::unistd::{Pid, gettid};

    use super::*;
    use crate::id::DevNo;
    use crate::kernel::devices::{Completion, NumberedDevice};
    use crate::kernel::worker::events_elsewhere;
    use crate::kernel::{DeviceAccess, Devices};

    /// A kernel with a disk and its partition.
    #[derive(Debug, Default)]
    struct Partitioned {
        open_partition: Option<Errno>,
        drop_disk: Option<Errno>,
        write_partition: Option<Errno>,
        write_disk: Option<Errno>,
        /// The calls so far.
        calls: Mutex<Vec<&'static str>>,
        /// The threads of the calls.
        threads: Mutex<BTreeSet<Pid>>,
    }

    impl Partitioned {
        fn end(&self, call: &'static str, error: Option<Errno>) -> io::Result<()> {
            self.calls.lock().unwrap().push(call);
            self.threads.lock().unwrap().insert(gettid());
            error.map_or(Ok(()), |errno| Err(errno.into()))
        }
    }

    fn is_partition(file: &File) -> bool {
        file.metadata().unwrap().len() > 0
    }

    impl DeviceAccess for Partitioned {
        fn write_attribute(&self, _: &Path, _: &str, _: &dyn Fn() -> bool) -> io::Result<bool> {
            Err(Errno::ENOSYS.into())
        }

        fn open(&self, node: &Path, _: OpenMode) -> io::Result<(File, Option<DevNo>)> {
            let file = File::open(node)?;
            let minor = u32::from(is_partition(&file));
            if let Some(errno) = self.open_partition.filter(|_| minor == 1) {
                return Err(errno.into());
            }
            Ok((file, Some(format!("8:{minor}").parse().unwrap())))
        }

        fn device_at(&self, _: &Path) -> io::Result<Option<NumberedDevice>> {
            Err(Errno::ENOSYS.into())
        }

        fn disk_sequence(&self, _: &File) -> io::Result<u64> {
            Err(Errno::ENOSYS.into())
        }

        fn sync(&self, _: &File) -> io::Result<()> {
            self.end("sync", None)
        }

        fn write_pages(&self, file: &File) -> io::Result<()> {
            if is_partition(file) {
                self.end("write partition", self.write_partition)
            } else {
                self.end("write disk", self.write_disk)
            }
        }

        fn drop_pages(&self, file: &File) -> io::Result<()> {
            let partition = is_partition(file);
            if partition {
                self.end("drop partition", None)
            } else {
                self.end("drop disk", self.drop_disk)
            }
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

    /// Opens the disk on this kernel, and writes it back.
    fn written_back(kernel: &Arc<Partitioned>) -> Result<()> {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots {
            devices: Devices::Other(Arc::<Partitioned>::clone(kernel)),
            ..Roots::below(root.path())
        };
        let dir = roots.sysfs.join("block/sda");
        fs::create_dir_all(dir.join("sda1")).unwrap();
        fs::create_dir_all(&roots.dev).unwrap();
        for (file, text) in [("dev", "8:0"), ("sda1/dev", "8:1"), ("sda1/partition", "1")] {
            fs::write(dir.join(file), format!("{text}\n")).unwrap();
        }
        fs::write(roots.dev.join("sda"), "").unwrap();
        fs::write(roots.dev.join("sda1"), "1").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        let noted = [(); 2].map(|()| Arc::<Mutex<Option<Pid>>>::default());
        let [open, write] = noted
            .clone()
            .map(|thread| Box::new(move || *thread.lock().unwrap() = Some(gettid())));
        let written = OpenDisk::open(&roots, &disk, open)?.write_back(write);
        for thread in noted {
            let thread = thread.lock().unwrap().expect("a thread");
            assert_eq!(*kernel.threads.lock().unwrap(), BTreeSet::from([thread]));
        }
        written
    }

    #[test]
    fn pages_are_written_by_the_call_that_leaves_a_failure_to_the_next() {
        let kernel = Arc::new(Partitioned::default());
        written_back(&kernel).unwrap();
        let calls = [
            "drop disk",
            "write disk",
            "drop partition",
            "write partition",
        ];
        assert_eq!(*kernel.calls.lock().unwrap(), calls);
    }

    #[test]
    fn pages_that_cannot_be_dropped_are_written_and_the_caller_emits_the_event() {
        assert_eq!(events_elsewhere::seen(), [""; 0]);
        let kernel = Arc::new(Partitioned {
            drop_disk: Some(Errno::EACCES),
            ..Partitioned::default()
        });
        written_back(&kernel).unwrap();
        assert!(kernel.calls.lock().unwrap().contains(&"write disk"));
        assert_eq!(events_elsewhere::seen(), [""; 0]);
    }

    #[test]
    fn a_disk_whose_partition_cannot_be_opened_is_not_open() {
        for (errno, kind) in [
            (Errno::EPERM, ErrorKind::NotPermitted),
            (Errno::ENXIO, ErrorKind::Vanished),
        ] {
            let kernel = Arc::new(Partitioned {
                open_partition: Some(errno),
                ..Partitioned::default()
            });
            let error = written_back(&kernel).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
        }
    }

    #[test]
    fn a_lost_page_is_not_hidden_by_an_earlier_refusal() {
        let kernel = Arc::new(Partitioned {
            write_disk: Some(Errno::EACCES),
            write_partition: Some(Errno::EIO),
            ..Partitioned::default()
        });
        let error = written_back(&kernel).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    }
}
