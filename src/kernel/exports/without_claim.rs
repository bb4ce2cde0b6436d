//! Parts of the kernel, besides its targets, that open a block device without a claim.
//!
//! Each opens the device without a holder, so an exclusive open does not exclude it:
//!
//! - Xen's block backend (`drivers/block/xen-blkback/xenbus.c`, `xen_vbd_create`);
//! - the server of the RDMA network block device (`drivers/block/rnbd/rnbd-srv.c`,
//!   `process_msg_open`);
//! - the heartbeat of OCFS2 (`fs/ocfs2/cluster/heartbeat.c`, `o2hb_region_dev_store`).

use std::path::Path;

use super::attribute::read_if_there;
use crate::error::Result;
use crate::id::DevNo;
use crate::kernel::{Roots, sysfs};

/// Every such use of a device, by name.
pub(super) fn read(roots: &Roots) -> Result<Vec<(String, DevNo)>> {
    let mut uses = Vec::new();
    read_xen(&roots.sysfs.join("bus/xen-backend/devices"), &mut uses)?;
    read_rnbd(
        &roots.sysfs.join("class/rnbd-server/ctl/devices"),
        &mut uses,
    )?;
    read_heartbeats(roots, &mut uses)?;
    Ok(uses)
}

/// The attribute is there from the moment at which the backend has the device.
fn read_xen(devices: &Path, uses: &mut Vec<(String, DevNo)>) -> Result<()> {
    for name in sysfs::names(devices)? {
        let number = sysfs::read_if_there(&devices.join(&name).join("physical_device"))?;
        if let Some(number) = number.as_deref().and_then(hexadecimal) {
            uses.push((format!("xen-backend {name}"), number));
        }
    }
    Ok(())
}

/// Parses `8:1f`.
fn hexadecimal(number: &str) -> Option<DevNo> {
    let (major, minor) = number.split_once(':')?;
    let parse = |part| u32::from_str_radix(part, 16).ok();
    Some(DevNo {
        major: parse(major)?,
        minor: parse(minor)?,
    })
}

/// The link leads to the disk, also for a partition.
fn read_rnbd(devices: &Path, uses: &mut Vec<(String, DevNo)>) -> Result<()> {
    for name in sysfs::names(devices)? {
        let number = sysfs::read_if_there(&devices.join(&name).join("block_dev/dev"))?;
        if let Some(number) = number.and_then(|number| number.parse().ok()) {
            uses.push((format!("rnbd-server {name}"), number));
        }
    }
    Ok(())
}

/// A region without a device shows an empty line.
fn read_heartbeats(roots: &Roots, uses: &mut Vec<(String, DevNo)>) -> Result<()> {
    let clusters = roots.sysfs.join("kernel/config/cluster");
    for cluster in sysfs::names(&clusters)? {
        let regions = clusters.join(&cluster).join("heartbeat");
        for region in sysfs::names(&regions)? {
            let device = read_if_there(&regions.join(&region).join("dev"))?;
            let Some(device) = device.filter(|device| !device.is_empty()) else {
                continue;
            };
            // sysfs has no slash in a name.
            let device = device.replace('/', "!");
            let number = roots.sysfs.join("class/block").join(device).join("dev");
            let number = sysfs::read_if_there(&number)?;
            if let Some(number) = number.and_then(|number| number.parse().ok()) {
                uses.push((format!("o2hb {cluster}/{region}"), number));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn put(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn each_part_of_the_kernel_that_opens_a_device_without_a_claim_is_named_with_the_device() {
        let root = tempfile::tempdir().unwrap();
        let roots = Roots::below(root.path());
        let below = |path: &str| roots.sysfs.join(path);
        assert!(read(&roots).unwrap().is_empty());
        let xen = "bus/xen-backend/devices";
        put(below(xen).join("vbd-1-768/physical_device"), "8:1f\n");
        put(below(xen).join("vif-1-0/state"), "4\n");
        let rnbd = "class/rnbd-server/ctl/devices";
        put(below(rnbd).join("sdc/block_dev/dev"), "8:32\n");
        let regions = below("kernel/config/cluster/c/heartbeat");
        put(regions.join("R1/dev"), "sdd\n");
        put(regions.join("R2/dev"), "\n");
        put(regions.join("threshold"), "31\n");
        put(below("class/block/sdd/dev"), "8:48\n");
        let uses = read(&roots).unwrap();
        let uses: Vec<String> = uses
            .iter()
            .map(|(name, number)| format!("{name} {number}"))
            .collect();
        let expected = [
            "xen-backend vbd-1-768 8:31",
            "rnbd-server sdc 8:32",
            "o2hb c/R1 8:48",
        ];
        assert_eq!(uses, expected);
    }
}
