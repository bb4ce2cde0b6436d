//! Which events reach this process.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sys::statfs::{SYSFS_MAGIC, statfs};

use crate::kernel::Roots;

/// What a wait can stand on here. Found out once, when the [`Hub`](super::Hub)
/// starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Mode {
    /// Kernel and udev events: a device has settled when udevd says so.
    Udev,
    /// Kernel events only, since no udevd runs here or its messages stay in
    /// another network namespace: there are no by-id links to wait for.
    KernelOnly,
    /// No events (a user namespace, or a sysfs that is not the kernel's):
    /// sysfs is looked at again after 1 to 50 ms.
    SysfsPoll,
}

impl Mode {
    /// The name used in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Udev => "udev",
            Self::KernelOnly => "kernel_only",
            Self::SysfsPoll => "sysfs_poll",
        }
    }

    pub(super) fn find(roots: &Roots) -> Self {
        let is_sysfs = statfs(&roots.sysfs).is_ok_and(|fs| fs.filesystem_type() == SYSFS_MAGIC);
        if !is_sysfs || !in_initial_user_namespace() {
            return Self::SysfsPoll;
        }
        // libudev itself looks at the control socket before it binds.
        let udevd = roots.run.join("udev/control").exists();
        if udevd && in_network_namespace_of_init(roots) {
            Self::Udev
        } else {
            Self::KernelOnly
        }
    }
}

/// The kernel sends uevents to network namespaces that the initial user
/// namespace owns (`lib/kobject_uevent.c`). That one has a fixed inode
/// (`include/linux/proc_ns.h`, `PROC_USER_INIT_INO`).
fn in_initial_user_namespace() -> bool {
    const PROC_USER_INIT_INO: u64 = 0xEFFF_FFFD;
    fs::metadata("/proc/self/ns/user").is_ok_and(|meta| meta.ino() == PROC_USER_INIT_INO)
}

/// udevd multicasts in its own network namespace, which is the first
/// process's. Where that may not be read, it is taken to be ours: the wait for
/// udev's answer then says so when none comes.
fn in_network_namespace_of_init(roots: &Roots) -> bool {
    let inode = |path: &Path| fs::metadata(path).map(|meta| meta.ino()).ok();
    let own = inode(Path::new("/proc/self/ns/net"));
    let first = inode(&roots.proc.join("1/ns/net"));
    first.is_none() || own == first
}
