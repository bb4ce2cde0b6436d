//! What the kernel shows of the unit behind a disk that is flushed.

use crate::id::Wwid;
use crate::kernel::blockdev::BlockDevice;
use crate::multipath::Map;
use crate::scsi::ScsiDevice;

/// What the kernel shows of the unit behind a disk or a map.
#[derive(Debug)]
pub(super) enum UnitBehindDisk {
    Map(Map),
    PartitionMap(Map),
    Device(ScsiDevice),
    /// The disk is neither a map nor a SCSI disk, or it is gone.
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
            Self::PartitionMap(_) | Self::Unknown => None,
        };
        count.unwrap_or(0)
    }

    /// The names of the unit, as far as the kernel shows them.
    pub(super) fn names(&self) -> Vec<Wwid> {
        match self {
            Self::Map(map) | Self::PartitionMap(map) => map.wwid().into_iter().collect(),
            Self::Device(device) => device.cached_identity().unwrap_or_default().names,
            Self::Unknown => Vec::new(),
        }
    }
}
