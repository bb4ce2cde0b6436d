//! The block devices of each mounted btrfs. `mountinfo` shows one of them as the source.

use super::{Roots, sysfs};
use crate::error::Result;
use crate::id::DevNo;

/// The numbers of the devices of each mounted btrfs.
pub(super) struct BtrfsDevices(Vec<Vec<DevNo>>);

impl BtrfsDevices {
    /// Reads the links to the devices of each file system (Linux, `fs/btrfs/sysfs.c`,
    /// `/sys/fs/btrfs/UUID/devices`). It leaves out devices that go away meanwhile.
    ///
    /// # Errors
    /// Fails if sysfs cannot be read.
    pub(super) fn read(roots: &Roots) -> Result<Self> {
        let file_systems = roots.sysfs.join("fs/btrfs");
        let mut all = Vec::new();
        for uuid in sysfs::names(&file_systems)? {
            let links = file_systems.join(uuid).join("devices");
            let mut devices = Vec::new();
            for name in sysfs::names(&links)? {
                let number = sysfs::read_if_there(&links.join(name).join("dev"))?;
                devices.extend(number.and_then(|number| number.trim().parse::<DevNo>().ok()));
            }
            all.push(devices);
        }
        Ok(Self(all))
    }

    /// The other devices of the btrfs that is on this device; none if no mounted btrfs is.
    pub(super) fn beside(&self, device: DevNo) -> impl Iterator<Item = DevNo> {
        let own = self.0.iter().find(|devices| devices.contains(&device));
        let devices = own.into_iter().flatten().copied();
        devices.filter(move |other| *other != device)
    }
}
