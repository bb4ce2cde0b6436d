//! The mounts of network file systems. A walk of a path there can wait for a server
//! that has gone.

use std::path::{Path, PathBuf};

/// File systems whose files come from a server or a daemon, or whose mounts a daemon
/// makes when a path is walked. FUSE has more of them under names that begin with
/// `fuse.`.
const TYPES: [&str; 14] = [
    "9p", "afs", "autofs", "beegfs", "ceph", "cifs", "coda", "fuse", "lustre", "nfs", "nfs4",
    "orangefs", "smb3", "virtiofs",
];

/// Every mount point, in mount order, and whether such a file system is mounted there.
#[derive(Debug, Clone, Default)]
pub(crate) struct FileServers(Vec<(PathBuf, bool)>);

impl FileServers {
    /// Takes each mount's file system type and mount point.
    pub(crate) fn of_mounts<'a>(mounts: impl Iterator<Item = (&'a str, PathBuf)>) -> Self {
        let is_server = |kind: &str| TYPES.contains(&kind) || kind.starts_with("fuse.");
        Self(
            mounts
                .map(|(kind, point)| (point, is_server(kind)))
                .collect(),
        )
    }

    /// Whether this path is on a file server. The nearest mount point above the path
    /// decides, and the last of several mounts at one point. So a root file system from
    /// a server does not make `/dev` a server's.
    pub(crate) fn contains(&self, path: &Path) -> bool {
        let above = self.0.iter().filter(|(point, _)| path.starts_with(point));
        let nearest = above.max_by_key(|(point, _)| point.components().count());
        nearest.is_some_and(|(_, is_server)| *is_server)
    }
}
