//! Reads all SCSI disks of the machine in one pass.

use std::cmp::Reverse;
use std::path::PathBuf;
use std::str::FromStr;

use super::cached::Cached;
use super::identity::Identity;
use super::state::State;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{DevNo, DiskSeq, Hctl};
use crate::kernel::block_tree::BlockTree;
use crate::kernel::device_dir::DeviceDir;
use crate::kernel::parallel::in_parallel;
use crate::kernel::{Roots, sysfs};

/// The unit in which the kernel counts sizes, in bytes (`include/linux/blk_types.h`).
const SECTOR: u64 = 512;

/// The facts that sysfs shows about one instance of a SCSI disk. A fact that cannot be read is
/// `None`, and `unreadable` says why.
#[derive(Debug)]
pub(crate) struct DiskFacts<'a> {
    pub(crate) hctl: Hctl,
    /// The device's directory, with no link in the path.
    pub(crate) dir: PathBuf,
    pub(crate) state: Option<State>,
    /// The kernel's copies of the unit's pages, which are no proof of identity.
    pub(crate) identity: Identity,
    /// The kernel's name of the disk; `None` if the driver has created none.
    pub(crate) disk: Option<&'a str>,
    pub(crate) devno: Option<DevNo>,
    /// `None` also before Linux 5.15.
    pub(crate) diskseq: Option<DiskSeq>,
    /// In bytes.
    pub(crate) size: Option<u64>,
    pub(crate) unreadable: Vec<String>,
}

impl<'a> DiskFacts<'a> {
    /// The facts of all devices, by address. A device that goes away meanwhile is left out.
    ///
    /// # Errors
    /// Only those of reading the list of devices itself.
    pub(crate) fn of_all(roots: &Roots, tree: &'a BlockTree) -> Result<Vec<Self>> {
        let mut facts = in_parallel(tree.disks().collect(), |disks| {
            let facts = disks.into_iter().map(|disk| Self::of_disk(tree, disk));
            facts.filter_map(Result::transpose).collect()
        })?
        .into_iter()
        .collect::<Result<Vec<_>>>()?;
        // Only this list has the devices without a disk; it has hosts and targets too.
        let bus = roots.sysfs.join("bus/scsi/devices");
        // If two disks appeared at one address during the reads, the later one counts.
        facts.sort_unstable_by_key(|facts| (facts.hctl, Reverse(facts.diskseq)));
        facts.dedup_by_key(|facts| facts.hctl);
        let is_known = |hctl: &Hctl| facts.binary_search_by_key(hctl, |known| known.hctl).is_ok();
        let mut others = Vec::new();
        for name in sysfs::names(&bus)? {
            if let Some(hctl) = name.parse().ok().filter(|hctl| !is_known(hctl))
                && let Some(dir) = sysfs::follow(&bus.join(name))?
            {
                others.extend(Self::read(hctl, dir, None));
            }
        }
        if !others.is_empty() {
            facts.append(&mut others);
            facts.sort_unstable_by_key(|facts| facts.hctl);
        }
        Ok(facts)
    }

    /// `None` if the disk is gone, or of another kind.
    fn of_disk(tree: &BlockTree, name: &'a str) -> Result<Option<Self>> {
        let Some(mut dir) = tree.dir(name)? else {
            return Ok(None);
        };
        // .../H:C:T:L/block/sda
        dir.pop();
        dir.pop();
        let address = dir
            .file_name()
            .and_then(|address| address.to_str()?.parse().ok());
        Ok(address.and_then(|hctl| Self::read(hctl, dir, Some(name))))
    }

    /// `None` if the device is gone, or no disk.
    fn read(hctl: Hctl, path: PathBuf, disk: Option<&'a str>) -> Option<Self> {
        let mut reader = Reader::default();
        let dir = reader.keep("the device", DeviceDir::open(&path).transpose()?);
        let mut facts = Self {
            hctl,
            dir: PathBuf::new(),
            state: None,
            identity: Identity::default(),
            disk,
            devno: None,
            diskseq: None,
            size: None,
            unreadable: Vec::new(),
        };
        if let Some(dir) = dir {
            // Only the sd driver gives such names (drivers/scsi/sd.c), and it serves only
            // disks.
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
                // This one file has both numbers.
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
            // The state is read last: if it is there, so was everything above.
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

/// As [`super::ScsiDevice::is_disk`].
fn is_disk(peripheral_type: u8) -> bool {
    matches!(peripheral_type, 0x00 | 0x07 | 0x0e | 0x14)
}

/// The value in a `KEY=value` line.
fn value<'a>(event: &'a str, key: &str) -> Option<&'a str> {
    let lines = event.lines();
    let mut pairs = lines.filter_map(|line| line.split_once('='));
    pairs.find_map(|(found, value)| (found == key).then_some(value))
}

/// Returns the values that can be read, and records the errors of the others.
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
