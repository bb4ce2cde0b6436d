//! Which processes have a block device open.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

use super::{Roots, blockdev, sysfs};
use crate::error::Result;
use crate::id::DevNo;

/// A process that has a device open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Opener {
    /// What is open.
    pub device: DevNo,
    /// The process.
    pub pid: u32,
    /// Its command name.
    pub command: String,
}

/// The processes that `/proc` shows.
pub(crate) fn pids(roots: &Roots) -> Result<Vec<u32>> {
    let names = sysfs::names(&roots.proc)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// Whether a process runs whose command has this name, of those that `/proc`
/// shows.
pub(crate) fn is_running(roots: &Roots, command: &str) -> Result<bool> {
    let is_it = |pid: u32| {
        let name = sysfs::read(&roots.proc.join(format!("{pid}/comm")));
        name.is_ok_and(|name| name == command)
    };
    Ok(pids(roots)?.into_iter().any(is_it))
}

/// The processes that have one of `devices` open. Those
/// that may not be read are passed over: an empty answer proves nothing.
pub fn read_openers(roots: &Roots, devices: &[DevNo]) -> Result<Vec<Opener>> {
    let mut openers = Vec::new();
    for pid in pids(roots)? {
        let process = roots.proc.join(pid.to_string());
        let Ok(descriptors) = fs::read_dir(process.join("fd")) else {
            continue;
        };
        let mut open: Vec<DevNo> = descriptors
            .filter_map(|entry| fs::metadata(entry.ok()?.path()).ok())
            .filter(|meta| meta.file_type().is_block_device())
            .map(|meta| blockdev::devno_of(meta.rdev()))
            .filter(|device| devices.contains(device))
            .collect();
        open.sort_unstable();
        open.dedup();
        let command = || sysfs::read(&process.join("comm")).unwrap_or_default();
        openers.extend(open.into_iter().map(|device| Opener {
            device,
            pid,
            command: command(),
        }));
    }
    Ok(openers)
}
