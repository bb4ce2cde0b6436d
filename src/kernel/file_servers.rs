//! Where the files of others are mounted: a walk of a path there can wait for a
//! server that has gone.

use std::path::{Path, PathBuf};

/// File systems whose files a server or a daemon has, or whose mounts are made by one
/// when a path is walked. FUSE has more under names that begin with `fuse.`.
const TYPES: [&str; 14] = [
    "9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "fuse", "lustre", "nfs", "nfs4",
    "orangefs", "smb3", "virtiofs",
];

/// Every mount point, in the order in which they were mounted, and whether such a file
/// system is mounted there.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileServers(Vec<(PathBuf, bool)>);

impl FileServers {
    /// Of these mounts, each with its file system's type.
    pub(crate) fn among<'a>(mounts: impl Iterator<Item = (&'a str, PathBuf)>) -> Self {
        let is_one = |kind: &str| TYPES.contains(&kind) || kind.starts_with("fuse.");
        Self(mounts.map(|(kind, point)| (point, is_one(kind))).collect())
    }

    /// Whether this path is on one. The nearest mount point above the path decides, and
    /// of several mounts there the last: a root file system of a server does not make
    /// `/dev` a server's.
    pub(crate) fn have(&self, path: &Path) -> bool {
        let above = self.0.iter().filter(|(point, _)| path.starts_with(point));
        let nearest = above.max_by_key(|(point, _)| point.components().count());
        nearest.is_some_and(|(_, is_one)| *is_one)
    }
}
