//! The namespaces of a process.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::errno::Errno;

/// The inode of one of a process's namespaces. `process` is its directory in `/proc`, and `kind`
/// is a name such as `pid`.
///
/// # Errors
/// `EACCES` if this process may not look: on Linux 5.10 a link that it may not follow leads to
/// the directory of the links (measured there).
pub(crate) fn inode(process: &Path, kind: &str) -> io::Result<u64> {
    let namespace = fs::metadata(process.join("ns").join(kind))?;
    if namespace.is_dir() {
        return Err(Errno::EACCES.into());
    }
    Ok(namespace.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_leads_to_a_directory_may_not_be_followed() {
        let process = tempfile::tempdir().unwrap();
        let links = process.path().join("ns");
        fs::create_dir(&links).unwrap();
        std::os::unix::fs::symlink(&links, links.join("pid")).unwrap();
        let denied = inode(process.path(), "pid").unwrap_err();
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        let own = Path::new("/proc/self");
        assert_eq!(
            inode(own, "pid").unwrap(),
            fs::metadata("/proc/self/ns/pid").unwrap().ino()
        );
    }
}
