//! Which processes have a block device open.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

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
        let mut open: Vec<DevNo> = descriptors(&process)
            .into_iter()
            .filter_map(|path| fs::metadata(path).ok())
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

/// The descriptors of a process, and where its first thread has ended, those of the
/// others: a process that was killed stays for as long as the kernel holds one.
fn descriptors(process: &Path) -> Vec<PathBuf> {
    let paths = |dir: PathBuf| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten();
        entries.flatten().map(|entry| entry.path()).collect()
    };
    let own = paths(process.join("fd"));
    if !own.is_empty() {
        return own;
    }
    let threads = paths(process.join("task")).into_iter();
    threads
        .flat_map(|thread| paths(thread.join("fd")))
        .collect()
}
