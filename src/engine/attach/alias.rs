//! A unit may be at two LUNs of one target. This module chooses the device that the attach
//! uses.

use crate::engine::Engine;
use crate::engine::attach::scsi_path::ProbedPath;
use crate::engine::unit::place::are_addresses_of_one_number;
use crate::error::{ErrorKind, Result};
use crate::id::{DiskSeq, Lun};
use crate::scsi::{Comparison, Identity, ScsiDevice, Strength};

impl ProbedPath {
    /// The same unit at another LUN of the same target, if its disk is older. Disks have
    /// no sequence number before Linux 5.15: of two disks that are older than this attach,
    /// the lower LUN counts as the older.
    pub(super) fn earlier_alias(&self, engine: &Engine) -> Result<Option<ScsiDevice>> {
        let Some(name) = self.identity.wwid() else {
            return Ok(None);
        };
        // Another attach may have returned the other device, so a device of this attach
        // counts as younger than any other. This holds even if its number is lower: the
        // kernel assigns the number before it shows the disk.
        let mut first = (self.changed, self.diskseq, self.device.hctl().lun);
        let mut earlier = None;
        let device = &self.device;
        let mut units = engine.units.lock();
        let indexed = units.sibling_candidates(engine.roots(), device, name)?;
        drop(units);
        let siblings = match indexed {
            Some(siblings) => siblings,
            None => device.sibling_candidates(name)?,
        };
        for other in siblings {
            match self.alias_age(&other) {
                Ok(Some(age)) if age < first => {
                    first = age;
                    earlier = Some(other);
                }
                // The read of another unit's device may fail once that is gone. The kernel
                // removes the attributes of a device before its directory.
                Err(error) if error.kind() != ErrorKind::Vanished && other.is_there() => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(earlier)
    }

    /// Whether another device of the target, which reports this identity, is the same unit.
    pub(super) fn is_unit_at(&self, other: &ScsiDevice, identity: &Identity) -> bool {
        let (ours, theirs) = (self.device.hctl().lun, other.hctl().lun);
        match identity.compare(&self.identity) {
            Comparison::Same(Strength::Strong) => true,
            // Two units of one target may share names that are not unique, but not a LUN
            // number.
            Comparison::Same(Strength::Weak) => are_addresses_of_one_number(ours, theirs),
            _ => false,
        }
    }

    fn alias_age(&self, other: &ScsiDevice) -> Result<Option<(bool, Option<DiskSeq>, Lun)>> {
        // A device without a disk is younger; its own attach checks for aliases.
        let Some(disk) = other.disk()? else {
            return Ok(None);
        };
        let same = self.is_unit_at(other, &other.cached_identity()?);
        let age = (false, disk.diskseq()?, other.hctl().lun);
        Ok(same.then_some(age))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::kernel::Roots;
    use crate::transport::RouteKind;

    const UNIQUE: [u8; 8] = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
    const LOCAL: [u8; 8] = [0x30, 0, 0, 0, 0xa1, 0xb2, 0xc3, 0xd4];

    /// Creates a device of this target, with a disk, for the unit `naa`.
    fn device(target: &Path, naa: [u8; 8], lun: &str, disk: &str, diskseq: u64) {
        let dir = target.join(lun);
        let block = dir.join("block").join(disk);
        fs::create_dir_all(&block).unwrap();
        let page = [&[0, 0x83, 0, 12, 2, 3, 0, 8][..], &naa].concat();
        fs::write(dir.join("vpd_pg83"), page).unwrap();
        fs::write(block.join("dev"), format!("8:{diskseq}\n")).unwrap();
        fs::write(block.join("diskseq"), format!("{diskseq}\n")).unwrap();
    }

    /// Returns the earlier alias of the device at `lun`; all `devices` have the same name.
    fn alias(naa: [u8; 8], devices: &[&str], lun: &str, changed: bool) -> Option<String> {
        alias_after(|_| {}, naa, devices, lun, changed)
    }

    /// As [`alias`], after this change below the target's directory.
    fn alias_after(
        change: impl FnOnce(&Path),
        naa: [u8; 8],
        devices: &[&str],
        lun: &str,
        changed: bool,
    ) -> Option<String> {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let target = roots.sysfs.join("devices/target2:0:0");
        let bus = roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        for (disk, seq) in devices.iter().zip(7..) {
            device(&target, naa, disk, &format!("sd{seq}"), seq);
            std::os::unix::fs::symlink(target.join(disk), bus.join(disk)).unwrap();
        }
        change(&target);
        let engine = Engine::start(roots.clone()).unwrap();
        let device = ScsiDevice::find(&roots, lun.parse().unwrap());
        let device = device.unwrap().unwrap();
        let disk = device.disk().unwrap().unwrap();
        let hctl = device.hctl();
        let path = ProbedPath {
            access_state: None,
            via: RouteKind::Address { hctl },
            diskseq: disk.diskseq().unwrap(),
            identity: device.cached_identity().unwrap(),
            watch: engine.hub().watch(lun),
            changed,
            device,
            disk,
        };
        let alias = path.earlier_alias(&engine).unwrap();
        alias.map(|device| device.hctl().to_string())
    }

    #[test]
    fn what_an_attach_has_brought_gives_way_to_another_lun_of_the_unit_whatever_their_numbers() {
        let both = ["2:0:0:1", "2:0:0:16385"];
        let alias = |lun, changed| alias(UNIQUE, &both, lun, changed);
        // Neither disk is new: the older one is used.
        assert_eq!(alias("2:0:0:1", false), None);
        assert_eq!(alias("2:0:0:16385", false).as_deref(), Some("2:0:0:1"));
        assert_eq!(alias("2:0:0:16385", true).as_deref(), Some("2:0:0:1"));
        // LUN 1 has the lower number, but another attach may have returned the other disk
        // before this one was visible.
        assert_eq!(alias("2:0:0:1", true).as_deref(), Some("2:0:0:16385"));
    }

    #[test]
    fn a_device_whose_attributes_the_kernel_has_removed_is_no_alias() {
        let both = ["2:0:0:1", "2:0:0:2"];
        // A name of the vendor's own needs the attribute `vendor`, which is not there.
        let vendors_own = |target: &Path| {
            let page = [0, 0x83, 0, 6, 2, 0, 0, 2, 1, 2];
            fs::write(target.join("2:0:0:2/vpd_pg83"), page).unwrap();
        };
        let alias = alias_after(vendors_own, UNIQUE, &both, "2:0:0:1", true);
        assert_eq!(alias, None);
    }

    #[test]
    fn a_weakly_identified_unit_has_an_alias_at_the_other_address_of_its_number_alone() {
        let devices = ["2:0:0:1", "2:0:0:2", "2:0:0:16386"];
        let alias = |lun| alias(LOCAL, &devices, lun, true);
        assert_eq!(alias("2:0:0:16386").as_deref(), Some("2:0:0:2"));
        assert_eq!(alias("2:0:0:1"), None);
    }
}
