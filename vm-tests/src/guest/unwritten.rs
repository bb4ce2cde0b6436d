//! Data that stays in the page cache, and the close that has to write it back.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// A reader of a disk, for as long as what is written to it is to stay unwritten. No
/// writer's close is the last one then. And udevd, which takes this lock for itself
/// alone, does not have the kernel reread the partition table, which would write back.
#[must_use]
pub fn keep_unwritten(node: &Path) -> File {
    let reader = File::open(node).expect("the node");
    reader.lock_shared().expect("a lock of the node");
    reader
}

/// Closes it on a thread of its own, and returns when no process has it open any more:
/// the last close writes back, and waits for that in the kernel.
#[must_use]
pub fn closing(file: File) -> JoinHandle<()> {
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let node = fs::read_link(&link).expect("an open file");
    let closer = thread::spawn(move || drop(file));
    super::wait_until("the descriptor to be gone", Duration::from_secs(60), || {
        let stays = fs::read_link(&link).is_ok_and(|now| now == node);
        (!stays).then_some(())
    });
    closer
}
