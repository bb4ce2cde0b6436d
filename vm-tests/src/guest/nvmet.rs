//! A namespace of the kernel's `NVMe` target, which no port presents.

use std::fs;
use std::path::{Path, PathBuf};

use super::lio::{mount_configfs, remove_dir, write};

const SUBSYSTEMS: &str = "/sys/kernel/config/nvmet/subsystems";
const NQN: &str = "nqn.2026-01.example:namespace";

/// Dropping it removes the namespace.
#[derive(Debug)]
pub struct NvmeNamespace(PathBuf);

impl NvmeNamespace {
    /// Enables a namespace on this block device. The kernel then opens the device for writing.
    #[must_use]
    pub fn on(node: &Path) -> Self {
        mount_configfs();
        super::need_module("nvmet");
        let subsystem = Path::new(SUBSYSTEMS).join(NQN);
        let namespace = Self(subsystem.join("namespaces/1"));
        for directory in [&subsystem, &namespace.0] {
            let made = fs::create_dir(directory);
            made.unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
        }
        write(
            &namespace.0.join("device_path"),
            &node.display().to_string(),
        );
        write(&namespace.0.join("enable"), "1");
        namespace
    }
}

impl Drop for NvmeNamespace {
    fn drop(&mut self) {
        let _said_below = fs::write(self.0.join("enable"), "0");
        remove_dir(&self.0);
        remove_dir(&Path::new(SUBSYSTEMS).join(NQN));
    }
}
