//! The names in a directory.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use lunbd_sys::directory::LastRead;
use nix::fcntl::OFlag;

/// Hands over each name in a directory, in the kernel's order.
///
/// # Errors
/// Those of the file system. The names before the error were handed over.
pub(super) fn read_names(path: &Path, take: impl FnMut(&OsStr)) -> io::Result<()> {
    open_and_read_names(path, take).map(drop)
}

/// As [`read_names`]. Returns the directory, which stays open.
///
/// # Errors
/// Those of [`read_names`].
pub(super) fn open_and_read_names(path: &Path, take: impl FnMut(&OsStr)) -> io::Result<File> {
    let mut options = File::options();
    let directory = options.read(true).custom_flags(OFlag::O_DIRECTORY.bits());
    let directory = directory.open(path)?;
    let is_of_kernel = ["/sys", "/proc"].iter().any(|root| path.starts_with(root));
    let last = if is_of_kernel {
        LastRead::LeavesRoom
    } else {
        LastRead::Empty
    };
    lunbd_sys::directory::read_names(directory.as_fd(), last, take)?;
    Ok(directory)
}
