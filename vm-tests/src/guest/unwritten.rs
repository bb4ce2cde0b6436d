//! Keeps data in the page cache, and closes the file that must write it back.

use std::fs::{self, File};
use std::path::Path;
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::unistd::gettid;

/// How long a close may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(60);

/// Opens a disk for reading, for as long as written data must stay in the page cache. Then no
/// writer's close is the last one. udevd wants this lock exclusively, so it does not make the
/// kernel reread the partition table, which would write the data back.
#[must_use]
pub fn keep_unwritten(node: &Path) -> File {
    let reader = File::open(node).expect("the node");
    reader.lock_shared().expect("a lock of the node");
    reader
}

/// Closes the file on its own thread, and returns when no process has the file open any more:
/// the last close writes back, and waits for that in the kernel.
///
/// Nothing looks at the descriptor meanwhile: a look takes a reference of the file
/// (`fs/proc/fd.c`, `proc_fd_link`, Linux 5.11), so that the look may end with the last close.
#[must_use]
pub fn closing(file: File) -> JoinHandle<()> {
    let (own, id) = mpsc::channel();
    let closer = thread::spawn(move || {
        own.send(gettid()).expect("the test");
        drop(file);
    });
    let stack = format!("/proc/self/task/{}/stack", id.recv().expect("the closer"));
    super::wait_until("the last close of the disk", LIMIT, || {
        // The function is `blkdev_release` since Linux 6.5.
        let stack = fs::read_to_string(&stack).unwrap_or_default();
        let mut names = ["blkdev_close", "blkdev_release"].iter();
        let waits = names.any(|name| stack.contains(name));
        (closer.is_finished() || waits).then_some(())
    });
    closer
}

/// Waits until a [closer](closing) has ended.
pub fn closed(closer: JoinHandle<()>) {
    super::wait_until("the close of the disk to end", LIMIT, || {
        closer.is_finished().then_some(())
    });
    closer.join().expect("the closer");
}

/// Keeps pages dirty until a process asks for them, as on a machine with much memory.
#[derive(Debug)]
pub struct LazyWriteback(Vec<(&'static str, String)>);

impl LazyWriteback {
    /// Changes the kernel's settings until the result is dropped.
    #[must_use]
    pub fn start() -> Self {
        super::enter();
        let settings = [
            // One hour. With 0 the flusher runs when an inode becomes dirty, and it writes what
            // exceeds the small share of the thresholds that a new device has.
            ("/proc/sys/vm/dirty_writeback_centisecs", "360000"),
            ("/proc/sys/vm/dirty_background_ratio", "90"),
            ("/proc/sys/vm/dirty_ratio", "95"),
        ];
        let before = settings.map(|(file, value)| {
            let before = fs::read_to_string(file).unwrap();
            fs::write(file, value).unwrap();
            (file, before)
        });
        Self(before.into())
    }
}

impl Drop for LazyWriteback {
    fn drop(&mut self) {
        for (file, before) in self.0.iter().rev() {
            fs::write(file, before).unwrap();
        }
    }
}
