//! The descriptors of a process, in each table of descriptors that it has.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::kernel::{Roots, directory, proc_file};

/// The count of links of `/proc/PID/task` if the process has one thread: two of each
/// directory, and one for each thread (`fs/proc/base.c`, `proc_task_getattr`).
const LINKS_OF_ONE_THREAD: u64 = 3;

/// Whether this error means that a process has ended, or has closed a descriptor. Any other error
/// does not show what is there: a process of uid 0 without `CAP_SYS_PTRACE` may list the
/// descriptors of other processes, but not look at one (`EACCES`).
pub(in crate::kernel) fn has_gone(error: &io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::ENOENT | Errno::ESRCH))
}

/// What was read; `None` if it has gone. Any other error makes the look at its process
/// incomplete.
pub(super) fn unless_denied<T>(read: io::Result<T>, is_complete: &mut bool) -> Option<T> {
    read.inspect_err(|error| *is_complete &= has_gone(error))
        .ok()
}

/// The descriptors of one process.
#[derive(Debug)]
pub(super) struct Descriptors {
    /// The path of each in `/proc`.
    pub(super) paths: Vec<PathBuf>,
    /// The number of a thread that has not ended, for what all threads share.
    pub(super) thread: u32,
}

/// Tells tables of descriptors apart.
#[derive(Debug)]
pub(super) struct DescriptorTables {
    /// Whether the numbers in `/proc` are those of this process's PID namespace, so that
    /// they mean the same in a system call.
    has_own_numbers: bool,
}

impl DescriptorTables {
    pub(super) fn read(roots: &Roots) -> Self {
        let own = fs::read_link(roots.proc.join("self")).ok();
        let number = std::process::id().to_string();
        Self {
            has_own_numbers: own.is_some_and(|own| own == Path::new(&number)),
        }
    }

    /// The descriptors of a process: those of its first thread, and those of each thread
    /// with another table. A process that was killed stays for as long as the kernel holds
    /// one of its threads, and then its first thread has no descriptors.
    pub(super) fn descriptors(
        &self,
        pid: u32,
        process: &Path,
        is_complete: &mut bool,
    ) -> Descriptors {
        let mut paths = entries(&process.join("fd"), is_complete);
        let has_ended = paths.is_empty();
        let mut thread = pid;
        let mut last = pid;
        for other in other_threads(pid, process, is_complete) {
            if has_ended {
                thread = other;
            }
            if self.share_table(pid, other) || (last != pid && self.share_table(last, other)) {
                continue;
            }
            last = other;
            let table = process.join(format!("task/{other}/fd"));
            paths.extend(entries(&table, is_complete));
        }
        Descriptors { paths, thread }
    }

    /// Whether one look serves both threads: they have one table, or one has ended.
    fn share_table(&self, thread: u32, other: u32) -> bool {
        matches!(self.compare(thread, other), Ok(true) | Err(Errno::ESRCH))
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

fn other_threads(pid: u32, process: &Path, is_complete: &mut bool) -> Vec<u32> {
    let threads = process.join("task");
    if fs::metadata(&threads).is_ok_and(|threads| threads.nlink() == LINKS_OF_ONE_THREAD) {
        return Vec::new();
    }
    let numbers = entries(&threads, is_complete)
        .into_iter()
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?;
            name.parse().ok()
        });
    numbers.filter(|thread| *thread != pid).collect()
}

fn entries(dir: &Path, is_complete: &mut bool) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    let read = directory::read_names(dir, |name| paths.push(dir.join(name)));
    unless_denied(read, is_complete);
    paths
}

/// Whether a descriptor was opened for writing, by the flags in `fdinfo` (`fs/proc/fd.c`,
/// octal); `None` if it does not have the device open. A descriptor whose flags cannot be
/// read may write.
pub(super) fn writes(descriptor: &Path) -> Option<bool> {
    let text = match proc_file::read(&fdinfo_path(descriptor)?) {
        Ok(text) => String::from_utf8_lossy(&text).into_owned(),
        Err(error) => return (!has_gone(&error)).then_some(true),
    };
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok());
    let Some(flags) = flags.map(OFlag::from_bits_retain) else {
        return Some(true);
    };
    if flags.contains(OFlag::O_PATH) {
        return None;
    }
    Some(flags & OFlag::O_ACCMODE != OFlag::O_RDONLY)
}

/// The file in which the kernel shows more of a descriptor.
pub(super) fn fdinfo_path(descriptor: &Path) -> Option<PathBuf> {
    let number = descriptor.file_name()?;
    Some(descriptor.parent()?.with_file_name("fdinfo").join(number))
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::OpenOptionsExt as _;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn descriptor(file: &File) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
    }

    #[test]
    fn a_writer_differs_from_a_reader_and_from_a_process_with_an_o_path_descriptor() {
        let mut both = OpenOptions::new();
        both.read(true).write(true);
        let file = both.open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(true));
        let file = OpenOptions::new().write(true).open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(true));
        let file = File::open("/dev/null").unwrap();
        assert_eq!(writes(&descriptor(&file)), Some(false));
        let path = OFlag::O_PATH.bits();
        let file = OpenOptions::new().read(true).custom_flags(path).open("/");
        assert_eq!(writes(&descriptor(&file.unwrap())), None);
    }

    #[test]
    fn each_table_of_descriptors_of_a_process_is_read_once() {
        let (told, is_open) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let apart = thread::spawn(move || {
            lunbd_sys::files::unshare_fd_table().unwrap();
            let file = File::open("/dev/full").unwrap();
            told.send(()).unwrap();
            let _ended = ended.recv();
            drop(file);
        });
        is_open.recv().unwrap();
        let roots = Roots::default();
        let pid = std::process::id();
        let process = roots.proc.join(pid.to_string());
        let is_full =
            |path: &Path| fs::read_link(path).is_ok_and(|to| to == Path::new("/dev/full"));
        let mut is_complete = true;
        let own = DescriptorTables::read(&roots);
        assert!(own.has_own_numbers);
        let found = own.descriptors(pid, &process, &mut is_complete);
        assert_eq!(found.thread, pid);
        // The harness has other threads, and each shares the table of the first.
        assert_eq!(found.paths.iter().filter(|path| is_full(path)).count(), 1);
        // If the numbers may be of another namespace, each thread is read.
        let foreign = DescriptorTables {
            has_own_numbers: false,
        };
        let all = foreign.descriptors(pid, &process, &mut is_complete);
        assert!(all.paths.len() > found.paths.len());
        drop(end);
        apart.join().unwrap();
    }
}
