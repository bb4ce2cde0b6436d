//! The tables of descriptors of threads. A thread may have one of its own.

use std::fs;
use std::path::Path;

use nix::errno::Errno;

use crate::kernel::Roots;

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
    use std::thread;

    use nix::unistd::gettid;

    use super::*;

    #[test]
    fn a_thread_shares_the_table_of_its_process_until_it_has_its_own() {
        let tables = DescriptorTables::read(&Roots::default());
        let pid = std::process::id();
        thread::spawn(move || {
            let number = gettid().as_raw().unsigned_abs();
            assert_eq!(tables.compare(pid, number), Ok(true));
            lunbd_sys::files::unshare_fd_table().unwrap();
            assert_eq!(tables.compare(pid, number), Ok(false));
            let foreign = DescriptorTables {
                has_own_numbers: false,
            };
            assert_eq!(foreign.compare(pid, number), Err(Errno::ENOSYS));
        })
        .join()
        .unwrap();
    }
}
