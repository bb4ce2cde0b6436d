//! The paths of the machine's file systems.

use std::path::PathBuf;

use super::devices::Devices;

/// The paths of the machine's file systems. Every path that this crate uses
/// lies below one of them. So a container can use its host's mounts, and a test
/// a directory.
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
    /// How the engine opens the devices that these paths show.
    pub devices: Devices,
}

impl Default for Roots {
    fn default() -> Self {
        Self::below("/")
    }
}

impl Roots {
    /// The four paths below one directory, for a machine mounted as a whole.
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
