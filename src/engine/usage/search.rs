//! Reads the users of disks, and decides nothing.

use std::cell::LazyCell;
use std::path::Path;

use crate::deadline::Deadline;
use crate::engine::usage::{Holder, NotLookedAt, not_looked_at};
use crate::error::Result;
use crate::id::DevNo;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::devices::NumberedDevice;
use crate::kernel::generic_nodes::{self, GenericNode};
use crate::kernel::process::{Means, Opener};
use crate::kernel::{Roots, exports, loops, mounts, process, sysfs};

/// Which users are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Extent {
    /// Every kind of user.
    All,
    /// Those that an exclusive open does not exclude. A caller that has the disk open
    /// exclusively, or is about to, needs no more: the kernel refuses that open while
    /// the disk or a partition is mounted, stacked on or swapped on (`block/bdev.c`,
    /// `bd_may_claim`).
    NotExcludedByClaim,
}

/// The users of one disk, as far as this process can see.
#[derive(Debug, Clone, Default)]
pub(in crate::engine) struct Users {
    pub(in crate::engine) found: Vec<Holder>,
    pub(in crate::engine) not_looked_at: Vec<NotLookedAt>,
}

/// Reads the users of each of these disks, with its partitions, in their order.
/// **May block** while a file server does not answer: call it on a worker.
pub(super) fn read(
    roots: &Roots,
    disks: &[BlockDevice],
    extent: Extent,
    deadline: Deadline,
) -> Result<Vec<Users>> {
    let mut search = UserSearch::of_disks(disks)?;
    if extent == Extent::All {
        search.read_exclusive(roots, deadline)?;
    }
    search.read_processes(roots, deadline)?;
    search.read_without_process(roots, deadline)?;
    let not_looked_at = search.not_looked_at;
    let of_one = |found| Users {
        found,
        not_looked_at: not_looked_at.clone(),
    };
    Ok(search.found.into_iter().map(of_one).collect())
}

/// Reads the users of a SCSI device without a disk, by its directory in sysfs: the
/// processes that have a character device of it open.
pub(super) fn read_diskless(roots: &Roots, device: &Path, deadline: Deadline) -> Result<Users> {
    let mut search = UserSearch::of_diskless(device)?;
    search.read_processes(roots, deadline)?;
    Ok(Users {
        found: search.found.pop().unwrap_or_default(),
        not_looked_at: search.not_looked_at,
    })
}

/// The places that cannot be looked at, whatever the disk.
pub(super) fn read_places_not_looked_at(
    roots: &Roots,
    deadline: Deadline,
) -> Result<Vec<NotLookedAt>> {
    let mut search = UserSearch::of_disks(&[])?;
    search.read_exclusive(roots, deadline)?;
    search.read_processes(roots, deadline)?;
    search.read_without_process(roots, deadline)?;
    Ok(search.not_looked_at)
}

/// A search for the users of some disks.
struct UserSearch {
    /// The disks and their partitions, each with the position of its disk in `found`.
    devices: Vec<(usize, BlockDevice)>,
    numbers: Vec<DevNo>,
    /// The generic nodes of the disks, each with the place of its disk.
    generic: Vec<(usize, GenericNode)>,
    /// The users of each disk.
    found: Vec<Vec<Holder>>,
    not_looked_at: Vec<NotLookedAt>,
}

impl UserSearch {
    fn of_disks(disks: &[BlockDevice]) -> Result<Self> {
        let mut devices = Vec::new();
        let mut generic = Vec::new();
        for (place, disk) in disks.iter().enumerate() {
            devices.push((place, disk.clone()));
            let nodes = generic_nodes::read_generic_nodes(&disk.dir().join("device"))?;
            generic.extend(nodes.into_iter().map(|node| (place, node)));
            let partitions = disk.partitions()?.into_iter();
            devices.extend(partitions.map(|partition| (place, partition)));
        }
        Ok(Self {
            numbers: devices.iter().map(|(_, device)| device.devno()).collect(),
            devices,
            generic,
            found: vec![Vec::new(); disks.len()],
            not_looked_at: Vec::new(),
        })
    }

    /// The search for the users of a SCSI device without a disk, by its directory.
    fn of_diskless(device: &Path) -> Result<Self> {
        let nodes = generic_nodes::read_generic_nodes(device)?.into_iter();
        Ok(Self {
            numbers: Vec::new(),
            devices: Vec::new(),
            generic: nodes.map(|node| (0, node)).collect(),
            found: vec![Vec::new()],
            not_looked_at: Vec::new(),
        })
    }

    /// Adds a user of this device to its disk, once.
    fn add(&mut self, device: DevNo, holder: &Holder) {
        for (place, known) in &self.devices {
            let found = self.found.get_mut(*place);
            let found = found.filter(|found| known.devno() == device && !found.contains(holder));
            if let Some(found) = found {
                found.push(holder.clone());
            }
        }
    }

    /// Reads mounts, stacked devices and swap areas.
    fn read_exclusive(&mut self, roots: &Roots, deadline: Deadline) -> Result<()> {
        let mounts = mounts::read_mounts(roots, deadline)?;
        for mount in mounts.found {
            let (path, pid) = (mount.path, mount.pid);
            self.add(mount.device, &Holder::Mount { path, pid });
        }
        let mut stacked = Vec::new();
        for (_, device) in &self.devices {
            let names = device.holders()?.into_iter();
            stacked.extend(names.map(|name| (device.devno(), name)));
        }
        for (below, device) in stacked {
            self.add(below, &Holder::Stacked { device });
        }
        let swaps = mounts::read_swaps(roots, deadline)?;
        for device in swaps.found {
            self.add(device, &Holder::Swap { device });
        }
        let unseen = NotLookedAt::of_paths([mounts.unknown, swaps.unknown].concat());
        NotLookedAt::merge(&mut self.not_looked_at, &unseen);
        Ok(())
    }

