//! The SCSI disks of the machine.

use std::path::PathBuf;

use super::Engine;
use crate::error::Result;
use crate::id::{DevNo, DiskSeq, Hctl, Source};
use crate::scsi::ScsiDevice;

/// One SCSI disk, as sysfs shows it.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Disk {
    /// What an attach of it would name.
    pub source: Source,
    /// The SCSI address.
    pub hctl: Hctl,
    /// The device node; `None` where the disk driver has brought none.
    pub node: Option<PathBuf>,
    /// Its number.
    pub devno: Option<DevNo>,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Its size in bytes.
    pub size: Option<u64>,
    /// The kernel's state of the SCSI device.
    pub state: Option<String>,
    /// The kernel's cached name: no proof of identity, since only a scan or a
    /// rescan refreshes it.
    pub cached_wwid: Option<String>,
    /// The names of the devices stacked on it.
    pub holders: Vec<String>,
}

impl Engine {
    /// Lists the SCSI disks. A disk that goes away meanwhile is left out.
    pub fn list(&self) -> Result<Vec<Disk>> {
        let mut disks = Vec::new();
        for device in ScsiDevice::all(self.roots())? {
            match self.describe(&device) {
                Ok(Some(disk)) => disks.push(disk),
                Ok(None) => {}
                Err(_) if !device.is_there() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(disks)
    }

    fn describe(&self, device: &ScsiDevice) -> Result<Option<Disk>> {
        if !device.is_disk()? {
            return Ok(None);
        }
        let mut disk = Disk {
            source: device.hctl().into(),
            hctl: device.hctl(),
            node: None,
            devno: None,
            diskseq: None,
            size: None,
            state: device.state()?,
            cached_wwid: device.cached_wwid()?,
            holders: Vec::new(),
        };
        if let Some(block) = device.disk()? {
            disk.node = Some(block.node(self.roots()));
            disk.devno = Some(block.devno());
            disk.diskseq = block.diskseq()?;
            disk.size = Some(block.size()?);
            disk.holders = block.holders()?;
        }
        Ok(Some(disk))
    }
}
