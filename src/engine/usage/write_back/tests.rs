//! The flush of a claimed disk where the kernel refuses a part of it.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;
use crate::id::DevNo;
use crate::kernel::devices::{Completion, NumberedDevice};
use crate::kernel::worker::events_elsewhere;
use crate::kernel::{DeviceAccess, Devices, OpenMode};

/// A kernel whose calls for an open disk end with these errors, or succeed.
#[derive(Debug, Clone, Copy, Default)]
struct Failing {
    drop_pages: Option<Errno>,
    write_pages: Option<Errno>,
    sync: Option<Errno>,
    /// The target fails the flush.
    fails_on_target: bool,
}

const SOUND: Failing = Failing {
    drop_pages: None,
    write_pages: None,
    sync: None,
    fails_on_target: false,
};

/// The SCSI device of the disk, below the root of its machine.
const DEVICE: &str = "sys/devices/2:0:0:1";

/// The kernel's counts of commands that it sent and that a target failed.
const COUNTS: [&str; 2] = ["iorequest_cnt", "ioerr_cnt"];

/// The mark of a flush of the disk, below the root of its machine.
fn mark_of(disk: &str) -> String {
    format!("run/lunbd/lost-{disk}-7")
}

/// The mark of a flush of the open disk.
fn mark_beside(disk: &File) -> io::Result<PathBuf> {
    let link = format!("/proc/thread-self/fd/{}", disk.as_raw_fd());
    let disk = fs::read_link(link)?;
    let name = disk.file_name().unwrap().to_str().unwrap();
    Ok(disk.with_file_name(mark_of(name)))
}

fn end(error: Option<Errno>) -> io::Result<()> {
    error.map_or(Ok(()), |errno| Err(errno.into()))
}

impl DeviceAccess for Failing {
    fn write_attribute(&self, _: &Path, _: &str, _: &dyn Fn() -> bool) -> io::Result<bool> {
        Err(Errno::ENOSYS.into())
    }

    fn open(&self, _: &Path, _: OpenMode) -> io::Result<(File, Option<DevNo>)> {
        Err(Errno::ENOSYS.into())
    }

    fn device_at(&self, _: &Path) -> io::Result<Option<NumberedDevice>> {
        Err(Errno::ENOSYS.into())
    }

    fn disk_sequence(&self, _: &File) -> io::Result<u64> {
        Err(Errno::ENOSYS.into())
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        if self.fails_on_target {
            let root = mark_beside(file)?.ancestors().nth(3).unwrap().to_owned();
            for count in COUNTS {
                fs::write(root.join(DEVICE).join(count), "0x8\n")?;
            }
        }
        end(self.sync)
    }

    fn write_pages(&self, file: &File) -> io::Result<()> {
        if matches!(self.drop_pages, Some(Errno::ENODEV | Errno::EAGAIN)) {
            let mark = fs::read_to_string(mark_beside(file)?)?;
            assert!(mark.contains("does not count"), "{mark}");
        }
        end(self.write_pages)
    }

    fn drop_pages(&self, file: &File) -> io::Result<()> {
        let is_marked = mark_beside(file)?.exists();
        assert!(is_marked, "a process that is killed now leaves no mark");
        end(self.drop_pages)
    }

    fn scsi_read(&self, _: &File, _: &[u8], _: &mut [u8], _: Duration) -> io::Result<Completion> {
        Err(Errno::ENOSYS.into())
    }
}

type WriteBack = fn(&Engine, &Claim, &BlockDevice, FlushPolicy, Deadline) -> Result<Flush>;

/// A machine with one disk that this process has claimed.
struct ClaimedDisk {
    root: tempfile::TempDir,
    name: &'static str,
    claim: Claim,
}

impl ClaimedDisk {
    fn new() -> Self {
        Self::named("sda")
    }

    fn named(name: &'static str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/block").join(name);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "8:0\n").unwrap();
        fs::write(dir.join("diskseq"), "7\n").unwrap();
        let file = File::create_new(root.path().join(name)).unwrap();
        let claim = Claim::Held(Arc::new(file));
        Self { root, name, claim }
    }

    /// The machine and its disk, with this kernel.
    fn on(&self, kernel: Failing) -> (Roots, BlockDevice) {
        let roots = Roots {
            devices: Devices::Other(Arc::new(kernel)),
            ..Roots::below(self.root.path())
        };
        let disk = BlockDevice::at(&roots.sysfs.join("block").join(self.name));
        (roots, disk.unwrap().unwrap())
    }

    /// Writes the disk back in another process, to which the kernel answers so.
    fn flush(&self, write_back: WriteBack, kernel: Failing, policy: FlushPolicy) -> Result<Flush> {
        let _events_are_watched = events_elsewhere::seen();
        let (roots, disk) = self.on(kernel);
        let engine = Engine::start(roots).unwrap();
        let soon = Deadline::after(Duration::from_secs(60));
        let flushed = write_back(&engine, &self.claim, &disk, policy, soon);
        assert_eq!(events_elsewhere::seen(), [""; 0]);
        flushed
    }

