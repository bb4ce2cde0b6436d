//! A block device: its attributes in sysfs, and its node.

mod flush;
mod open;
mod open_disk;
mod read;

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::roots::Roots;
use super::sysfs;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{DevNo, DiskSeq};
pub(crate) use open_disk::OpenDisk;

/// The unit in which the kernel counts sizes, whatever the device's block size
/// (`include/linux/blk_types.h`, `SECTOR_SIZE`).
const SECTOR: u64 = 512;

/// A whole disk or a partition in sysfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDevice {
    dir: PathBuf,
    name: String,
    devno: DevNo,
}

impl BlockDevice {
    /// The block device of this sysfs directory; `None` if it is gone.
    pub fn at(dir: &Path) -> Result<Option<Self>> {
        let Some(text) = sysfs::read_if_there(&dir.join("dev"))? else {
            return Ok(None);
        };
        let name = dir.file_name().and_then(|name| name.to_str());
        let (Some(name), Ok(devno)) = (name, text.parse()) else {
            let message = format!("{text:?} is no device number");
            return Err(Error::new(ErrorKind::Io, message).with_path(dir));
        };
        Ok(Some(Self {
            dir: dir.to_owned(),
            name: name.to_owned(),
            devno,
        }))
    }

    /// All disks and partitions.
    pub(crate) fn all(roots: &Roots) -> Result<Vec<Self>> {
        let class = roots.sysfs.join("class/block");
        let mut devices = Vec::new();
        for name in sysfs::names(&class)? {
            if let Some(dir) = sysfs::resolve(&class.join(name))? {
                devices.extend(Self::at(&dir)?);
            }
        }
        Ok(devices)
    }

    /// The block device of this number; `None` if there is none.
    pub fn of(roots: &Roots, devno: DevNo) -> Result<Option<Self>> {
        let link = roots.sysfs.join("dev/block").join(devno.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Self::at(&dir),
            None => Ok(None),
        }
    }

    /// The device's directory in sysfs, with no link in the path.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The kernel's name, `sda` or `sda1`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether device-mapper made it: only its devices are named `dm-N` (`drivers/md/dm.c`,
    /// `alloc_dev`).
    pub(crate) fn is_mapped(&self) -> bool {
        self.name.starts_with("dm-")
    }

    /// The device number.
    #[must_use]
    pub fn devno(&self) -> DevNo {
        self.devno
    }

    /// The disk sequence number, from sysfs; `None` before Linux 5.15.
    pub fn diskseq(&self) -> Result<Option<DiskSeq>> {
        let Some(text) = sysfs::read_if_there(&self.dir.join("diskseq"))? else {
            return Ok(None);
        };
        Ok(Some(text.parse::<DiskSeq>()?))
    }

    /// What distinguishes this disk from an earlier or later one of its name: its sequence
    /// number. Before Linux 5.15 it is the inode of its directory in sysfs, which gives each
    /// directory its own.
    pub(crate) fn instance(&self) -> Result<String> {
        if let Some(sequence) = self.diskseq()? {
            return Ok(sequence.to_string());
        }
        let metadata = fs::metadata(&self.dir);
        let metadata = metadata.map_err(|error| Error::io("cannot examine", &self.dir, &error))?;
        Ok(metadata.ino().to_string())
    }

    /// The size in bytes.
    pub fn size(&self) -> Result<u64> {
        let sectors: u64 = sysfs::parse(&self.dir.join("size"))?;
        Ok(sectors.saturating_mul(SECTOR))
    }

    /// Whether the device is read-only: the kernel refuses writes.
    pub fn read_only(&self) -> Result<bool> {
        Ok(sysfs::read(&self.dir.join("ro"))? != "0")
    }

    /// Whether its medium can be removed, as that of a card reader (`block/genhd.c`,
    /// `disk_removable_show`).
    pub(crate) fn has_removable_medium(&self) -> Result<bool> {
        let removable = sysfs::read_if_there(&self.dir.join("removable"))?;
        Ok(removable.as_deref() == Some("1"))
    }

    /// One line about the visible state, for the error of a timeout.
    pub(crate) fn describe(&self) -> String {
        let attribute = |name: &str| {
            let text = sysfs::read_if_there(&self.dir.join(name)).ok().flatten();
            text.map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let inflight = attribute("inflight").unwrap_or_else(|| "unreadable".to_owned());
        let state = attribute("device/state");
        let state = state.map_or_else(String::new, |state| format!(" state={state}"));
        format!("{}:{state} inflight={inflight}", self.name)
    }

    /// Whether this is a partition.
    #[must_use]
    pub fn is_partition(&self) -> bool {
        self.dir.join("partition").exists()
    }

    /// The partitions of a disk, whose names begin with the disk's
    /// (`block/partitions/core.c`, `add_partition`).
    pub fn partitions(&self) -> Result<Vec<Self>> {
        let mut partitions = Vec::new();
        let mut names = sysfs::names(&self.dir)?;
        names.retain(|name| name.starts_with(&self.name));
        for name in names {
            let dir = self.dir.join(name);
            if dir.join("partition").exists() {
                partitions.extend(Self::at(&dir)?);
            }
        }
        Ok(partitions)
    }

    /// The kernel's names of the devices stacked on this one (`dm-0`, `md127`).
    pub fn holders(&self) -> Result<Vec<String>> {
        sysfs::names(&self.dir.join("holders"))
    }

    /// The path of the node.
    #[must_use]
    pub fn node(&self, roots: &Roots) -> PathBuf {
        // The kernel writes a slash in a name as `!`.
        roots.dev.join(self.name.replace('!', "/"))
    }
}

/// The links among `links` (as udev names them, below `/dev`) that lead to the device, as
/// paths below our own root.
#[must_use]
pub fn links_to(roots: &Roots, devno: DevNo, links: &[String]) -> Vec<PathBuf> {
    links
        .iter()
        .filter_map(|link| Some(roots.dev.join(link.strip_prefix("/dev/")?)))
        .filter(|link| devno_at(roots, link).is_ok_and(|found| found == devno))
        .collect()
}

/// The number of the block device that `path` leads to. It follows links.
///
/// # Errors
/// `NotFound` if nothing is at `path`, `InvalidInput` if it is not a block device.
pub fn devno_at(roots: &Roots, path: &Path) -> Result<DevNo> {
    let found = roots.devices.number_at(path).map_err(|error| {
        let error = Error::io("cannot find the device", path, &error);
        match error.kind() {
            ErrorKind::Vanished => error.with_kind(ErrorKind::NotFound),
            _ => error,
        }
    })?;
    found.ok_or_else(|| {
        let message = "not a block device: expected a disk's node or a link to it";
        Error::new(ErrorKind::InvalidInput, message).with_path(path)
    })
}
