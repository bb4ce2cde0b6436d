//! Groups SCSI devices into units.

use std::collections::HashMap;
use std::mem;

use crate::engine::inventory::users::MachineUsers;
use crate::engine::inventory::{InventoryMap, InventoryPath, InventoryUnit, ScsiUnit, UnitKind};
use crate::error::Result;
use crate::id::{Lun, Wwid};
use crate::kernel::Roots;
use crate::kernel::block_tree::BlockTree;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::parallel::in_parallel;
use crate::multipath::Map;
use crate::scsi::{DiskFacts, State};
use crate::transport::{TargetPort, TransportReader};

pub(super) fn units(
    roots: &Roots,
    tree: &BlockTree,
    users: &MachineUsers<'_>,
) -> Result<Vec<InventoryUnit>> {
    let groups = group(roots, DiskFacts::of_all(roots, tree)?);
    in_parallel(groups, |groups| {
        let mut transports = TransportReader::new(roots);
        let units = groups
            .into_iter()
            .map(|devices| unit(roots, tree, users, &mut transports, devices));
        units.collect()
    })
}

fn unit(
    roots: &Roots,
    tree: &BlockTree,
    users: &MachineUsers<'_>,
    transports: &mut TransportReader<'_>,
    mut devices: Vec<DiskFacts<'_>>,
) -> InventoryUnit {
    let first = devices.first_mut();
    let identity = first.map(|device| mem::take(&mut device.identity));
    let disks: Vec<&str> = devices.iter().filter_map(|device| device.disk).collect();
    let map = disks.iter().find_map(|disk| map_above(roots, tree, disk));
    let (above, map) = map.unzip();
    let path = |device: DiskFacts<'_>| InventoryPath {
        hctl: device.hctl,
        node: device.disk.map(|name| roots.dev.join(name)),
        devno: device.devno,
        diskseq: device.diskseq,
        size: device.size,
        state: device.state,
        reach: transports.of(device.hctl, &device.dir),
        unreadable: device.unreadable,
    };
    let paths: Vec<_> = devices.into_iter().map(path).collect();
    let own = map.as_ref().and_then(|map: &InventoryMap| map.size);
    let sizes = || {
        own.into_iter()
            .chain(paths.iter().filter_map(|path| path.size))
    };
    let size = sizes().next();
    let runs = |path: &InventoryPath| path.state == Some(State::Running);
    let unit = ScsiUnit {
        identity: identity.unwrap_or_default(),
        degraded: !paths.iter().all(runs),
        sizes_differ: sizes().any(|other| Some(other) != size),
        paths,
        map,
    };
    users.of(disks, above).unit(UnitKind::Scsi(unit), size)
}

/// Groups the devices by unit and keeps their order. The key is the same as in a detach:
/// the strongest name where it is unique, and else that name and the LUN of the target
/// port.
fn group<'a>(roots: &Roots, devices: Vec<DiskFacts<'a>>) -> Vec<Vec<DiskFacts<'a>>> {
    let mut groups: Vec<Vec<DiskFacts<'_>>> = Vec::new();
    let mut by_name: HashMap<(Wwid, Option<(TargetPort, Lun)>), usize> = HashMap::new();
    for device in devices {
        let next = groups.len();
        let key = device.identity.wwid().and_then(|name| {
            if name.is_unique() {
                return Some((name.clone(), None));
            }
            let port = TargetPort::of(roots, device.hctl, &device.dir)?;
            Some((name.clone(), Some((port, device.hctl.lun))))
        });
        let group = key.map_or(next, |key| *by_name.entry(key).or_insert(next));
        match groups.get_mut(group) {
            Some(group) => group.push(device),
            None => groups.push(vec![device]),
        }
    }
    groups
}

/// The multipath map on a disk, and its kernel name. A map that cannot be read is listed
/// as a holder.
fn map_above<'a>(
    roots: &Roots,
    tree: &'a BlockTree,
    disk: &str,
) -> Option<(&'a str, InventoryMap)> {
    tree.directly_above(disk).find_map(|name| {
        let disk = BlockDevice::at(&tree.dir(name).ok()??).ok()??;
        let map = Map::of_disk(&disk).ok()??;
        let shown = InventoryMap {
            name: map.name().to_owned(),
            uuid: map.uuid().to_owned(),
            node: disk.node(roots),
            devno: disk.devno(),
            size: disk.size().ok(),
        };
        Some((name, shown))
    })
}
