//! The inventory of a machine: every SCSI logical unit and every connected NBD device.

pub(super) mod capacity;
pub(super) mod file_system_query;
mod scsi;
mod unit;
mod users;

use std::time::Duration;

use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::engine::inventory::users::MachineUsers;
use crate::engine::nbd::known::current_links;
use crate::engine::usage::NotLookedAt;
use crate::error::{ErrorKind, Result};
use crate::id::{DevNo, NbdIndex, Source};
use crate::kernel::block_tree::BlockTree;
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Hints, Link, NbdDevice};
pub use unit::{
    Inventory, InventoryMap, InventoryPath, InventoryUnit, NbdUnit, ScsiUnit, UnitKind,
};

/// How long unresponsive file servers may block an inventory, all together.
const FILE_SERVERS_LIMIT: Duration = Duration::from_secs(16);

impl Engine {
    /// Lists the SCSI disks, grouped into logical units, and the NBD devices that are in use.
    /// It leaves out a device that goes away meanwhile; where something cannot be read of a
    /// SCSI path, the path's data say so.
    ///
    /// The call sends no command to a device, so no device can block it. A mount source behind a
    /// file server that does not answer delays the call by at most two seconds. All such sources
    /// together delay it by at most 16 s. A path costs about twenty system calls; each session,
    /// remote port, map and mount is read once, or once on each of a few threads where there are
    /// many paths.
    ///
    /// # Errors
    /// Those of reading the lists of devices or of mounts.
    pub fn inventory(&self) -> Result<Inventory> {
        inventory_by(self, Deadline::after(FILE_SERVERS_LIMIT))
    }
}

/// The inventory. The lookups of file servers that do not answer end by `deadline`.
fn inventory_by(engine: &Engine, deadline: Deadline) -> Result<Inventory> {
    let roots = engine.roots();
    let tree = BlockTree::read(roots)?;
    let users = MachineUsers::read(roots, &tree, deadline)?;
    let mut units = scsi::units(roots, &tree, &users)?;
    let mut indexes: Vec<_> = tree.disks().filter_map(NbdIndex::of_name).collect();
    indexes.sort_unstable();
    for index in indexes {
        let Some(device) = NbdDevice::find(roots, index)? else {
            continue;
        };
        match describe_nbd(engine, &device, &users) {
            Ok(unit) => units.extend(unit),
            // The kernel removes the device's attributes before its directory.
            Err(error) if error.kind() == ErrorKind::Vanished => {}
            Err(error) => return Err(error),
        }
    }
    let not_looked_at = users.not_looked_at;
    Ok(Inventory {
        units,
        not_looked_at,
    })
}

/// The unit of a device, which is a path of it, its map, or a partition of one of these, and the
/// places where further mounts of it may be.
pub(super) fn unit_behind(
    engine: &Engine,
    devno: DevNo,
    deadline: Deadline,
) -> Result<(Option<InventoryUnit>, Vec<NotLookedAt>)> {
    let mut disk = BlockDevice::of(engine.roots(), devno)?;
    if let Some(partition) = disk.as_ref().filter(|disk| disk.is_partition()) {
        let parent = partition.dir().parent();
        disk = parent.map(BlockDevice::at).transpose()?.flatten();
    }
    let Some(disk) = disk else {
        return Ok((None, Vec::new()));
    };
    let inventory = inventory_by(engine, deadline)?;
    let mut units = inventory.units.into_iter();
    let unit = units.find(|unit| unit.is(disk.devno()));
    Ok((unit, inventory.not_looked_at))
}

/// Returns `None` for a free device.
fn describe_nbd(
    engine: &Engine,
    device: &NbdDevice,
    users: &MachineUsers<'_>,
) -> Result<Option<InventoryUnit>> {
    let facts = device.facts()?;
    let ours = |link: &Link| Some(link.backend.as_str()) == facts.backend.as_deref();
    let dead = |link: &Link| ours(link) && link.is_dead();
    // Only the process that made a link knows whether it is dead.
    let hints = Hints {
        link_dead: current_links(engine, device)
            .get(&device.index())
            .is_some_and(dead),
        ..Hints::default()
    };
    let state = facts.state(&hints);
    if matches!(state, nbd::State::Free | nbd::State::OpenedByOther) {
        return Ok(None);
    }
    let backend = facts.backend;
    let uri = backend.as_deref().and_then(|id| id.parse().ok());
    let disk = device.disk();
    let unit = NbdUnit {
        index: device.index(),
        source: uri.map(Source::Nbd),
        backend,
        node: disk.node(engine.roots()),
        devno: disk.devno(),
        diskseq: disk.diskseq()?,
        state,
        connections: device.connections()?,
        content: device.content_by_udev(engine.roots())?,
    };
    let used = users.of([disk.name()], None);
    Ok(Some(used.unit(UnitKind::Nbd(unit), Some(facts.size))))
}
