//! The size of a volume and the usage of its file systems.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::deadline::Deadline;
use crate::engine::inventory::unit_behind;
use crate::engine::usage::NotLookedAt;
use crate::engine::{Engine, InventoryUnit};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::DevNo;
use crate::kernel::blockdev;
use crate::kernel::file_system::{self, Usage};
use crate::kernel::mounts::{self, Mount};

/// The capacity of an attached block volume.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Capacity {
    /// The size of the device in bytes; the map's size where there is a map.
    pub bytes: u64,
    /// The mounted file systems of the volume, each listed once.
    pub file_systems: Vec<FileSystem>,
    /// The places where further mounts of the volume may be: file servers that did not answer
    /// have them.
    pub not_looked_at: Vec<NotLookedAt>,
}

/// A mounted file system.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FileSystem {
    /// The mounted device: the volume, a partition of it, or a device stacked on it.
    pub device: DevNo,
    /// The mount point; see [`Mount::path`].
    pub path: PathBuf,
    /// The process whose namespace has it; see [`Mount::pid`].
    pub pid: Option<u32>,
    /// The space that the file system reports; `None` where it does not answer.
    pub usage: Option<Usage>,
    /// Why the file system does not answer.
    pub error: Option<Error>,
}

impl Engine {
    /// The data for CSI's `NodeGetVolumeStats`. `node` is the node of a disk, of a
    /// partition of it or of its multipath map, or a link to one of these.
    ///
    /// A file system that does not answer by `deadline` is reported with that error, and
    /// the rest as usual. The thread that asks it stays until it answers; no second one
    /// asks meanwhile.
    ///
    /// # Errors
    /// `NotFound` where nothing is at the path; `InvalidInput` where it is no block
    /// device; `NotSupported` for a device that is neither a SCSI unit nor a connected
    /// NBD device; those of reading sysfs or the mounts.
    pub fn capacity(&self, node: &Path, deadline: Deadline) -> Result<Capacity> {
        let at = |error: Error| error.at(Stage::Resolve);
        let devno = blockdev::devno_at(self.roots(), node).map_err(at)?;
        let (unit, not_looked_at) = unit_behind(self, devno, deadline).map_err(at)?;
        let Some(unit) = unit else {
            let message = "it is neither a SCSI unit nor a connected NBD device";
            let error = Error::new(ErrorKind::NotSupported, message);
            return Err(at(error).with_path(node));
        };
        Ok(Capacity {
            bytes: unit.size.unwrap_or(0),
            file_systems: self.file_systems(&unit, deadline),
            not_looked_at,
        })
    }

    /// Asks all mounted file systems of a unit for their space at once; see
    /// [`capacity`](Self::capacity).
    #[must_use]
    pub fn file_systems(&self, unit: &InventoryUnit, deadline: Deadline) -> Vec<FileSystem> {
        // Uses each device's first mount: those in this process's namespace come first.
        let mut mounted: BTreeMap<DevNo, &Mount> = BTreeMap::new();
        for mount in &unit.mounts {
            mounted.entry(mount.device).or_insert(mount);
        }
        let file_system_queries: Vec<_> = mounted
            .into_values()
            .map(|mount| {
                let path = path_in_this_process(self, mount);
                let read = move || file_system::read(&path);
                (mount, self.file_system_queries.ask(mount.device, read))
            })
            .collect();
        let answers = file_system_queries.into_iter().map(|(mount, query)| {
            let answer = query.and_then(|query| query.wait(&mount.path, deadline));
            let usage = answer.and_then(|answer| require_answer_of(self, mount, answer, deadline));
            let (usage, error) = match usage {
                Ok(usage) => (Some(usage), None),
                Err(error) => (None, Some(error)),
            };
            FileSystem {
                device: mount.device,
                path: mount.path.clone(),
                pid: mount.pid,
                usage,
                error,
            }
        });
        answers.collect()
    }
}

/// The path under which this process sees a mount.
fn path_in_this_process(engine: &Engine, mount: &Mount) -> PathBuf {
    let Some(pid) = mount.pid else {
        return mount.path.clone();
    };
    let root = engine.roots().proc.join(format!("{pid}/root"));
    root.join(mount.path.strip_prefix("/").unwrap_or(&mount.path))
}

/// Checks that the requested file system answered: after an unmount the directory
/// below it does.
fn require_answer_of(
    engine: &Engine,
    mount: &Mount,
    (usage, device): (Usage, DevNo),
    deadline: Deadline,
) -> Result<Usage> {
    // btrfs has a device number of its own for each subvolume.
    let is_it = if device.major == 0 {
        let mounts = mounts::read_mounts(engine.roots(), deadline)?;
        mounts.found.contains(mount)
    } else {
        device == mount.device
    };
    if is_it {
        return Ok(usage);
    }
    let message = format!("it was unmounted from {} meanwhile", mount.path.display());
    Err(Error::new(ErrorKind::Vanished, message).at(Stage::Measure))
}
