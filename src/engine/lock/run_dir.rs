//! The directory of locks and marks, `run/lunbd`.
//!
//! Any process that can open a file there can lock it, and another user's lock would
//! delay attaches or make a detach leave its session. So only the directory's owner has
//! access to it.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::kernel::{Roots, process};

/// The owner has all rights, and other users have none.
const DIRECTORY: u32 = 0o700;
/// The mode bits of group and others.
const OTHERS: u32 = 0o077;

/// The path of the directory.
pub(in crate::engine) fn path(roots: &Roots) -> PathBuf {
    roots.run.join("lunbd")
}

/// Whether the directory, or the place where it would be created, is that of the
/// machine's first process; `None` where that process is not visible.
pub(in crate::engine) fn is_of_first_process(roots: &Roots) -> Option<bool> {
    if !process::shows_all_namespaces(roots).unwrap_or(false) {
        return None;
    }
    let root = roots.proc.join("1/root");
    let is_there = |path: &Path| match fs::metadata(path) {
        Ok(found) => Some(Some((found.dev(), found.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Some(None),
        Err(_) => None,
    };
    is_there(&root)??;
    // This process may see the machine's directory at another path than the machine
    // itself.
    let places = [roots.run.as_path(), Path::new("/run")].map(|run| {
        let below_root = run.strip_prefix("/").unwrap_or(run);
        root.join(below_root)
    });
    for run in places {
        let pairs = [(path(roots), run.join("lunbd")), (roots.run.clone(), run)];
        for (own, machines) in pairs {
            match (is_there(&own)?, is_there(&machines)?) {
                // Neither exists, so the parent directories are compared.
                (None, None) => {}
                (own, machines) if own == machines => return Some(true),
                _ => break,
            }
        }
    }
    Some(false)
}

/// Removes other users' access to the directory, which an earlier version allowed. A
/// process without the right to change it, such as one that only lists devices, leaves it
/// as it is.
pub(in crate::engine) fn make_private(roots: &Roots) {
    let path = path(roots);
    let is_open = |metadata: &fs::Metadata| metadata.mode() & OTHERS != 0;
    if !fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir() && is_open(&found)) {
        return;
    }
    if let Err(error) = fs::set_permissions(&path, fs::Permissions::from_mode(DIRECTORY)) {
        tracing::warn!(path = %path.display(), %error, "other users can take locks in this directory");
    }
}

/// Creates the directory where it is missing.
///
/// # Errors
/// `NotPermitted`; `Io`.
pub(in crate::engine) fn make(path: &Path) -> Result<()> {
    if let Some(parent) = path.parent() {
        let made = fs::create_dir_all(parent);
        made.map_err(|error| Error::io("cannot make the directory", parent, &error))?;
    }
    let made = DirBuilder::new().mode(DIRECTORY).create(path);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(Error::io(
            "cannot make the directory of locks",
            path,
            &error,
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o777
    }

    #[test]
    fn the_directory_of_locks_is_its_owners_alone() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let directory = path(&roots);
        make(&directory).unwrap();
        make(&directory).unwrap();
        assert_eq!(mode(&directory), DIRECTORY);
    }

    #[test]
    fn the_directory_is_compared_with_that_of_the_machines_first_process_where_that_is_seen() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        fs::create_dir_all(&roots.run).unwrap();
        assert_eq!(is_of_first_process(&roots), None);
        let first = roots.proc.join("1");
        fs::create_dir_all(&first).unwrap();
        std::os::unix::fs::symlink("/", first.join("root")).unwrap();
        assert_eq!(is_of_first_process(&roots), Some(true));
        make(&path(&roots)).unwrap();
        assert_eq!(is_of_first_process(&roots), Some(true));
        // The first process has another root directory.
        fs::remove_file(first.join("root")).unwrap();
        fs::create_dir_all(first.join("root/run/lunbd")).unwrap();
        assert_eq!(is_of_first_process(&roots), Some(false));
    }

    #[test]
    fn a_directory_that_an_earlier_version_left_open_is_closed() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        make_private(&roots);
        assert!(!path(&roots).exists());
        fs::create_dir_all(path(&roots)).unwrap();
        fs::set_permissions(path(&roots), fs::Permissions::from_mode(0o755)).unwrap();
        make_private(&roots);
        assert_eq!(mode(&path(&roots)), DIRECTORY);
    }
}
