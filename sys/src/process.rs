//! What two processes share.

use nix::errno::Errno;

/// `include/uapi/linux/kcmp.h`.
const KCMP_FILES: libc::c_long = 2;

/// Whether two threads, by their numbers in the caller's PID namespace, have the same table
/// of open files.
///
/// # Errors
/// The errno of the call: `ESRCH` where one has ended; `EPERM` where the caller may not
/// trace one; `ENOSYS` in a kernel without `CONFIG_KCMP`.
#[doc(alias = "kcmp")]
pub fn share_files(one: u32, other: u32) -> nix::Result<bool> {
    let number = |pid: u32| libc::c_long::from(libc::pid_t::try_from(pid).unwrap_or(0));
    let none: libc::c_long = 0;
    // SAFETY: with this type the call takes numbers alone and touches no memory of ours.
    let order = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            number(one),
            number(other),
            KCMP_FILES,
            none,
            none,
        )
    };
    Errno::result(order).map(|order| order == 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_shares_the_table_of_its_process_until_it_leaves_it() {
        let us = std::process::id();
        let (told, tid) = mpsc::channel();
        let (leave, left) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let link = fs::read_link("/proc/thread-self").unwrap();
            let name = link.file_name().unwrap().to_str().unwrap().to_owned();
            told.send(name.parse::<u32>().unwrap()).unwrap();
            left.recv().unwrap();
            crate::files::unshare_fd_table().unwrap();
            told.send(0).unwrap();
            let _ended = left.recv();
        });
        let number = tid.recv().unwrap();
        assert_eq!(share_files(us, number), Ok(true));
        leave.send(()).unwrap();
        tid.recv().unwrap();
        assert_eq!(share_files(us, number), Ok(false));
        drop(leave);
        thread.join().unwrap();
        assert_eq!(share_files(us, u32::MAX), Err(Errno::ESRCH));
    }
}
