//! The file of a lock, which its last holder may remove.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

/// Any process that can open the file can lock it, so only its owner may open it.
const MODE: u32 = 0o600;

/// The result of an attempt to lock without waiting.
#[derive(Debug)]
pub(in crate::engine) enum Locked {
    /// The file at the path is locked, and had this length in bytes then.
    Ours(Flock<File>, u64),
    /// Another process has the lock.
    HeldByAnother,
    /// The file was removed before it was locked, and another process may lock the next
    /// one at the path: try again.
    Removed,
}

/// Opens the file of a lock, and creates it where it is missing.
///
/// # Errors
/// Those of the file system.
pub(in crate::engine) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.create(true).truncate(false).write(true);
    options.mode(MODE).open(path)
}

/// Locks the open file of the lock at `path`.
///
/// # Errors
/// Those of the kernel.
pub(in crate::engine) fn lock(path: &Path, file: File, how: FlockArg) -> io::Result<Locked> {
    match Flock::lock(file, how) {
        Ok(file) => {
            let ours = file.metadata()?;
            if is_file_at(path, &ours) {
                return Ok(Locked::Ours(file, ours.len()));
            }
            Ok(Locked::Removed)
        }
        Err((_, Errno::EWOULDBLOCK | Errno::EINTR)) => Ok(Locked::HeldByAnother),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Whether the path leads to this open file.
///
/// # Errors
/// Those of the file system.
pub(in crate::engine) fn is_at(path: &Path, file: &File) -> io::Result<bool> {
    Ok(is_file_at(path, &file.metadata()?))
}

fn is_file_at(path: &Path, ours: &fs::Metadata) -> bool {
    let is_ours = |there: fs::Metadata| (there.dev(), there.ino()) == (ours.dev(), ours.ino());
    fs::symlink_metadata(path).is_ok_and(is_ours)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: FlockArg = FlockArg::LockExclusiveNonblock;

    #[test]
    fn a_file_that_was_removed_before_it_was_locked_is_no_lock_and_the_next_one_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lock");
        let early = open(&path).unwrap();
        assert_eq!(early.metadata().unwrap().mode() & 0o777, MODE);
        fs::remove_file(&path).unwrap();
        let gone = lock(&path, early, ALONE).unwrap();
        assert!(matches!(gone, Locked::Removed), "{gone:?}");
        // The next one is at the path before the first is locked.
        let early = open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let next = open(&path).unwrap();
        let other = lock(&path, early, ALONE).unwrap();
        assert!(matches!(other, Locked::Removed), "{other:?}");
        let ours = lock(&path, next, ALONE).unwrap();
        assert!(matches!(ours, Locked::Ours(_, 0)), "{ours:?}");
        let refused = lock(&path, open(&path).unwrap(), ALONE).unwrap();
        assert!(matches!(refused, Locked::HeldByAnother), "{refused:?}");
    }
}
