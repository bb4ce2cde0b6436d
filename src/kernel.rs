//! Doors to the kernel: one attribute, file or ioctl a function. No policy and
//! no retries here.

pub(crate) mod block_tree;
pub mod blockdev;
pub(crate) mod device_dir;
pub mod devices;
pub(crate) mod dm;
pub(crate) mod exports;
pub(crate) mod file_server_looks;
pub(crate) mod file_servers;
pub mod file_system;
pub(crate) mod generic_nodes;
pub(crate) mod genl;
pub(crate) mod iscsi_netlink;
pub(crate) mod loops;
pub mod machine;
mod mount_sources;
pub mod mounts;
pub(crate) mod netlink_port;
pub(crate) mod parallel;
pub(crate) mod peer;
pub mod process;
pub(crate) mod sg;
pub(crate) mod stream;
pub mod sysfs;
pub(crate) mod tcp;
pub(crate) mod udev_record;
pub(crate) mod unix_socket;
pub(crate) mod worker;
pub(crate) mod written;

use std::path::PathBuf;

pub use devices::{DeviceAccess, Devices};

/// Where the machine's file systems are. Every path of this crate hangs off
/// one of these, so that a container's host mounts, or a directory of a test,
/// is a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `/sys`.
    pub sysfs: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `/run`: udev's database is read there and lunbd's locks are made there.
    pub run: PathBuf,
    /// `/proc`.
    pub proc: PathBuf,
    /// How the devices are opened that these show.
    pub devices: Devices,
}

impl Default for Roots {
    fn default() -> Self {
        Self::below("/")
    }
}

impl Roots {
    /// The four below one directory, for a machine mounted as a whole.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self {
            sysfs: root.join("sys"),
            dev: root.join("dev"),
            run: root.join("run"),
            proc: root.join("proc"),
            devices: Devices::default(),
        }
    }
}
