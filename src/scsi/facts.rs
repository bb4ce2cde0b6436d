//! Every SCSI disk of the machine, in one look.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;
use std::thread;

use super::cached::Cached;
use super::identity::Identity;
use super::state::State;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{DevNo, DiskSeq, Hctl};
use crate::kernel::block_tree::BlockTree;
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::{Roots, sysfs};

/// The kernel counts sizes in these (`include/linux/blk_types.h`).
const SECTOR: u64 = 512;

/// What sysfs shows of one life of a SCSI disk. What cannot be read is `None`,
/// and said in `unreadable`.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) hctl: Hctl,
    /// Its directory, with no link in the path.
    pub(crate) dir: Cow<'a, Path>,
    pub(crate) state: Option<State>,
    /// The kernel's copies of its pages: no proof of identity.
    pub(crate) identity: Identity,
    /// The kernel's name of its disk; `None` where the driver has brought none.
    pub(crate) disk: Option<&'a str>,
    pub(crate) devno: Option<DevNo>,
    /// `None` before Linux 5.15 too.
    pub(crate) diskseq: Option<DiskSeq>,
    /// Bytes.
    pub(crate) size: Option<u64>,
    pub(crate) unreadable: Vec<String>,
}

impl<'a> Facts<'a> {
    /// Those of all, by address. One that goes away meanwhile is left out.
    ///
    /// # Errors
    /// Only where the list of devices itself cannot be read.
    pub(crate) fn of_all(roots: &Roots, tree: &'a BlockTree) -> Result<Vec<Self>> {
        let mut found = BTreeMap::new();
        for (name, disk) in tree.disks() {
            // .../H:C:T:L/block/sda
            let device = disk.parent().and_then(Path::parent);
            let address = device.and_then(|dir| dir.file_name()?.to_str()?.parse().ok());
            if let Some((device, hctl)) = device.zip(address) {
                found.insert(hctl, (Cow::Borrowed(device), Some(name)));
            }
        }
        // Those without a disk are listed here alone, as hosts and targets are.
        let bus = roots.sysfs.join("bus/scsi/devices");
        for name in sysfs::names(&bus)? {
            if let Ok(hctl) = name.parse()
                && !found.contains_key(&hctl)
                && let Some(device) = sysfs::follow(&bus.join(name))?
            {
                found.insert(hctl, (Cow::Owned(device), None));
            }
        }
        let places: Vec<Place<'a>> = found
            .into_iter()
            .map(|(hctl, (dir, disk))| Place { hctl, dir, disk })
            .collect();
        at_all(&places)
    }

    /// `None` where it is gone, or no disk.
    fn read(place: &Place<'a>) -> Option<Self> {
        let path = place.dir.clone();
        let (hctl, disk) = (place.hctl, place.disk);
        let mut reader = Reader::default();
        let dir = reader.keep("the device", DeviceDir::open(&path).transpose()?);
        let mut facts = Self {
            hctl,
            dir: Cow::Borrowed(Path::new("")),
            state: None,
            identity: Identity::default(),
            disk,
            devno: None,
            diskseq: None,
            size: None,
            unreadable: Vec::new(),
        };
        if let Some(dir) = dir {
            // Only the sd driver gives such names (drivers/scsi/sd.c), and it
            // only serves what is a disk.
            let is_sd = disk.is_some_and(|name| name.starts_with("sd"));
            if !is_sd && !reader.parsed(&dir, "type").is_none_or(is_disk) {
                return None;
            }
            let identity = reader.keep(
                "identity",
                Identity::read(&Cached {
                    dir: &dir,
                    below: "",
                }),
            );
            facts.identity = identity.unwrap_or_default();
            if let Some(name) = disk {
                let of_disk = |attribute| format!("block/{name}/{attribute}");
                // One file that has both.
                let event = reader.keep("uevent", dir.text(&of_disk("uevent")));
                if let Some(event) = event.flatten() {
                    let number = |key| value(&event, key).and_then(|text| text.parse().ok());
                    let devno = number("MAJOR").zip(number("MINOR"));
                    facts.devno = devno.map(|(major, minor)| DevNo { major, minor });
                    facts.diskseq = value(&event, "DISKSEQ").and_then(|text| text.parse().ok());
                }
                let sectors: Option<u64> = reader.parsed(&dir, &of_disk("size"));
                facts.size = sectors.map(|sectors| sectors.saturating_mul(SECTOR));
            }
            // Last: where it is there, so was all of the above.
            let state = reader.keep("state", dir.text("state").transpose()?);
            facts.state = state.map(|word| {
                let Ok(state) = word.parse();
                state
            });
        }
        facts.unreadable = reader.unreadable;
        facts.dir = path;
        Some(facts)
    }
}

/// Where to read.
struct Place<'a> {
    hctl: Hctl,
    dir: Cow<'a, Path>,
    disk: Option<&'a str>,
}

/// The time goes into opening files, so processors share it where there are
/// many.
fn at_all<'a>(places: &[Place<'a>]) -> Result<Vec<Facts<'a>>> {
    /// What a thread must find to do to be worth its start.
    const SHARE: usize = 500;
    const MOST: usize = 4;
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let share = places.len().div_ceil(processors.min(MOST)).max(SHARE);
    let read = |places: &[Place<'a>]| -> Vec<Facts<'a>> {
        let facts = places.iter().filter_map(Facts::read);
        facts.collect()
    };
    if places.len() <= share {
        return Ok(read(places));
    }
    thread::scope(|scope| {
        let threads: Vec<_> = places
            .chunks(share)
            .map(|share| scope.spawn(move || read(share)))
            .collect();
        let mut facts = Vec::with_capacity(places.len());
        for thread in threads {
            let died = |_| Error::new(ErrorKind::Io, "the thread of an inventory died");
            facts.extend(thread.join().map_err(died)?);
        }
        Ok(facts)
    })
}

/// See [`super::ScsiDevice::is_disk`].
fn is_disk(peripheral_type: u8) -> bool {
    matches!(peripheral_type, 0x00 | 0x07 | 0x0e | 0x14)
}

/// Of a `KEY=value` line.
fn value<'a>(event: &'a str, key: &str) -> Option<&'a str> {
    let lines = event.lines();
    let mut pairs = lines.filter_map(|line| line.split_once('='));
    pairs.find_map(|(found, value)| (found == key).then_some(value))
}

/// Keeps what was read and notes what was not.
#[derive(Default)]
struct Reader {
    unreadable: Vec<String>,
}

impl Reader {
    fn keep<T>(&mut self, what: &str, read: Result<T>) -> Option<T> {
        read.inspect_err(|error| self.unreadable.push(format!("{what}: {error}")))
            .ok()
    }

    fn parsed<T: FromStr>(&mut self, dir: &DeviceDir<'_>, attribute: &str) -> Option<T> {
        let text = self.keep(attribute, dir.text(attribute)).flatten()?;
        let odd = |_| Error::new(ErrorKind::Io, format!("{text:?} is not what belongs there"));
        self.keep(attribute, text.parse().map_err(odd))
    }
}
