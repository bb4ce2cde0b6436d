//! What the inventory says of a machine and of each unit.

use std::path::{Path, PathBuf};

use crate::engine::usage::NotLookedAt;
use crate::id::{ContentName, DevNo, DiskSeq, Hctl, NbdIndex, Source};
use crate::kernel::mounts::Mount;
use crate::nbd::{self};
use crate::scsi::{Identity, State};
use crate::transport::TransportInfo;

/// What the machine has, as sysfs and `/proc` showed it one after the other:
/// what is changing meanwhile may be of two moments.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Inventory {
    /// SCSI units in the order of their first path's address, then NBD devices
    /// by index.
    pub units: Vec<InventoryUnit>,
    /// Mounts and swap areas of which nobody could say what they are on: they may be on any
    /// of the units.
    pub not_looked_at: Vec<NotLookedAt>,
}

/// One logical unit, or one connected NBD device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InventoryUnit {
    /// What it is.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub kind: UnitKind,
    /// Bytes: of the map where there is one, else of the first path that shows
    /// one.
    pub size: Option<u64>,
    /// The kernel's names of all devices stacked on it, on a partition of it, or
    /// on one of these, sorted; without its multipath map.
    pub holders: Vec<String>,
    /// The mounts of it, of its partitions and of what is stacked on them, in
    /// our own mount namespace and in those of all processes that may be read.
    pub mounts: Vec<Mount>,
    /// The swap areas on the same.
    pub swaps: Vec<DevNo>,
}

impl InventoryUnit {
    /// Whether this is the node of its map, of a path of it, or of it.
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

    /// Whether the device of this number is its map, a path of it, or it.
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

/// What a unit is.
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

/// A SCSI logical unit: the devices whose strongest name, as the kernel has it,
/// is the same and one that no other unit can have. Devices without such a name are one
/// unit where they also lead to the same LUN of the same iSCSI target or Fibre Channel
/// port.
///
/// The kernel's names are **no proof of identity**: only a scan or a rescan
/// refreshes them, so an array that has since given an address to another volume
/// shows the old one here. Attach and detach ask the device itself.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ScsiUnit {
    /// The names in the kernel's copies.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub identity: Identity,
    /// Its devices, by address; at least one.
    pub paths: Vec<InventoryPath>,
    /// The multipath map of one of them.
    pub map: Option<InventoryMap>,
    /// Whether a path is in another state than running, or in none that can be
    /// read.
    pub degraded: bool,
    /// Whether the paths, and the map, are not all of one size: the unit was
    /// resized and not all of them know.
    pub sizes_differ: bool,
}

/// One SCSI device. What cannot be read of it is `None`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct InventoryPath {
    /// Its address.
    pub hctl: Hctl,
    /// Its node; `None` where the disk driver has brought none.
    pub node: Option<PathBuf>,
    /// Its disk's number.
    pub devno: Option<DevNo>,
    /// Its disk's life (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// Bytes.
    pub size: Option<u64>,
    /// The kernel's state of it.
    pub state: Option<State>,
    /// By which session or remote port; `None` where by neither.
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
    /// Device-mapper's uuid of it.
    pub uuid: String,
    /// Its node, a `dm-N`.
    pub node: PathBuf,
    /// Its number.
    pub devno: DevNo,
    /// Bytes; `None` where it cannot be read.
    pub size: Option<u64>,
}

/// A connected NBD device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct NbdUnit {
    /// The index.
    pub index: NbdIndex,
    /// What an attach of it would name, where the backend id is a URI.
    pub source: Option<Source>,
    /// The id that it was connected with (Linux 5.14).
    pub backend: Option<String>,
    /// Its node.
    pub node: PathBuf,
    /// Its number.
    pub devno: DevNo,
    /// The life of the disk, which outlives a connection (Linux 5.15).
    pub diskseq: Option<DiskSeq>,
    /// What it is doing.
    pub state: nbd::State,
    /// How many connections carry its I/O.
    pub connections: usize,
    /// The names of its content, as udev read them last; `None` where udev has no record
    /// of it.
    pub content: Option<Vec<ContentName>>,
}
