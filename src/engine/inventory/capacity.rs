//! How large a volume is, and how full.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::deadline::Deadline;
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
    /// Bytes of the device: of the map where there is one.
    pub bytes: u64,
    /// The file systems that are mounted of it, each once; none where it is used
    /// as a block device.
    pub file_systems: Vec<FileSystem>,
}

/// A mounted file system.
#[derive(Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct FileSystem {
    /// What is mounted: the device, a partition of it, or what is stacked on it.
    pub device: DevNo,
    /// Where; see [`Mount::path`].
    pub path: PathBuf,
    /// See [`Mount::pid`].
    pub pid: Option<u32>,
    /// What it says; `None` where it does not answer.
    pub usage: Option<Usage>,
    /// Why it does not.
    pub error: Option<Error>,
}

impl Engine {
    /// What CSI's `NodeGetVolumeStats` asks of an attached volume, by its node or
    /// a link to it: of a disk, a partition of it or its multipath map.
    ///
    /// A file system that does not answer by `deadline` is reported with that, and
    /// all else is as it is. The thread that asks it stays until it answers, and
    /// no second one asks meanwhile.
    ///
    /// # Errors
    /// `NotFound` where nothing is at the path; `InvalidInput` where it is no
    /// block device; `NotSupported` for a device that is neither a SCSI unit nor
    /// a connected NBD device; where sysfs or the mounts cannot be read.
    pub fn capacity(&self, node: &Path, deadline: Deadline) -> Result<Capacity> {
        let at = |error: Error| error.at(Stage::Resolve);
        let devno = blockdev::devno_at(self.roots(), node).map_err(at)?;
        let Some(unit) = self.unit_behind(devno).map_err(at)? else {
            let message = "it is neither a SCSI unit nor a connected NBD device";
            let error = Error::new(ErrorKind::NotSupported, message);
            return Err(at(error).with_path(node));
        };
        Ok(Capacity {
            bytes: unit.size.unwrap_or(0),
            file_systems: self.file_systems(&unit, deadline),
        })
    }

    /// Asks the file systems that are mounted of a unit for their space, all at
    /// once; see [`capacity`](Self::capacity).
    #[must_use]
    pub fn file_systems(&self, unit: &InventoryUnit, deadline: Deadline) -> Vec<FileSystem> {
        // Its first mount: those in our own namespace come first.
        let mut mounted: BTreeMap<DevNo, &Mount> = BTreeMap::new();
        for mount in &unit.mounts {
            mounted.entry(mount.device).or_insert(mount);
        }
        let file_system_queries: Vec<_> = mounted
            .into_values()
            .map(|mount| {
                let path = self.seen_from_here(mount);
                let read = move || file_system::read(&path);
                (mount, self.file_system_queries.ask(mount.device, read))
            })
            .collect();
        let answers = file_system_queries.into_iter().map(|(mount, query)| {
            let answer = query.and_then(|query| query.wait(&mount.path, deadline));
            let usage = answer.and_then(|answer| self.check(mount, answer, deadline));
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

    /// Where a mount is as this process sees it.
    fn seen_from_here(&self, mount: &Mount) -> PathBuf {
        let Some(pid) = mount.pid else {
            return mount.path.clone();
        };
        let root = self.roots().proc.join(format!("{pid}/root"));
        root.join(mount.path.strip_prefix("/").unwrap_or(&mount.path))
    }

    /// Makes sure that what answered is what was asked: a file system that was
    /// unmounted meanwhile leaves its directory to the one below.
    fn check(
        &self,
        mount: &Mount,
        (usage, device): (Usage, DevNo),
        deadline: Deadline,
    ) -> Result<Usage> {
        // btrfs has a number of its own for each subvolume.
        let is_it = if device.major == 0 {
            let mounts = mounts::read_mounts(self.roots(), deadline)?;
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
}
