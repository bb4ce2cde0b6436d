//! The table of open files of a thread.

use nix::errno::Errno;

/// Gives the calling thread a table of open files of its own, with standard
/// input, output and error alone (`close_range`, `CLOSE_RANGE_UNSHARE`, Linux 5.9).
///
/// The other threads keep theirs. What they close is closed then, and locks go
/// with it, though this thread stays in the kernel: a process that is killed does
/// not end before its last thread does, and without this neither do its locks.
///
/// **Descriptors from before are not this thread's any more**, and their numbers
/// are given to what it opens: it must use, and drop, only what it opens itself.
///
/// # Errors
/// `ENOMEM`; `ENOSYS` before Linux 5.9. The table is the process's then.
pub fn leave_those_of_the_process() -> nix::Result<()> {
    const FIRST: libc::c_uint = 3;
    // SAFETY: the call takes three numbers and touches no memory of ours. No
    // descriptor of another thread is closed, since the table is unshared first.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            FIRST,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_UNSHARE,
        )
    };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsRawFd as _, BorrowedFd};
    use std::thread;

    use super::*;

    #[test]
    fn the_thread_has_none_of_the_files_and_the_others_have_them_still() {
        let file = File::open("/dev/null").unwrap();
        let number = file.as_raw_fd();
        let gone = thread::spawn(move || {
            leave_those_of_the_process().unwrap();
            !std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists()
        });
        assert!(gone.join().unwrap());
        // SAFETY: the file is open for as long as this is used.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        assert!(borrowed.try_clone_to_owned().is_ok());
        drop(file);
    }
}
