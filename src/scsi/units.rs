//! An index of the addresses at which a unit may be, so that a query does not read every
//! device.
//!
//! The kernel sends an event for an added device before the scan returns, and for a removed
//! device before it leaves the bus (`drivers/scsi/scsi_sysfs.c`, `scsi_sysfs_add_sdev`,
//! `__scsi_remove_device`). Its copies of a device's pages change without an event if a
//! process writes to `rescan`, so the index watches those files. The engine reads the
//! device again before it acts on what the index finds.
//!
//! The index may miss a device. The kernel also reads the pages again when a device is set
//! running, when a driver asks for it, and for a process that writes through the sysfs of
//! another network namespace. So the engine trusts only the devices themselves, not the
//! index, that no path of a unit is left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::cached::Cached;
use super::device::ScsiDevice;
use super::identity::Identity;
use super::state::State;
use crate::error::{ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::written::{WatchedFile, WriteWatcher};
use crate::kernel::{Roots, sysfs};
use crate::uevent::{Changed, Changes, Hub};

/// Building the index costs more than reading all devices. A process that attaches or
/// detaches one unit and ends makes no more queries than this.
const QUERIES_WITHOUT_INDEX: u32 = 4;

/// The SCSI devices of the machine by the names of their units. Without events each query
/// reads each device.
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
    dir: PathBuf,
    watched: Option<WatchedFile>,
    /// The names in the kernel's copies. `None` if they are unreliable until the next
    /// event, because the device could not be read, or is being added or removed.
    names: Option<Vec<Wwid>>,
}

impl Units {
    /// Listens from now on, but reads nothing yet.
    pub(crate) fn new(hub: &Hub) -> Self {
        Self::of(hub.changes(device_in))
    }

    fn of(changes: Option<Changes>) -> Self {
        Self {
            changes,
            queries: 0,
            index: None,
        }
    }

    /// The devices whose units may have a wanted name, by the strongest name in the
    /// kernel's copies, in the order of their addresses. A device of which the kernel has
    /// read no name is one of them.
    pub(crate) fn candidates(
        &mut self,
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(index) = self.read(roots) else {
            return ScsiDevice::candidates(roots, is_wanted);
        };
        index.devices_with(|names| names.first().is_none_or(&is_wanted))
    }

    /// The same for the other devices on the device's own target.
    pub(crate) fn sibling_candidates(
        &mut self,
        roots: &Roots,
        device: &ScsiDevice,
        wanted: &Wwid,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(index) = self.read(roots) else {
            return device.sibling_candidates(wanted);
        };
        let mut found = index.devices_with(|names| names.first() == Some(wanted))?;
        let target = device.dir().parent();
        found.retain(|other| other.hctl() != device.hctl() && other.dir().parent() == target);
        Ok(found)
    }

    /// A superset of the devices whose unit has this name in the kernel's copies, whether
    /// it is the strongest or not.
    pub(crate) fn candidates_with_name(
        &mut self,
        roots: &Roots,
        name: &Wwid,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(index) = self.read(roots) else {
            return ScsiDevice::all(roots);
        };
        index.devices_with(|names| names.contains(name))
    }

    /// The devices that the kernel is removing, and some that it may be removing: see
    /// [`ScsiDevice::being_removed`].
    pub(crate) fn being_removed(&mut self, roots: &Roots) -> Result<Vec<ScsiDevice>> {
        let Some(index) = self.read(roots) else {
            return ScsiDevice::being_removed(roots);
        };
        let unsettled = index
            .devices
            .iter()
            .filter(|(_, seen)| seen.names.is_none());
        let devices = unsettled.filter_map(|(hctl, seen)| ScsiDevice::at(*hctl, seen.dir.clone()));
        Ok(devices.collect())
    }

    /// The current index; `None` if the query must read each device.
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
        for name in sysfs::names(&known.bus)? {
            // The bus lists hosts and targets too.
            if let Ok(hctl) = name.parse() {
                known.read_device(hctl)?;
            }
        }
        for device in ScsiDevice::being_removed(roots)? {
            known.insert(device.hctl(), device.dir().to_owned(), None, None);
        }
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
        for hctl in stale {
            self.read_device(hctl)?;
        }
        Ok(Some(self))
    }

    fn read_device(&mut self, hctl: Hctl) -> Result<()> {
        let name = hctl.to_string();
        if let Some(dir) = sysfs::follow(&self.bus.join(&name))? {
            // The watch begins before the read, so that it covers every later write.
            let watched = match self.written.watch(&dir.join("rescan")) {
                Err(error) if error.kind() == ErrorKind::Vanished => None,
                watched => Some(watched?),
            };
            let names = watched.and_then(|_| names_of(&dir));
            self.insert(hctl, dir, watched, names);
            return Ok(());
        }
        // A device that has left the bus stays below its target until its cache is written.
        let (target, _) = name.rsplit_once(':').unwrap_or_default();
        let target = sysfs::follow(&self.bus.join(format!("target{target}")))?;
        let dir = target.map(|target| target.join(name));
        match dir.filter(|dir| dir.exists()) {
            Some(dir) => self.insert(hctl, dir, None, None),
            None => self.remove(hctl),
        }
        Ok(())
    }

    fn insert(
        &mut self,
        hctl: Hctl,
        dir: PathBuf,
        watched: Option<WatchedFile>,
        names: Option<Vec<Wwid>>,
    ) {
        let seen = IndexedDevice {
            dir,
            watched,
            names,
        };
        let before = self.devices.insert(hctl, seen);
        self.unwatch(before.filter(|before| before.watched != watched));
        self.watched.extend(watched.map(|file| (file, hctl)));
    }

    fn remove(&mut self, hctl: Hctl) {
        let before = self.devices.remove(&hctl);
        self.unwatch(before);
    }

    fn unwatch(&mut self, before: Option<IndexedDevice>) {
        if let Some(file) = before.and_then(|before| before.watched) {
            self.watched.remove(&file);
            self.written.unwatch(file);
        }
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

/// The names in the kernel's copies; `None` if they cannot be read, or if the device is
/// being removed, because its files go before its directory.
fn names_of(dir: &Path) -> Option<Vec<Wwid>> {
    let open = DeviceDir::open(dir).ok().flatten()?;
    let pages = Cached {
        dir: &open,
        below: "",
    };
    let mut names = Identity::of_page_83(&pages).ok()?;
    if names.is_empty() {
        names = Identity::read(&pages).ok()?.names;
    }
    // The state is read after the pages, because a device that is being removed loses it
    // before them.
    let Ok(state) = open.text("state").ok().flatten()?.parse();
    let is_unsettled = matches!(state, State::Cancel | State::Deleted | State::Created);
    (!is_unsettled).then_some(names)
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
