//! At which addresses a unit may be, without a look at each device for each question.
//!
//! The kernel sends an event for a device that comes, before the scan returns, and for
//! one that goes, before it leaves the bus (`drivers/scsi/scsi_sysfs.c`,
//! `scsi_sysfs_add_sdev`, `__scsi_remove_device`). Its copies of a device's pages change
//! without an event where a process writes to `rescan`, so those files are listened to.
//! What the index finds is read again on the device before anything is done with it.
//! What it does not find may be there all the same: the kernel also reads the pages again
//! when a device is set running, when a driver asks for it, and for a process that writes
//! through the sysfs of another network namespace. So the engine takes the word of the
//! devices themselves, not of the index, that no path of a unit is left.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use super::cached::Cached;
use super::device::ScsiDevice;
use super::identity::Identity;
use super::state::State;
use crate::error::{ErrorKind, Result};
use crate::id::{Hctl, Wwid};
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::written::{Listened, Written};
use crate::kernel::{Roots, sysfs};
use crate::uevent::{Changed, Changes, Hub};

/// The index costs more than a walk. A process that attaches or detaches one unit and
/// ends asks no more questions than these.
const WALKS: u32 = 4;

/// The SCSI devices of the machine by the names of their units. Where no events come
/// each question looks at each device.
#[derive(Debug)]
pub(crate) struct Units {
    changes: Option<Changes>,
    asked: u32,
    known: Option<Known>,
}

#[derive(Debug)]
struct Known {
    bus: PathBuf,
    written: Written,
    devices: BTreeMap<Hctl, Seen>,
    listened: HashMap<Listened, Hctl>,
}

#[derive(Debug)]
struct Seen {
    dir: PathBuf,
    listened: Option<Listened>,
    /// The names in the kernel's copies; `None` where they cannot be relied on until
    /// the next event: the device could not be read, or it is coming or going.
    names: Option<Vec<Wwid>>,
}

impl Units {
    /// Listens from now on; reads nothing yet.
    pub(crate) fn new(hub: &Hub) -> Self {
        Self::of(hub.changes(device_in))
    }

    fn of(changes: Option<Changes>) -> Self {
        Self {
            changes,
            asked: 0,
            known: None,
        }
    }

    /// The devices of units that may have one of the wanted names, by the strongest
    /// name in the kernel's copies, in the order of their addresses. Those of which the
    /// kernel has read no name are among them.
    pub(crate) fn that_may_be(
        &mut self,
        roots: &Roots,
        is_wanted: impl Fn(&Wwid) -> bool,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(known) = self.read(roots) else {
            return ScsiDevice::all_that_may_be(roots, is_wanted);
        };
        known.with(|names| names.first().is_none_or(&is_wanted))
    }

    /// Those on the device's own target, without itself.
    pub(crate) fn siblings_that_may_be(
        &mut self,
        roots: &Roots,
        device: &ScsiDevice,
        wanted: &Wwid,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(known) = self.read(roots) else {
            return device.siblings_that_may_be(wanted);
        };
        let mut found = known.with(|names| names.first() == Some(wanted))?;
        let target = device.dir().parent();
        found.retain(|other| other.hctl() != device.hctl() && other.dir().parent() == target);
        Ok(found)
    }

    /// Devices among which are all of units that have this name in the kernel's copies,
    /// be it the strongest or not.
    pub(crate) fn among_which_named(
        &mut self,
        roots: &Roots,
        name: &Wwid,
    ) -> Result<Vec<ScsiDevice>> {
        let Some(known) = self.read(roots) else {
            return ScsiDevice::all(roots);
        };
        known.with(|names| names.contains(name))
    }

    /// The devices that the kernel is taking away, and some that it may be taking away:
    /// see [`ScsiDevice::leaving`].
    pub(crate) fn leaving(&mut self, roots: &Roots) -> Result<Vec<ScsiDevice>> {
        let Some(known) = self.read(roots) else {
            return ScsiDevice::leaving(roots);
        };
        let unsettled = known
            .devices
            .iter()
            .filter(|(_, seen)| seen.names.is_none());
        let devices = unsettled.filter_map(|(hctl, seen)| ScsiDevice::at(*hctl, seen.dir.clone()));
        Ok(devices.collect())
    }

    /// The index as of now; `None` where each device has to be looked at.
    fn read(&mut self, roots: &Roots) -> Option<&Known> {
        let since = self.changes.as_mut()?.take();
        if self.asked < WALKS {
            self.asked += 1;
            return None;
        }
        // An error on the way leaves nothing that could be out of date.
        let read = match (since, self.known.take()) {
            (Changed::These(names), Some(known)) => known.read_again(&names).transpose(),
            _ => None,
        };
        match read.unwrap_or_else(|| Known::build(roots)) {
            Ok(known) => Some(self.known.insert(known)),
            // A user may listen to so many files and no more.
            Err(error) => {
                tracing::debug!(%error, "there is no index of SCSI devices: every query reads all of them");
                self.changes = None;
                None
            }
        }
    }
}

