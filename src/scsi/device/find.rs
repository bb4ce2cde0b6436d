//! The search for SCSI devices in sysfs.

use std::collections::BTreeSet;
use std::path::Path;

use super::ScsiDevice;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::{Roots, sysfs};
use crate::scsi::cached;

impl ScsiDevice {
    /// The device at this address; `None` if there is none.
    pub fn find(roots: &Roots, hctl: Hctl) -> Result<Option<Self>> {
        let link = roots.sysfs.join("bus/scsi/devices").join(hctl.to_string());
        match sysfs::follow(&link)? {
            Some(dir) => Ok(Self::at(hctl, dir)),
            None => Ok(None),
        }
    }

    /// The device below this disk; `None` if the disk is gone.
    ///
    /// # Errors
    /// `NotSupported` if the disk is not a SCSI disk.
    pub fn of_disk(disk: &BlockDevice) -> Result<Option<Self>> {
        let Some(dir) = sysfs::follow(&disk.dir().join("device"))? else {
            // A disk that is being removed loses its number first, and then this link
            // (`drivers/base/core.c`, `device_del`).
            return match BlockDevice::at(disk.dir())? {
                Some(_) => Err(not_scsi(disk)),
                None => Ok(None),
            };
        };
        match address_of(&dir) {
            Some(hctl) => Ok(Self::at(hctl, dir)),
            None => Err(not_scsi(disk)),
        }
    }

    /// The device below this disk; `None` if the disk is no SCSI disk, is gone or cannot be read.
    pub(crate) fn below(disk: &BlockDevice) -> Option<Self> {
        let dir = sysfs::follow(&disk.dir().join("device")).ok().flatten()?;
        Self::at(address_of(&dir)?, dir)
    }

    /// All devices, in the order of their addresses.
    pub fn all(roots: &Roots) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        let bus = roots.sysfs.join("bus/scsi/devices");
        for name in sysfs::names(&bus)? {
            // The bus lists hosts and targets too.
            if let Ok(hctl) = name.parse()
                && let Some(dir) = sysfs::follow(&bus.join(name))?
            {
                devices.extend(Self::at(hctl, dir));
            }
        }
        devices.sort_by_key(|device| device.hctl);
        Ok(devices)
    }

    /// The devices whose units may have a wanted name, by the strongest name and the unique
    /// ones in the kernel's copies, in the order of their addresses. A device of which the kernel
    /// has read no name is one of them. A device of other names costs three system calls.
    pub(crate) fn candidates(
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Vec<Self>> {
        let mut devices = Vec::new();
        let bus = roots.sysfs.join("bus/scsi/devices");
        for hctl in cached::candidate_addresses(&bus, is_wanted)? {
            if let Some(dir) = sysfs::follow(&bus.join(hctl.to_string()))? {
                devices.extend(Self::at(hctl, dir));
            }
        }
        Ok(devices)
    }

    /// The devices that the kernel is removing, whichever process asked for it. They are
    /// off the bus, and the last write and the SYNCHRONIZE CACHE of their disk are still to
    /// come (`drivers/base/core.c`, `device_del`). Their identity can no longer be read. A
    /// device that is just being added looks the same, until it
    /// [is on the bus](Self::is_on_bus).
    pub(crate) fn being_removed(roots: &Roots) -> Result<Vec<Self>> {
        let bus = roots.sysfs.join("bus/scsi/devices");
        let on_bus: BTreeSet<String> = sysfs::names(&bus)?.into_iter().collect();
        let mut being_removed = Vec::new();
        for target in on_bus.iter().filter(|name| name.starts_with("target")) {
            let Some(target) = sysfs::follow(&bus.join(target))? else {
                continue;
            };
            for name in sysfs::names(&target)? {
                if let Ok(hctl) = name.parse::<Hctl>()
                    && !on_bus.contains(&name)
                    && !bus.join(&name).exists()
                {
                    being_removed.extend(Self::at(hctl, target.join(name)));
                }
            }
        }
        Ok(being_removed)
    }

    /// How many sent commands have returned with an error since the device was scanned
    /// (`drivers/scsi/scsi_lib.c`, `ioerr_cnt`); `None` if the count cannot be read.
    pub(crate) fn failed_commands(&self) -> Option<u64> {
        self.command_count("ioerr_cnt")
    }

    /// How many commands the kernel has sent since the device was scanned
    /// (`drivers/scsi/scsi_lib.c`, `iorequest_cnt`); `None` if the count cannot be read.
    pub(crate) fn sent_commands(&self) -> Option<u64> {
        self.command_count("iorequest_cnt")
    }

    fn command_count(&self, attribute: &str) -> Option<u64> {
        let count = sysfs::read(&self.dir.join(attribute)).ok()?;
        u64::from_str_radix(count.strip_prefix("0x")?, 16).ok()
    }

    /// The other devices of the same target.
    pub(crate) fn siblings(&self) -> Result<Vec<Self>> {
        let Some(target) = self.dir.parent() else {
            return Ok(Vec::new());
        };
        let names = sysfs::names(target)?;
        let others = names.iter().filter_map(|name| name.parse().ok());
        let others = others.filter(|&hctl: &Hctl| hctl != self.hctl);
        Ok(others
            .filter_map(|hctl| Self::at(hctl, target.join(hctl.to_string())))
            .collect())
    }

    /// The [`siblings`](Self::siblings) whose unit may have the wanted name, as in
    /// `candidates`.
    pub(crate) fn sibling_candidates(&self, wanted: &Wwid) -> Result<Vec<Self>> {
        let Some(target) = self.dir.parent() else {
            return Ok(Vec::new());
        };
        let found = cached::candidate_addresses(target, |name| name == wanted)?;
        let others = found.into_iter().filter(|&hctl| hctl != self.hctl);
        Ok(others
            .filter_map(|hctl| Self::at(hctl, target.join(hctl.to_string())))
            .collect())
    }
}

fn address_of(dir: &Path) -> Option<Hctl> {
    dir.file_name()?.to_str()?.parse().ok()
}

fn not_scsi(disk: &BlockDevice) -> Error {
    let message = format!("{} is not a SCSI disk", disk.name());
    Error::new(ErrorKind::NotSupported, message).with_path(disk.dir())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_device_is_being_removed_from_when_it_is_off_the_bus_until_its_directory_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let bus = roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        let target = roots.sysfs.join("devices/target2:0:0");
        let device = target.join("2:0:0:1");
        fs::create_dir_all(&device).unwrap();
        for dir in [&target, &device] {
            symlink(dir, bus.join(dir.file_name().unwrap())).unwrap();
        }
        let being_removed = || {
            let found = ScsiDevice::being_removed(&roots).unwrap().into_iter();
            found.map(|it| it.hctl().to_string()).collect::<Vec<_>>()
        };
        assert!(being_removed().is_empty());
        fs::remove_file(bus.join("2:0:0:1")).unwrap();
        assert_eq!(being_removed(), ["2:0:0:1"]);
        fs::remove_dir_all(&device).unwrap();
        assert!(being_removed().is_empty());
    }

    #[test]
    fn a_disk_that_loses_its_device_is_gone_and_one_that_never_had_one_is_no_scsi_disk() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("sys/devices/virtual/block/dm-0");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("dev"), "253:0\n").unwrap();
        let disk = BlockDevice::at(&dir).unwrap().unwrap();
        let error = ScsiDevice::of_disk(&disk).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotSupported);
        fs::remove_file(dir.join("dev")).unwrap();
        assert_eq!(ScsiDevice::of_disk(&disk).unwrap(), None);
    }
}