    fn read_processes(&mut self, roots: &Roots, deadline: Deadline) -> Result<()> {
        let blocks = self.numbers.iter().copied().map(NumberedDevice::Block);
        let generic = self.generic.iter().map(|(_, node)| node.number);
        let wanted: Vec<_> = blocks
            .chain(generic.map(NumberedDevice::Character))
            .collect();
        let openers = process::read_all_openers(roots, &wanted, deadline)?;
        for opener in openers.found {
            match opener.device {
                NumberedDevice::Block(device) => self.add_opener(roots, device, opener)?,
                NumberedDevice::Character(node) => self.add_generic(node, opener),
            }
        }
        self.not_looked_at
            .extend(not_looked_at::read_hidden(roots)?);
        if !openers.unreadable.is_empty() {
            let count = openers.unreadable.len();
            let unreadable = NotLookedAt::UnreadableProcesses { count };
            self.not_looked_at.push(unreadable);
        }
        Ok(())
    }

    fn add_opener(&mut self, roots: &Roots, device: DevNo, opener: Opener) -> Result<()> {
        let (pid, command, writes) = (opener.pid, opener.command, opener.writes);
        let holder = match opener.means {
            Means::Descriptor if self.runs_connect_ioctl(roots, pid, device)? => return Ok(()),
            Means::Descriptor => Holder::Open {
                pid,
                command,
                writes,
            },
            Means::Mapping => Holder::Mapped { pid, command },
            Means::FixedFile => Holder::Registered { pid, command },
        };
        self.add(device, &holder);
        Ok(())
    }

    /// Adds a user of a generic node. A process that only reads is no user: it asks the disk
    /// about itself, as inventory tools do.
    fn add_generic(&mut self, number: DevNo, opener: Opener) {
        let node = self.generic.iter().find(|(_, node)| node.number == number);
        if let Some((place, node)) = node.filter(|_| opener.writes) {
            let (place, node) = (*place, node.name.clone());
            let (pid, command) = (opener.pid, opener.command);
            let holder = Holder::Generic { pid, command, node };
            let found = self.found.get_mut(place);
            if let Some(found) = found.filter(|found| !found.contains(&holder)) {
                found.push(holder);
            }
        }
    }

    /// Whether this process is in the ioctl that connects this NBD device, where
    /// `qemu-nbd -c` and `nbd-client -nonetlink` stay while it is connected: the descriptor of
    /// such a process writes nothing. sysfs shows the thread (`drivers/block/nbd.c`,
    /// `nbd_start_device`). A device with a backend id was connected over netlink: the thread
    /// that did so may have ended, and another may have its number by now.
    fn runs_connect_ioctl(&self, roots: &Roots, process: u32, device: DevNo) -> Result<bool> {
        if process == std::process::id() {
            return Ok(false);
        }
        let disk = self.devices.iter().map(|(_, disk)| disk);
        let disk = disk.filter(|disk| disk.name().starts_with("nbd") && !disk.is_partition());
        let mut disk = disk.filter(|disk| disk.devno() == device);
        let Some(dir) = disk.next().map(BlockDevice::dir) else {
            return Ok(false);
        };
        let attribute = |name| sysfs::read_if_there(&dir.join(name));
        let (thread, backend) = (attribute("pid")?, attribute("backend")?);
        let Some(thread) = thread.filter(|_| backend.is_none_or(|id| id.is_empty())) else {
            return Ok(false);
        };
        let task = roots.proc.join(process.to_string()).join("task");
        Ok(task.join(thread.trim()).exists())
    }

    /// Reads the opens of the kernel itself, which are in no process.
    fn read_without_process(&mut self, roots: &Roots, deadline: Deadline) -> Result<()> {
        // Most machines have neither a loop device nor a target. A process without mounts has no
        // file servers either.
        let servers = LazyCell::new(|| mounts::read_file_servers(roots).unwrap_or_default());
        let is_on_file_server = |path: &Path| servers.contains(path);
        let loops = loops::read_loops(roots, &self.numbers, &is_on_file_server, deadline)?;
        for (device, backing) in loops.found {
            self.add(backing, &Holder::Loop { device });
        }
        let unseen = loops.unknown.into_iter();
        let unseen = unseen.map(|device| NotLookedAt::LoopDevice { device });
        self.not_looked_at.extend(unseen);
        let exports = exports::read_exports(roots, &self.numbers, &is_on_file_server, deadline)?;
        for (volume, device) in exports.found {
            self.add(device, &Holder::Export { volume });
        }
        for (user, device) in exports.without_claim {
            self.add(device, &Holder::Kernel { user });
        }
        let unseen = exports.unknown.into_iter();
        let unseen = unseen.map(|module| NotLookedAt::Target {
            module: module.into(),
        });
        self.not_looked_at.extend(unseen);
        let unseen = exports.unknown_volumes.into_iter();
        let unseen = unseen.map(|volume| NotLookedAt::TargetVolume { volume });
        self.not_looked_at.extend(unseen);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
