//! The data of the inventory: the machine and its units.

use std::path::{Path, PathBuf};

use crate::engine::usage::NotLookedAt;
use crate::id::{ContentName, DevNo, DiskSeq, Hctl, NbdIndex, Source};
use crate::kernel::mounts::Mount;
use crate::nbd::{self};
use crate::scsi::{Identity, State};
use crate::transport::TransportInfo;

/// The machine's devices as sysfs and `/proc` showed them one after the other: data that
/// change during the call may be from different moments.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Inventory {
    /// SCSI units by their first path's address, then NBD devices by index.
    pub units: Vec<InventoryUnit>,
    /// The mounts and swap areas whose device is unknown: each may be on any of the units.
    pub not_looked_at: Vec<NotLookedAt>,
}

/// One logical unit, or one connected NBD device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InventoryUnit {
    /// The unit's kind and its data.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub kind: UnitKind,
    /// The size in bytes: of the map where there is one, else of the first path that has a
    /// size.
    pub size: Option<u64>,
    /// The kernel's names of all devices stacked on the unit, on a partition of it, or on
    /// one of these, sorted; without its multipath map.
    pub holders: Vec<String>,
    /// The mounts of the unit, of its partitions and of the devices stacked on them, in
    /// this process's mount namespace and in those of all processes that may be read.
    pub mounts: Vec<Mount>,
    /// The swap areas on the same devices.
    pub swaps: Vec<DevNo>,
}

impl InventoryUnit {
    /// Whether `node` is that of the unit's map, of a path, or of its NBD device.
    #[must_use]
    pub fn has_node(&self, node: &Path) -> bool {
        match &self.kind {
            UnitKind::Scsi(unit) => {
                let map = unit.map.as_ref().map(|map| &map.node);
                let paths = unit.paths.iter().filter_map(|path| path.node.as_ref());
                map.into_iter().chain(paths).any(|own| own == node)
            }
            UnitKind::Nbd(unit) => unit.node == node,
        }
    }

    /// Whether `devno` is that of the unit's map, of a path, or of its NBD device.
    pub(super) fn is(&self, devno: DevNo) -> bool {
        match &self.kind {
            UnitKind::Scsi(unit) => {
                let map = unit.map.as_ref().map(|map| map.devno);
                let paths = unit.paths.iter().filter_map(|path| path.devno);
                map.into_iter().chain(paths).any(|number| number == devno)
            }
            UnitKind::Nbd(unit) => unit.devno == devno,
        }
    }
}

/// The kind of a unit and its data.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(tag = "kind", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum UnitKind {
    /// A SCSI logical unit.
    Scsi(ScsiUnit),
    /// A connected NBD device.
    Nbd(NbdUnit),
}

/// A SCSI logical unit: the devices whose strongest name, as the kernel has it, is the same
/// and unique. Devices without a unique name are one unit where they also lead to the same
/// LUN of the same iSCSI target or Fibre Channel port.
///
/// The kernel's names are **no proof of identity**: only a scan or a rescan refreshes them,
/// so an array that has since given an address to another volume shows the old one here.
/// Attach and detach ask the device itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ScsiUnit {
    /// The names in the kernel's copy of the unit's identification pages.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub identity: Identity,
    /// Its devices, by address; at least one.
    pub paths: Vec<InventoryPath>,
    /// The multipath map of one of them.
    pub map: Option<InventoryMap>,
    /// Whether the state of a path is not running, or cannot be read.
    pub degraded: bool,
    /// Whether the sizes of the paths and the map differ: some still have the size before a
    /// resize.
    pub sizes_differ: bool,
}

/// One SCSI device. A value that cannot be read is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InventoryPath {
    /// Its SCSI address.
    pub hctl: Hctl,
    /// Its node; `None` where the disk driver has created no disk.
    pub node: Option<PathBuf>,
    /// The disk's device number.
    pub devno: Option<DevNo>,
    /// The disk's sequence number (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// The size in bytes.
    pub size: Option<u64>,
    /// Its state in the kernel.
    pub state: Option<State>,
    /// The session or remote port of the path; `None` where it has neither.
    pub reach: Option<TransportInfo>,
    /// What could not be read, and why.
    pub unreadable: Vec<String>,
}

/// A multipath map.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InventoryMap {
    /// Its name below `/dev/mapper`, which multipathd calls the alias.
    pub name: String,
    /// The uuid that device-mapper has for it.
    pub uuid: String,
    /// Its node, `/dev/dm-N`.
    pub node: PathBuf,
    /// Its device number.
    pub devno: DevNo,
    /// The size in bytes; `None` where it cannot be read.
    pub size: Option<u64>,
}

/// A connected NBD device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NbdUnit {
    /// The index.
    pub index: NbdIndex,
    /// The source to attach it again, where the backend id is a URI.
    pub source: Option<Source>,
    /// Its backend id (Linux 5.14).
    pub backend: Option<String>,
    /// Its node.
    pub node: PathBuf,
    /// Its device number.
    pub devno: DevNo,
    /// The disk's sequence number, which outlives a connection (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Its state.
    pub state: nbd::State,
    /// How many connections carry its I/O.
    pub connections: usize,
    /// The names of its content as udev last read them; `None` where udev has no record of
    /// it.
    pub content: Option<Vec<ContentName>>,
}
