//! An index of the addresses at which a unit may be, so that a query does not read every
//! device.
//!
//! The kernel sends an event for an added device before the scan returns, and for a removed
//! device before it leaves the bus (`drivers/scsi/scsi_sysfs.c`, `scsi_sysfs_add_sdev`,
//! `__scsi_remove_device`). Its copies of a device's pages change without an event if a
//! process writes to `rescan`, or sets the device running in `state`. So the index watches
//! those files. The engine reads the device again before it acts on what the index finds.
//!
//! The index may miss a device: the kernel also reads the pages again when a driver asks for
//! it, and for a process that writes through the sysfs of another network namespace. While a
//! write to `rescan` has not returned, the index has the old names. So the engine reads the
//! devices themselves before it claims that no path of a unit is left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
#[cfg(test)]
use std::sync::Arc;

use super::cached::{Cached, may_be_wanted};
use super::device::ScsiDevice;
use super::identity::Identity;
use crate::error::{ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::written::{WatchedFile, WriteWatcher};
use crate::kernel::{Roots, sysfs};
#[cfg(test)]
use crate::uevent::ChangedNames;
use crate::uevent::{Changed, Changes, Hub};

/// Building the index costs more than reading all devices, and takes an inotify instance, of
/// which a user has 128. A process that attaches or detaches one unit and ends makes no more
/// queries than this.
const QUERIES_WITHOUT_INDEX: u32 = 4;

/// A write to one of these files of a device has the kernel read the pages again
/// (`drivers/scsi/scsi_sysfs.c`, `store_rescan_field`, `store_state_field`).
const FILES_THAT_REREAD: [&str; 2] = ["rescan", "state"];

/// The SCSI devices of the machine by the names of their units. Without events, and for the
/// first queries, there is no index, and its user reads each device.
#[derive(Debug)]
pub(crate) struct Units {
    changes: Option<Changes>,
    queries: u32,
    index: Option<UnitIndex>,
}

#[derive(Debug)]
struct UnitIndex {
    bus: PathBuf,
    written: WriteWatcher,
    devices: BTreeMap<Hctl, IndexedDevice>,
    watched: HashMap<WatchedFile, Hctl>,
}

#[derive(Debug)]
struct IndexedDevice {
    watched: Vec<WatchedFile>,
    /// The names in the kernel's copies. `None` if the device could not be read, and then the
    /// next query reads it again.
    names: Option<Vec<Wwid>>,
}

impl Units {
    /// Listens from now on, but reads nothing yet.
    pub(crate) fn new(hub: &Hub) -> Self {
        Self::of(hub.changes(device_in))
    }

    /// Units with an index from the first query on, and the end that receives its events.
    #[cfg(test)]
    pub(crate) fn for_test() -> (Self, Arc<ChangedNames>) {
        let (changes, noted) = Changes::for_test(device_in);
        let mut units = Self::of(Some(changes));
        units.queries = QUERIES_WITHOUT_INDEX;
        (units, noted)
    }

    fn of(changes: Option<Changes>) -> Self {
        Self {
            changes,
            queries: 0,
            index: None,
        }
    }

    /// The devices whose units may have a wanted name, by the strongest name and the unique
    /// ones in the kernel's copies, in the order of their addresses. A device of which the kernel
    /// has read no name is one of them. `None` without an index.
    pub(crate) fn candidates(
        &mut self,
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Option<Vec<ScsiDevice>>> {
        self.devices_with(roots, |names| may_be_wanted(names, &is_wanted))
    }

    /// The other devices on the device's own target whose strongest name this is, and those
    /// that could not be read. `None` without an index.
    pub(crate) fn sibling_candidates(
        &mut self,
        roots: &Roots,
        device: &ScsiDevice,
        wanted: &Wwid,
    ) -> Result<Option<Vec<ScsiDevice>>> {
        let found = self.devices_with(roots, |names| names.first() == Some(wanted))?;
        let target = device.dir().parent();
        let is_sibling =
            |other: &ScsiDevice| other.hctl() != device.hctl() && other.dir().parent() == target;
        Ok(found.map(|found| found.into_iter().filter(is_sibling).collect()))
    }

    /// A superset of the devices whose unit has this name in the kernel's copies, whether
    /// it is the strongest or not. `None` without an index.
    pub(crate) fn candidates_with_name(
        &mut self,
        roots: &Roots,
        name: &Wwid,
    ) -> Result<Option<Vec<ScsiDevice>>> {
        self.devices_with(roots, |names| names.contains(name))
    }

    fn devices_with(
        &mut self,
        roots: &Roots,
        matches: impl Fn(&[Wwid]) -> bool,
    ) -> Result<Option<Vec<ScsiDevice>>> {
        let index = self.read(roots);
        index.map(|index| index.devices_with(matches)).transpose()
    }

    /// The current index; `None` without one.
    fn read(&mut self, roots: &Roots) -> Option<&UnitIndex> {
        let since = self.changes.as_mut()?.take();
        if self.queries < QUERIES_WITHOUT_INDEX {
            self.queries += 1;
            return None;
        }
        // An error on the way drops the index, so nothing outdated stays.
        let read = match (since, self.index.take()) {
            (Changed::These(names), Some(known)) => known.read_again(&names).transpose(),
            _ => None,
        };
        match read.unwrap_or_else(|| UnitIndex::build(roots)) {
            Ok(index) => Some(self.index.insert(index)),
            // A user may watch only a limited number of files.
            Err(error) => {
                tracing::debug!(%error, "there is no index of SCSI devices: every query reads all of them");
                self.changes = None;
                None
            }
        }
    }
}

impl UnitIndex {
    fn build(roots: &Roots) -> Result<Self> {
        let bus = roots.sysfs.join("bus/scsi/devices");
        let mut known = Self {
            bus,
            written: WriteWatcher::new()?,
            devices: BTreeMap::new(),
            watched: HashMap::new(),
        };
        // The bus lists hosts and targets too.
        let names = sysfs::names(&known.bus)?;
        known.read_devices(names.iter().filter_map(|name| name.parse().ok()))?;
        Ok(known)
    }

    /// Reads again the devices that had an event, were rescanned or are unsettled; `None`
    /// if the index cannot know which were rescanned.
    fn read_again(mut self, names: &BTreeSet<String>) -> Result<Option<Self>> {
        let Some(written) = self.written.take() else {
            return Ok(None);
        };
        let mut stale: Vec<Hctl> = names.iter().filter_map(|name| name.parse().ok()).collect();
        stale.extend(written.iter().filter_map(|file| self.watched.get(file)));
        let unsettled = self.devices.iter().filter(|(_, seen)| seen.names.is_none());
        stale.extend(unsettled.map(|(hctl, _)| *hctl));
        stale.sort_unstable();
        stale.dedup();
        self.read_devices(stale.into_iter())?;
        Ok(Some(self))
    }

    fn read_devices(&mut self, devices: impl Iterator<Item = Hctl>) -> Result<()> {
        let bus = self.bus.clone();
        let Some(dir) = DeviceDir::open(&bus)? else {
            return Ok(());
        };
        for hctl in devices {
            let name = hctl.to_string();
            // The watches begin before the read, so that they cover every later write.
            let mut watched = Vec::new();
            for file in FILES_THAT_REREAD {
                match self.written.watch(&bus.join(&name).join(file)) {
                    Err(error) if error.kind() == ErrorKind::Vanished => {}
                    file => watched.push(file?),
                }
            }
            let is_watched = watched.len() == FILES_THAT_REREAD.len();
            let names = is_watched.then(|| names_of(&dir, &format!("{name}/")));
            let names = names.flatten();
            let is_there = names.is_some() || bus.join(&name).exists();
            let seen = is_there.then_some(IndexedDevice { watched, names });
            self.replace(hctl, seen);
        }
        Ok(())
    }

    /// Replaces what is known of a device. Without `seen` the device is not on the bus.
    fn replace(&mut self, hctl: Hctl, seen: Option<IndexedDevice>) {
        let before = self.devices.remove(&hctl);
        let watched = seen.as_ref().map(|seen| seen.watched.clone());
        let watched = watched.unwrap_or_default();
        self.devices.extend(seen.map(|seen| (hctl, seen)));
        let before = before.map(|before| before.watched).unwrap_or_default();
        for file in before.into_iter().filter(|file| !watched.contains(file)) {
            self.watched.remove(&file);
            self.written.unwatch(file);
        }
        self.watched
            .extend(watched.into_iter().map(|file| (file, hctl)));
    }

    /// The devices on the bus whose names satisfy `matches`, and those whose names are
    /// unknown.
    fn devices_with(&self, matches: impl Fn(&[Wwid]) -> bool) -> Result<Vec<ScsiDevice>> {
        let mut found = Vec::new();
        for (hctl, seen) in &self.devices {
            let may_be = seen.names.as_ref().is_none_or(|names| matches(names));
            if may_be && let Some(dir) = sysfs::follow(&self.bus.join(hctl.to_string()))? {
                found.extend(ScsiDevice::at(*hctl, dir));
            }
        }
        Ok(found)
    }
}

/// The names in the kernel's copies, of the device `below` the directory of the bus; `None` if
/// they cannot be read.
fn names_of(bus: &DeviceDir<'_>, below: &str) -> Option<Vec<Wwid>> {
    let pages = Cached { dir: bus, below };
    let names = Identity::of_page_83(&pages).ok()?;
    if !names.is_empty() {
        return Some(names);
    }
    let names = Identity::read(&pages).ok()?.names;
    // A device that is being removed loses this attribute before its pages.
    bus.text(&format!("{below}state")).ok()??;
    Some(names)
}

/// The address of the device in the path of an event of the device or of a device below it.
fn device_in(devpath: &str) -> Option<&str> {
    let mut names = devpath.split('/');
    names.find(|name| {
        name.bytes().filter(|byte| *byte == b':').count() == 3 && name.parse::<Hctl>().is_ok()
    })
}

#[cfg(test)]
mod tests;
