//! The file table of a thread.

use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use nix::errno::Errno;

/// Gives the calling thread a file table of its own, with only standard input,
/// output and error (`close_range`, `CLOSE_RANGE_UNSHARE`, Linux 5.9).
///
/// The other threads keep the process's table. What they close is closed at once,
/// and its locks are released, even while this thread stays in the kernel. A killed
/// process ends only with its last thread, and without this call its locks would
/// last as long.
///
/// **The thread loses all earlier descriptors**, and their numbers are given to
/// what it opens later. It must use, and drop, only what it opens itself.
///
/// # Errors
/// `ENOMEM`; `ENOSYS` before Linux 5.9. The thread then keeps the process's table.
pub fn unshare_fd_table() -> nix::Result<()> {
    close_own(FIRST, libc::c_uint::MAX)
}

/// Like [`unshare_fd_table`], but the new table also has `kept`. The
/// result is this thread's own descriptor: the same open file under the same
/// number.
///
/// **It must not be given to another thread**, where the number means another file.
/// A thread with the process's table must close the process's descriptor, from
/// which `kept` is borrowed, or the file stays open there.
///
/// # Errors
/// Those of [`unshare_fd_table`].
pub fn unshare_fd_table_keeping(kept: BorrowedFd<'_>) -> nix::Result<OwnedFd> {
    let number = kept.as_raw_fd();
    let unsigned = libc::c_uint::try_from(number).map_err(|_| Errno::EBADF)?;
    close_own(FIRST.max(unsigned + 1), libc::c_uint::MAX)?;
    if unsigned > FIRST {
        // This cannot fail: the table is this thread's own by now.
        let _closed = close_own(FIRST, unsigned - 1);
    }
    // SAFETY: the table belongs to this thread only, and the number is open in it.
    // Nothing else in this thread owns it: `kept` belongs to the earlier table.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// The first number after standard input, output and error.
const FIRST: libc::c_uint = 3;

/// Closes these numbers in the calling thread's own file table. A thread that
/// shares a table first gets its own.
fn close_own(first: libc::c_uint, last: libc::c_uint) -> nix::Result<()> {
    // SAFETY: the call takes three numbers and touches no memory of ours. No
    // descriptor of another thread is closed, since the table is unshared first.
    let result = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first,
            last,
            libc::CLOSE_RANGE_UNSHARE,
        )
    };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd as _, AsRawFd};
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn the_thread_has_none_of_the_files_and_the_others_have_them_still() {
        let file = File::open("/dev/null").unwrap();
        let number = file.as_raw_fd();
        let gone = thread::spawn(move || {
            unshare_fd_table().unwrap();
            !std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists()
        });
        assert!(gone.join().unwrap());
        // SAFETY: the file is open for as long as this is used.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        assert!(borrowed.try_clone_to_owned().is_ok());
        drop(file);
    }

    #[test]
    fn the_thread_has_one_of_the_files_alone_for_as_long_as_it_wants_it() {
        let others = [(); 2].map(|()| File::open("/dev/null").unwrap());
        let file = File::open("/dev/zero").unwrap();
        let behind = File::open("/dev/null").unwrap();
        let numbers = others.iter().chain([&behind]).map(AsRawFd::as_raw_fd);
        let numbers: Vec<_> = numbers.collect();
        let (kept, closed) = (mpsc::channel(), mpsc::channel());
        thread::scope(|scope| {
            let borrowed = file.as_fd();
            let thread = scope.spawn(move || {
                let own = unshare_fd_table_keeping(borrowed).unwrap();
                kept.0.send(()).unwrap();
                closed.1.recv().unwrap();
                let has = |number: &i32| {
                    std::path::Path::new(&format!("/proc/thread-self/fd/{number}")).exists()
                };
                let byte = &mut [1];
                let read = std::io::Read::read(&mut File::from(own), byte).unwrap();
                (read, *byte, numbers.iter().any(has))
            });
            kept.1.recv().unwrap();
            closed.0.send(()).unwrap();
            assert_eq!(thread.join().unwrap(), (1, [0], false));
        });
        assert!(file.metadata().is_ok());
    }
}