impl Known {
    fn build(roots: &Roots) -> Result<Self> {
        let bus = roots.sysfs.join("bus/scsi/devices");
        let mut known = Self {
            bus,
            written: Written::new()?,
            devices: BTreeMap::new(),
            listened: HashMap::new(),
        };
        for name in sysfs::names(&known.bus)? {
            // Hosts and targets are on the bus too.
            if let Ok(hctl) = name.parse() {
                known.look_at(hctl)?;
            }
        }
        for device in ScsiDevice::leaving(roots)? {
            known.keep(device.hctl(), device.dir().to_owned(), None, None);
        }
        Ok(known)
    }

    /// Reads again what had an event, what was written to and what is not settled;
    /// `None` where it is not known what was written to.
    fn read_again(mut self, names: &BTreeSet<String>) -> Result<Option<Self>> {
        let Some(written) = self.written.take() else {
            return Ok(None);
        };
        let mut stale: Vec<Hctl> = names.iter().filter_map(|name| name.parse().ok()).collect();
        stale.extend(written.iter().filter_map(|file| self.listened.get(file)));
        let unsettled = self.devices.iter().filter(|(_, seen)| seen.names.is_none());
        stale.extend(unsettled.map(|(hctl, _)| *hctl));
        stale.sort_unstable();
        stale.dedup();
        for hctl in stale {
            self.look_at(hctl)?;
        }
        Ok(Some(self))
    }

    fn look_at(&mut self, hctl: Hctl) -> Result<()> {
        let name = hctl.to_string();
        if let Some(dir) = sysfs::follow(&self.bus.join(&name))? {
            // First, so that what is written from here on is heard of.
            let listened = match self.written.listen(&dir.join("rescan")) {
                Err(error) if error.kind() == ErrorKind::Vanished => None,
                listened => Some(listened?),
            };
            let names = listened.and_then(|_| names_of(&dir));
            self.keep(hctl, dir, listened, names);
            return Ok(());
        }
        // Off the bus it stays in its target until its cache is written.
        let (target, _) = name.rsplit_once(':').unwrap_or_default();
        let target = sysfs::follow(&self.bus.join(format!("target{target}")))?;
        let dir = target.map(|target| target.join(name));
        match dir.filter(|dir| dir.exists()) {
            Some(dir) => self.keep(hctl, dir, None, None),
            None => self.forget(hctl),
        }
        Ok(())
    }

    fn keep(
        &mut self,
        hctl: Hctl,
        dir: PathBuf,
        listened: Option<Listened>,
        names: Option<Vec<Wwid>>,
    ) {
        let seen = Seen {
            dir,
            listened,
            names,
        };
        let before = self.devices.insert(hctl, seen);
        self.unlisten(before.filter(|before| before.listened != listened));
        self.listened.extend(listened.map(|file| (file, hctl)));
    }

    fn forget(&mut self, hctl: Hctl) {
        let before = self.devices.remove(&hctl);
        self.unlisten(before);
    }

    fn unlisten(&mut self, before: Option<Seen>) {
        if let Some(file) = before.and_then(|before| before.listened) {
            self.listened.remove(&file);
            self.written.drop(file);
        }
    }

    /// The devices on the bus whose names are so, and those whose names are not known.
    fn with(&self, is_so: impl Fn(&[Wwid]) -> bool) -> Result<Vec<ScsiDevice>> {
        let mut found = Vec::new();
        for (hctl, seen) in &self.devices {
            let may_be = seen.names.as_ref().is_none_or(|names| is_so(names));
            if may_be && let Some(dir) = sysfs::follow(&self.bus.join(hctl.to_string()))? {
                found.extend(ScsiDevice::at(*hctl, dir));
            }
        }
        Ok(found)
    }
}

/// The names in the kernel's copies; `None` where they cannot be read, and where the
/// device goes: what it shows goes before its directory.
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
    // After its pages: a device that goes loses its state before them.
    let Ok(state) = open.text("state").ok().flatten()?.parse();
    let goes = matches!(state, State::Cancel | State::Deleted | State::Created);
    (!goes).then_some(names)
}

/// The address of the device in the path of its event, or of one of what is below it.
fn device_in(devpath: &str) -> Option<&str> {
    let mut names = devpath.split('/');
    names.find(|name| {
        name.bytes().filter(|byte| *byte == b':').count() == 3 && name.parse::<Hctl>().is_ok()
    })
}

#[cfg(test)]
mod tests;
