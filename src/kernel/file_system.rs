//! The space of a mounted file system.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::statvfs::fstatvfs;

use super::devices::devno_of;
use crate::error::{Error, Result};
use crate::id::DevNo;

/// Space in bytes and numbers of files, as statvfs counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Usage {
    /// The size of the file system.
    pub total_bytes: u64,
    /// The space in use.
    pub used_bytes: u64,
    /// The space left for processes without privilege. Used and available space
    /// together are less than the total by what the file system reserves.
    pub available_bytes: u64,
    /// How many files the file system can hold; 0 if it sets no limit.
    pub total_inodes: u64,
    /// How many files it holds.
    pub used_inodes: u64,
    /// How many more files it can hold.
    pub free_inodes: u64,
}

/// The usage of the file system mounted at `path`, and the device that its
/// files are on. The device is another than expected if the file system was
/// unmounted meanwhile. **Blocks** for as long as the file system does: call it
/// on a worker.
///
/// # Errors
/// By the errno; `Io` (`EIO`) if the file system has shut down.
pub(crate) fn read(path: &Path) -> Result<(Usage, DevNo)> {
    let failed = |error: &std::io::Error| Error::io("cannot examine", path, error);
    let directory = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_PATH.bits())
        .open(path)
        .map_err(|error| failed(&error))?;
    let device = directory.metadata().map_err(|error| failed(&error))?.dev();
    let stat = fstatvfs(&directory).map_err(|errno| failed(&errno.into()))?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.fragment_size());
    let usage = Usage {
        total_bytes: bytes(stat.blocks()),
        used_bytes: bytes(stat.blocks().saturating_sub(stat.blocks_free())),
        available_bytes: bytes(stat.blocks_available()),
        total_inodes: stat.files(),
        used_inodes: stat.files().saturating_sub(stat.files_free()),
        free_inodes: stat.files_free(),
    };
    Ok((usage, devno_of(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_and_what_is_available_are_parts_of_all() {
        let directory = tempfile::tempdir().unwrap();
        let (usage, device) = read(directory.path()).unwrap();
        let found = std::fs::metadata(directory.path()).unwrap().dev();
        assert_eq!(device, devno_of(found));
        assert!(usage.total_bytes > 0, "{usage:?}");
        assert!(usage.used_bytes + usage.available_bytes <= usage.total_bytes);
        assert_eq!(usage.used_inodes + usage.free_inodes, usage.total_inodes);
        assert!(read(&directory.path().join("none")).is_err());
    }
}
