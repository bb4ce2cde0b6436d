//! What the kernel shows of the unit behind a disk that is flushed.

use crate::error::Result;
use crate::id::{NbdIndex, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::sysfs;
use crate::multipath::Map;
use crate::scsi::ScsiDevice;

/// A mark has room for this text beside its reason. The text is longer only if another client has
/// given the device a longer id than lunbd accepts.
const LONGEST_CONNECTION: usize = 3000;

/// What the kernel shows of the unit behind a disk or a map.
#[derive(Debug)]
pub(super) enum UnitBehindDisk {
    Map(Map),
    PartitionMap(Map),
    Device(ScsiDevice),
    /// The connection of an NBD device, as in a mark. `None` if it cannot be told from a later one.
    Nbd(Option<String>),
    /// The disk is none of these, or it is gone.
    Unknown,
}

impl UnitBehindDisk {
    pub(super) fn read(disk: &BlockDevice) -> Self {
        if disk.is_mapped() {
            if let Ok(Some(map)) = Map::of_disk(disk) {
                return Self::Map(map);
            }
            let map = Map::of_partition(disk).ok().flatten();
            return map.map_or(Self::Unknown, Self::PartitionMap);
        }
        if NbdIndex::of_name(disk.name()).is_some() {
            let connection = nbd_connection(disk).ok().flatten();
            return Self::Nbd(connection.filter(|text| text.len() <= LONGEST_CONNECTION));
        }
        ScsiDevice::below(disk).map_or(Self::Unknown, Self::Device)
    }

    /// Whether this process reads how many commands have failed, which the kernel counts for SCSI.
    pub(super) fn counts_failed_commands(&self) -> bool {
        matches!(self, Self::Map(_) | Self::Device(_))
    }

    /// How many commands the device, or the devices below the map, have failed; 0 if the kernel
    /// does not count them, as for NBD.
    pub(super) fn failed_commands(&self) -> u64 {
        let of_path = |path: &BlockDevice| {
            ScsiDevice::below(path).and_then(|device| device.failed_commands())
        };
        let count = match self {
            Self::Map(map) => map.paths().unwrap_or_default().iter().map(of_path).sum(),
            Self::Device(device) => device.failed_commands(),
            Self::PartitionMap(_) | Self::Nbd(_) | Self::Unknown => None,
        };
        count.unwrap_or(0)
    }

    /// The names of the unit, as far as the kernel shows them.
    pub(super) fn names(&self) -> Vec<Wwid> {
        match self {
            Self::Map(map) | Self::PartitionMap(map) => map.wwid().into_iter().collect(),
            Self::Device(device) => device.cached_identity().unwrap_or_default().names,
            Self::Nbd(_) | Self::Unknown => Vec::new(),
        }
    }

    /// What distinguishes the connection of an NBD device from an earlier one and from a later one.
    pub(super) fn connection(&self) -> Option<&str> {
        match self {
            Self::Nbd(connection) => connection.as_deref(),
            _ => None,
        }
    }
}

/// The thread that connected an NBD device, and its backend id, which both stay when a heal replaces
/// the sockets. `None` for a device that is not connected, and for one without the attribute of the
/// id, which only netlink makes, from Linux 5.14 on: older kernels look the thread up after it has
/// ended, and may show another.
pub(super) fn nbd_connection(disk: &BlockDevice) -> Result<Option<String>> {
    let read = |attribute: &str| sysfs::read_if_there(&disk.dir().join(attribute));
    let both = read("pid")?.zip(read("backend")?);
    Ok(both.map(|(pid, backend)| format!("{pid} {backend:?}")))
}
