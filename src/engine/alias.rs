//! One unit at two LUNs of one target: which of its devices is the one.

use super::bring::Brought;
use crate::error::Result;
use crate::id::{DiskSeq, Lun};
use crate::scsi::ScsiDevice;

impl Brought {
    /// The same unit at another LUN of the same target, where its disk was there
    /// before this one. Before Linux 5.15 nothing tells that of two that were both
    /// there before us, and then the lower LUN is taken.
    pub(super) fn earlier_alias(&self) -> Result<Option<ScsiDevice>> {
        // A vendor's text may be the same on two units of one target.
        let Some(name) = self.identity.wwid().filter(|name| name.is_registered()) else {
            return Ok(None);
        };
        // One that this attach brought gives way to any: another attach may have
        // handed that one out, though its number is the higher (the kernel gives
        // it before it shows the disk).
        let mut first = (self.changed, self.diskseq, self.device.hctl().lun);
        let mut earlier = None;
        for other in self.device.siblings_that_may_be(name)? {
            match self.is_alias_since(&other) {
                Ok(Some(age)) if age < first => {
                    first = age;
                    earlier = Some(other);
                }
                // Another unit's, which goes away while we look.
                Err(error) if other.is_there() => return Err(error),
                _ => {}
            }
        }
        Ok(earlier)
    }

    fn is_alias_since(&self, other: &ScsiDevice) -> Result<Option<(bool, Option<DiskSeq>, Lun)>> {
        // Without a disk it is younger; its own attach will look here.
        let Some(disk) = other.disk()? else {
            return Ok(None);
        };
        let same = other.cached_identity()?.is_same_unit(&self.identity);
        let age = (false, disk.diskseq()?, other.hctl().lun);
        Ok(same.then_some(age))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::engine::Engine;
    use crate::kernel::Roots;
    use crate::transport::Via;

    /// A device with a disk of the one unit of this target.
    fn device(target: &Path, lun: &str, disk: &str, diskseq: u64) {
        let dir = target.join(lun);
        let block = dir.join("block").join(disk);
        fs::create_dir_all(&block).unwrap();
        let naa = [0x50, 0, 0xc5, 0, 0xa1, 0xb2, 0xc3, 0xd4];
        let page = [&[0, 0x83, 0, 12, 2, 3, 0, 8][..], &naa].concat();
        fs::write(dir.join("vpd_pg83"), page).unwrap();
        fs::write(block.join("dev"), format!("8:{diskseq}\n")).unwrap();
        fs::write(block.join("diskseq"), format!("{diskseq}\n")).unwrap();
    }

    #[test]
    fn what_an_attach_has_brought_gives_way_to_another_lun_of_the_unit_whatever_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let target = roots.sysfs.join("devices/target2:0:0");
        device(&target, "2:0:0:1", "sda", 7);
        device(&target, "2:0:0:16385", "sdb", 8);
        let bus = roots.sysfs.join("bus/scsi/devices");
        fs::create_dir_all(&bus).unwrap();
        for lun in ["2:0:0:1", "2:0:0:16385"] {
            std::os::unix::fs::symlink(target.join(lun), bus.join(lun)).unwrap();
        }
        let engine = Engine::start(roots.clone()).unwrap();
        let alias = |lun: &str, changed| {
            let device = ScsiDevice::find(&roots, lun.parse().unwrap());
            let device = device.unwrap().unwrap();
            let disk = device.disk().unwrap().unwrap();
            let hctl = device.hctl();
            let path = Brought {
                via: Via::Address { hctl },
                diskseq: disk.diskseq().unwrap(),
                identity: device.cached_identity().unwrap(),
                watch: engine.hub().watch(lun),
                changed,
                device,
                disk,
            };
            let alias = path.earlier_alias().unwrap();
            alias.map(|device| device.hctl().to_string())
        };
        // Both stood: the one that came first is the one.
        assert_eq!(alias("2:0:0:1", false), None);
        assert_eq!(alias("2:0:0:16385", false).as_deref(), Some("2:0:0:1"));
        assert_eq!(alias("2:0:0:16385", true).as_deref(), Some("2:0:0:1"));
        // Its number is the lower, and the other may have been handed out before it
        // was to be seen.
        assert_eq!(alias("2:0:0:1", true).as_deref(), Some("2:0:0:16385"));
    }
}
