//! The tables of descriptors of a process. A thread may have one of its own.

use std::fs;
use std::io;
use std::iter;
use std::path::{Path, PathBuf};

use nix::errno::Errno;

use super::threads::ThreadList;
use crate::kernel::Roots;

/// Tells tables of descriptors apart.
#[derive(Debug)]
pub(super) struct DescriptorTables {
    /// Whether the numbers in `/proc` are those of this process's PID namespace, so that
    /// they mean the same in a system call.
    has_own_numbers: bool,
}

/// The directory in `/proc` with the descriptors of a process's first thread. A thread that
/// executes a program takes the number of its process, and with it this directory (`fs/exec.c`,
/// `de_thread`).
pub(super) fn of_first_thread(process: &Path) -> PathBuf {
    process.join("fd")
}

/// The tables of the threads that do not have the table of their process's first thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OtherTables {
    /// Their directories in `/proc`.
    pub(super) directories: Vec<PathBuf>,
    /// Whether the process has more threads than one.
    pub(super) of_several_threads: bool,
    /// Whether these are all, if the caller then finds each directory there. If a thread has
    /// ended meanwhile, the kernel may have skipped another one.
    pub(super) are_all: bool,
}

impl OtherTables {
    /// Those of a process that has ended.
    pub(super) fn none() -> Self {
        Self {
            directories: Vec::new(),
            of_several_threads: false,
            are_all: true,
        }
    }
}

impl DescriptorTables {
    pub(super) fn read(roots: &Roots) -> Self {
        let own = fs::read_link(roots.proc.join("self")).ok();
        let number = std::process::id().to_string();
        Self {
            has_own_numbers: own.is_some_and(|own| own == Path::new(&number)),
        }
    }

    /// The tables of the other threads of a process.
    ///
    /// # Errors
    /// `ENOENT` or `ESRCH` if the process has ended.
    pub(super) fn of_other_threads(&self, pid: u32, process: &Path) -> io::Result<OtherTables> {
        let list = ThreadList::read(process)?;
        // A thread that has ended counts as one with another table, whose directory is not there.
        let share_table = |one, other| self.compare(one, other) == Ok(true);
        let mut threads: Vec<u32> = Vec::new();
        for &thread in list.numbers.iter().filter(|thread| **thread != pid) {
            let mut known = iter::once(&pid).chain(threads.last());
            let is_known = known.any(|known| share_table(*known, thread));
            if !is_known {
                threads.push(thread);
            }
        }
        let directory = |thread| process.join(format!("task/{thread}/fd"));
        Ok(OtherTables {
            directories: threads.into_iter().map(directory).collect(),
            of_several_threads: !list.numbers.is_empty(),
            are_all: list.count_matches(),
        })
    }

    /// Whether both threads have one table.
    ///
    /// # Errors
    /// Those of [`lunbd_sys::process::share_files`]; `ENOSYS` if the numbers in `/proc` are not
    /// those of a system call.
    pub(super) fn compare(&self, thread: u32, other: u32) -> nix::Result<bool> {
        if !self.has_own_numbers {
            return Err(Errno::ENOSYS);
        }
        lunbd_sys::process::share_files(thread, other)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Sender};
    use std::thread::{self, JoinHandle};

    use nix::unistd::gettid;

    use super::*;

    /// A thread that ends when the sender is dropped, and its number.
    fn start_thread(has_own_table: bool) -> (PathBuf, Sender<()>, JoinHandle<()>) {
        let (told, number) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            if has_own_table {
                lunbd_sys::files::unshare_fd_table().unwrap();
            }
            told.send(gettid()).unwrap();
            let _ended = ended.recv();
        });
        let number = number.recv().unwrap();
        let directory = format!("/proc/{}/task/{number}/fd", std::process::id());
        (PathBuf::from(directory), end, thread)
    }

    #[test]
    fn a_table_that_threads_share_is_read_once_if_the_kernel_compares_them() {
        let (shared, end, sharing) = start_thread(false);
        let (own, end_own, apart) = start_thread(true);
        let roots = Roots::default();
        let pid = std::process::id();
        let process = roots.proc.join(pid.to_string());
        let tables = DescriptorTables::read(&roots);
        assert!(tables.has_own_numbers);
        let read = |tables: &DescriptorTables| {
            loop {
                let found = tables.of_other_threads(pid, &process).unwrap();
                // Threads of other tests end meanwhile.
                if found.are_all {
                    let has = |table| found.directories.contains(table);
                    return (has(&shared), has(&own));
                }
            }
        };
        assert_eq!(read(&tables), (false, true));
        // If the numbers may be of another namespace, each thread is read.
        let foreign = DescriptorTables {
            has_own_numbers: false,
        };
        assert_eq!(read(&foreign), (true, true));
        drop((end, end_own));
        sharing.join().unwrap();
        apart.join().unwrap();
    }
}
