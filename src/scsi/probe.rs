//! Waits for the disk driver, which probes after the scan on a thread of the kernel.

use super::call_scheduler::CallScheduler;
use super::device::ScsiDevice;
use crate::deadline::{Backoff, Deadline};
use crate::error::{Error, ErrorKind, Result, Stage};
use crate::id::Hctl;
use crate::kernel::Roots;
use crate::kernel::blockdev::BlockDevice;
use crate::uevent::{self, Notice, Watch};

/// Which call scanned a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ScannedBy {
    /// By the caller, whose watch has the events of its disk.
    Caller,
    /// Earlier, or by another process.
    Other,
}

/// Waits until the kernel has announced the disk of `device`. If another call scanned the
/// device, or if events were lost, a disk that can be opened is ready too.
///
/// # Errors
/// `NotFound` if the target said that no unit is connected at the LUN; `NotSupported` if
/// the device is no disk; `NotReady` if the kernel has it in a state in which it serves no
/// I/O; `Vanished`; `Quarantined`; `TimedOut` at stage `probe`, which leaves the SCSI
/// device in place.
pub(crate) fn wait_for_disk(
    device: &ScsiDevice,
    scanned_by: ScannedBy,
    roots: &Roots,
    scheduler: &CallScheduler,
    watch: &mut Watch,
    deadline: Deadline,
) -> Result<BlockDevice> {
    let hctl = device.hctl();
    device.require_usable(Stage::Probe)?;
    if !device.is_disk()? {
        let kind = device.peripheral_type()?;
        let message = format!("{hctl} is no disk: its peripheral device type is {kind:#04x}");
        return Err(Error::new(ErrorKind::NotSupported, message).at(Stage::Probe));
    }
    let mut pauses = Backoff::for_kernel_state();
    loop {
        let mut limit = deadline;
        device.require_usable(Stage::Probe)?;
        if let Some(disk) = device.disk()? {
            let announced = watch.kernel_announced(&uevent::devpath(roots, disk.dir())?);
            if announced {
                return Ok(disk);
            }
            if scanned_by == ScannedBy::Other || watch.has_missed() {
                if is_live(hctl, &disk, roots, scheduler, deadline)? {
                    return Ok(disk);
                }
                limit = deadline.at_most(pauses.pause());
            }
        } else {
            require_connected(device)?;
        }
        if !wait_for_event(watch, limit) && deadline.has_passed() {
            let what = format!("the kernel to bring the disk of {hctl}");
            let error = Error::timed_out(Stage::Probe, deadline, &what);
            return Err(error.with_last_seen(device.describe()));
        }
    }
}

/// # Errors
/// `NotFound` if the target says that no unit is connected: then no disk comes.
fn require_connected(device: &ScsiDevice) -> Result<()> {
    let qualifier = device.qualifier()?;
    if qualifier == 0 {
        return Ok(());
    }
    let message = format!(
        "the target answers for {} and says that no unit is connected there: {}",
        device.hctl(),
        describe_qualifier(qualifier)
    );
    Err(Error::new(ErrorKind::NotFound, message).at(Stage::Probe))
}

/// The peripheral qualifier in the form of messages.
pub(crate) fn describe_qualifier(qualifier: u8) -> String {
    format!("peripheral qualifier {qualifier:03b}b")
}

/// Waits for an event that may concern the disk: the devices that the kernel adds beside it
/// tell nothing. `false` after `limit`.
fn wait_for_event(watch: &mut Watch, limit: Deadline) -> bool {
    loop {
        match watch.next(limit) {
            Some(Notice::Event(event)) if event.action == "add" && event.subsystem != "block" => {}
            notice => return notice.is_some(),
        }
    }
}

fn is_live(
    hctl: Hctl,
    disk: &BlockDevice,
    roots: &Roots,
    scheduler: &CallScheduler,
    deadline: Deadline,
) -> Result<bool> {
    let what = format!("the kernel to open {}", disk.name());
    let (disk, roots) = (disk.clone(), roots.clone());
    let seen = || "not returned".to_owned();
    let slot = scheduler.on_device(hctl, Stage::Probe, &what)?;
    slot.run(deadline, seen, move || disk.is_live(&roots))
}
