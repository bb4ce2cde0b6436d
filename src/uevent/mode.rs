//! Which events reach this process.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::sys::statfs::{SYSFS_MAGIC, statfs};

use super::udev_reachability::udev_unreachable_reason;
use crate::kernel::Roots;

/// What a wait can rely on here. The [`Hub`](super::Hub) determines it once, at
/// its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
pub enum Mode {
    /// Kernel and udev events: a device has settled when udevd says so.
    Udev,
    /// Only kernel events, because no udevd runs here or its messages stay in
    /// another network namespace. There are no by-id links to wait for.
    KernelOnly,
    /// No events (a user namespace, or a sysfs that is not the kernel's). Waits
    /// look at sysfs again after 1 to 50 ms.
    SysfsPoll,
}

impl Mode {
    /// The name used in `--json`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    pub(super) fn find(roots: &Roots) -> Self {
        let is_sysfs = statfs(&roots.sysfs).is_ok_and(|fs| fs.filesystem_type() == SYSFS_MAGIC);
        if !is_sysfs || !in_initial_user_namespace() {
            return Self::SysfsPoll;
        }
        match udev_unreachable_reason(roots) {
            None => Self::Udev,
            Some(why) => {
                tracing::info!(%why, "the kernel's events alone");
                Self::KernelOnly
            }
        }
    }
}

/// The kernel sends uevents to network namespaces that the initial user
/// namespace owns (`lib/kobject_uevent.c`). The initial user namespace has a
/// fixed inode (`include/linux/proc_ns.h`, `PROC_USER_INIT_INO`).
fn in_initial_user_namespace() -> bool {
    const PROC_USER_INIT_INO: u64 = 0xEFFF_FFFD;
    fs::metadata("/proc/self/ns/user").is_ok_and(|meta| meta.ino() == PROC_USER_INIT_INO)
}
