//! Sends commands to the unit itself, through a node that is proven to be this instance of the
//! disk. They read its identity, size and access state, and the target's LUNs.

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
use crate::kernel::{Devices, OpenMode, Roots, sg};

/// The longest wait for an answer: that of the kernel's own scan for an INQUIRY
/// (`scsi_scan.c`, `scsi_inq_timeout`).
const LIMIT: Duration = Duration::from_secs(20);

/// Reads the identity of the device's disk with INQUIRY.
///
/// # Errors
/// `Vanished` if the node belongs to another instance; `NotFound` if the target has no unit
/// there; `NotReady` or `Io` if the unit does not answer; `Quarantined`; `TimedOut` at stage
/// `identify`.
pub(crate) fn read_identity(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Identity> {
    let request = (Stage::Identify, "answer INQUIRY");
    ask(
        roots,
        scheduler,
        device,
        disk,
        deadline,
        request,
        Identity::read,
    )
}

/// Asks the unit for its size in bytes with READ CAPACITY. The size that the kernel shows
/// is as old as its last read.
///
/// # Errors
/// `Vanished` if the node belongs to another instance; `NotReady` or `Io` if the unit does not
/// answer; `Quarantined`; `TimedOut` at stage `rescan`.
pub(crate) fn read_capacity(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<u64> {
    let request = (Stage::Rescan, "answer READ CAPACITY");
    ask(roots, scheduler, device, disk, deadline, request, |unit| {
        sg::read_capacity(unit.opened(), unit.limit())
    })
}

/// Asks the unit for the ALUA access state in which the device's target port serves it.
/// `None` if the unit has none, refuses, or does not answer within five seconds or half of
/// the remaining time, whichever is less.
///
/// # Errors
/// `Vanished` if the node belongs to another instance; `NotReady` if the path to the unit is
/// down; `Cancelled`.
pub(crate) fn read_access_state(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Option<AccessState>> {
    /// A path that does not answer so soon is better returned without its state than waited
    /// for.
    const STATE_LIMIT: Duration = Duration::from_secs(5);
    if !device.has_port_groups()? {
        return Ok(None);
    }
    let what = format!("{} to report its ALUA access state", disk.name());
    let limit = deadline.at_most(STATE_LIMIT.min(deadline.remaining() / 2));
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

/// As [`read_access_state`], for a unit that has such states and whose disk is open.
/// **Blocks**: call it on a worker.
///
/// # Errors
/// `NotReady` or `Io` if the unit does not answer.
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

/// Asks the device's target whether the unit exists.
///
/// # Errors
/// `Vanished` if the node belongs to another instance; `NotReady` or `Io` without an answer;
/// `Quarantined`; `TimedOut` at stage `identify`.
pub(crate) fn ask_presence(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Presence> {
    let request = (Stage::Identify, "report whether it is there");
    ask(roots, scheduler, device, disk, deadline, request, |unit| {
        sg::ask_presence(unit.opened(), unit.limit())
    })
}

/// Asks the device's target for all of its LUNs.
///
/// # Errors
/// As for [`ask_presence`]; `NotSupported`.
pub(crate) fn report_luns(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
) -> Result<Vec<Lun>> {
    let request = (Stage::Identify, "list the LUNs of its target");
    ask(roots, scheduler, device, disk, deadline, request, |unit| {
        sg::report_luns(unit.opened(), unit.limit())
    })
}

/// Asks the unit on a worker. `request` is its stage and what the unit is to do.
fn ask<T: Send + 'static>(
    roots: &Roots,
    scheduler: &CallScheduler,
    device: &ScsiDevice,
    disk: &BlockDevice,
    deadline: Deadline,
    (stage, request): (Stage, &str),
    send: impl FnOnce(&Unit) -> Result<T> + Send + 'static,
) -> Result<T> {
    let what = format!("{} to {request}", disk.name());
    let (roots, disk) = (roots.clone(), disk.clone());
    let slot = scheduler.on_device(device.hctl(), stage, &what)?;
    let seen = || format!("no answer; {}", device.describe());
    slot.run(deadline, seen, move || {
        send(&Unit::open(&roots, &disk, deadline)?)
    })
}

/// A unit's open node.
struct Unit {
    file: File,
    devices: Devices,
    deadline: Deadline,
}

impl Unit {
    fn open(roots: &Roots, disk: &BlockDevice, deadline: Deadline) -> Result<Self> {
        let file = disk.open(roots, OpenMode::Shared)?;
        // Before Linux 5.15 neither the disk nor the node has a number.
        if let Some(expected) = disk.diskseq()? {
            let node = disk.node(roots);
            let found = roots
                .devices
                .disk_sequence(&file)
                .map_err(|error| Error::io("cannot read the sequence number of", &node, &error))?;
            if found != expected.0 {
                let message = "the node belongs to another instance of this disk";
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