    #[track_caller]
    fn flushes(&self, write_back: WriteBack) {
        let flush = self.flush(write_back, SOUND, FlushPolicy::Require);
        assert_eq!(flush.unwrap(), Flush::Done);
    }

    /// No later flush proves anything, and a caller that abandons the data goes on.
    #[track_caller]
    fn has_lost_data(&self) {
        for write_back in [write_back, write_back_below_map] {
            let error = self.flush(write_back, SOUND, FlushPolicy::Require);
            let error = error.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io, "{error}");
            assert_eq!(error.stage(), Some(Stage::Flush), "{error}");
            assert!(error.to_string().contains("an earlier flush"), "{error}");
            let flush = self.flush(write_back, SOUND, FlushPolicy::Abandon);
            let flush = flush.unwrap();
            assert!(matches!(flush, Flush::Abandoned(_)), "{flush:?}");
        }
    }
}

fn refusing_to_drop_pages(errno: Errno) -> Failing {
    Failing {
        drop_pages: Some(errno),
        ..SOUND
    }
}

#[test]
fn a_map_with_a_dead_path_or_whose_paths_are_changed_is_flushed_also_before_linux_5_11() {
    for (errno, kind) in [
        (Errno::ENODEV, ErrorKind::Vanished),
        (Errno::EAGAIN, ErrorKind::Io),
    ] {
        let refusing = refusing_to_drop_pages(errno);
        let map = ClaimedDisk::named("dm-0");
        let flush = map.flush(write_back, refusing, FlushPolicy::Require);
        assert_eq!(flush.unwrap(), Flush::Done);
        // A process that died in it would have left a mark, and this one leaves none.
        map.flushes(write_back);
        let disk = ClaimedDisk::named("sda");
        let flush = disk.flush(write_back, refusing, FlushPolicy::Require);
        assert_eq!(flush.unwrap_err().kind(), kind);
        // The calls after a refusal report a failed write.
        let failing = Failing {
            sync: Some(Errno::EIO),
            ..refusing
        };
        let map = ClaimedDisk::named("dm-0");
        let flush = map.flush(write_back, failing, FlushPolicy::Require);
        assert!(flush.unwrap_err().to_string().contains("cannot flush"));
        map.has_lost_data();
    }
    for (errno, kind) in [
        (Errno::EIO, ErrorKind::Io),
        (Errno::EACCES, ErrorKind::NotPermitted),
    ] {
        let refusing = refusing_to_drop_pages(errno);
        let map = ClaimedDisk::named("dm-0");
        let flush = map.flush(write_back, refusing, FlushPolicy::Require);
        assert_eq!(flush.unwrap_err().kind(), kind);
    }
}

#[test]
fn a_flush_that_cannot_be_marked_is_not_done() {
    let disk = ClaimedDisk::new();
    let mark = disk.root.path().join(mark_of(disk.name));
    fs::create_dir_all(mark.parent().unwrap()).unwrap();
    symlink("no/such/folder", mark).unwrap();
    for write_back in [write_back, write_back_below_map] {
        let error = disk.flush(write_back, SOUND, FlushPolicy::Require);
        assert_eq!(error.unwrap_err().stage(), Some(Stage::Flush));
        let flush = disk.flush(write_back, SOUND, FlushPolicy::Abandon);
        assert!(matches!(flush, Ok(Flush::Abandoned(_))), "{flush:?}");
    }
}

#[test]
fn a_path_below_a_map_that_lost_a_write_is_never_flushed_again_and_can_be_abandoned() {
    let broken = Failing {
        write_pages: Some(Errno::EIO),
        ..SOUND
    };
    let disk = ClaimedDisk::new();
    let error = disk.flush(write_back_below_map, broken, FlushPolicy::Require);
    let error = error.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io, "{error}");
    assert_eq!(error.stage(), Some(Stage::Flush), "{error}");
    disk.has_lost_data();

    let disk = ClaimedDisk::new();
    let flush = disk.flush(write_back_below_map, broken, FlushPolicy::Abandon);
    let flush = flush.unwrap();
    assert!(matches!(flush, Flush::Abandoned(_)), "{flush:?}");
    disk.has_lost_data();
}

#[test]
fn a_path_below_a_map_that_cannot_flush_its_cache_has_lost_nothing() {
    for refused in [
        Failing {
            sync: Some(Errno::EIO),
            ..SOUND
        },
        Failing {
            drop_pages: Some(Errno::EACCES),
            ..SOUND
        },
        // The path is gone: its pages were the map's.
        Failing {
            write_pages: Some(Errno::ENXIO),
            sync: Some(Errno::ENXIO),
            ..SOUND
        },
    ] {
        for policy in [FlushPolicy::Require, FlushPolicy::Abandon] {
            let disk = ClaimedDisk::new();
            let flush = disk.flush(write_back_below_map, refused, policy).unwrap();
            assert!(matches!(flush, Flush::ThroughMap(_)), "{flush:?}");
            disk.flushes(write_back_below_map);
            disk.flushes(write_back);
        }
    }
}

