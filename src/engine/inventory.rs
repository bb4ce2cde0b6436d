//! What the machine has: every SCSI logical unit and every connected NBD device.

pub(super) mod capacity;
pub(super) mod file_system_query;
mod scsi;
mod unit;
mod users;

use super::Engine;
use crate::error::{ErrorKind, Result};
use crate::id::{DevNo, NbdIndex, Source};
use crate::kernel::block_tree::BlockTree;
use crate::kernel::blockdev::BlockDevice;
use crate::nbd::{self, Hints, Link, NbdDevice};
pub use unit::{
    Inventory, InventoryMap, InventoryPath, InventoryUnit, NbdUnit, ScsiUnit, UnitKind,
};
use users::Users;

impl Engine {
    /// Shows the SCSI disks, grouped to logical units, and the NBD devices that
    /// are in use. One that goes away meanwhile is left out; what cannot be read
    /// of a SCSI path is data about this path.
    ///
    /// Nothing is asked of a device, so none can hold this up. A file server that does not
    /// answer can for two seconds, where a mount was made from a link to it. A path costs about
    /// twenty system calls; each session, remote port, map and mount is read
    /// once, or once on each of a few threads where there are many paths.
    ///
    /// # Errors
    /// Where the lists themselves, of devices or of mounts, cannot be read.
    pub fn inventory(&self) -> Result<Inventory> {
        let roots = self.roots();
        let tree = BlockTree::read(roots)?;
        let users = Users::read(roots, &tree)?;
        let mut units = scsi::units(roots, &tree, &users)?;
        let mut indexes: Vec<_> = tree.disks().filter_map(NbdIndex::of_name).collect();
        indexes.sort_unstable();
        for index in indexes {
            let Some(device) = NbdDevice::find(roots, index)? else {
                continue;
            };
            match self.describe_nbd(&device, &users) {
                Ok(unit) => units.extend(unit),
                // What it shows goes before its directory.
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

    /// The unit that a device is: a path of it, its map, or a partition of one of
    /// these.
    pub(super) fn unit_behind(&self, devno: DevNo) -> Result<Option<InventoryUnit>> {
        let mut disk = BlockDevice::of(self.roots(), devno)?;
        if let Some(partition) = disk.as_ref().filter(|disk| disk.is_partition()) {
            let parent = partition.dir().parent();
            disk = parent.map(BlockDevice::at).transpose()?.flatten();
        }
        let Some(disk) = disk else {
            return Ok(None);
        };
        let mut units = self.inventory()?.units.into_iter();
        Ok(units.find(|unit| unit.is(disk.devno())))
    }

    /// `None` where it is free.
    fn describe_nbd(&self, device: &NbdDevice, users: &Users<'_>) -> Result<Option<InventoryUnit>> {
        let facts = device.facts()?;
        let ours = |link: &Link| Some(link.backend.as_str()) == facts.backend.as_deref();
        let dead = |link: &Link| ours(link) && link.is_dead();
        // Only who made a link can tell a dead one from a live one.
        let hints = Hints {
            link_dead: self
                .links_beside(device)
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
            node: disk.node(self.roots()),
            devno: disk.devno(),
            diskseq: disk.diskseq()?,
            state,
            connections: device.connections()?,
            content: device.content_by_udev(self.roots())?,
        };
        let used = users.of([disk.name()], None);
        Ok(Some(used.unit(UnitKind::Nbd(unit), Some(facts.size))))
    }
}
