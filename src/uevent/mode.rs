//! Which events reach this process.

use nix::sys::statfs::{SYSFS_MAGIC, statfs};

use super::udev_reachability::udev_unreachable_reason;
use crate::kernel::{Roots, user_namespace};

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
    /// No events (a user namespace, a network namespace of one, or a sysfs that is not the
    /// kernel's). Waits
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
        // The kernel sends uevents to network namespaces that the initial user namespace owns
        // (`lib/kobject_uevent.c`).
        let gets_uevents = user_namespace::is_initial(roots)
            && user_namespace::owns_network_namespace_of_this_thread(roots);
        if !is_sysfs || !gets_uevents {
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