#[test]
fn a_process_that_may_not_flush_a_disk_has_lost_nothing_and_another_process_can() {
    let forbidden = Failing {
        drop_pages: Some(Errno::EACCES),
        ..SOUND
    };
    let disk = ClaimedDisk::new();
    let error = disk.flush(write_back, forbidden, FlushPolicy::Require);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::NotPermitted);
    disk.flushes(write_back);

    let broken = Failing {
        sync: Some(Errno::EIO),
        ..SOUND
    };
    let error = disk.flush(write_back, broken, FlushPolicy::Require);
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Io);
    disk.has_lost_data();
}

/// A disk whose unit has target port groups, with the state of its path that the kernel knows.
fn path_that_the_kernel_knows_as(state: &str) -> ClaimedDisk {
    let claimed = ClaimedDisk::new();
    let device = claimed.root.path().join(DEVICE);
    fs::create_dir_all(&device).unwrap();
    symlink(&device, claimed.root.path().join("sys/block/sda/device")).unwrap();
    // The TPGS field of the INQUIRY data (SPC-5, 6.7.2).
    fs::write(device.join("inquiry"), [0, 0, 6, 2, 31, 0x30]).unwrap();
    fs::write(device.join("access_state"), format!("{state}\n")).unwrap();
    for count in COUNTS {
        fs::write(device.join(count), "0x7\n").unwrap();
    }
    claimed
}

#[test]
fn a_flush_that_the_kernel_refuses_by_an_earlier_access_state_has_lost_nothing() {
    let refused = Failing {
        sync: Some(Errno::EIO),
        ..SOUND
    };
    let claimed = path_that_the_kernel_knows_as("standby");
    let flush = claimed.flush(write_back, refused, FlushPolicy::Require);
    let Ok(Flush::PagesWritten(why)) = flush else {
        panic!("{flush:?}");
    };
    assert!(why.contains("standby"), "{why}");
    claimed.flushes(write_back);
    // Without one of the counts the other proves it.
    for unknown in COUNTS {
        let claimed = path_that_the_kernel_knows_as("standby");
        fs::remove_file(claimed.root.path().join(DEVICE).join(unknown)).unwrap();
        let flush = claimed.flush(write_back, refused, FlushPolicy::Require);
        assert!(matches!(flush, Ok(Flush::PagesWritten(_))), "{flush:?}");
    }
}

#[test]
fn a_flush_that_fails_on_the_target_has_lost_data_whatever_state_the_kernel_knows() {
    for (state, fails_on_target) in [("standby", true), ("active/optimized", false)] {
        let failed = Failing {
            sync: Some(Errno::EIO),
            fails_on_target,
            ..SOUND
        };
        let claimed = path_that_the_kernel_knows_as(state);
        let flush = claimed.flush(write_back, failed, FlushPolicy::Require);
        assert_eq!(flush.unwrap_err().kind(), ErrorKind::Io, "{state}");
        claimed.has_lost_data();
    }
}

/// The kernel frees an NBD device at its last close, and the detach that waits for that then takes
/// the mark for the last word of this flush.
#[test]
fn a_failed_flush_is_recorded_before_its_file_is_closed() {
    let lost = Failing {
        sync: Some(Errno::EIO),
        ..SOUND
    };
    for _ in 0..20 {
        let claimed = ClaimedDisk::named("nbd0");
        let fifo = claimed.root.path().join("nbd0");
        fs::remove_file(&fifo).unwrap();
        mkfifo(&fifo, Mode::S_IRWXU).unwrap();
        let mut options = File::options();
        let reader = options.read(true).custom_flags(nix::libc::O_NONBLOCK);
        let reader = reader.open(&fifo).unwrap();
        let file = Arc::new(File::options().write(true).open(&fifo).unwrap());
        let (roots, disk) = claimed.on(lost);
        let mark = FailedFlush::of(&roots, &disk).unwrap();
        let marked = claimed.root.path().join(mark_of("nbd0"));
        let at_the_last_close = thread::spawn(move || {
            let mut closed = [PollFd::new(reader.as_fd(), PollFlags::empty())];
            poll(&mut closed, PollTimeout::NONE).unwrap();
            fs::read_to_string(marked).unwrap()
        });
        flush(roots, file, disk, mark, Box::new(|| {})).unwrap_err();
        let marked = at_the_last_close.join().unwrap();
        assert!(marked.contains("cannot flush"), "{marked}");
    }
}
