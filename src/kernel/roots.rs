//! Where the machine's file systems are.

use std::path::PathBuf;

use super::devices::Devices;

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
