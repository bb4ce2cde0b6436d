//! Commands to the unit itself, through a node that is proven to be this life of
//! the disk. The identity is read here, and the size.

use std::fs::File;
use std::time::Duration;

use super::access_state::AccessState;
use super::call_scheduler::CallScheduler;
use super::designators;
use super::device::ScsiDevice;
use super::identity::{Identity, Pages};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Lun;
use crate::kernel::blockdev::BlockDevice;
use crate::kernel::sg::Presence;
use crate::kernel::{Devices, Roots, sg};

/// As long as the kernel's own scan gives an INQUIRY (`scsi_scan.c`,
/// `scsi_inq_timeout`).
const LIMIT: Duration = Duration::from_secs(20);

/// Reads the identity of the device's disk with INQUIRY.
///
/// # Errors
/// `Vanished` where the node belongs to another life; `NotReady` or `Io` where
/// the unit does not answer; `Quarantined`; `TimedOut` at stage `identify`.
pub(crate) fn read_identity(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Identity> {
    let what = format!("{} to answer INQUIRY", disk.name());
    let (roots, disk) = (roots.clone(), disk.clone());
    scheduler.on_device(
        device.hctl(),
        Stage::Identify,
        &what,
        deadline,
        || format!("no answer; {}", device.describe()),
        move || Identity::read(&Unit::open(&roots, &disk, deadline)?),
    )
}

/// Asks the unit for its size in bytes, with READ CAPACITY: what the kernel
/// shows is as old as its last look.
///
/// # Errors
/// `Vanished` where the node belongs to another life; `NotReady` or `Io` where
/// the unit does not answer; `Quarantined`; `TimedOut` at stage `rescan`.
pub(crate) fn read_capacity(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<u64> {
    let what = format!("{} to answer READ CAPACITY", disk.name());
    let (roots, disk) = (roots.clone(), disk.clone());
    scheduler.on_device(
        device.hctl(),
        Stage::Rescan,
        &what,
        deadline,
        || format!("no answer; {}", device.describe()),
        move || {
            let unit = Unit::open(&roots, &disk, deadline)?;
            sg::read_capacity(unit.opened(), unit.limit())
        },
    )
}

/// Asks the unit in which ALUA access state the device's target port serves it; `None`
/// where it says nothing of that, refuses to, or does not answer within five seconds.
///
/// # Errors
/// `Vanished` where the node belongs to another life; `NotReady` where the path to the
/// unit is down; `Cancelled`.
pub(crate) fn read_access_state(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Option<AccessState>> {
    /// Whoever cannot say it so soon is better handed out than waited for.
    const PATIENCE: Duration = Duration::from_secs(5);
    if !device.has_port_groups()? {
        return Ok(None);
    }
    let what = format!("{} to report its ALUA access state", disk.name());
    let limit = deadline.at_most(PATIENCE.min(deadline.remaining() / 2));
    let (roots, disk) = (roots.clone(), disk.clone());
    let answer = scheduler.ask(device.hctl(), Stage::Identify, &what, limit, move || {
        let unit = Unit::open(&roots, &disk, deadline)?;
        access_state(unit.opened(), unit.limit())
    });
    match answer {
        Err(error) if error.kind() == ErrorKind::Io => {
            let hctl = device.hctl();
            tracing::debug!(%hctl, %error, "its ALUA access state is not known");
            Ok(None)
        }
        answer => answer.map(Option::flatten),
    }
}

/// As [`read_access_state`], of a unit that has such states and whose disk is open.
/// **Blocks**: call it on a worker.
///
/// # Errors
/// `NotReady` or `Io` where the unit does not answer.
pub(crate) fn access_state_of_open(roots: &Roots, file: &File) -> Result<Option<AccessState>> {
    let devices = &roots.devices;
    access_state(sg::Opened { devices, file }, LIMIT)
}

fn access_state(device: sg::Opened<'_>, limit: Duration) -> Result<Option<AccessState>> {
    let Some(groups) = sg::report_port_groups(device, limit)? else {
        return Ok(None);
    };
    let page = sg::read_vpd(device, designators::PAGE, limit)?.unwrap_or_default();
    Ok(AccessState::of_port(&page, &groups))
}

/// Asks the device's target whether there is a unit at all.
///
/// # Errors
/// `Vanished` where the node belongs to another life; `NotReady` or `Io` where
/// nobody answers; `Quarantined`; `TimedOut` at stage `identify`.
pub(crate) fn ask_presence(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Presence> {
    let what = format!("{} to report whether it is there", disk.name());
    let (roots, disk) = (roots.clone(), disk.clone());
    scheduler.on_device(
        device.hctl(),
        Stage::Identify,
        &what,
        deadline,
        || format!("no answer; {}", device.describe()),
        move || {
            let unit = Unit::open(&roots, &disk, deadline)?;
            sg::ask_presence(unit.opened(), unit.limit())
        },
    )
}

/// Asks the device's target for all of its LUNs.
///
/// # Errors
/// As [`ask_presence`]; `NotSupported`.
pub(crate) fn report_luns(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Vec<Lun>> {
    let what = format!("{} to list the LUNs of its target", disk.name());
    let (roots, disk) = (roots.clone(), disk.clone());
    scheduler.on_device(
        device.hctl(),
        Stage::Identify,
        &what,
        deadline,
        || format!("no answer; {}", device.describe()),
        move || {
            let unit = Unit::open(&roots, &disk, deadline)?;
            sg::report_luns(unit.opened(), unit.limit())
        },
    )
}

/// A unit's open node.
struct Unit {
    file: File,
    devices: Devices,
    deadline: Deadline,
}

impl Unit {
    fn open(roots: &Roots, disk: &BlockDevice, deadline: Deadline) -> Result<Self> {
        let file = disk.open(roots, false)?;
        // Before 5.15 there is neither.
        if let Some(expected) = disk.diskseq()? {
            let node = disk.node(roots);
            let found = roots
                .devices
                .disk_sequence(&file)
                .map_err(|error| Error::io("cannot read the sequence number of", &node, &error))?;
            if found != expected.0 {
                let message = "the node belongs to another life of this disk";
                return Err(Error::new(ErrorKind::Vanished, message).with_path(node));
            }
        }
        let devices = roots.devices.clone();
        Ok(Self {
            file,
            devices,
            deadline,
        })
    }

    fn opened(&self) -> sg::Opened<'_> {
        sg::Opened {
            devices: &self.devices,
            file: &self.file,
        }
    }

    fn limit(&self) -> Duration {
        self.deadline
            .remaining()
            .clamp(Duration::from_millis(1), LIMIT)
    }
}

impl Pages for Unit {
    fn vpd(&self, code: u8) -> Result<Option<Vec<u8>>> {
        sg::read_vpd(self.opened(), code, self.limit())
    }

    fn product(&self) -> Result<String> {
        sg::read_product(self.opened(), self.limit())
    }
}
