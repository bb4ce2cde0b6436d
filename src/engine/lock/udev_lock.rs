//! The lock on a disk by which udev and other programs coordinate.

use std::fs::{File, TryLockError};
use std::time::Duration;

use crate::deadline::{Backoff, Deadline};

/// How long to wait for udev's reads. After that the caller continues while udev still
/// reads.
const LONGEST: Duration = Duration::from_secs(10);

/// Waits until udev has read the disk, and keeps udev from it until the file is closed.
/// udevd holds a shared lock on a disk while it reads it, and retries later where another
/// process holds the exclusive lock (<https://systemd.io/BLOCK_DEVICE_LOCKING>).
///
/// A disconnect fails requests in flight. nbdkit before 1.34 aborts, with all its other
/// exports, where its client leaves before it has all replies (nbdkit commit 9d82aa4f).
///
/// The lock is optional: where it is not free in time, the caller goes on. A reader does
/// not keep a disk from being detached.
pub(in crate::engine) fn keep_udev_away(disk: &File, deadline: Deadline) {
    let limit = deadline.half().at_most(LONGEST);
    let mut pauses = Backoff::for_lock();
    while let Err(TryLockError::WouldBlock) = disk.try_lock() {
        if limit.has_passed() {
            tracing::debug!("udev still reads the disk");
            return;
        }
        limit.pause(pauses.pause());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_disk_that_udev_reads_is_waited_for_and_then_kept_from_it() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let [udev, ours] = [(); 2].map(|()| File::open(disk.path()).unwrap());
        udev.lock_shared().unwrap();
        let (done, is_done) = mpsc::channel();
        let waits = thread::spawn(move || {
            keep_udev_away(&ours, Deadline::after(Duration::from_secs(60)));
            done.send(()).unwrap();
            ours
        });
        is_done.recv_timeout(Duration::from_millis(50)).unwrap_err();
        udev.unlock().unwrap();
        let ours = waits.join().unwrap();
        assert!(udev.try_lock_shared().is_err());
        drop(ours);
        udev.try_lock_shared().unwrap();
    }

    #[test]
    fn a_lock_that_is_never_released_keeps_no_caller_beyond_its_deadline() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        let [udev, ours] = [(); 2].map(|()| File::open(disk.path()).unwrap());
        udev.lock_shared().unwrap();
        let start = Instant::now();
        keep_udev_away(&ours, Deadline::after(Duration::from_millis(20)));
        // It waits for half of the deadline.
        assert!(start.elapsed() >= Duration::from_millis(10));
        assert!(start.elapsed() < LONGEST);
    }
}
