//! The disks of the machine that the engine knows how to attach.

use std::path::PathBuf;

use super::Engine;
use crate::error::Result;
use crate::id::{DevNo, DiskSeq, Hctl, NbdIndex, Source};
use crate::nbd::{Knowledge, Link, NbdDevice, State};
use crate::scsi::ScsiDevice;

/// One disk, as sysfs shows it.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Disk {
    /// What an attach of it would name: of SCSI its address, of NBD the URI
    /// where its backend id is one.
    pub source: Option<Source>,
    /// The device node; `None` where the disk driver has brought none.
    pub node: Option<PathBuf>,
    /// Its number.
    pub devno: Option<DevNo>,
    /// Its life's serial number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Its size in bytes.
    pub size: Option<u64>,
    /// The kernel's state of the SCSI device; what the NBD device is doing.
    pub state: Option<String>,
    /// What is behind it.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub kind: DiskKind,
    /// The names of the devices stacked on it.
    pub holders: Vec<String>,
}

/// What is behind a disk, as far as sysfs shows it.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum DiskKind {
    /// A SCSI logical unit.
    Scsi {
        /// The SCSI address.
        hctl: Hctl,
        /// The kernel's cached name: no proof of identity, since only a scan or
        /// a rescan refreshes it.
        cached_wwid: Option<String>,
    },
    /// A connected NBD device.
    Nbd {
        /// The index.
        index: NbdIndex,
        /// The id that it was connected with (Linux 5.14).
        backend: Option<String>,
        /// How many connections carry its I/O.
        connections: usize,
    },
}

impl Engine {
    /// Lists the SCSI disks and the NBD devices that are in use. One that goes
    /// away meanwhile is left out.
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
        for device in NbdDevice::all(self.roots())? {
            match self.describe_nbd(&device) {
                Ok(disk) => disks.extend(disk),
                Err(_) if !device.disk().dir().exists() => {}
                Err(error) => return Err(error),
            }
        }
        Ok(disks)
    }

    fn describe_nbd(&self, device: &NbdDevice) -> Result<Option<Disk>> {
        let facts = device.facts()?;
        let ours = |link: &Link| Some(link.backend.as_str()) == facts.backend.as_deref();
        let dead = |link: &Link| ours(link) && link.is_dead();
        // Only who made a link can tell a dead one from a live one.
        let knowledge = Knowledge {
            link_dead: self.links().get(&device.index()).is_some_and(dead),
            ..Knowledge::default()
        };
        let state = facts.state(&knowledge);
        if matches!(state, State::Free | State::OpenedByOther) {
            return Ok(None);
        }
        let backend = facts.backend;
        let uri = backend.as_deref().and_then(|id| id.parse().ok());
        Ok(Some(Disk {
            source: uri.map(Source::Nbd),
            node: Some(device.disk().node(self.roots())),
            devno: Some(device.disk().devno()),
            diskseq: device.disk().diskseq()?,
            size: Some(facts.size),
            state: Some(state.to_string()),
            kind: DiskKind::Nbd {
                index: device.index(),
                backend,
                connections: device.connections()?,
            },
            holders: facts.holders,
        }))
    }

    fn describe(&self, device: &ScsiDevice) -> Result<Option<Disk>> {
        if !device.is_disk()? {
            return Ok(None);
        }
        let mut disk = Disk {
            source: Some(device.hctl().into()),
            node: None,
            devno: None,
            diskseq: None,
            size: None,
            state: device.state()?.map(|state| state.to_string()),
            kind: DiskKind::Scsi {
                hctl: device.hctl(),
                cached_wwid: device.cached_wwid()?,
            },
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
