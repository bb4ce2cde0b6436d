//! A descriptor of a process.

use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;

use crate::kernel::proc_file;

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

/// Whether a descriptor was opened for writing, by the flags in `fdinfo` (`fs/proc/fd.c`,
/// octal); `None` if it does not have the device open. A descriptor whose flags cannot be
/// read may write.
pub(super) fn writes(descriptor: &Path) -> Option<bool> {
    let Ok(text) = proc_file::read_record(&fdinfo_path(descriptor)?) else {
        return Some(true);
    };
    let text = String::from_utf8_lossy(&text);
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
    use std::path::PathBuf;

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
}
